"""The front door: same numbers as the float model, the model untouched, clear errors."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

import fxqat
from fxqat import (
    BackendType,
    convert_export,
    disable_all,
    enable_calibration,
    enable_quantization,
    load_checkpoint,
    prepare_by_platform,
    save_checkpoint,
)
from fxqat.errors import ConfigError, TraceError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.fake_quantize.learnable import LearnableFakeQuantize
from fxqat.nn.qat import QATLayer
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.utils.tensors import flatten_tensors
from tests.export_models import run_file
from tests.fresh_process import run_fresh
from tests.models import BACKENDS, TOYS, build, calibrate, calibrated, inputs, prepared

PLACEMENTS = [backend for backend in BACKENDS if backend != "Experimental"]  # its placement is that of TSQAT
TRAINS_ANOTHER_WAY = {"auxiliary_head"}  # its forward in training has an output more than the graph


def quantizers(gm):
    return [module for module in gm.modules() if isinstance(module, FakeQuantizeBase)]


def outputs_and_gradients(model, example):
    """Outputs, gradients of the inputs, and of the parameters by name."""
    model.zero_grad()
    example = tuple(tensor.clone().requires_grad_() for tensor in example)
    torch.manual_seed(0)
    outputs = flatten_tensors(model(*example))
    weights = [torch.linspace(-1, 1, output.numel()).reshape(output.shape) for output in outputs]
    sum((weight * output).sum() for weight, output in zip(weights, outputs, strict=True)).backward()
    grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    return outputs, [tensor.grad for tensor in example], grads


def assert_same_function(gm, model, example):
    """Outputs, input gradients, parameter gradients and buffers agree."""
    expected, actual = outputs_and_gradients(model, example), outputs_and_gradients(gm, example)
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(actual[0], expected[0], **close)
    torch.testing.assert_close(actual[1], expected[1], **close)
    where = gm.provenance.tensor_names
    state = gm.state_dict(keep_vars=True)
    assert expected[2]
    for name, gradient in expected[2].items():
        torch.testing.assert_close(state[where[name]].grad, gradient, **close)
    for name, buffer in model.named_buffers():
        if name in where:
            torch.testing.assert_close(state[where[name]], buffer, **close)


# off is float


@pytest.mark.parametrize("backend", PLACEMENTS)
@pytest.mark.parametrize("name", TOYS)
def test_switched_off_it_is_the_float_model_in_eval_mode(name, backend):
    model = build(name)
    gm = prepare_by_platform(model, backend, example_inputs=inputs(name))
    assert not gm.training
    assert_same_function(gm, model, inputs(name))


@pytest.mark.parametrize("backend", ["TSQAT", "ONNXRuntime"])
@pytest.mark.parametrize("name", [name for name in TOYS if name not in TRAINS_ANOTHER_WAY])
def test_switched_off_it_is_the_float_model_in_training(name, backend):
    model = build(name).train()
    gm = prepare_by_platform(model, backend)
    assert gm.training
    for seed in (0, 1):
        assert_same_function(gm, model, inputs(name, seed=seed))


@pytest.mark.parametrize("name", ["conv_bn_relu", "residual", "transpose_convs", "linear_bn"])
def test_off_again_after_quantized_steps_it_computes_its_own_float_function(name):
    model = build(name)
    gm = calibrate(prepare_by_platform(model), inputs(name, seed=1))
    with torch.no_grad():
        on = flatten_tensors(gm(*inputs(name)))[0]
    disable_all(gm)
    assert_same_function(gm, model, inputs(name))
    with torch.no_grad():
        off = flatten_tensors(gm(*inputs(name)))[0]
    assert not torch.equal(on, off)
    assert (on - off).abs().max() < 0.2 * off.abs().max()


@pytest.mark.parametrize("bn_mode", ["freeze", 0])
@pytest.mark.parametrize("name", ["conv_bn_relu", "residual", "conv1d", "conv3d", "transpose_convs"])
def test_with_frozen_statistics_it_is_the_float_model_with_frozen_statistics(name, bn_mode):
    model = build(name).train()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
    gm = prepare_by_platform(model, "TSQAT", {"bn_mode": bn_mode})
    for module in gm.modules():
        if isinstance(module, _BatchNorm):
            module.train()
    assert_same_function(gm, model, inputs(name))


@pytest.mark.parametrize("bn_mode", ["freeze", 0, 1])
def test_statistics_that_are_frozen_from_the_start_are_no_difference(bn_mode):
    gm = prepare_by_platform(
        build("conv_bn_relu"), "TSQAT", {"bn_mode": bn_mode}, example_inputs=inputs("conv_bn_relu")
    )
    checks = str(gm.quant_report)
    assert "equal to the model on inputs with other values" in checks
    assert ("equal to the model in training" in checks) == (bn_mode == 1)


@pytest.mark.parametrize("name", TOYS)
def test_it_follows_train_and_eval(name):
    gm, model = prepared(name), build(name)
    assert not any(module.training for module in gm.modules())
    gm.train()
    assert all(module.training for module in gm.modules())
    gm.eval()
    for actual, expected in zip(*(flatten_tensors(m(*inputs(name))) for m in (gm, model)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_the_auxiliary_head_is_kept_for_the_float_model():
    model = build("auxiliary_head")
    gm = prepare_by_platform(model)
    assert gm(*inputs("auxiliary_head")).shape == (4, 3)
    assert torch.equal(gm.provenance.unread["auxiliary.weight"], model.auxiliary.weight)
    assert "auxiliary" not in {row.node for row in gm.quant_report}


# on, it trains


@pytest.mark.parametrize("backend", PLACEMENTS)
@pytest.mark.parametrize("name", TOYS)
def test_a_quantized_step_gives_every_parameter_a_gradient(name, backend):
    gm = calibrate(prepared(name, backend), inputs(name, seed=1), inputs(name, seed=2)).train()
    loss = sum(output.square().mean() for output in flatten_tensors(gm(*inputs(name))))
    loss.backward()
    assert torch.isfinite(loss)
    missing = [name for name, p in gm.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert missing == []
    assert any(
        quant.relative_scale.grad.ne(0).any() for quant in quantizers(gm) if isinstance(quant, LearnableFakeQuantize)
    )


def test_training_fits_a_target():
    gm = calibrated("conv_bn_relu").train()
    (x,) = inputs("conv_bn_relu")
    target = torch.randn(4, 5, generator=torch.Generator().manual_seed(3)) / 2  # about the calibrated range
    optimizer = torch.optim.Adam(gm.parameters(), lr=0.01)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = F.mse_loss(gm(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    assert all(torch.isfinite(p).all() for p in gm.parameters())


def test_the_error_is_that_of_eight_bits_and_grows_with_fewer():
    (x,) = inputs("residual")
    reference = build("residual")(x)
    errors = []
    for bit in (12, 8, 4):
        config = {"extra_qconfig_dict": {"w_qscheme": {"bit": bit}, "a_qscheme": {"bit": bit}, "a_observer": "MinMax"}}
        gm = calibrate(prepared("residual", "TSQAT", config), (x,))
        errors.append(((gm(x) - reference).norm() / reference.norm()).item())
    assert errors[0] < errors[1] < errors[2]
    assert errors[1] < 0.05


def test_is_qat_false_trains_no_scale():
    for config in (None, {"extra_qconfig_dict": {"w_qscheme": {"bit": 4}}}):
        gm = prepared("residual", "Experimental", config, is_qat=False)
        names = {name for name, _ in gm.named_parameters()}
        assert not any("fake_quant" in name for name in names)
        assert len(names) == len(list(build("residual").parameters()))
    assert any("fake_quant" in name for name, _ in prepared("residual", "Experimental").named_parameters())


# the user's model


def picture(model):
    """Everything that must not change, in a form that can be compared."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {
        "modules": {name: (id(module), type(module), module.training) for name, module in modules.items()},
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "hooks": {
            name: len(module._forward_hooks) + len(module._forward_pre_hooks) for name, module in modules.items()
        },
        "parameters": {name: (id(p), p.requires_grad, p._version) for name, p in model.named_parameters()},
        "buffers": {name: (id(b), b._version) for name, b in model.named_buffers()},
    }


@pytest.mark.parametrize("backend", PLACEMENTS)
@pytest.mark.parametrize("name", TOYS)
def test_the_users_model_is_untouched(name, backend):
    model = build(name).train()
    frozen = [module for module in model.modules() if isinstance(module, (_BatchNorm, nn.Conv2d))][:1]
    for module in frozen:
        module.eval()
        module.requires_grad_(False)
    bits, before = {key: value.clone() for key, value in model.state_dict().items()}, picture(model)
    gm = calibrate(prepare_by_platform(model, backend, example_inputs=inputs(name)), inputs(name))
    sum(output.square().mean() for output in flatten_tensors(gm(*inputs(name)))).backward()
    torch.optim.SGD(gm.parameters(), lr=0.1).step()
    assert picture(model) == before
    assert all(torch.equal(value, bits[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    storages = {p.untyped_storage().data_ptr() for p in model.state_dict().values() if p.numel()}
    assert not storages & {p.untyped_storage().data_ptr() for p in (*gm.parameters(), *gm.buffers()) if p.numel()}


def test_modes_and_frozen_parameters_are_taken_over():
    model = build("residual").train()
    model.layer1[0].bn1.eval()
    model.layer1[1].conv2.eval()
    model.stem.requires_grad_(False)
    gm = prepare_by_platform(model)
    block = gm.get_submodule("layer1.0.conv1")
    assert (block.training, block.bn.training) == (True, False)
    assert not gm.get_submodule("layer1.1.conv2").training
    assert gm.get_submodule("layer1.1.conv2").bn.training
    assert not gm.stem.weight.requires_grad
    assert gm.get_submodule("layer1.0.conv1").weight.requires_grad


def test_a_batch_norm_in_eval_mode_keeps_its_statistics():
    model = build("conv_bn_relu").train()
    model.bn1.eval()
    gm = prepare_by_platform(model)
    assert_same_function(gm, model, inputs("conv_bn_relu"))
    assert torch.equal(gm.conv1.bn.running_mean, build("conv_bn_relu").bn1.running_mean)
    assert not torch.equal(gm.conv2.bn.running_mean, build("conv_bn_relu").bn2.running_mean)


# sharing


def test_a_shared_module_stays_one_module():
    gm = calibrated("shared_module").train()
    layers = [module for module in gm.modules() if isinstance(module, QATLayer)]
    assert [node.target for node in gm.graph.nodes].count("head") == 3
    assert len(layers) == 2
    before = gm.head.weight.detach().clone()
    sum(output.square().mean() for output in gm(*inputs("shared_module"))).backward()
    torch.optim.SGD(gm.parameters(), lr=0.1).step()
    assert not torch.equal(gm.head.weight, before)
    assert len([p for p in gm.parameters() if p is gm.head.weight]) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_tied_weights_stay_tied_through_training(backend):
    gm = calibrated("tied_weights", backend).train()
    optimizer = torch.optim.Adam(gm.parameters(), lr=0.01)
    before = gm.encoder.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        gm(*inputs("tied_weights")).square().mean().backward()
        optimizer.step()
    assert gm.encoder.weight is gm.decoder.weight
    assert not torch.equal(gm.encoder.weight, before)
    assert gm.encoder.weight_fake_quant is not gm.decoder.weight_fake_quant


def test_one_module_under_two_names_stays_one():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first

        def forward(self, x):
            return self.second(F.relu(self.first(x)))

    torch.manual_seed(0)
    model = Twice().eval()
    gm = prepare_by_platform(model)
    x = torch.randn(3, 4)
    torch.testing.assert_close(gm(x), model(x))
    assert len([module for module in gm.modules() if isinstance(module, QATLayer)]) == 1
    assert set(gm.provenance.tensor_names) == set(model.state_dict())


# saving


@pytest.mark.parametrize("name", TOYS)
def test_a_checkpoint_goes_back_into_the_float_model(name, tmp_path):
    gm = calibrated(name)
    save_checkpoint(gm, tmp_path / "model.pth", extra={"epoch": 3})
    saved = torch.load(tmp_path / "model.pth", weights_only=True)["state_dict"]
    model = build(name, seed=1)
    model.load_state_dict(saved, strict=True)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), build(name).state_dict().values(), strict=True)
    )
    twin = prepare_by_platform(build(name, seed=2))
    assert load_checkpoint(twin, tmp_path / "model.pth") == {"epoch": 3}
    for actual, expected in zip(*(flatten_tensors(m(*inputs(name))) for m in (twin, gm)), strict=True):
        assert torch.equal(actual, expected)


# torch.compile


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("name", "training"),
    [(name, True) for name in ("squeeze_excite", "shared_module", "attention", "dropouts", "transpose_convs")]
    + [("attention", False), ("dropouts", False)],
)
def test_it_compiles_in_one_graph(name, training):
    gm = calibrated(name).train(training)
    assert_compiled_is_equal(gm, inputs(name), "aot_eager")


@pytest.mark.usefixtures("fresh_compiler")
def test_it_compiles_with_inductor():
    """In a process of its own: at the end of a long test run, torch's compiler crashes the process that it is in."""
    script = "from tests.test_prepare_by_platform import compile_with_inductor; compile_with_inductor(); print('equal')"
    done = run_fresh(["-c", script])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "equal\n"


def compile_with_inductor():
    """Generated code is slow to compile: one layer with BatchNorm and activation, forward and backward."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), torch.randn(2, 3, 6, 6)
    gm = calibrate(prepare_by_platform(model), (torch.randn(2, 3, 6, 6),)).train()
    assert_compiled_is_equal(gm, (x,), "inductor")


def assert_compiled_is_equal(gm, example, backend):
    """Outputs; in training also gradients and buffers."""
    with torch.no_grad():
        for quant in quantizers(gm):  # off the edge of the range, where the last bit of a division decides
            quant.store(quant.scale * 1.01, quant.zero_point)
    twin = copy.deepcopy(gm)
    compiled = torch.compile(twin, backend=backend, fullgraph=True)
    close = {"rtol": 1e-3, "atol": 1e-4}
    if not gm.training:
        with torch.no_grad():
            expected, actual = flatten_tensors(gm(*example)), flatten_tensors(compiled(*example))
        assert expected
        torch.testing.assert_close(actual, expected, **close)
        return
    expected, actual = outputs_and_gradients(gm, example), outputs_and_gradients(compiled, example)
    torch.testing.assert_close(actual[0], expected[0], **close)
    torch.testing.assert_close(actual[1], expected[1], **close)
    ours = {key.removeprefix("_orig_mod."): value for key, value in actual[2].items()}
    assert set(ours) == set(expected[2])
    for key, gradient in expected[2].items():
        torch.testing.assert_close(ours[key], gradient, msg=lambda text, key=key: f"{key}: {text}", **close)
    for key, buffer in gm.named_buffers():
        torch.testing.assert_close(twin.get_buffer(key), buffer, **close)


@pytest.mark.usefixtures("fresh_compiler")
def test_the_state_functions_reach_through_compile():
    gm = prepared("conv_bn_relu")
    compiled = torch.compile(gm, backend="eager", fullgraph=True)
    (x,) = inputs("conv_bn_relu")
    with torch.no_grad():
        off = compiled(x)
        enable_calibration(compiled)
        torch.testing.assert_close(compiled(x), off)
        enable_quantization(compiled)
        on = compiled(x)
    torch.testing.assert_close(on, gm(x))
    assert not torch.equal(on, off)


# arguments


def test_names_are_where_users_import_them_from():
    from fxqat.prepare_by_platform import BackendType as Enum
    from fxqat.prepare_by_platform import prepare_by_platform as function

    assert (Enum, function) == (fxqat.BackendType, fxqat.prepare_by_platform)
    gm = prepare_by_platform(build("conv_bn_relu"))
    assert isinstance(gm, QuantGraphModule)
    assert isinstance(gm, fx.GraphModule)
    assert gm.quant_report.backend == "TSQAT"


@pytest.mark.parametrize("backend", [BackendType.TensorRT, "TensorRT"])
def test_a_backend_is_given_by_member_or_name(backend):
    gm = prepare_by_platform(build("residual"), backend)
    assert gm.quant_report.backend == gm.provenance.backend == "TensorRT"
    assert gm.quant_report == prepare_by_platform(build("residual"), backend="TensorRT").quant_report


@pytest.mark.parametrize("how", [lambda x: x, lambda x: (x,), lambda x: [x]])
def test_example_inputs_are_a_tensor_or_a_tuple(how):
    (x,) = inputs("residual")
    gm = prepare_by_platform(build("residual"), example_inputs=how(x))
    assert torch.isinf(gm.stem.weight_fake_quant.observer.min_val).all()
    torch.testing.assert_close(gm(x), build("residual")(x))


@pytest.mark.parametrize("wrong", [(), [], {}, 3, "x"])
def test_wrong_example_inputs_are_an_error(wrong):
    with pytest.raises(ConfigError, match="example_inputs must be a tensor, a non-empty tuple") as caught:
        prepare_by_platform(build("residual"), example_inputs=wrong)
    assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "resnet18"}, ConfigError, "model must be a torch.nn.Module, got str"),
        ({"model": None}, ConfigError, "got NoneType"),
        ({"model": nn.Conv2d}, ConfigError, "got type"),
        ({"backend": "TSQUAT"}, ConfigError, "unknown backend 'TSQUAT'; did you mean 'TSQAT'"),
        ({"backend": None}, ConfigError, "unknown backend None"),
        ({"prepare_custom_config_dict": 3}, ConfigError, "expected a mapping, got int"),
        ({"prepare_custom_config_dict": {"override": []}}, ConfigError, "did you mean 'overrides'"),
        ({"prepare_custom_config_dict": "no/such/file.yaml"}, ConfigError, "cannot read no/such/file.yaml"),
        ({"custom_tracer": "symbolic"}, ConfigError, "custom_tracer|Tracer|'str'"),
    ],
)
def test_wrong_arguments_are_errors(change, error, message):
    arguments = {"model": build("residual"), "backend": "TSQAT"} | change
    with pytest.raises(error, match=message):
        prepare_by_platform(**arguments)
    assert prepare_by_platform(**({"model": build("residual")} | {"backend": "TSQAT"})).quant_report.num_quantized > 0


NOTHING = {
    "no layer": (nn.Sequential(nn.Flatten()), "TensorRT"),
    "an embedding": (nn.Embedding(4, 4), "TensorRT"),
    "only what the backend leaves float": (nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.Hardswish()), "ONNXRuntime"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_a_model_with_nothing_to_quantize_is_an_error_that_shows_why(case):
    model, backend = NOTHING[case]
    with pytest.raises(ConfigError, match="nothing to quantize for") as caught:
        prepare_by_platform(model, backend)
    message = str(caught.value)
    assert type(model).__name__ in message
    assert f"{backend}: 0 of" in message
    assert "reason" in message


def test_everything_excluded_is_nothing_to_quantize():
    config = {"extra_quantizer_dict": {"exclude_node_name": ["re:(?!x$|output$).*"]}}
    with pytest.raises(ConfigError, match="nothing to quantize") as caught:
        prepared("residual", config=config)
    assert "left float by exclude_node_name" in str(caught.value)


def test_an_untraceable_model_is_an_error_with_the_line_and_the_remedy():
    class Data(nn.Module):
        def forward(self, x):
            return x if x.mean() > 0 else -x

    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(Data()))
    with pytest.raises(TraceError, match=r"in module: 1\.0") as caught:
        prepare_by_platform(model, untraceable="error")
    assert f"{__file__}:" in str(caught.value)
    assert "x.mean() > 0" in str(caught.value)
    assert "leaf_module" in str(caught.value)
    gm = prepare_by_platform(model, "TSQAT", {"leaf_module": [Data]})
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(gm(x), model(x))


def test_a_graph_that_computes_something_else_is_an_error():
    class Counting(nn.Module):
        """Does something else each time."""

        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.conv(x) * self.calls

    model = Counting()
    with pytest.raises(TraceError, match="the traced Counting computes something else .* it keeps state") as caught:
        prepare_by_platform(model, example_inputs=torch.randn(1, 3, 4, 4))
    assert "concrete_args" in str(caught.value)
    assert model.calls == 0


def test_an_argument_fixed_to_another_value_than_its_default():
    class Switch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, first=True):
            return self.a(x) if first else self.b(x)

    model, x = Switch(), torch.randn(2, 4)
    gm = prepare_by_platform(model, "TSQAT", {"concrete_args": {"first": False}}, example_inputs=(x,))
    torch.testing.assert_close(gm(x), model(x, False))
    with pytest.raises(ConfigError, match="example_inputs"):  # a fixed argument is no input any more
        prepare_by_platform(model, "TSQAT", {"concrete_args": {"first": False}}, example_inputs=(x, False))


class Magnifying(nn.Module):
    """Float32 rounding of the first layer, magnified a hundred million times."""

    def __init__(self, factor=1e8, reads_input=True):
        super().__init__()
        torch.manual_seed(0)
        self.reads_input = reads_input
        self.conv, self.bn = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        nn.init.uniform_(self.bn.running_var, 0.5, 1.5)
        self.factor = factor

    def forward(self, x):
        return torch.sin(self.factor * self.bn(self.conv(x * self.reads_input + 1)))


def test_a_model_that_magnifies_roundings_is_judged_in_float64():
    model, x = Magnifying().eval(), torch.randn(2, 3, 8, 8)
    folded = fxqat.prepare_by_platform(model)
    assert not torch.allclose(folded(x), model(x), atol=0.1)
    assert fxqat.prepare_by_platform(model, example_inputs=(x,)).quant_report.num_quantized
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize(("factor", "compared"), [(1e8, True), (1e20, False)])
@pytest.mark.parametrize("reads_input", [True, False])
def test_a_model_that_differs_from_itself_is_prepared_with_a_warning(factor, compared, reads_input, caplog):
    model = Magnifying(factor, reads_input).eval()  # without its input, by the last digits of its weights
    gm = fxqat.prepare_by_platform(model, example_inputs=(torch.randn(2, 3, 8, 8),))
    assert gm.quant_report.num_quantized
    assert ["could not be compared" in record.message for record in caplog.records] == [True] * (not compared)


class FromWeight(nn.Module):
    """Computes with weights that the graph would hold as constants."""

    def __init__(self):
        super().__init__()
        self.inner, self.lin = nn.Identity(), nn.Linear(4, 4)

    def forward(self, x):
        return x * self.lin.state_dict()["bias"].exp()


def test_a_module_that_the_graph_does_not_compute_becomes_a_leaf(caplog):
    x, config = torch.randn(2, 4), {"extra_quantizer_dict": {}}
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(FromWeight(), nn.Tanh()), nn.Linear(4, 4))
    gm = prepare_by_platform(model, "TSQAT", config, example_inputs=(x,))
    leaf = gm.quant_report.leaves[0]
    assert [found.path for found in gm.quant_report.leaves] == ["1.0"]
    assert leaf.reason == "in the graph it computes something else than the model on inputs with other values"
    assert leaf.source.startswith(__file__)
    assert "left float, not traced: 1.0" in caplog.text
    assert gm.quant_report.row("0").status == "quantized"
    torch.testing.assert_close(gm(x), model(x))
    with pytest.raises(TraceError, match="they begin to differ in '1.0'"):
        prepare_by_platform(model, "TSQAT", example_inputs=(x,), untraceable="error")


def test_the_module_around_a_difference_becomes_a_leaf():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.tail = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.tail(x * self.lin.state_dict()["bias"].exp())

    x = torch.randn(2, 4)
    gm = prepare_by_platform(nn.Sequential(nn.Linear(4, 4), Weighted()), "TSQAT", example_inputs=(x,))
    assert [leaf.path for leaf in gm.quant_report.leaves] == ["1"]
    with pytest.raises(TraceError, match="they begin to differ in 'tail'"):
        prepare_by_platform(Weighted(), "TSQAT", example_inputs=(x,))


class CastsBack(nn.Module):
    """Attention in float32 inside a model of any type."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        return (y @ y.transpose(1, 2)).float().softmax(-1).to(y.dtype) @ y


def test_autocast_around_prepare_and_export_changes_nothing(tmp_path):
    torch.manual_seed(0)
    model, x = CastsBack(), torch.randn(2, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        gm = calibrate(prepare_by_platform(model, "TSQAT", example_inputs=x), (x,))
    assert gm.code == prepare_by_platform(model, "TSQAT", example_inputs=x).code
    with torch.autocast("cpu", torch.bfloat16):
        report = convert_export(gm, x, tmp_path / "model.onnx")
        assert torch.is_autocast_enabled("cpu")
    (found,) = run_file(report.onnx_path, (x,))
    assert torch.equal(torch.as_tensor(found), gm.eval()(x))
