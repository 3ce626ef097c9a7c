"""What holds for every fake-quant of the table: in a model, in its file, and whatever training does."""

import copy
import math
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from fxqat import (
    convert_export,
    enable_calibration,
    enable_quantization,
    load_checkpoint,
    load_quant_params,
    prepare_by_platform,
    save_checkpoint,
)
from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import ACTIVATION, WEIGHT, FakeQuantizeBase
from fxqat.fake_quantize.fake_quantizes import ALIASES, FAKE_QUANTIZES
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.numerics import SCALE_MAX, SCALE_MIN
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.scheme import QuantizeScheme
from tests.builders import calibrate, make_suitable

KINDS = pytest.mark.parametrize("kind", FAKE_QUANTIZES.values(), ids=list(FAKE_QUANTIZES))
WIDTHS = [
    QuantizeScheme(2, narrow_range=True),
    QuantizeScheme(3, per_channel=True),
    QuantizeScheme(4, signed=False),
    QuantizeScheme(8, symmetric=False, per_channel=True),
    QuantizeScheme(16, signed=False, symmetric=False),
]


class Tiny(nn.Module):
    """Convolution with BatchNorm, ReLU, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, bias=False)
        self.bn = nn.BatchNorm2d(6)
        self.linear = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.relu(self.bn(self.conv(x))).mean((2, 3)))


def ready(model: nn.Module, config: dict[str, Any]) -> QuantGraphModule:
    """A model, prepared and calibrated."""
    gm = prepare_by_platform(model, "Experimental", config)
    enable_calibration(gm)
    gm(torch.randn(8, 3, 6, 6))
    enable_quantization(gm)
    return gm.train()


def make_gm(weight: str, activation: str, **config: Any) -> QuantGraphModule:
    """A tiny model, prepared and calibrated, with the fake-quants of these names."""
    torch.manual_seed(0)
    names = {"w_fakequantize": weight, "a_fakequantize": activation}
    schemes = {f"{letter}_qscheme": {"pot_scale": True} for letter in "wa" if names[f"{letter}_fakequantize"] == "TQT"}
    return ready(Tiny(), {"extra_qconfig_dict": names | schemes | config})


def train(gm: nn.Module, steps: int = 3) -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.SGD(gm.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        gm(torch.randn(8, 3, 6, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    return gm


PAIRS = {
    "conv": ("PACT", "DSQ"),
    "layers.0": ("DSQ", "PACT"),
    "layers.1": ("DoReFa", "PACT"),
    "layers.2": ("TQT", "TQT"),
    "layers.3": ("EWGS", "EWGS"),
    "layers.4": ("Oscillation", "Learnable"),
}
"""The fake-quants of the weight and of the output of each layer of :class:`Chain`."""


class Chain(nn.Module):
    """Convolution with BatchNorm, ReLU, and five linear layers: each layer can have other fake-quants."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, bias=False)
        self.bn = nn.BatchNorm2d(6)
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.relu(self.bn(self.conv(x))).mean((2, 3)))


def make_chain() -> QuantGraphModule:
    """A chain with the fake-quants of ``PAIRS``, prepared and calibrated."""

    def entry(name: str) -> dict[str, Any]:
        return {"fake_quantize": name} | ({"pot_scale": True} if name == "TQT" else {})

    torch.manual_seed(0)
    overrides = [
        {"match": {"module": path}, "weight": entry(weight), "output": entry(activation)}
        for path, (weight, activation) in PAIRS.items()
    ]
    return ready(Chain(), {"overrides": overrides})


def test_the_file_computes_what_was_trained(tmp_path: Path) -> None:
    gm = make_chain()
    quants = dict(named_fake_quants(gm))
    before = {name: [value.detach().clone() for value in quant.parameters()] for name, quant in quants.items()}
    train(gm)
    for path, pair in PAIRS.items():
        names = (f"{path}.weight_fake_quant", f"{path.replace('.', '_')}_act_fake_quant")
        for name, row in zip(names, pair, strict=True):
            moved = [not torch.equal(*p) for p in zip(quants[name].parameters(), before[name], strict=True)]
            assert type(quants[name]) is FAKE_QUANTIZES[row], name
            assert any(moved) == FAKE_QUANTIZES[row].learned, name
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(5))
    report = convert_export(gm, x, tmp_path / "chain.onnx", tmp_path / "chain.json")
    assert report.certificate.passed
    assert all(tensor.step.off == 0 for tensor in report.certificate.tensors)
    again = make_chain()
    load_quant_params(again, tmp_path / "chain.json")
    for name, quant in named_fake_quants(again):
        for one, other in zip(quant.qparams(), quants[name].qparams(), strict=True):
            assert torch.equal(one, other), name


def test_frozen_weights_are_exported_as_they_are_frozen(tmp_path: Path) -> None:
    settings = {"momentum": 0.5, "freeze_threshold": 0.2}
    gm = make_gm("Oscillation", "Learnable", w_fakeq_params=settings)
    quant = gm.get_submodule("linear").weight_fake_quant
    weight = gm.get_submodule("linear").weight
    scale = quant.qparams()[0].unsqueeze(1)
    for sign in (1, -1, 1, -1):
        with torch.no_grad():
            weight[:2].add_(sign * scale[:2])
        gm(torch.randn(8, 3, 6, 6))
    assert quant.frozen[:2].float().mean() > 0.5
    assert not quant.frozen[2:].any()
    with torch.no_grad():
        weight.normal_()
        quant.relative_scale.mul_(1.3)
    x = torch.randn(4, 3, 6, 6)
    report = convert_export(gm, x, tmp_path / "frozen.onnx")
    assert report.certificate.passed
    file = onnx.load(tmp_path / "frozen.onnx").graph.initializer
    found = [numpy_helper.to_array(t) for t in file if tuple(t.dims) == (4, 6)]
    assert len(found) == 1
    saved = torch.from_numpy(found[0].astype("float32"))
    assert torch.equal(saved[quant.frozen], quant.integer[quant.frozen])
    assert not torch.isclose(saved[2:], quant.integer[2:]).all()


@pytest.mark.parametrize(("weight", "activation"), [("DSQ", "PACT"), ("Oscillation", "EWGS"), ("TQT", "TQT")])
def test_training_resumes_bit_by_bit(weight: str, activation: str, tmp_path: Path) -> None:
    gm = train(make_gm(weight, activation))
    save_checkpoint(gm, tmp_path / "model.pth")
    twin = copy.deepcopy(gm)
    fresh = make_gm(weight, activation)
    load_checkpoint(fresh, tmp_path / "model.pth")
    results = [train(model).state_dict() for model in (gm, twin, fresh)]
    for name, value in results[0].items():
        if isinstance(value, torch.Tensor):
            assert all(torch.equal(value.nan_to_num(9), other[name].nan_to_num(9)) for other in results[1:])
    assert torch.equal(gm(torch.ones(8, 3, 6, 6)), fresh(torch.ones(8, 3, 6, 6)))


@KINDS
@pytest.mark.parametrize("scheme", WIDTHS, ids=str)
def test_every_width_rounds_to_its_grid_and_trains(kind: type[FakeQuantizeBase], scheme: QuantizeScheme) -> None:
    quant = make_suitable(kind, scheme, WEIGHT, 1, 3)
    x = torch.randn(5, 3, 40, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = calibrate(quant, x.detach())(x)
    y.square().sum().backward()
    scale, zero_point = (values.reshape(-1, 1) if values.dim() else values for values in quant.qparams())
    integers = y.detach() / scale + zero_point
    assert (integers - integers.round()).abs().max() < 0.02
    assert integers.min() >= scheme.quant_min - 0.02
    assert integers.max() <= scheme.quant_max + 0.02
    assert x.grad.abs().sum() > 0
    assert all(parameter.grad.isfinite().all() for parameter in quant.parameters())


@KINDS
def test_a_scale_that_is_given_is_used(kind: type[FakeQuantizeBase]) -> None:
    quant = make_suitable(kind, QuantizeScheme(8, per_channel=True), WEIGHT, 0, 3)
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0), requires_grad=True)
    calibrate(quant, x.detach())
    factor, given = torch.tensor([2.0, -0.5, 1.0]), torch.tensor([0.25, 0.5, 1.0])
    y = quant.quantize(x, factor=factor, used_scale=given)
    steps = y * (factor / given).unsqueeze(1)
    torch.testing.assert_close(steps, steps.round(), rtol=0.0, atol=1e-3)
    assert steps[0].unique().numel() > 8
    y.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in (x, *quant.parameters()))


@KINDS
def test_half_precision_under_autocast(kind: type[FakeQuantizeBase]) -> None:
    quant = make_suitable(kind, QuantizeScheme(8))
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    calibrate(quant, x)
    for dtype in (torch.bfloat16, torch.float32):
        leaf = x.to(dtype, copy=True).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = quant(leaf)
            y.float().square().sum().backward()
        assert y.dtype == leaf.grad.dtype == dtype
        assert torch.equal(y, quant(x.float()).to(dtype)) or kind.__name__.startswith("DoReFa")
        assert all(parameter.grad.dtype == torch.float32 for parameter in quant.parameters())
    assert quant.qparams()[0].dtype == torch.float32


@KINDS
@pytest.mark.parametrize("transposed", [False, True])
def test_it_compiles_into_one_graph(kind: type[FakeQuantizeBase], transposed: bool) -> None:
    quant = make_suitable(kind, QuantizeScheme(4, symmetric=False), WEIGHT)
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    x = x.t() if transposed else x
    calibrate(quant, x).attach(x)
    twin = copy.deepcopy(quant)
    torch.compiler.reset()
    compiled = torch.compile(quant, fullgraph=True, backend="aot_eager")
    results = []
    for module in (compiled, twin):
        leaf = x.clone().requires_grad_()
        assert leaf.is_contiguous() is not transposed
        y = module(leaf)
        y.square().sum().backward()
        results.append((y, leaf.grad, *(parameter.grad for parameter in module.parameters())))
    assert torch.equal(results[0][0], results[1][0])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@KINDS
def test_without_gradients_it_gives_the_same(kind: type[FakeQuantizeBase]) -> None:
    quant = make_suitable(kind, QuantizeScheme(4, symmetric=False, per_channel=True), WEIGHT, 0, 6)
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    calibrate(quant, x).attach(x)
    quant.eval()
    for factor in (None, torch.linspace(0.5, 2.0, 6)):
        with torch.no_grad():
            alone = quant.quantize(x, factor)
        assert torch.equal(alone, quant.quantize(x, factor))
        assert not alone.requires_grad


@KINDS
@pytest.mark.parametrize("tensor", [WEIGHT, ACTIVATION])
def test_no_training_breaks_the_scale(kind: type[FakeQuantizeBase], tensor: str) -> None:
    """Learning rate 10, all-zero gradients, batches of NaN and infinity, 80 steps, so that all of these coincide."""
    generator = torch.Generator().manual_seed(0)
    scheme = QuantizeScheme(4, symmetric=False, per_channel=tensor == WEIGHT)
    quant = make_suitable(kind, scheme, tensor, 0, 3)
    quant = calibrate(quant, torch.randn(3, 50, generator=generator))
    parameters = list(quant.parameters())
    optimizer = torch.optim.SGD(parameters, lr=10.0, momentum=0.9) if parameters else None
    for step in range(80):
        x = torch.randn(3, 50, generator=generator)
        grad = torch.randn(3, 50, generator=generator) * (step % 3)
        if step % 7 == 3:
            x[1] = math.nan
        if step % 11 == 5:
            grad[0, 4], x[2, 7] = math.inf, -math.inf
        x.requires_grad_()
        quant.zero_grad()
        y = quant(x)
        y.backward(grad)
        if optimizer is not None:
            optimizer.step()
        scale, zero_point = quant.qparams()
        assert torch.all((scale >= SCALE_MIN) & (scale <= SCALE_MAX))
        assert torch.all((zero_point >= scheme.quant_min) & (zero_point <= scheme.quant_max))
        assert all(parameter.isfinite().all() for parameter in parameters)
    y = quant(torch.linspace(-9.0, 9.0, 150).reshape(3, 50))
    assert y.isfinite().all()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"w_fakequantize": "TQT"}, "TQT trains power-of-two scales"),
        ({"a_fakequantize": "DoReFa"}, "'DoReFa' is for weights"),
        ({"a_fakequantize": "Oscillation"}, "'Oscillation' is for weights"),
        ({"w_fakequantize": "EWGS", "w_fakeq_params": {"delta": -1.0}}, "delta"),
        ({"w_fakequantize": "DSQ", "w_fakeq_params": {"delta": 1.0}}, "delta"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_by_platform(Tiny(), "Experimental", {"extra_qconfig_dict": config})
    assert isinstance(prepare_by_platform(Tiny(), "Experimental"), QuantGraphModule)


@pytest.mark.parametrize("name", ["PACT", "DSQ", "EWGS", "LSQPlus"])
def test_the_models_input_is_not_learned(name: str) -> None:
    config = {"extra_qconfig_dict": {"w_fakequantize": name, "a_fakequantize": name}}
    gm = prepare_by_platform(Tiny(), "Experimental", config)
    kinds = {key: type(quant).__name__ for key, quant in named_fake_quants(gm)}
    assert kinds.pop("x_act_fake_quant") == "FixedFakeQuantize"
    assert set(kinds.values()) == {FAKE_QUANTIZES[ALIASES.get(name, name)].__name__}
