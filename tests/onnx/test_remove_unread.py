"""Nodes that nothing reads go, with the constants that only they read."""

import numpy as np
import onnx_ir as ir

from fxqat.onnx.remove_unread import drop_unread, remove_unread


def constant(name):
    return ir.Value(name=name, const_value=ir.tensor(np.ones(2, np.float32), name=name))


def test_what_is_read_stays():
    x, scale, shared = ir.Value(name="x"), constant("scale"), constant("shared")
    unread, first = ir.node("Mul", [x, scale]), ir.node("Add", [x, shared])
    last = ir.node("Mul", [first.outputs[0], shared])
    graph = ir.Graph([x], [last.outputs[0]], nodes=[unread, first, last], initializers=[scale, shared], name="g")
    remove_unread(graph, [first, unread])
    assert [node.op_type for node in graph] == ["Add", "Mul"]
    assert list(graph.initializers) == ["shared"]
    drop_unread(graph, [x, shared])
    assert list(graph.initializers) == ["shared"]


def test_a_chain_goes_from_its_end():
    x, bound = ir.Value(name="x"), constant("bound")
    first = ir.node("Max", [x, bound])
    last = ir.node("Min", [first.outputs[0], bound])
    graph = ir.Graph([x], [x], nodes=[first, last], initializers=[bound], name="g")
    remove_unread(graph, [last, first])
    assert len(list(graph)) == 0
    assert not graph.initializers
