"""NameTensors: the exporter's ``<path>.<buffer>`` gets the name of the tensor in the prepared model."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from fxqat.errors import ParityError
from fxqat.onnx.name_tensors import NameTensors, empty_tensors, tensors_of
from fxqat.scheme import QuantizedTensor, QuantizeScheme
from tests.export_models import constants, run_session, session

SCHEME = QuantizeScheme()


def record(name: str, kind: str = "activation") -> QuantizedTensor:
    return QuantizedTensor(name, kind, name, "int8", SCHEME, None, (0.5,), (0,))


def pair(source: str, path: str, result: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("QuantizeLinear", [source, f"{path}.scale", f"{path}.zero_point"], [f"{result}_q"]),
        helper.make_node("DequantizeLinear", [f"{result}_q", f"{path}.scale", f"{path}.zero_point"], [result]),
    ]


def parameters(path: str) -> dict[str, np.ndarray]:
    return {f"{path}.scale": np.array(0.5, np.float32), f"{path}.zero_point": np.array(0, np.int8)}


def model_of(nodes: list[onnx.NodeProto], held: dict[str, np.ndarray], output: str) -> ir.Model:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    y = helper.make_tensor_value_info(output, TensorProto.FLOAT, [2, 3])
    initializers = [numpy_helper.from_array(array, name) for name, array in held.items()]
    graph = helper.make_graph(nodes, "graph", [x], [y], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return ir.from_proto(model)


def name_tensors(model: ir.Model, tensors: dict[str, QuantizedTensor]) -> dict[str, QuantizedTensor]:
    """Run the pass; the records with the names in the file."""
    return tensors_of(NameTensors(tensors)(model).model)


def typical() -> tuple[ir.Model, dict[str, QuantizedTensor]]:
    """A quantized input, a stored weight, and a quantized product that is the output."""
    nodes = [
        *pair("x", "lowered_0", "a"),
        helper.make_node("DequantizeLinear", ["lowered_1.integers", "lowered_1.scale", "lowered_1.zero_point"], ["b"]),
        helper.make_node("MatMul", ["a", "b"], ["c"]),
        *pair("c", "lowered_2", "d"),
        helper.make_node("Relu", ["d"], ["y"]),
    ]
    held = parameters("lowered_0") | parameters("lowered_1") | parameters("lowered_2")
    held["lowered_1.integers"] = np.arange(-4, 5, dtype=np.int8).reshape(3, 3)
    tensors = {
        "lowered_0": record("x"),
        "lowered_1": record("head.weight", "weight"),
        "lowered_2": record("head"),
    }
    return model_of(nodes, held, "y"), tensors


def test_every_tensor_and_parameter_is_renamed() -> None:
    model, tensors = typical()
    named = name_tensors(model, tensors)
    proto = ir.to_proto(model)
    assert {path: tensor.name for path, tensor in named.items()} == {
        "lowered_0": "x",
        "lowered_1": "head.weight",
        "lowered_2": "head",
    }
    assert [(node.op_type, list(node.input), list(node.output)) for node in proto.graph.node] == [
        ("QuantizeLinear", ["x", "x_scale", "x_zero_point"], ["x_quantized"]),
        ("DequantizeLinear", ["x_quantized", "x_scale", "x_zero_point"], ["x_dequantized"]),
        (
            "DequantizeLinear",
            ["head.weight_quantized", "head.weight_scale", "head.weight_zero_point"],
            ["head.weight"],
        ),
        ("MatMul", ["x_dequantized", "head.weight"], ["head"]),
        ("QuantizeLinear", ["head", "head_scale", "head_zero_point"], ["head_quantized"]),
        ("DequantizeLinear", ["head_quantized", "head_scale", "head_zero_point"], ["head_dequantized"]),
        ("Relu", ["head_dequantized"], ["y"]),
    ]


def test_renaming_changes_no_number() -> None:
    model, tensors = typical()
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    before = ir.to_proto(model)
    expected = run_session(session(before), [x])[0]
    name_tensors(model, tensors)
    after = ir.to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    assert np.array_equal(run_session(session(after), [x])[0], expected)
    sizes = [sorted((a.dtype.name, a.tobytes()) for a in constants(m).values()) for m in (before, after)]
    assert sizes[0] == sizes[1]


def test_an_input_or_output_keeps_its_name_and_the_tensor_is_known_by_it() -> None:
    nodes = [*pair("x", "lowered_0", "a"), helper.make_node("Relu", ["a"], ["y"]), *pair("y", "lowered_1", "b")]
    model = model_of(nodes, parameters("lowered_0") | parameters("lowered_1"), "y")
    named = name_tensors(model, {"lowered_0": record("image"), "lowered_1": record("act")})
    assert [named["lowered_0"].name, named["lowered_1"].name] == ["x", "y"]
    proto = ir.to_proto(model)
    assert [proto.graph.input[0].name, proto.graph.output[0].name] == ["x", "y"]
    assert {"x_scale", "y_scale", "x_zero_point", "y_zero_point"} == set(constants(proto))


def test_two_tensors_of_one_name_get_two_names() -> None:
    nodes = [*pair("x", "lowered_0", "a"), helper.make_node("Relu", ["a"], ["b"]), *pair("b", "lowered_1", "c")]
    nodes += [
        helper.make_node("Neg", ["c"], ["d"]),
        *pair("d", "lowered_2", "e"),
        helper.make_node("Abs", ["e"], ["y"]),
    ]
    held = parameters("lowered_0") | parameters("lowered_1") | parameters("lowered_2")
    model = model_of(nodes, held, "y")
    named = name_tensors(model, {"lowered_0": record("x"), "lowered_1": record("act"), "lowered_2": record("act")})
    assert [tensor.name for tensor in named.values()] == ["x", "act", "act_1"]
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    assert {"act_scale", "act_1_scale", "act_zero_point", "act_1_zero_point"} <= set(constants(proto))


def test_a_name_that_the_exporter_gave_to_something_else_is_taken_from_it() -> None:
    """``relu`` is the exporter's name of the value before; the quantized tensor is the one that is known by it."""
    nodes = [
        helper.make_node("Relu", ["x"], ["relu"]),
        helper.make_node("Neg", ["relu"], ["b"]),
        *pair("b", "lowered_0", "c"),
        helper.make_node("Abs", ["c"], ["y"]),
    ]
    model = model_of(nodes, parameters("lowered_0"), "y")
    named = name_tensors(model, {"lowered_0": record("relu")})
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    quantize = next(node for node in proto.graph.node if node.op_type == "QuantizeLinear")
    assert named["lowered_0"].name == quantize.input[0] == "relu"
    names = [output for node in proto.graph.node for output in node.output]
    assert len(set(names)) == len(names)


def test_a_stored_tensor_that_is_read_twice_has_one_name() -> None:
    """A layer that is called twice: two DequantizeLinear nodes of the same integers."""
    inputs = ["lowered_0.integers", "lowered_0.scale", "lowered_0.zero_point"]
    nodes = [
        helper.make_node("DequantizeLinear", inputs, ["a"]),
        helper.make_node("MatMul", ["x", "a"], ["b"]),
        helper.make_node("DequantizeLinear", inputs, ["c"]),
        helper.make_node("MatMul", ["b", "c"], ["y"]),
    ]
    held = parameters("lowered_0") | {"lowered_0.integers": np.eye(3, dtype=np.int8)}
    model = model_of(nodes, held, "y")
    named = name_tensors(model, {"lowered_0": record("head.weight", "weight")})
    proto = ir.to_proto(model)
    assert named["lowered_0"].name == "head.weight"
    assert set(constants(proto)) == {"head.weight_quantized", "head.weight_scale", "head.weight_zero_point"}
    onnx.checker.check_model(proto, full_check=True)


@pytest.mark.parametrize("kind", ["scale", "zero_point"])
def test_pairs_that_are_not_ours_keep_their_names(kind: str) -> None:
    nodes = [*pair("x", "user", "a"), helper.make_node("Relu", ["a"], ["y"])]
    model = model_of(nodes, parameters("user"), "y")
    before = ir.to_proto(model).SerializeToString()
    with pytest.raises(ParityError, match="^x: quantized in the model, but not in the exported file$"):
        name_tensors(model, {"lowered_0": record("x")})
    assert ir.to_proto(model).SerializeToString() == before
    assert f"user.{kind}" in constants(ir.to_proto(model))


def test_float_weights_and_clipping_bounds_are_named_too() -> None:
    nodes = [
        helper.make_node("Max", ["lowered_0.values", "lowered_0.pair.low"], ["a"]),
        *pair("a", "lowered_0.pair", "b"),
        helper.make_node("Add", ["x", "b"], ["y"]),
    ]
    held = parameters("lowered_0.pair") | {
        "lowered_0.values": np.ones((2, 3), np.float32),
        "lowered_0.pair.low": np.array(-1, np.float32),
    }
    model = model_of(nodes, held, "y")
    named = name_tensors(model, {"lowered_0": record("head.weight", "weight")})
    names = set(constants(ir.to_proto(model)))
    assert named["lowered_0"].name == "head.weight"
    assert names == {"head.weight_float", "head.weight_low", "head.weight_scale", "head.weight_zero_point"}


def test_a_value_that_two_tensors_are_keeps_the_first_name_and_the_other_gets_a_copy() -> None:
    """``y[:, 0:3] + y[:, 0:3]`` of a y of 3 columns, after both slices are simplified away."""
    nodes = [
        *pair("x", "lowered_0", "a"),
        *pair("a", "lowered_1", "b"),
        *pair("a", "lowered_2", "c"),
        *pair("x", "lowered_3", "d"),
        helper.make_node("Sum", ["b", "c", "d"], ["y"]),
    ]
    paths = [f"lowered_{number}" for number in range(4)]
    model = model_of(nodes, {k: v for path in paths for k, v in parameters(path).items()}, "y")
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    expected = run_session(session(ir.to_proto(model)), [x])[0]
    records = zip(paths, ["x", "getitem", "getitem_1", "again"], strict=True)
    named = name_tensors(model, {path: record(name) for path, name in records})
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    read = [node.input[0] for node in proto.graph.node if node.op_type == "QuantizeLinear"]
    assert read == [tensor.name for tensor in named.values()] == ["x", "getitem", "getitem_1", "again"]
    copies = [(node.input[0], node.output[0]) for node in proto.graph.node if node.op_type == "Identity"]
    assert copies == [("getitem", "getitem_1"), ("x", "again")]
    assert np.array_equal(run_session(session(proto), [x])[0], expected)


def test_a_stored_tensor_that_is_quantized_again_keeps_its_name() -> None:
    held = parameters("lowered_0") | parameters("lowered_1") | {"lowered_0.integers": np.eye(3, dtype=np.int8)[:2]}
    nodes = [
        helper.make_node("DequantizeLinear", ["lowered_0.integers", "lowered_0.scale", "lowered_0.zero_point"], ["a"]),
        *pair("a", "lowered_1", "b"),
        helper.make_node("Add", ["x", "b"], ["y"]),
    ]
    model = model_of(nodes, held, "y")
    named = name_tensors(model, {"lowered_0": record("head.weight", "weight"), "lowered_1": record("act")})
    assert [tensor.name for tensor in named.values()] == ["head.weight", "act"]
    names = [output for node in ir.to_proto(model).graph.node for output in node.output]
    assert names == ["head.weight", "act", "act_quantized", "act_dequantized", "y"]


def test_float_tensors_of_the_model_give_way() -> None:
    """A float parameter ``head.weight`` and one ``x_scale`` beside the quantized ``head.weight`` and ``x``."""
    model, tensors = typical()
    graph = model.graph
    for name in ("head.weight", "x_scale"):
        value = ir.Value(name=name, const_value=ir.tensor(np.ones(3, np.float32), name=name))
        graph.register_initializer(value)
        last = graph.node(-1)
        added = ir.node("Add", [last.inputs[0], value])
        graph.insert_before(last, added)
        last.replace_input_with(0, added.outputs[0])
    named = name_tensors(model, tensors)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    assert [tensor.name for tensor in named.values()] == ["x", "head.weight", "head"]
    assert {"head.weight_value", "x_scale", "x_scale_1"} <= set(constants(proto))
    assert constants(proto)["x_scale"].shape == (3,)


def test_only_a_tensor_without_values_or_effect_may_be_missing() -> None:
    """``cat([x, p])`` of a parameter p without rows: Simplify drops p."""
    nodes = [*pair("p", "lowered_0", "a"), helper.make_node("Concat", ["x", "a"], ["y"], axis=0)]
    model = model_of(nodes, parameters("lowered_0") | {"p": np.zeros((0, 3), np.float32)}, "y")
    tensors = {"lowered_0": record("p"), "lowered_1": record("lost")}
    empty = empty_tensors(model, tensors)
    assert empty == {"lowered_0"}
    dropped = model_of([helper.make_node("Relu", ["x"], ["y"])], {}, "y")
    with pytest.raises(ParityError, match="^lost: quantized"):
        NameTensors(tensors, empty)(dropped)
    asked: list[str] = []
    assert tensors_of(NameTensors(tensors, empty, lambda names: bool(asked.extend(names)))(dropped).model) == {}
    assert asked == ["lost"]
    with pytest.raises(ParityError, match="^lost, w: quantized"):
        NameTensors(tensors | {"lowered_2": record("w", "weight")}, empty, lambda names: False)(dropped)
    assert tensors_of(NameTensors({"lowered_0": record("p")}, empty)(dropped).model) == {}
