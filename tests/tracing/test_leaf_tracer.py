"""Float leaves: the smallest module that cannot be traced is called as a whole, and is reported."""

import copy
import inspect
import pickle
import threading

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from fxqat import convert_export, enable_calibration, enable_quantization, prepare_by_platform
from fxqat.errors import ConfigError, TraceError
from fxqat.tracing.leaf_tracer import LeafTracer, explain
from fxqat.tracing.trace import trace


class Gate(nn.Module):
    """Branches on tensor values."""

    def forward(self, x):
        if x.sum() > 0:  # the line to name
            return x * 2
        return -x


class Weighted(nn.Module):
    """The same, around a layer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = self.inner(x)
        while y.abs().max() > 1.0:  # the line to name
            y = y / 2
        return y


class Net(nn.Module):
    """A layer, something that cannot be traced twice over, and another layer."""

    def __init__(self, middle):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.body = nn.Sequential(nn.ReLU(), middle, nn.ReLU())
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.last(self.body(self.first(x)))


def image(batch=2, seed=0):
    return torch.randn(batch, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def line_of(kind):
    lines, start = inspect.getsourcelines(kind)
    return start + next(i for i, line in enumerate(lines) if "the line to name" in line)


def targets(gm):
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize("with_inputs", [True, False])
@pytest.mark.parametrize("middle", [Gate, Weighted])
def test_the_smallest_module_becomes_the_leaf(middle, with_inputs):
    model = Net(middle())
    traced = trace(model, example_inputs=(image(),) if with_inputs else None)
    assert targets(traced.gm) == ["first", "body.0", "body.1", "body.2", "last"]
    (leaf,) = traced.leaves
    assert leaf.path == "body.1"
    assert leaf.source.startswith(f"{__file__}:{line_of(middle)}: ")
    assert "tensor" in leaf.reason
    for seed in range(4):  # both ways
        assert torch.equal(traced.gm(image(3, seed)), model(image(3, seed)))


def test_a_leaf_is_in_the_report_and_what_is_around_it_is_quantized():
    gm = prepare_by_platform(Net(Weighted()), example_inputs=(image(),))
    report = gm.quant_report
    assert [leaf.path for leaf in report.leaves] == ["body.1"]
    assert f"left float, not traced: body.1: {report.leaves[0].reason}" in str(report)
    assert report.row("first").status == "quantized"
    assert report.row("last").weight
    assert not report.row("body_1").weight


def test_a_model_with_a_leaf_is_trained():
    gm = prepare_by_platform(Net(Weighted()), example_inputs=(image(),)).eval()
    enable_calibration(gm)
    gm(image())
    enable_quantization(gm)
    gm.train()(image(4)).square().mean().backward()
    for name in ("first", "body.1.inner", "last"):
        gradient = next(p.grad for n, p in gm.named_parameters() if n.startswith(name) and n.endswith("weight"))
        assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0


def test_a_model_with_a_leaf_is_copied_and_pickled():
    gm = prepare_by_platform(Net(Gate()), example_inputs=(image(),))
    for other in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        assert other.quant_report.leaves == gm.quant_report.leaves
        for seed in range(4):
            assert torch.equal(other(image(seed=seed)), gm(image(seed=seed)))


def test_a_leaf_that_is_called_twice_is_one_leaf():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)
            self.gate = Gate()

        def forward(self, x):
            return self.gate(self.conv(self.gate(x)))

    model = Twice()
    traced = trace(model, example_inputs=(image(),))
    assert targets(traced.gm) == ["gate", "conv", "gate"]
    assert [leaf.path for leaf in traced.leaves] == ["gate"]
    assert torch.equal(traced.gm(image(seed=1)), model(image(seed=1)))


def test_nodes_of_a_failed_attempt_are_taken_back():
    model = Net(Weighted())
    graph = trace(model, example_inputs=(image(),)).gm.graph
    assert [node.op for node in graph.nodes] == ["placeholder", *["call_module"] * 5, "output"]
    graph.lint()


@pytest.mark.parametrize("with_inputs", [True, False])
def test_untraceable_error_names_module_line_and_remedy(with_inputs):
    model = Net(Weighted())
    with pytest.raises(TraceError) as caught:
        prepare_by_platform(model, example_inputs=(image(),) if with_inputs else None, untraceable="error")
    message = str(caught.value)
    assert "in module: body.1" in message
    assert f"{__file__}:{line_of(Weighted)}: while y.abs()" in message
    assert "'leaf_module'" in message
    assert "custom_tracer" in message


def test_untraceable_is_checked():
    with pytest.raises(ConfigError, match="untraceable must be 'leaf' or 'error'"):
        prepare_by_platform(Net(Gate()), untraceable="ignore")
    with pytest.raises(TraceError):
        trace(Net(Gate()), untraceable="error")


def test_a_gate_in_the_models_own_forward_is_an_error():
    class Top(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            y = self.conv(x)
            return y if y.sum() > 0 else -y  # the line to name

    with pytest.raises(TraceError, match="in module: the model itself") as caught:
        prepare_by_platform(Top(), example_inputs=(image(),))
    assert f"{__file__}:{line_of(Top)}: " in str(caught.value)
    assert "Remedy" in str(caught.value)


def test_leaf_types_and_paths_are_not_failures():
    traced = trace(Net(Gate()), example_inputs=(image(),), leaf_modules=[Gate, "last"])
    assert targets(traced.gm) == ["first", "body.0", "body.1", "body.2", "last"]
    assert traced.leaves == ()


def test_a_tracer_as_it_is_has_no_leaves_with_error():
    tracer = LeafTracer(untraceable="error")
    model = Net(Gate())
    with pytest.raises(fx.proxy.TraceError):
        tracer.trace(model)
    assert tracer.leaves == {}
    assert tracer.path_of_failure == "body.1"


def test_reasons_are_one_line():
    assert explain(ValueError("first\nsecond")) == "ValueError: first"
    assert explain(ValueError()) == "ValueError: "
    assert "not known while tracing" in explain(fx.proxy.TraceError("long text of torch"))


class Symmetric(nn.Module):
    """A parametrization that is not part of torch."""

    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


def symmetric(layer):
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def test_layers_with_parametrized_weights_are_quantized(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    parametrized = [make(nn.Linear(6, 6)) for make in (weight_norm, spectral_norm, symmetric)]
    model = nn.Sequential(nn.Linear(6, 6), *parametrized, nn.ReLU(), nn.Linear(6, 2))
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    torch.testing.assert_close(gm.eval()(x), model.eval()(x))
    layers = [row.status for row in gm.quant_report if row.op == "linear"]
    assert len(layers) == 5
    assert set(layers) <= {"quantized", "shares"}
    assert gm.quant_report.leaves == ()
    enable_calibration(gm)
    gm(x)
    enable_quantization(gm)
    gm.train()(x).square().sum().backward()
    originals = [p.grad for path, p in gm.named_parameters() if "original" in path and "fake_quant" not in path]
    assert len(originals) == 4
    assert all(gradient.abs().sum() > 0 for gradient in originals)
    certificate = convert_export(gm.eval(), (x,), tmp_path / "model.onnx").certificate
    assert certificate.passed


class MakesModules(nn.Module):
    """Forward creates modules."""

    def __init__(self, make):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.make = make

    def forward(self, x):
        return self.last(self.make()(self.first(x)))


@pytest.mark.parametrize("with_inputs", [True, False])
@pytest.mark.parametrize(
    ("make", "op"),
    [
        (lambda: nn.ReLU(), "relu"),
        (lambda: nn.Softmax(dim=-1), "softmax"),
        (lambda: nn.Sequential(nn.Tanh(), nn.Sigmoid()), "sigmoid"),
    ],
)
def test_a_module_that_forward_makes_is_traced_into(make, op, with_inputs):
    model, x = MakesModules(make), torch.randn(4, 6)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,) if with_inputs else None)
    assert [row.status for row in gm.quant_report if row.op == op] == ["quantized"] * (op != "relu")
    assert gm.quant_report.leaves == ()
    torch.testing.assert_close(gm(x), model(x))


class DropsLayers(nn.Module):
    """Forward makes a module of those of the model, all of them in eval mode, and trains the first one only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Sigmoid())])

    def forward(self, x):
        return nn.Sequential(*(self.layers[:1] if self.training else self.layers), nn.Tanh())(x)


@pytest.mark.parametrize("with_inputs", [True, False])
def test_a_module_that_forward_makes_of_modules_of_the_model_is_traced_into(with_inputs):
    model, x = DropsLayers(), torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,) if with_inputs else None)
    assert gm.quant_report.leaves == ()
    assert {row.node for row in gm.quant_report if row.op == "linear"} == {"layers_0", "layers_1_0"}
    torch.testing.assert_close(gm.eval()(x), model.eval()(x))
    if with_inputs:
        torch.testing.assert_close(gm.train()(x), model.train()(x))


def test_parameters_that_forward_makes_are_refused_in_a_symbolic_trace():
    with pytest.raises(TraceError, match="not installed as a submodule"):
        prepare_by_platform(MakesModules(lambda: nn.Linear(6, 6)), "TSQAT")


class Step(nn.Module):
    """A function of the module and a value, in a module of its own."""

    def __init__(self, step):
        super().__init__()
        self.lin, self.gain, self.step = nn.Linear(4, 4), nn.Parameter(torch.tensor(1.5)), step

    def forward(self, y):
        return self.step(self, y)


class Around(nn.Module):
    """A step between two layers, in the model itself or in a module."""

    def __init__(self, step, apart=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.inner = nn.Linear(4, 4), nn.Linear(4, 4), Step(step)
        self.apart = apart

    def forward(self, x):
        y = self.first(x)
        y = self.inner(y) if self.apart else self.inner.step(self.inner, y)
        return self.last(y)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
WITH_AND_WITHOUT = pytest.mark.parametrize("given", [(X,), None], ids=["inputs", "no inputs"])


@WITH_AND_WITHOUT
def test_a_tensor_of_a_state_dict_follows_the_weight(given):
    def step(module, y):
        return nn.functional.linear(y, module.lin.state_dict()["weight"])

    model = Around(step)
    gm = copy.deepcopy(prepare_by_platform(model, "TSQAT", example_inputs=given, check="off"))
    assert gm.quant_report.remarks == []
    with torch.no_grad():
        for holder in (model, gm):
            for parameter in holder.parameters():
                parameter.mul_(2) if parameter.dim() else None
    torch.testing.assert_close(gm(X), model(X))
    gm(X).sum().backward()
    assert gm.get_parameter("inner.lin.linear.parametrizations.weight.original").grad is None


def test_a_part_of_a_weight_that_is_read_outside_of_the_graph_makes_a_leaf():
    gm = prepare_by_platform(Around(lambda m, y: y * m.lin._parameters["weight"].data[0]), "TSQAT", check="off")
    assert [leaf.path for leaf in gm.quant_report.leaves] == ["inner"]
    assert "a part of inner.lin.weight was read outside of the graph" in gm.quant_report.leaves[0].reason


def clamped(module, y):
    module.gain.data.clamp_(0.1, 1.0)
    return y * module.gain


def clamped_without_gradients(module, y):
    with torch.no_grad():
        module.gain.clamp_(0.1, 1.0)
    return y * module.gain


def clamped_and_assigned(module, y):
    module.gain.data = module.gain.data.clamp(0.1, 1.0)
    return y * module.gain


@WITH_AND_WITHOUT
@pytest.mark.parametrize("step", [clamped, clamped_without_gradients, clamped_and_assigned])
def test_a_module_that_overwrites_its_parameter_is_a_leaf(step, given):
    model = Around(step)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=given, check="off")
    assert "inner" in [leaf.path for leaf in gm.quant_report.leaves]
    assert "forward overwrites the parameter inner.gain" in str(gm.quant_report)
    assert model.inner.gain.item() == 1.5
    for holder in (model, gm):
        with torch.no_grad():
            holder.inner.gain.fill_(3.0)
    torch.testing.assert_close(gm(X), model(X))
    assert gm.inner.gain.item() == 1.0
    remedy = "overwrites the parameter inner.gain(?s:.*)Remedy: overwrite it after each step of the optimizer"
    with pytest.raises(TraceError, match=remedy):
        prepare_by_platform(Around(step, apart=False), "TSQAT", example_inputs=given)


def normalized_in_training(module, y):
    if module.training:
        with torch.no_grad():
            module.gain.copy_(module.gain.sign())
    return y * module.gain


def test_a_module_that_overwrites_its_parameter_in_training_follows_eval_mode():
    gm = prepare_by_platform(Around(normalized_in_training), "TSQAT", example_inputs=(X,))
    assert gm.quant_report.eval_only == ("inner",)
    assert not gm.quant_report.leaves


class Scaled(nn.Module):
    """Has an argument of the name that torch.fx gives a module."""

    def forward(self, x, mod):
        return x * mod


@WITH_AND_WITHOUT
def test_a_module_can_be_called_with_the_keyword_mod(given):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.scaled = nn.Linear(4, 4), Scaled()

        def forward(self, x):
            return self.scaled(self.lin(x), mod=x)

    model, call = Net(), nn.Module.__call__
    gm = prepare_by_platform(model, "TSQAT", example_inputs=given)
    assert nn.Module.__call__ is call
    torch.testing.assert_close(gm(X), model(X))


def test_a_write_through_a_view_of_a_parameter_makes_a_leaf():
    def step(module, y):
        with torch.no_grad():
            module.lin.weight[0].zero_()
        return module.lin(y)

    gm = prepare_by_platform(Around(step), "TSQAT", example_inputs=(X,))
    assert "forward overwrites the parameter inner.lin.weight" in gm.quant_report.leaves[-1].reason


@WITH_AND_WITHOUT
def test_random_numbers_and_seeds_outside_of_the_graph_make_a_leaf(given):
    def step(module, y):
        torch.manual_seed(3)
        return y + torch.rand_like(y)

    model = Around(step)
    state = torch.get_rng_state()
    gm = prepare_by_platform(model, "TSQAT", example_inputs=given)
    assert torch.equal(torch.get_rng_state(), state)
    assert gm.quant_report.leaves[-1].path == "inner"
    assert gm.quant_report.leaves[-1].reason == "forward calls torch.manual_seed() outside of the graph"
    torch.testing.assert_close(gm(X), model(X))
    torch.set_rng_state(state)
    with pytest.raises(TraceError, match=r"forward calls torch.manual_seed\(\) outside of the graph"):
        prepare_by_platform(Around(step, apart=False), "TSQAT", example_inputs=given)


def test_numbers_that_are_drawn_in_a_symbolic_trace_are_no_constant():
    model = Around(lambda module, y: y * torch.rand(()))
    gm = prepare_by_platform(model, "TSQAT")
    assert [leaf.path for leaf in gm.quant_report.leaves] == ["inner"]
    assert not torch.equal(gm(X), gm(X))


def test_a_text_of_a_value_is_no_output():
    class Named(Around):
        def forward(self, x):
            return {"out": super().forward(x), "name": f"batch of {x.shape[0]}"}

    model = Named(lambda module, y: y)
    with pytest.raises(TraceError, match=r"(?s)the text 'batch of Proxy\(.*pass example_inputs"):
        prepare_by_platform(model, "TSQAT")
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(X,))
    assert gm(X)["name"] == model(X)["name"]
    assert gm.quant_report.forced


def test_gradients_that_are_switched_off_in_a_symbolic_trace_are_reported(caplog):
    def step(module, y):
        with torch.no_grad():
            z = y * 0.5
        return y + z

    gm = prepare_by_platform(Around(step), "TSQAT")
    assert len(gm.quant_report.state_changes) == 1
    assert gm.quant_report.state_changes[0].startswith("forward switches gradients off")
    assert "test_leaf_tracer.py:" in gm.quant_report.state_changes[0]
    assert gm.quant_report.state_changes[0] in caplog.text
    assert prepare_by_platform(Around(step), "TSQAT", example_inputs=(X,)).quant_report.state_changes == ()


def test_a_value_of_an_earlier_trace_cannot_be_used():
    tracer = LeafTracer()
    tracer.trace(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(fx.proxy.TraceError, match="keeps a tensor for its next call outside of the model"):
        tracer.create_node("placeholder", "x", (), {})


def test_another_thread_may_draw_random_numbers_meanwhile():
    def step(module, y):
        drawn = threading.Thread(target=lambda: (torch.manual_seed(5), torch.rand(2)))
        drawn.start()
        drawn.join()
        return y * 2

    for given in ((X,), None):
        gm = prepare_by_platform(Around(step), "TSQAT", example_inputs=given, check="off")
        assert gm.quant_report.leaves == ()
    assert torch.rand.__name__ == "rand"
    assert not hasattr(torch.rand, "__wrapped__")
