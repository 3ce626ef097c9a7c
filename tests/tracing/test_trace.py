"""Trace: a copy becomes a graph, the model stays as it is, and errors say what cannot be traced, where and why."""

import copy
import inspect

import pytest
import torch
from torch import fx, nn
from torchvision.ops import StochasticDepth

from fxqat import prepare_by_platform
from fxqat.errors import ConfigError, TraceError
from fxqat.tracing.leaf_tracer import LeafTracer
from fxqat.tracing.trace import copy_model, trace
from fxqat.utils.source import line_of_node
from tests.models import TOYS, Counting, build, inputs


class Gate(nn.Module):
    """Branches on tensor values."""

    def forward(self, x):
        if x.sum() > 0:  # the line that the message must name
            return x
        return -x


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.body = nn.Sequential(nn.ReLU(), Gate())

    def forward(self, x):
        return self.body(self.conv(x))


class Flagged(nn.Module):
    """Branches on an argument."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x, first=True, scale=1.0):
        return (self.a(x) if first else self.b(x)) * scale


def targets(gm, op="call_module"):
    return [str(node.target) for node in gm.graph.nodes if node.op == op]


@pytest.mark.parametrize("name", TOYS)
def test_the_graph_computes_what_the_model_computes(name):
    model = build(name)
    root, gm, *_ = trace(model)
    example = inputs(name)
    expected, actual = model(*example), gm(*example)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert root is not model
    assert not {id(p) for p in gm.parameters()} & {id(p) for p in model.parameters()}


def test_every_module_keeps_its_mode():
    model = build("residual").train()
    model.layer1[0].bn1.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    root, gm, *_ = trace(model)
    assert {name: module.training for name, module in root.named_modules()} == modes
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {n: m.training for n, m in gm.named_modules()}.items() <= modes.items()
    assert gm.training


def test_shared_modules_and_tied_weights_stay_shared():
    _, shared, *_ = trace(build("shared_module"))
    assert targets(shared).count("head") == 3
    _, tied, *_ = trace(build("tied_weights"))
    assert tied.encoder.weight is tied.decoder.weight
    assert len(list(tied.parameters())) == 2


@pytest.mark.parametrize("leaf", [Gate, "body.1"])
def test_a_leaf_is_kept_whole(leaf):
    model = Gated()
    _, gm, *_ = trace(model, leaf_modules=[leaf])
    assert targets(gm) == ["conv", "body.0", "body.1"]
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
    torch.testing.assert_close(gm(-x), model(-x), rtol=0, atol=0)


def test_a_leaf_container_hides_what_is_in_it():
    _, gm, *_ = trace(build("residual"), leaf_modules=["layer1"])
    assert targets(gm) == ["stem", "layer1", "fc"]
    torch.testing.assert_close(gm(*inputs("residual")), build("residual")(*inputs("residual")), rtol=0, atol=0)


def test_stochastic_depth_goes_on_switching_with_the_mode():
    _, gm, *_ = trace(nn.Sequential(nn.Conv2d(1, 1, 1), StochasticDepth(0.5, "row")))
    x = torch.ones(64, 1, 2, 2)
    dropped = (gm.train()(x) == 0).flatten(1).all(1).sum().item()
    assert targets(gm) == ["0", "1"]
    assert 10 < dropped < 54
    assert (gm.eval()(x) == gm.get_submodule("0")(x)).all()


def test_a_custom_tracer_is_used():
    class Tracer(fx.Tracer):
        def is_leaf_module(self, m, module_qualified_name):
            return isinstance(m, Gate) or super().is_leaf_module(m, module_qualified_name)

    model = Gated()
    tracer = Tracer()
    _, gm, *_ = trace(model, tracer)
    assert targets(gm) == ["conv", "body.0", "body.1"]
    assert tracer.root is not model
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize(("first", "taken"), [(True, "a"), (False, "b")])
def test_concrete_args_choose_the_way(first, taken):
    model = Flagged()
    _, gm, *_ = trace(model, concrete_args={"first": first})
    assert targets(gm) == [taken]
    x = torch.randn(2, 4)
    torch.testing.assert_close(gm(x, first, 2.0), model(x, first, 2.0), rtol=0, atol=0)


def test_the_message_names_module_line_and_remedy():
    with pytest.raises(TraceError) as caught:
        trace(Gated(), untraceable="error")
    message = str(caught.value)
    lines, start = inspect.getsourcelines(Gate)
    number = start + next(i for i, line in enumerate(lines) if "x.sum()" in line)
    assert "in module: body.1" in message
    assert f"{__file__}:{number}: if x.sum() > 0:" in message
    assert "keep that module whole and float with untraceable='leaf'" in message
    assert "{'leaf_module': ['body.1']}" in message
    assert isinstance(caught.value.__cause__, fx.proxy.TraceError)


class Sum(nn.Module):
    """Branches on tensor values in its own forward."""

    def forward(self, x, scale=1.0):
        return x if x.sum() > 0 else x * scale


class Stop(fx.Tracer):
    """A tracer that raises."""

    def trace(self, root, concrete_args=None):
        raise ValueError("stop")


@pytest.mark.parametrize(
    ("options", "remedies"),
    [
        ({}, "pass example_inputs, so that sizes are known while tracing; or fix an argument of forward (scale)"),
        (
            {"example_inputs": (torch.ones(2),)},
            "fix an argument of forward (scale) with 'concrete_args'; or pass a cus",
        ),
        (
            {"concrete_args": {"scale": 2.0}},
            "pass example_inputs, so that sizes are known while tracing; or pass a cus",
        ),
        ({"example_inputs": (torch.ones(2),), "concrete_args": {"scale": 2.0}}, "pass a custom_tracer; or move that"),
        ({"custom_tracer": Stop()}, "fix an argument of forward (scale) with 'concrete_args'; or move that line"),
    ],
)
def test_the_remedy_is_not_what_was_already_done(options, remedies):
    with pytest.raises(TraceError) as caught:
        trace(Sum(), **options)
    assert f"Remedy: {remedies}" in str(caught.value)
    assert "leaf_module" not in str(caught.value)


class KVCache:
    """An object that a graph cannot hold."""


class Decoder(nn.Module):
    """Returns such an object unless an argument switches it off."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, mask=None, use_cache=True):
        return (self.fc(x), KVCache()) if use_cache else (self.fc(x),)


def test_an_output_that_a_graph_cannot_hold_names_its_type_and_the_argument_that_switches_it_off():
    x = torch.ones(2, 4)
    with pytest.raises(TraceError) as caught:
        trace(Decoder(), example_inputs=(x,))
    assert f"a graph cannot hold a value of the type {__name__}.KVCache" in str(caught.value)
    assert "switch it off with prepare_custom_config_dict={'concrete_args': {'use_cache': False}}" in str(caught.value)
    (output,) = trace(Decoder(), example_inputs=(x,), concrete_args={"use_cache": False}).gm(x)
    assert output.shape == (2, 4)


def test_without_an_argument_of_that_name_all_optional_ones_are_named():
    class Other(Decoder):
        def forward(self, x, mask=None, caching=True):
            return super().forward(x, mask, caching)

    with pytest.raises(TraceError, match="cannot hold a value of the type") as caught:
        trace(Other(), example_inputs=(torch.ones(2, 4),))
    assert "switch it off by an argument of forward (mask, caching) with 'concrete_args'" in str(caught.value)


def test_a_failure_in_the_models_own_forward_is_named_too():
    class Loop(nn.Module):
        def forward(self, x):
            return sum(x[i] for i in range(len(x)))

    with pytest.raises(TraceError, match="cannot trace Loop") as caught:
        trace(Loop())
    assert "the model itself" in str(caught.value)
    assert "for i in range(len(x))" in str(caught.value)


def test_a_model_that_cannot_be_copied_is_an_error():
    model = nn.Linear(2, 2)
    model.lock = (item for item in ())
    with pytest.raises(TraceError, match="cannot copy Linear") as caught:
        trace(model)
    assert "deep-copyable" in str(caught.value)
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        (["body.7"], "no module 'body.7'"),
        ([Gate()], "a module type, its name"),
        ([3], "got 3"),
        (["Gat"], "no module 'Gat'; did you mean 'Gate'"),
        ([nn.LSTM], "no module 'LSTM'"),
    ],
)
def test_wrong_leaves_are_errors(leaves, message):
    model = Gated()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=message):
        trace(model, leaf_modules=leaves)
    with pytest.raises(ConfigError, match="leaf_module"):
        trace(model, leaf_modules=leaves)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_leaves_and_a_custom_tracer_exclude_each_other():
    with pytest.raises(ConfigError, match="exclude each other"):
        trace(Gated(), LeafTracer(), leaf_modules=[Gate])
    with pytest.raises(TraceError):  # the tracer alone is taken as it is, without leaves of ours
        trace(Gated(), LeafTracer(untraceable="error"))


def test_an_argument_the_model_does_not_have_is_an_error():
    model = Flagged()
    with pytest.raises(ConfigError, match="frist") as caught:
        trace(model, concrete_args={"frist": False, "first": True})
    assert "'first'" in str(caught.value)


def test_nodes_know_their_source_line():
    _, gm, *_ = trace(Flagged(), concrete_args={"first": True})
    lines, start = inspect.getsourcelines(Flagged)
    number = start + next(i for i, line in enumerate(lines) if "return (self.a" in line)
    found = {node.name: line_of_node(node) for node in gm.graph.nodes}
    assert found["a"] == f"{__file__}:{number}"
    assert found["mul"] == f"{__file__}:{number}"


def test_a_copy_is_a_model_of_its_own():
    model, x = Counting(), torch.randn(2, 3)
    handle = model.linear.register_forward_hook(lambda module, args, result: 2 * result)
    expected = model(x)
    copied = copy_model(model)
    assert copied.tied.weight is copied.linear.weight
    assert copied.linear.weight is not model.linear.weight
    assert torch.equal(copied(x), expected)
    assert int(model.calls) == 1
    handle.remove()  # of the model
    assert torch.equal(copied(x), expected)
    copied.tied.register_forward_hook(lambda module, args, result: 2 * result)
    assert not torch.equal(copied(x), expected)
    assert torch.equal(model(x), model(x))
    assert not model.tied._forward_hooks


def test_hooks_on_the_gradients_of_parameters_are_copied():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.gain = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.7))
            self.seen = []
            self.gain.register_hook(lambda gradient: gradient * 0.1)
            self.fc.weight.register_hook(self.keep)

        def keep(self, gradient):
            self.seen.append(gradient.shape)

        def forward(self, x):
            return self.fc(x) * self.gain

    model, x = Net(), torch.randn(2, 4)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert gm.quant_report.remarks == []
    for holder in (model, gm):
        holder(x).sum().backward()
    torch.testing.assert_close(gm.gain.grad, model.gain.grad)
    torch.testing.assert_close(gm.get_parameter("fc.weight").grad, model.fc.weight.grad)
    assert model.seen == [(4, 4)]


def test_hooks_after_a_gradient_was_added_are_reported(caplog):
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(torch.randn(2, 4),))
    line = "register_post_accumulate_grad_hook of 0.weight is not kept: register it on the prepared model"
    assert gm.quant_report.state_changes == (line,)
    assert line in caplog.text


@torch.compile(backend="eager", fullgraph=True)
def compiled_gelu(x):
    return x * torch.sigmoid(1.702 * x)


class CallsCompiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return compiled_gelu(self.fc(x))


class IsCompiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    @torch.compile(backend="eager", fullgraph=True)
    def forward(self, x):
        return self.fc(x).relu()


class HoldsCompiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.body = torch.compile(self.in_python, backend="eager")

    def in_python(self, x):
        return self.fc(x) * 2

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("with_inputs", [True, False])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("kind", [CallsCompiled, IsCompiled, HoldsCompiled])
def test_compiled_functions_are_traced_as_python(kind, inside, with_inputs):
    model = nn.Sequential(nn.Linear(4, 4), kind()) if inside else kind()
    x = torch.randn(3, 4)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,) if with_inputs else None)
    torch.testing.assert_close(gm(x), model(x))
    assert gm.quant_report.leaves == ()
    layers = [row for row in gm.quant_report if row.op == "linear" or row.op.startswith("linear_")]
    assert [row.status for row in layers] == ["quantized"] * (1 + inside)
