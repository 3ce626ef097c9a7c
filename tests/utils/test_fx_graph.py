"""Small helpers on fx graphs."""

import pickle

import pytest
import torch
from torch import fx, nn

from fxqat.tracing.trace import LeafTracer
from fxqat.utils.fx_graph import (
    called_module,
    calls_in,
    calls_of,
    get_module,
    graph_of,
    module_path,
    node_inputs,
    only_user,
    overwritten_state,
    set_module,
    unique_name,
)


class Block(nn.Module):
    """A convolution and a functional op."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.conv(x))


class Net(nn.Module):
    """One block called twice under two names, then an op that reads one value twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.again(self.first(x))
        return torch.cat([y, y], dim=1)


@pytest.fixture
def gm() -> fx.GraphModule:
    """The net, traced as fxqat traces."""
    net = Net()
    return fx.GraphModule(net, LeafTracer().trace(net))


def node_named(gm: fx.GraphModule, target: object) -> fx.Node:
    """The first node with a target."""
    return next(node for node in gm.graph.nodes if node.target == target)


def test_modules_are_read_and_replaced_by_path(gm: fx.GraphModule) -> None:
    conv = nn.Conv2d(2, 5, 1)
    assert get_module(gm, "first.conv").out_channels == 2
    set_module(gm, "first.conv", conv)
    assert get_module(gm, "first.conv") is conv
    set_module(gm, "top", nn.ReLU())
    assert isinstance(gm.top, nn.ReLU)


def test_only_module_calls_call_a_module(gm: fx.GraphModule) -> None:
    calls = [node for node in gm.graph.nodes if node.op == "call_module"]
    assert [called_module(node) for node in calls] == [gm.first.conv] * 2
    assert called_module(node_named(gm, torch.sin)) is None
    assert called_module(node_named(gm, "x")) is None


def test_calls_are_counted_per_object_not_per_path(gm: fx.GraphModule) -> None:
    calls = calls_of(gm)
    assert len(calls) == 1
    assert [node.op for node in calls[id(get_module(gm, "first.conv"))]] == ["call_module"] * 2


def test_only_user_is_the_one_reader() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.sin, (x,))
    assert only_user(x) is y
    assert only_user(y) is None
    graph.call_function(torch.cos, (x,))
    assert only_user(x) is None
    assert only_user(graph.call_function(torch.add, (y, y))) is None
    assert only_user(y).target is torch.add


def test_paths_name_the_innermost_module(gm: fx.GraphModule) -> None:
    sines = [node for node in gm.graph.nodes if node.target is torch.sin]
    assert module_path(sines[0]) == "first"
    assert module_path(node_named(gm, torch.cat)) == ""
    conv = next(node for node in gm.graph.nodes if node.op == "call_module")
    assert module_path(conv) == "first.conv"


def test_unique_names_count_up(gm: fx.GraphModule) -> None:
    assert unique_name(gm, "new") == "new"
    gm.new = nn.ReLU()
    assert unique_name(gm, "new") == "new_1"
    gm.new_1 = nn.ReLU()
    assert unique_name(gm, "new") == "new_2"
    assert unique_name(gm, "forward") == "forward_1"


def test_unique_names_may_be_paths(gm: fx.GraphModule) -> None:
    assert unique_name(gm, "first.conv") == "first.conv_1"
    assert unique_name(gm, "first.new") == "first.new"
    assert unique_name(gm, "missing.conv") == "missing.conv"


def test_inputs_are_found_in_any_structure_with_repetitions(gm: fx.GraphModule) -> None:
    cat = node_named(gm, torch.cat)
    y = cat.args[0][0]
    assert list(node_inputs(cat.args)) == [y, y]
    assert list(node_inputs({"a": [y, 3], "b": (y, {"c": y})})) == [y, y, y]
    assert list(node_inputs((1, "text", None))) == []


def test_operators_of_torch_survive_as_plain_values() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.add.Tensor(torch.ops.aten.relu(x), x)

    graph = LeafTracer().trace(Net())
    again = graph_of(pickle.loads(pickle.dumps(calls_in(graph))))
    assert [node.target for node in again.nodes] == [node.target for node in graph.nodes]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda p: p.mul_(2), "gain"),
        (lambda p: p.data.mul_(2), "gain"),
        (lambda p: p.detach().mul_(2).add_(1), "gain"),
        (lambda p: (p * 2).add_(1), None),
        (lambda p: p.data.mul(2), None),
    ],
)
def test_the_parameter_that_is_overwritten_is_found(step, expected) -> None:
    graph = fx.Graph()
    step(fx.Proxy(graph.get_attr("gain")))
    last = next(iter(reversed(graph.nodes)))
    assert overwritten_state(last) == expected
