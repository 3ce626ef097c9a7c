"""Models that cannot be prepared: each is refused with what to do, and models that only look alike are not."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from fxqat import prepare_by_platform
from fxqat.config.model_checks import check_model
from fxqat.errors import ConfigError

X = torch.ones(2, 3, 4, 4)


def net(inner=None):
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU() if inner is None else inner, nn.BatchNorm2d(4))


def prepared():
    return prepare_by_platform(net())


def compiled_in_place():
    model = net()
    model.compile()
    return model


def with_compiled_forward():
    model = net()
    model[1].forward = torch.compile(model[1].forward)
    return model


def in_mixed_precision():
    """As ``Accelerator(mixed_precision="bf16").prepare`` does it."""
    model = net()
    model._original_forward = model.forward
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    return model


def exported():
    return torch.export.export(net(), (torch.zeros(2, 3, 4, 4),))


def on_meta():
    with torch.device("meta"):
        return net()


def fake():
    with FakeTensorMode():
        return net()


def of_inference():
    with torch.inference_mode():
        return net()


def with_value(value, name="0.weight"):
    model = net()
    model.state_dict()[name][0] = value
    return model


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: "net", "model must be a torch.nn.Module, got str"),
        (lambda: torch.jit.script(net()), "TorchScript: prepare the Python model that it was made from"),
        (lambda: torch.jit.trace(net(), X), "TorchScript: prepare the Python model that it was made from"),
        (lambda: torch.jit.trace(torch.relu, X), "TorchScript: prepare the Python model"),
        (lambda: net(torch.jit.script(nn.ReLU())), "the module '1' of the model is a TorchScript"),
        (prepared, "the model is already prepared: use the prepared model itself"),
        (lambda: nn.Sequential(prepared()), "the module '0' of the model is already prepared"),
        (lambda: torch.compile(net()), "the model was compiled by torch.compile: prepare the model that is not"),
        (compiled_in_place, "the model was compiled by torch.compile"),
        (lambda: net(torch.compile(nn.ReLU())), "the module '1' of the model was compiled"),
        (with_compiled_forward, "the module '1' of the model was compiled by torch.compile"),
        (in_mixed_precision, "the model computes in mixed precision by accelerate: prepare accelerator.unwrap_model"),
        (exported, r"model is an ExportedProgram of torch.export: prepare the Python model .* fxqat quantize FILE.pt2"),
        (lambda: exported().module(), "the model was made by torch.export: prepare the Python model that was exported"),
        (lambda: nn.DataParallel(net()), r"the model is a DataParallel: prepare the model inside \(.module\)"),
        (on_meta, "0.weight, 0.bias, 2.weight, 2.bias and 3 more of Sequential are on the meta device"),
        (fake, "are fake tensors without values: make the model outside of FakeTensorMode"),
        (of_inference, r"were made inside torch.inference_mode\(\)"),
        (lambda: with_value(float("nan")), "the tensors 0.weight of Sequential hold NaN or infinity"),
        (lambda: with_value(float("-inf"), "0.bias"), "the tensors 0.bias of Sequential hold NaN or infinity"),
        (lambda: with_value(float("nan"), "2.running_var"), "the tensors 2.running_var of Sequential hold NaN"),
        (lambda: net().double(), r"Sequential is float64.* call model.float\(\) before prepare_by_platform"),
    ],
)
def test_a_model_that_cannot_be_prepared_is_refused(make, message):
    model = make()
    with pytest.raises(ConfigError, match=message):
        check_model(model)
    with pytest.raises(ConfigError, match=message):
        prepare_by_platform(model, example_inputs=(X,))


def test_an_exported_module_inside_a_model_stays_float():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), exported().module())
    gm = prepare_by_platform(model, "TSQAT", example_inputs=torch.randn(2, 3, 4, 4))
    assert gm.quant_report.row("0").status == "quantized"
    assert gm.quant_report.row("conv2d_default").status == "float"


def test_preparing_in_inference_mode_is_refused():
    model = net()
    with torch.inference_mode(), pytest.raises(ConfigError, match="inside torch.inference_mode"):
        prepare_by_platform(model)
    with torch.no_grad():
        assert prepare_by_platform(model)(X).shape == (2, 4, 4, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_type_is_refused(dtype):
    model = net()
    torch.set_default_dtype(dtype)
    try:
        with pytest.raises(ConfigError, match="set_default_dtype") as caught:
            prepare_by_platform(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert str(dtype).removeprefix("torch.") in str(caught.value)


def test_a_default_device_without_values():
    model = nn.Linear(2, 2)
    with torch.device("meta"):
        with pytest.raises(ConfigError, match="the default device is meta"):
            prepare_by_platform(model)
        x = torch.randn(1, 2)
        gm = prepare_by_platform(nn.Linear(2, 2), example_inputs=(x,))  # the report of a model without values
    assert all(parameter.is_meta for parameter in gm.parameters())
    assert not any(parameter.is_meta for parameter in prepare_by_platform(model).parameters())


class Mixed(nn.Module):
    """Holds a float64 parameter, a mask of infinities, an empty and an integer parameter."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.empty = nn.Parameter(torch.ones(0))
        self.table = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, 0.0, 0.0]))

    def forward(self, x):
        return torch.softmax(self.fc(x) + self.mask, -1) * self.scale.float()


def test_models_that_only_look_alike_are_accepted():
    check_model(Mixed())
    assert check_model(nn.Sequential(nn.LazyConv2d(4, 1))) is None
    check_model(on_meta(), (X.to("meta"),))  # a report without values
    x = torch.ones(2, 4)
    torch.testing.assert_close(prepare_by_platform(Mixed().eval(), example_inputs=x)(x)[:, 1], torch.zeros(2))
