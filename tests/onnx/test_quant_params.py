"""The JSON of parameters: its schema, its floats bit for bit, and the comparison with the ONNX file."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from fxqat.errors import CheckpointError, ParityError
from fxqat.onnx.quant_params import FORMAT, VERSION, check_params, params_document, read_params, schema
from fxqat.scheme import QuantizedTensor, QuantizeScheme

INT8 = QuantizeScheme(per_channel=True, narrow_range=True)
UINT8 = QuantizeScheme(signed=False, symmetric=False)
ACTIVATION = QuantizedTensor("x", "activation", "x_act_fake_quant", "uint8", UINT8, None, (0.1 + 1e-9,), (7,))
WEIGHT = QuantizedTensor("head.weight", "weight", "head", "int8", INT8, 0, (0.5, 0.25), (0, 0))
BIAS = QuantizedTensor("head.bias", "bias", "head", "int32", None, 0, (0.05, 0.025), (0, 0))
TENSORS = (replace(ACTIVATION, scale=(float(np.float32(0.1)),)), WEIGHT, replace(BIAS, scale=(0.0625, 0.03125)))


def document(tensors: tuple[QuantizedTensor, ...] = TENSORS) -> dict[str, Any]:
    return params_document(tensors, "TSQAT", 18, {"image": ([127.5], [58.0, 57.0, 57.5])})


def matching_model() -> onnx.ModelProto:
    """The ONNX file that ``TENSORS`` describes."""
    held = {"head.weight_quantized": np.ones((2, 3), np.int8), "head.bias_quantized": np.ones(2, np.int32)}
    for tensor in TENSORS:
        shape = () if tensor.axis is None else (-1,)
        held[f"{tensor.name}_scale"] = np.asarray(tensor.scale, np.float32).reshape(shape)
        held[f"{tensor.name}_zero_point"] = np.asarray(tensor.zero_point, tensor.dtype).reshape(shape)

    def node(kind: str, source: str, name: str, result: str) -> onnx.NodeProto:
        return helper.make_node(kind, [source, f"{name}_scale", f"{name}_zero_point"], [result], axis=0)

    nodes = [
        node("QuantizeLinear", "x", "x", "x_quantized"),
        node("DequantizeLinear", "x_quantized", "x", "x_dequantized"),
        node("DequantizeLinear", "head.weight_quantized", "head.weight", "head.weight"),
        node("DequantizeLinear", "head.bias_quantized", "head.bias", "head.bias"),
        helper.make_node("Gemm", ["x_dequantized", "head.weight", "head.bias"], ["y"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 2])],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


# The document


def test_the_document_is_what_the_schema_says() -> None:
    made = document()
    jsonschema.validate(made, schema())
    jsonschema.Draft202012Validator.check_schema(schema())
    assert [made[key] for key in ("format", "version", "backend", "opset")] == [FORMAT, VERSION, "TSQAT", 18]
    assert made["tensors"]["head.weight"] == {
        "kind": "weight",
        "module": "head",
        "dtype": "int8",
        "bit_width": 8,
        "signed": True,
        "symmetric": True,
        "axis": 0,
        "quant_min": -127,
        "quant_max": 127,
        "scale": [0.5, 0.25],
        "zero_point": [0, 0],
    }
    assert made["inputs"] == {"image": {"dtype": "uint8", "mean": [127.5], "std": [58.0, 57.0, 57.5]}}
    assert params_document((), "TSQAT", 18)["inputs"] == {}
    bias = made["tensors"]["head.bias"]
    assert (bias["bit_width"], bias["quant_min"], bias["quant_max"]) == (32, -(2**31), 2**31 - 1)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), "other"),
        (("version",), 1),
        (("opset",), 12),
        (("surplus",), 1),
        (("tensors", "x", "kind"), "parameter"),
        (("tensors", "x", "scale"), [0.0]),
        (("tensors", "x", "scale"), []),
        (("tensors", "x", "zero_point"), [0.5]),
        (("tensors", "x", "dtype"), "float32"),
        (("tensors", "x", "surplus"), 1),
        (("inputs", "image", "dtype"), "float32"),
        (("inputs", "image", "mean"), []),
        (("inputs", "image", "std"), [0.0]),
        (("inputs", "image", "surplus"), 1),
    ],
)
def test_the_schema_refuses_what_is_not_the_format(path: tuple[str, ...], value: Any) -> None:
    made = document()
    jsonschema.validate(made, schema())
    place = made
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError) as caught:
        jsonschema.validate(made, schema())
    named = caught.value.message if path[-1] == "surplus" else str(list(caught.value.absolute_path))
    assert path[-1] in named


@pytest.mark.parametrize("key", ["kind", "module", "dtype", "bit_width", "axis", "scale", "zero_point"])
def test_the_schema_misses_what_is_not_there(key: str) -> None:
    made = document()
    del made["tensors"]["x"][key]
    with pytest.raises(jsonschema.ValidationError, match=key):
        jsonschema.validate(made, schema())
    assert len(made["tensors"]) == 3


@given(st.lists(st.floats(2.0**-40, 2.0**40, width=32), min_size=1, max_size=8))
def test_every_float32_comes_back_bit_for_bit(scales: list[float]) -> None:
    tensor = replace(WEIGHT, scale=tuple(scales), zero_point=(0,) * len(scales))
    read = json.loads(json.dumps(document((tensor,))))["tensors"]["head.weight"]["scale"]
    assert np.asarray(read, np.float32).tobytes() == np.asarray(scales, np.float32).tobytes()
    assert read == scales


# Reading


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(document()))
    assert read_params(path) == document()
    assert read_params(str(path))["tensors"]["x"]["zero_point"] == [7]


def test_documents_of_version_1_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    older = document() | {"version": 1}
    del older["inputs"]
    path.write_text(json.dumps(older))
    assert read_params(path)["tensors"] == document()["tensors"]
    assert VERSION == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[]", "expected format"),
        ("{}", "expected format .* found None None"),
        ('{"format": "fxqat.quant_params", "version": 3, "tensors": {}}', "found 'fxqat.quant_params' 3"),
        ('{"format": "fxqat.parity", "version": 1, "tensors": {}}', "found 'fxqat.parity' 1"),
        ('{"format": "fxqat.quant_params", "version": 1}', "tensors"),
        ('{"format": "fxqat.quant_params", "version": 1, "tensors": []}', "tensors"),
        ('{"format": "fxqat.quant_params", "version": 1, "tensors": {"x": {}}}', "x"),
        ('{"format": "fxqat.quant_params", "version": 1, "tensors": {"x": 3}}', "x"),
    ],
)
def test_a_file_that_is_not_of_the_format_is_an_error(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_params(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("what", ["missing", "folder", "binary"])
def test_a_file_that_cannot_be_read_is_an_error(what: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    if what == "folder":
        path.mkdir()
    if what == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"model\.json") as caught:
        read_params(path)
    assert caught.value.__cause__ is not None


# The comparison with the file


def test_a_file_that_agrees_passes() -> None:
    model = matching_model()
    before = model.SerializeToString()
    assert check_params(model, TENSORS) is None
    assert model.SerializeToString() == before


@pytest.mark.parametrize("tensor", ["x", "head.weight", "head.bias"])
@pytest.mark.parametrize("part", ["scale", "zero_point"])
def test_one_changed_bit_is_found(tensor: str, part: str) -> None:
    model = matching_model()
    held = next(t for t in model.graph.initializer if t.name == f"{tensor}_{part}")
    array = numpy_helper.to_array(held).copy()
    last = (..., -1) if array.ndim else ()
    array[last] = np.nextafter(array[last], np.float32(np.inf)) if part == "scale" else array[last] + 1
    held.CopyFrom(numpy_helper.from_array(array, held.name))
    with pytest.raises(ParityError, match=f"^{tensor}: the ONNX file holds other parameters"):
        check_params(model, TENSORS)
    others = [t for t in TENSORS if t.name != tensor]
    assert check_params(model, others) is None


def test_a_tensor_the_file_does_not_have_is_found() -> None:
    surplus = replace(TENSORS[0], name="conv")
    with pytest.raises(ParityError, match="conv: in the parameter file but not quantized in the ONNX file"):
        check_params(matching_model(), (*TENSORS, surplus))
    assert check_params(matching_model(), ()) is None


def test_a_per_tensor_scale_is_not_a_per_channel_one() -> None:
    wrong = replace(TENSORS[1], scale=(0.5,), zero_point=(0,))
    with pytest.raises(ParityError, match=r"head\.weight"):
        check_params(matching_model(), (wrong,))
    assert check_params(matching_model(), (TENSORS[1],)) is None
