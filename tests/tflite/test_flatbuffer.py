"""Changes of a .tflite file: float interface, further outputs, given integers."""

import numpy as np
import pytest

from fxqat.errors import ExportError
from fxqat.tflite.flatbuffer import (
    graph_of,
    integer_tensors,
    operators,
    quantization_of,
    read_model,
    with_float_interface,
    with_given_integers,
    with_tensors_out,
)
from fxqat.tflite.run_tflite import run_tflite
from tests.litert_models import converted, needs_litert, small


@pytest.fixture
def content():
    needs_litert()
    return converted()


def test_the_float_interface_quantizes_and_dequantizes(content):
    changed = with_float_interface(content)
    names = [operator.name for operator in operators(read_model(changed))]
    assert names == ["QUANTIZE", *(operator.name for operator in operators(read_model(content))), "DEQUANTIZE"]
    assert not any(operator.is_float for operator in operators(read_model(changed)))
    graph, x = graph_of(read_model(content)), small()[1].numpy()
    (scale,), (zero_point,) = quantization_of(graph.tensors[graph.inputs[0]])
    given = np.clip(np.rint(x / scale) + zero_point, -128, 127).astype(np.int8)
    (integers,), (reals,) = run_tflite(content, [given]), run_tflite(changed, [x])
    assert np.array_equal(reals, (integers.astype(np.float32) + 128) / 256)


@pytest.mark.parametrize("kernels", ["reference", "default"])
def test_each_reader_gets_the_given_integers(content, kernels):
    """The convolution after the first one reads zeros; what the first one computes stays."""
    changed, x = with_float_interface(content), small()[1].numpy()
    model = read_model(changed)
    first, second = [operator for operator in operators(model) if operator.name.endswith("CONV_2D")][:2]
    indices = [first.outputs[0], second.outputs[0]]
    assert set(indices) <= set(integer_tensors(model))
    _, *plain = run_tflite(with_tensors_out(changed, indices), [x], kernels)
    _, zero_point = quantization_of(graph_of(model).tensors[indices[0]])
    zeros = np.full_like(plain[0], zero_point[0])
    step_file, given = with_given_integers(changed, {indices[0]: zeros})
    assert [array is zeros for array in given] == [True]
    _, computed, after = run_tflite(with_tensors_out(step_file, indices[1:]), [x, *given], kernels)
    assert np.array_equal(computed, plain[0])
    assert all(len(np.unique(after[..., channel])) == 1 for channel in range(after.shape[-1]))  # the bias alone
    assert len(np.unique(plain[1][..., 0])) > 10


def test_a_file_that_does_not_run_is_an_export_error(content):
    with pytest.raises(ExportError, match="LiteRT cannot run"):
        run_tflite(content, [small()[1].numpy()])  # float for int8
    with pytest.raises(ExportError, match="LiteRT cannot run"):
        run_tflite(b"no flatbuffer", [])
