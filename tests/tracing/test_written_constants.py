"""A tensor that forward makes and overwrites is made in each call, also where it is no node of the graph."""

import numpy as np
import pytest
import torch
from torch import fx, nn

import fxqat
from fxqat.tracing.trace import trace
from fxqat.tracing.written_constants import constants_of, copy_written_constants


def adds(y):
    total = torch.zeros(6)
    total.add_(y[0])
    return total


def adds_by_an_operator(y):
    total = torch.ones(6)
    total += y[0]
    return total


def clamps_first(y):
    return torch.zeros(6).clamp_(min=0).add_(y[1])


def of_numpy(y):
    return torch.from_numpy(np.zeros(6, dtype=np.float32)).add_(y[0])


def only_reads(y):
    return torch.full((6,), 2.0) * y[0]


class Writes(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(6, 6), function

    def forward(self, x):
        y = self.layer(x)
        return y * self.function(y)


@pytest.mark.parametrize("function", [adds, adds_by_an_operator, clamps_first, of_numpy, only_reads])
def test_the_next_call_finds_nothing_of_the_last_one(function, tmp_path):
    model, batches = Writes(function).eval(), torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))
    gm = fxqat.prepare_by_platform(model, "TSQAT")
    fxqat.disable_all(gm)
    for x in batches:
        torch.testing.assert_close(gm(x), model(x))
    fxqat.calibrate(gm, [(x,) for x in batches], progress=False)
    fxqat.enable_quantization(gm)
    report = fxqat.convert_export(gm, (batches[0],), tmp_path / "file.onnx")
    assert report.certificate.passed
    assert report.buffers_not_updated == ()


def test_what_is_only_read_is_not_copied():
    graphs = [trace(Writes(function).eval()).gm.graph for function in (only_reads, adds)]
    assert [sum(node.target == "clone" for node in graph.nodes) for graph in graphs] == [0, 1]


def test_constants_that_the_model_held_before_are_its_state():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_method("add_", (graph.get_attr("_tensor_constant0"), x)))
    root = nn.Module()
    root.register_buffer("_tensor_constant0", torch.zeros(2))
    model = fx.GraphModule(root, graph)
    assert constants_of(model) == {"_tensor_constant0"}
    copy_written_constants(model.graph, constants_of(model))
    assert [node.target for node in model.graph.nodes if node.op == "call_method"] == ["add_"]
    copy_written_constants(model.graph)
    assert [node.target for node in model.graph.nodes if node.op == "call_method"] == ["clone", "add_"]


def test_a_module_that_overwrites_a_constant():
    class Overwrites(Writes):
        def __init__(self):
            super().__init__(lambda y: self.rectified(torch.zeros(6) - 1) + y[0])
            self.rectified = nn.ReLU(inplace=True)

    model, x = Overwrites().eval(), torch.randn(3, 6)
    gm = fxqat.prepare_by_platform(model, "TSQAT")
    fxqat.disable_all(gm)
    for _ in range(2):
        torch.testing.assert_close(gm(x), model(x))
