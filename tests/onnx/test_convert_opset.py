"""ConvertOpset: a model of an older opset computes the same."""

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from fxqat.errors import ExportError
from fxqat.onnx.convert_opset import ConvertOpset
from fxqat.onnx.opset import opset_of
from tests.export_models import after, constants, node_types, run_session, session


def model_of(nodes: list[onnx.NodeProto], initializers: dict[str, np.ndarray], last: int = 4) -> onnx.ModelProto:
    """A model of opset 18 from x (2, 3, 4) to y (2, 3, last)."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3, last])
    held = [numpy_helper.from_array(array, name) for name, array in initializers.items()]
    graph = helper.make_graph(nodes, "graph", [x], [y], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def reduce_mean() -> onnx.ModelProto:
    """ReduceMean, whose axes were an attribute before opset 18, then a per-channel Q/DQ pair."""
    nodes = [
        helper.make_node("ReduceMean", ["x", "axes"], ["mean"], keepdims=1, noop_with_empty_axes=0),
        helper.make_node("QuantizeLinear", ["mean", "scale", "zero"], ["q"], axis=1),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], axis=1),
    ]
    scale, zero = np.array([0.1, 0.01, 0.5], np.float32), np.array([0, 3, -5], np.int8)
    return model_of(nodes, {"axes": np.array([2], np.int64), "scale": scale, "zero": zero}, last=1)


def reduce_max() -> onnx.ModelProto:
    """ReduceMax, whose axes are a list in a Constant node, plus a number in another."""
    nodes = [
        helper.make_node("Constant", [], ["axes"], value_ints=[2]),
        helper.make_node("Constant", [], ["added"], value_float=0.5),
        helper.make_node("ReduceMax", ["x", "axes"], ["most"], keepdims=1, noop_with_empty_axes=0),
        helper.make_node("Add", ["most", "added"], ["y"]),
    ]
    return model_of(nodes, {}, last=1)


def split() -> onnx.ModelProto:
    """Split into as many parts as it has outputs, and a Reshape in which a size of 0 would be 0, but there is none."""
    nodes = [
        helper.make_node("Split", ["x", ""], ["a", "b"], axis=-1, num_outputs=2),
        helper.make_node("Sub", ["a", "b"], ["c"]),
        helper.make_node("Reshape", ["c", "sizes"], ["y"], allowzero=1),
    ]
    return model_of(nodes, {"sizes": np.array([2, 3, 2])}, last=2)


def shape() -> onnx.ModelProto:
    """Sizes that a Shape takes out: the second, the last two, and all but the last."""
    nodes = [
        helper.make_node("Shape", ["x"], ["second"], start=1, end=2),
        helper.make_node("Shape", ["x"], ["last"], start=-2),
        helper.make_node("Shape", ["x"], ["first"], end=-1),
        helper.make_node("Concat", ["second", "last", "first"], ["sizes"], axis=0),
        helper.make_node("Cast", ["sizes"], ["numbers"], to=onnx.TensorProto.FLOAT),
        helper.make_node("ReduceMax", ["numbers"], ["most"], keepdims=0),
        helper.make_node("Div", ["numbers", "most"], ["parts"]),
        helper.make_node("ReduceSum", ["parts"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["x", "sum"], ["y"]),
    ]
    return model_of(nodes, {})


@pytest.mark.parametrize("make", [reduce_mean, reduce_max, split, shape])
@pytest.mark.parametrize("opset", [13, 14, 15, 16, 17])
def test_a_converted_model_computes_the_same(make: Callable[[], onnx.ModelProto], opset: int) -> None:
    model, x = make(), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    onnx.checker.check_model(model, full_check=True)
    older = after(model, ConvertOpset(opset))
    onnx.checker.check_model(older, full_check=True)
    assert opset_of(older) == opset
    assert older.ir_version <= 8
    expected, found = run_session(session(model), [x])[0], run_session(session(older), [x])[0]
    assert np.array_equal(expected, found)
    assert np.abs(expected).max() > 0


@pytest.mark.parametrize("opset", [19, 21])
def test_the_number_of_parts_stays_in_newer_opsets(opset: int) -> None:
    newer = after(split(), ConvertOpset(opset))
    onnx.checker.check_model(newer, full_check=True)
    assert opset_of(newer) == opset


def test_a_split_into_parts_of_several_sizes_is_refused() -> None:
    nodes = [
        helper.make_node("Split", ["x"], ["a", "b", "c"], axis=2, num_outputs=3),  # 2, 2 and 0 of 4
        helper.make_node("Concat", ["a", "b", "c"], ["y"], axis=2),
    ]
    with pytest.raises(ExportError, match="No Adapter From Version.*Split"):
        after(model_of(nodes, {}), ConvertOpset(13))


def test_arithmetic_goes_to_opset_13_as_it_is() -> None:
    """ONNX's converter alone stops at "No Adapter From Version $14 for Relu"."""
    nodes = [
        helper.make_node("Sub", ["x", "b"], ["a"]),
        helper.make_node("Div", ["a", "c"], ["d"]),
        helper.make_node("Mul", ["d", "b"], ["e"]),
        helper.make_node("Add", ["e", "c"], ["f"]),
        helper.make_node("Relu", ["f"], ["y"]),
    ]
    model = model_of(nodes, {"b": np.array([0.5], np.float32), "c": np.array([3.0], np.float32)})
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    for opset in (13, 14):
        older = after(model, ConvertOpset(opset))
        onnx.checker.check_model(older, full_check=True)
        assert [(entry.domain, entry.version) for entry in older.opset_import] == [("", opset)]
        assert node_types(older) == ["Sub", "Div", "Mul", "Add", "Relu"]
        found = run_session(session(older), [x])[0]
        np.testing.assert_allclose(found, np.maximum((x.numpy() - 0.5) / 3 * 0.5 + 3, 0), rtol=1e-6)


@pytest.mark.parametrize("opset", [13, 15])
def test_an_input_that_is_an_output_goes_to_older_opsets(opset: int) -> None:
    model, x = model_of([helper.make_node("Identity", ["x"], ["y"])], {}), torch.randn(2, 3, 4)
    older = after(model, ConvertOpset(opset))
    onnx.checker.check_model(older, full_check=True)
    assert (opset_of(older), node_types(older)) == (opset, ["Identity"])
    assert np.array_equal(run_session(session(older), [x])[0], x.numpy())


def test_integers_that_opset_13_cannot_add_are_refused() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["a"], to=TensorProto.INT16),
        helper.make_node("Add", ["a", "a"], ["b"]),
        helper.make_node("Cast", ["b"], ["y"], to=TensorProto.FLOAT),
    ]
    onnx.checker.check_model(after(model_of(nodes, {}), ConvertOpset(14)), full_check=True)
    with pytest.raises(Exception, match="int16"):
        onnx.checker.check_model(after(model_of(nodes, {}), ConvertOpset(13)), full_check=True)


def test_axes_become_the_attribute_they_were_and_the_default_is_dropped() -> None:
    older = after(reduce_mean(), ConvertOpset(17))
    reduction = next(node for node in older.graph.node if node.op_type == "ReduceMean")
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in reduction.attribute}
    assert attributes == {"axes": [2], "keepdims": 1}
    assert list(reduction.input) == ["x"]


def test_a_model_of_the_opset_stays_as_it_is() -> None:
    model = ir.from_proto(reduce_mean())
    before = ir.to_proto(model).SerializeToString()
    result = ConvertOpset(18)(model)
    assert (result.model, result.modified) == (model, False)
    assert ir.to_proto(model).SerializeToString() == before


def test_records_in_memory_are_kept() -> None:
    model = ir.from_proto(reduce_mean())
    model.meta["note"] = "kept"
    assert ConvertOpset(17)(model).model.meta["note"] == "kept"
    assert model.opset_imports[""] == 17


def test_integers_of_quantized_tensors_stay_initializers() -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["w_quantized", "w_scale", "w_zero"], ["w"], axis=0),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    integers = np.arange(20, dtype=np.int8).reshape(4, 5)
    scale, zero = np.full(4, 0.5, np.float32), np.zeros(4, np.int8)
    model = model_of(nodes, {"w_quantized": integers, "w_scale": scale, "w_zero": zero}, last=5)
    older = after(model, ConvertOpset(16))
    assert np.array_equal(constants(older)["w_quantized"], integers)
    assert constants(older)["w_quantized"].dtype == np.int8
    assert node_types(older) == ["DequantizeLinear", "MatMul"]


@pytest.mark.parametrize("opset", [17, 21])
def test_the_initializers_of_a_converted_model_have_type_and_shape(opset: int) -> None:
    model = ir.from_proto(reduce_mean())
    held = ConvertOpset(opset)(model).model.graph.initializers
    assert set(held) == {"scale", "zero"} | ({"axes"} if opset > 17 else set())
    assert {name: (value.dtype, tuple(value.shape)) for name, value in held.items() if name != "axes"} == {
        "scale": (ir.DataType.FLOAT, (3,)),
        "zero": (ir.DataType.INT8, (3,)),
    }
    assert [node.op_type for node in model.graph] == ["ReduceMean", "QuantizeLinear", "DequantizeLinear"]


def test_what_an_older_opset_cannot_express_is_an_error_with_the_remedy() -> None:
    nodes = [helper.make_node("LayerNormalization", ["x", "scale"], ["y"])]
    model = model_of(nodes, {"scale": np.ones(4, np.float32)})
    with pytest.raises(ExportError, match=r"opset 16 .*LayerNormalization") as caught:
        after(model, ConvertOpset(16))
    assert "Use opset_version=18" in str(caught.value)
    assert opset_of(after(model, ConvertOpset(17))) == 17
