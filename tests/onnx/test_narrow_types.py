"""Storage: narrow tensors get their own types, and nothing else changes."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from fxqat import convert_export, prepare_by_platform
from fxqat.onnx.name_tensors import RECORDS
from fxqat.onnx.narrow_types import StoreNarrow
from fxqat.scheme import QuantizedTensor, QuantizeScheme
from tests.export_models import calibrate, run_session, session

RANGES = {"int4": (-8, 7), "uint4": (0, 15), "int2": (-2, 1), "uint2": (0, 3)}


def model_of(weight: np.ndarray, zero_point: np.ndarray) -> onnx.ModelProto:
    """``y = dq(q(x)) + dq(weight)`` in bytes; the weight (3, 5) per channel."""
    one = zero_point.reshape(-1)[:1].reshape(())
    held = {
        "x_scale": np.float32(0.5),
        "x_zero_point": one,
        "w_quantized": weight,
        "w_scale": np.array([1, 2, 3], np.float32),
        "w_zero_point": zero_point,
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero_point"], ["x_quantized"]),
        helper.make_node("DequantizeLinear", ["x_quantized", "x_scale", "x_zero_point"], ["x_dequantized"]),
        helper.make_node("DequantizeLinear", ["w_quantized", "w_scale", "w_zero_point"], ["w"], axis=0),
        helper.make_node("Add", ["x_dequantized", "w"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, 5]) for name in "xy")
    initializers = [numpy_helper.from_array(np.asarray(array), name) for name, array in held.items()]
    quantized = helper.make_tensor_value_info("x_quantized", helper.np_dtype_to_tensor_dtype(weight.dtype), [3, 5])
    graph = helper.make_graph(nodes, "graph", [x], [y], initializers, value_info=[quantized])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=13)


def narrow(model: onnx.ModelProto, x: str, w: str) -> onnx.ModelProto:
    """The model after the pass, if its records say that x and w have these types."""
    scheme, work = QuantizeScheme(4), ir.from_proto(model)
    work.meta[RECORDS] = {
        "0": QuantizedTensor("x", "activation", "x", x, scheme, None, (0.5,), (0,)),
        "1": QuantizedTensor("w", "weight", "w", w, scheme, 0, (1.0, 2.0, 3.0), (0, 0, 0)),
    }
    return ir.to_proto(StoreNarrow()(work).model)


def types_of(model: onnx.ModelProto) -> dict[str, str]:
    """The types of integer initializers and of the quantized value, as declared."""
    held = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    held |= {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    names = {name: TensorProto.DataType.Name(number).lower() for name, number in held.items()}
    return {name: kind for name, kind in names.items() if kind != "float"}


@pytest.mark.parametrize("dtype", RANGES)
def test_a_narrow_tensor_has_its_type_its_values_and_its_size(dtype: str) -> None:
    low, high = RANGES[dtype]
    random = np.random.default_rng(0)
    byte = np.int8 if low < 0 else np.uint8
    weight, zero_point = (random.integers(low, high + 1, shape).astype(byte) for shape in ((3, 5), 3))
    model = narrow(model_of(weight, zero_point), dtype, dtype)
    onnx.checker.check_model(model, full_check=True)
    assert set(types_of(model).values()) == {dtype}
    assert len(types_of(model)) == 4
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    assert np.array_equal(numpy_helper.to_array(stored["w_quantized"]).astype(np.int8), weight.astype(np.int8))
    assert len(stored["w_quantized"].raw_data) == -(-15 * int(dtype[-1]) // 8)
    x = random.uniform(-40, 40, (3, 5)).astype(np.float32)
    first = float(zero_point[0])
    rounded = (np.clip(np.rint(x / 0.5) + first, low, high) - first) * 0.5
    real = (weight.astype(float) - zero_point[:, None]) * np.array([[1.0], [2.0], [3.0]])
    found = run_session(session(model), [torch.from_numpy(x)])[0]
    assert np.array_equal(found, (rounded + real).astype(np.float32))


@pytest.mark.parametrize(("x", "w"), [("int8", "int4"), ("int4", "int8"), ("int8", "int8")])
def test_each_tensor_is_stored_for_itself(x: str, w: str) -> None:
    weight, zero_point = np.arange(-8, 7, dtype=np.int8).reshape(3, 5), np.array([1, -8, 7], np.int8)
    model = narrow(model_of(weight, zero_point), x, w)
    onnx.checker.check_model(model, full_check=True)
    wanted = {"x_zero_point": x, "x_quantized": x, "w_quantized": w, "w_zero_point": w}
    assert types_of(model) == wanted
    expected = run_session(session(model_of(weight, zero_point)), [torch.zeros(3, 5)])[0]
    assert np.array_equal(run_session(session(model), [torch.zeros(3, 5)])[0], expected)


class WholeSlice(torch.nn.Module):
    """Adds a slice of positions that is all of them; the file has no Slice, so one value has the name of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = torch.nn.Parameter(torch.randn(1, 6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.positions[:, : x.shape[1]]


@pytest.mark.parametrize("bits", [2, 4])
def test_a_value_that_is_quantized_again_at_once_is_stored_in_its_type(bits, tmp_path):
    x, config = torch.randn(2, 6, 4), {"extra_qconfig_dict": {"a_qscheme": {"bit": bits}}}
    gm = calibrate(prepare_by_platform(WholeSlice(), "TSQAT", config, example_inputs=x), (x,))
    report = convert_export(gm, x, tmp_path / "model.onnx")
    (found,) = run_session(session(report.onnx_path), (x,))
    assert report.opset_version == 21
    assert torch.equal(torch.as_tensor(found), gm.eval()(x))
