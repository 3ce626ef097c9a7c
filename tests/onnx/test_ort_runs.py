"""ONNX Runtime on this processor, and what a certificate says of it."""

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from fxqat.errors import ParityError
from fxqat.onnx import verify as verify_module
from fxqat.onnx.ort_runs import sums_saturate
from fxqat.onnx.output_parity import OutputParity
from fxqat.onnx.verify import ParityCertificate, require_parity


def product(dtype: int) -> onnx.ModelProto:
    """``y = x @ w`` of integers, as floats; w is 100."""
    weight = np.full((4, 2), 100, helper.tensor_dtype_to_np_dtype(dtype))
    nodes = [
        helper.make_node("MatMulInteger", ["x", "w"], ["sums"]),
        helper.make_node("Cast", ["sums"], ["y"], to=TensorProto.FLOAT),
    ]
    x, y = (helper.make_tensor_value_info(name, kind, [1, size]) for name, kind, size in (("x", 2, 4), ("y", 1, 2)))
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(weight, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_sums_saturate_on_x86_without_vnni() -> None:
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    assert sums_saturate() == ("avx2" in flags and "vnni" not in flags)
    assert isinstance(sums_saturate(), bool)


@pytest.mark.parametrize("saturates", [True, False])
@pytest.mark.parametrize("dtype", [TensorProto.INT8, TensorProto.UINT8])
def test_a_failure_of_integer_products_names_the_processor(
    saturates: bool, dtype: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "sums_saturate", lambda: saturates)
    x = np.full((1, 4), 2, np.uint8)
    right = np.full((1, 2), 800, np.float32)
    assert require_parity(product(dtype), [x], {}, [right]).passed
    with pytest.raises(ParityError, match="does not compute what the model computes") as caught:
        require_parity(product(dtype), [x], {}, [right + np.array([[300.0, -300.0]], np.float32)])
    is_named = saturates and dtype == TensorProto.INT8
    assert ("x86 without VNNI" in str(caught.value)) == is_named
    assert ("export with verify=False" in str(caught.value)) == is_named


@pytest.mark.parametrize("saturates", [True, False])
@pytest.mark.parametrize("dtype", [TensorProto.INT8, TensorProto.UINT8])
def test_a_warning_of_the_optimizer_names_the_processor(
    saturates: bool, dtype: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "sums_saturate", lambda: saturates)
    output = OutputParity("y", 0.0, 0, 1.0, 1.0, 0.0, 1.0, 0.98)
    (warning,) = ParityCertificate((), (output,), 0.0, None, "1.32.0").warnings(product(dtype))
    assert "computes something else than the file says" in warning
    assert ('runtime="onnxruntime_avx2"' in warning) == (saturates and dtype == TensorProto.INT8)
