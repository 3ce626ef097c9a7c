"""The line of the user's code that something comes from."""

import contextlib
import inspect
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from fxqat.tracing.leaf_tracer import LeafTracer
from fxqat.utils.source import innermost_line, is_user_file, line_of_failure, line_of_node


class Doubled(nn.Module):
    def forward(self, x):
        return helper(x).relu()


def helper(x):
    return torch.cat([x, x])  # the line of cat


def line_with(text):
    return 1 + next(i for i, line in enumerate(Path(__file__).read_text().splitlines()) if line.endswith(text))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/me/net.py", True),
        ("/home/me/torch/net.py", True),
        (torch.fx.proxy.__file__, False),
        (inspect.getsourcefile(LeafTracer), False),
        ("<eval_with_key>.3", False),
        (contextlib.__file__, False),
        ("<frozen importlib>", False),
    ],
)
def test_whose_file_it_is(path, expected):
    assert is_user_file(path) is expected


@pytest.mark.parametrize("with_stacks_of_fx", [True, False])
def test_a_node_comes_from_the_innermost_line_of_the_user(with_stacks_of_fx):
    tracer = fx.Tracer() if with_stacks_of_fx else LeafTracer()
    tracer.record_stack_traces = with_stacks_of_fx
    nodes = {node.name: line_of_node(node) for node in tracer.trace(Doubled()).nodes}
    assert nodes["cat"] == f"{__file__}:{line_with('# the line of cat')}"
    assert nodes["relu"] == f"{__file__}:{line_with('return helper(x).relu()')}"


def test_a_node_of_nobody_has_no_line():
    assert line_of_node(fx.Graph().placeholder("x")) == ""
    graph = LeafTracer().trace(nn.Sequential(nn.ReLU()))  # the loop over the layers is torch's
    assert {line_of_node(node) for node in graph.nodes} == {""}


def test_the_search_ends_at_the_function_it_is_given():
    assert innermost_line(inspect.currentframe(), test_a_node_of_nobody_has_no_line.__code__).startswith(__file__)
    assert innermost_line(inspect.currentframe(), inspect.currentframe().f_code) == ""
    assert innermost_line(None, inspect.currentframe().f_code) == ""


def test_a_failure_comes_from_the_users_last_line():
    def fail():
        raise ValueError("no")  # the line to name

    with pytest.raises(ValueError, match="no") as caught:
        fail()
    line = line_with("# the line to name")
    assert line_of_failure(caught.value) == f'{__file__}:{line}: raise ValueError("no")  # the line to name'
    assert line_of_failure(ValueError("never raised")) == "unknown source line"
