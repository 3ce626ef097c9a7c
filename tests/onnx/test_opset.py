"""Opsets: which ones can be asked for, and which one a file needs."""

from typing import Any

import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from fxqat.errors import ExportError
from fxqat.onnx.opset import (
    DEFAULT,
    OLDEST,
    check_opset,
    newer_operators,
    newest,
    opset_for,
    opset_of,
    opset_with_operators,
)
from fxqat.scheme import QuantizedTensor, QuantizeScheme


@pytest.mark.parametrize("opset", [OLDEST, 17, 18, newest()])
def test_known_opsets_pass(opset: int) -> None:
    assert check_opset(opset) is None
    assert newest() == onnx.defs.onnx_opset_version() >= 18


@pytest.mark.parametrize(
    ("opset", "message"),
    [
        (OLDEST - 1, "opset_version 12 is too low: .*needs opset 13"),
        (-1, "too low"),
        (newest() + 1, f"newer than the installed onnx knows .{newest()}."),
        (True, "must be an integer, got True"),
        (18.0, "must be an integer, got 18.0"),
        ("18", "must be an integer, got '18'"),
        (None, "must be an integer, got None"),
    ],
)
def test_other_opsets_are_errors(opset: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message) as caught:
        check_opset(opset)
    assert "opset_version" in str(caught.value)


def quantized(name: str, bits: int, dtype: str) -> QuantizedTensor:
    return QuantizedTensor(name, "activation", name, dtype, QuantizeScheme(bits), None, (1.0,), (0,))


BIAS = QuantizedTensor("bias", "bias", "head", "int32", None, 0, (1.0,), (0,))
OF_8_BITS = [quantized("a", 8, "int8"), quantized("b", 5, "int8"), BIAS]


@pytest.mark.parametrize("bits", range(2, 17))
def test_the_default_opset_is_raised_to_what_a_width_needs(bits: int) -> None:
    tensors = [*OF_8_BITS, quantized("c", bits, "")]
    assert opset_for(tensors, None) == (DEFAULT if 5 <= bits <= 8 else 21)
    assert opset_for(OF_8_BITS, None) == DEFAULT == 18


@pytest.mark.parametrize(("bits", "dtype"), [(2, "int4"), (4, "int4"), (9, "int16"), (16, "int16")])
def test_an_opset_without_the_type_of_a_tensor_is_refused(bits: int, dtype: str) -> None:
    tensors = [*OF_8_BITS, quantized("layer.conv.weight", bits, dtype), quantized("late", 16, "int16")]
    with pytest.raises(ExportError, match=f"^layer.conv.weight is int{bits} .* {dtype}, .* since opset 21; .* is 20"):
        opset_for(tensors, 20)
    assert [opset_for(tensors, opset) for opset in (21, 25)] == [21, 25]
    assert opset_for(OF_8_BITS, 13) == 13


@pytest.mark.parametrize("domain", ["", "ai.onnx"])
def test_opset_of_reads_the_default_domain(domain: str) -> None:
    model = onnx.ModelProto()
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    model.opset_import.append(helper.make_opsetid(domain, 17))
    assert opset_of(model) == 17
    model.opset_import[1].version = 21
    assert opset_of(model) == 21


def test_an_operator_that_is_newer_than_the_opset_raises_it() -> None:
    def model(*op_types: str) -> ir.Model:
        values = [ir.val(f"v{number}") for number in range(len(op_types) + 1)]
        nodes = [ir.node(kind, [values[i]], outputs=[values[i + 1]]) for i, kind in enumerate(op_types)]
        return ir.Model(ir.Graph(values[:1], values[-1:], nodes=nodes, opset_imports={"": 18}), ir_version=10)

    assert newer_operators(["Conv", "DeformConv", "Gelu", "NoOperator"], 18) == {"DeformConv": 19, "Gelu": 20}
    assert newer_operators(["DeformConv"], 19) == {}
    assert opset_with_operators(model("Relu"), 18, None) == 18
    assert opset_with_operators(model("DeformConv", "Relu", "Gelu"), 18, None) == 20
    assert (
        opset_with_operators(model("DeformConv"), 21, None) == opset_with_operators(model("DeformConv"), 21, 21) == 21
    )
    with pytest.raises(ExportError, match="^the model becomes the operator DeformConv, .* since opset 19; .* is 17"):
        opset_with_operators(model("DeformConv"), 17, 17)
