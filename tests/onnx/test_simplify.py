"""Simplify: fewer nodes and the same numbers."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from fxqat.onnx.simplify import Simplify
from tests.export_models import constants, node_types, run_session, session


def model_of(nodes: list[onnx.NodeProto], held: dict[str, np.ndarray], shape: tuple[int, ...] = (2, 6)) -> ir.Model:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 6])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    initializers = [numpy_helper.from_array(array, name) for name, array in held.items()]
    graph = helper.make_graph(nodes, "graph", [x], [y], initializers)
    return ir.from_proto(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10, producer_name="test")
    )


def shape_arithmetic() -> ir.Model:
    """A reshape to a shape computed from the input's, an identity, and an unread node."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "first"], ["batch"], axis=0),
        helper.make_node("Concat", ["batch", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["a"]),
        helper.make_node("Identity", ["a"], ["b"]),
        helper.make_node("Exp", ["b"], ["unread"]),
        helper.make_node("Mul", ["b", "factor"], ["y"]),
    ]
    held = {
        "first": np.array([0], np.int64),
        "rest": np.array([3, 2], np.int64),
        "factor": np.array(2.5, np.float32),
        "nobody": np.zeros(100, np.float32),
    }
    return model_of(nodes, held, (2, 3, 2))


def test_only_nodes_that_compute_the_output_are_left() -> None:
    model = shape_arithmetic()
    assert Simplify()(model).model is model
    proto = ir.to_proto(model)
    assert [kind for kind in node_types(proto) if kind != "Constant"] == ["Reshape", "Mul"]
    assert "nobody" not in constants(proto)
    assert "factor" in constants(proto)


def test_the_numbers_are_the_same() -> None:
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    expected = run_session(session(ir.to_proto(shape_arithmetic())), [x])[0]
    proto = ir.to_proto(Simplify()(shape_arithmetic()).model)
    onnx.checker.check_model(proto, full_check=True)
    found = run_session(session(proto), [x])[0]
    assert np.array_equal(found, expected)
    assert found.shape == (2, 3, 2)


@pytest.mark.parametrize("scale", [0.5, 0.123])
def test_equal_parameters_of_two_tensors_stay_two(scale: float) -> None:
    held = {}
    for name in ("a", "b"):
        held |= {f"{name}_scale": np.array(scale, np.float32), f"{name}_zero_point": np.array(0, np.int8)}
    nodes = []
    for source, name, result in (("x", "a", "u"), ("u", "b", "y")):
        nodes += [
            helper.make_node("QuantizeLinear", [source, f"{name}_scale", f"{name}_zero_point"], [f"{name}_q"]),
            helper.make_node("DequantizeLinear", [f"{name}_q", f"{name}_scale", f"{name}_zero_point"], [result]),
        ]
    proto = ir.to_proto(Simplify()(model_of(nodes, held)).model)
    assert set(constants(proto)) == set(held)
    assert node_types(proto) == ["QuantizeLinear", "DequantizeLinear"] * 2


def test_stored_integers_are_not_folded_into_floats() -> None:
    integers = np.arange(12, dtype=np.int8).reshape(6, 2)
    nodes = [
        helper.make_node("DequantizeLinear", ["w_quantized", "w_scale", "w_zero_point"], ["w"], axis=1),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    held = {"w_quantized": integers, "w_scale": np.array([0.5, 2], np.float32), "w_zero_point": np.zeros(2, np.int8)}
    proto = ir.to_proto(Simplify()(model_of(nodes, held, (2, 2))).model)
    assert node_types(proto) == ["DequantizeLinear", "MatMul"]
    assert np.array_equal(constants(proto)["w_quantized"], integers)
    assert constants(proto)["w_quantized"].dtype == np.int8


@pytest.mark.parametrize(("axes", "shape"), [([0], (2, 6)), ([-1, 0], (2, 6)), ([0, 1], (2, 6)), ([1, 2], (2, 6))])
def test_a_squeeze_leaves_what_is_not_one_as_torch_does(axes, shape):
    nodes = [
        helper.make_node("Unsqueeze", ["x", "one"], ["a"]),
        helper.make_node("Squeeze", ["a", "axes"], ["b"]),
        helper.make_node("Reshape", ["b", "back"], ["y"]),
    ]
    held = {"one": np.array([1]), "axes": np.array(axes), "back": np.array(shape)}
    model = model_of(nodes, held)
    next(iter(model.graph)).outputs[0].shape = ir.Shape([2, 1, 6])
    proto = ir.to_proto(Simplify()(model).model)
    onnx.checker.check_model(proto, full_check=True)
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    assert np.array_equal(run_session(session(proto), (torch.as_tensor(x),))[0], x)
    assert ("Squeeze" in node_types(proto)) == (1 in axes)


def test_a_node_that_the_evaluator_cannot_compute_stays_without_a_word(caplog) -> None:
    nodes = [
        helper.make_node("GatherElements", ["table", "index"], ["a"], axis=1),  # onnx 1.23 raises a ValueError for it
        helper.make_node("Add", ["x", "a"], ["y"]),
    ]
    held = {"table": np.arange(64, dtype=np.float32)[None], "index": np.array([[5, 0, 2, 7, 63, 1]])}
    proto = ir.to_proto(Simplify()(model_of(nodes, held)).model)
    found = run_session(session(proto), (torch.zeros(2, 6),))[0]
    assert np.array_equal(found, [[5, 0, 2, 7, 63, 1]] * 2)
    assert node_types(proto) == ["GatherElements", "Add"]
    assert caplog.records == []


def test_a_branch_that_returns_a_value_from_outside_keeps_its_identity() -> None:
    def branch(name: str, kind: str) -> onnx.GraphProto:
        result = helper.make_tensor_value_info(f"{name}_result", TensorProto.FLOAT, [2, 6])
        nodes = [
            helper.make_node("Identity", ["a"], [f"{name}_a"]),
            helper.make_node(kind, [f"{name}_a"], [f"{name}_result"]),
        ]
        return helper.make_graph(nodes, name, [], [result])

    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node("ReduceMax", ["a"], ["most"], keepdims=0),
        helper.make_node("Cast", ["most"], ["condition"], to=TensorProto.BOOL),
        helper.make_node(
            "If", ["condition"], ["y"], then_branch=branch("same", "Identity"), else_branch=branch("b", "Exp")
        ),
    ]
    proto = ir.to_proto(Simplify()(model_of(nodes, {})).model)
    onnx.checker.check_model(proto, full_check=True)
    branches = [[node.op_type for node in attribute.g.node] for attribute in proto.graph.node[-1].attribute]
    assert sorted(branches) == [["Exp"], ["Identity"]]
    for x in (torch.ones(2, 6), torch.zeros(2, 6)):
        expected = -x if bool(x.any()) else torch.exp(-x)
        assert np.array_equal(run_session(session(proto), [x])[0], expected.numpy())


@pytest.mark.parametrize("kind", ["GatherND", "ScatterND"])
def test_indices_become_int64_as_onnx_wants_them(kind: str) -> None:
    nodes = [helper.make_node("Unsqueeze", ["picked", "last"], ["indices"])]
    if kind == "GatherND":
        nodes.append(helper.make_node("GatherND", ["x", "indices"], ["y"]))
    else:
        nodes.append(helper.make_node("ScatterND", ["x", "indices", "rows"], ["y"]))
    held = {"picked": np.array([1, 0], np.int32), "last": np.array([-1]), "rows": np.zeros((2, 6), np.float32)}
    proto = ir.to_proto(Simplify()(model_of(nodes, held)).model)
    onnx.checker.check_model(proto, full_check=True)
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    found = run_session(session(proto), (torch.as_tensor(x),))[0]
    assert np.array_equal(found, x[[1, 0]] if kind == "GatherND" else np.zeros_like(x))


@pytest.mark.parametrize(
    ("condition", "second", "chooses"),
    [
        (np.ones((2, 1), bool), np.float32(0), False),
        (np.array([[True], [False]]), np.float32(0), True),
        (np.ones((1, 2, 1), bool), np.float32(0), True),  # the result has another rank
        (np.ones(1, bool), np.zeros((1, 2, 6), np.float32), True),
    ],
)
def test_a_where_without_a_choice_is_removed(condition: np.ndarray, second: np.ndarray, chooses: bool) -> None:
    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node("Where", ["condition", "a", "second"], ["b"]),
        helper.make_node("Reshape", ["b", "back"], ["y"]),
    ]
    held = {"condition": condition, "second": np.asarray(second), "back": np.array([2, 6])}
    model = model_of(nodes, held)
    next(iter(model.graph)).outputs[0].shape = ir.Shape([2, 6])
    proto = ir.to_proto(Simplify()(model).model)
    onnx.checker.check_model(proto, full_check=True)
    x = np.arange(1, 13, dtype=np.float32).reshape(2, 6)
    found = run_session(session(proto), (torch.as_tensor(x),))[0]
    assert np.array_equal(found, np.where(condition, -x, second).reshape(2, 6))
    assert ("Where" in node_types(proto)) == chooses


def test_indices_of_a_node_without_inputs_stay_as_they_are() -> None:
    rows = numpy_helper.from_array(np.array([[1], [0]]), "rows")
    nodes = [
        helper.make_node("Constant", [], ["indices"], value=rows),
        helper.make_node("GatherND", ["x", "indices"], ["y"]),
    ]
    model = model_of(nodes, {})
    next(iter(model.graph)).outputs[0].type = None
    proto = ir.to_proto(Simplify()(model).model)
    onnx.checker.check_model(proto, full_check=True)
    assert "Cast" not in node_types(proto)
