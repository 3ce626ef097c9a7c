"""Read and change a .tflite file, which is a flatbuffer, by the classes that ``ai_edge_litert`` generates for it.

A model is a ``ModelT``: lists of tensors and operators, where operators name tensors by their index.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fxqat.errors import ExportError

INSTALL = 'pip install "fxqat[litert]"'


def missing(cause: ImportError) -> ExportError:
    """The error for a package of LiteRT that cannot be imported."""
    return ExportError(
        f"LiteRT files need the packages of the extra 'litert': {INSTALL}. Importing them failed with: {cause}"
    )


def schema() -> Any:
    """The generated classes.

    Raises:
        ExportError: ``ai_edge_litert`` cannot be imported.
    """
    try:
        from ai_edge_litert import schema_py_generated
    except ImportError as cause:
        raise missing(cause) from cause
    return schema_py_generated


def read_model(content: bytes) -> Any:
    """The model of a file, as a ``ModelT``."""
    return schema().ModelT.InitFromPackedBuf(bytearray(content), 0)


def write_model(model: Any) -> bytes:
    """The file of a model."""
    import flatbuffers

    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())


@dataclass(frozen=True)
class Operator:
    """One operator of a file.

    Args:
        name: its name, as ``CONV_2D``.
        inputs: indices of the tensors it reads, without those that are left out.
        outputs: indices of the tensors it computes.
        is_float: whether it computes in float: it reads or writes a float tensor, and converts none.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    is_float: bool


def graph_of(model: Any) -> Any:
    """The main graph of a model; further ones are the bodies of single operators."""
    return model.subgraphs[0]


def operators(model: Any) -> Iterator[Operator]:
    """The operators of a model in the order in which they run."""
    names = {value: name for name, value in vars(schema().BuiltinOperator).items() if isinstance(value, int)}
    graph, real = graph_of(model), schema().TensorType.FLOAT32
    for operator in graph.operators:
        code = model.operatorCodes[operator.opcodeIndex]
        builtin = max(code.builtinCode, code.deprecatedBuiltinCode)  # codes below 128 may be in the old field alone
        name = code.customCode.decode() if code.customCode else names[builtin]
        inputs, outputs = (tuple(int(i) for i in ids if i >= 0) for ids in (operator.inputs, operator.outputs))
        reals = any(graph.tensors[i].type == real for i in inputs + outputs)
        yield Operator(name, inputs, outputs, reals and name not in ("QUANTIZE", "DEQUANTIZE"))


def quantization_of(tensor: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Scales and zero points of a tensor, None if it is not quantized."""
    quantization = tensor.quantization
    if quantization is None or quantization.scale is None or len(quantization.scale) == 0:
        return None
    return np.asarray(quantization.scale, np.float32), np.asarray(quantization.zeroPoint, np.int64)


def with_float_interface(content: bytes) -> bytes:
    """The same model with float inputs and outputs: QUANTIZE after each quantized input, DEQUANTIZE before outputs."""
    model = read_model(content)
    classes, graph = schema(), graph_of(model)
    inputs = {int(i): _add_copy(graph, i, "float") for i in graph.inputs if _is_integer(graph.tensors[i])}
    outputs = {int(i): _add_copy(graph, i, "float") for i in graph.outputs if _is_integer(graph.tensors[i])}
    before = [_operator(model, classes.BuiltinOperator.QUANTIZE, new, old) for old, new in inputs.items()]
    after = [_operator(model, classes.BuiltinOperator.DEQUANTIZE, old, new) for old, new in outputs.items()]
    graph.operators = [*before, *graph.operators, *after]
    graph.inputs = [inputs.get(int(i), int(i)) for i in graph.inputs]
    graph.outputs = [outputs.get(int(i), int(i)) for i in graph.outputs]
    for signature in model.signatureDefs or ():
        for entries, new in ((signature.inputs, inputs), (signature.outputs, outputs)):
            for entry in entries:
                entry.tensorIndex = new.get(entry.tensorIndex, entry.tensorIndex)
    return write_model(model)


def integer_tensors(model: Any) -> list[int]:
    """The quantized int8 tensors that the operators of a model compute, in the order in which they get their values."""
    graph = graph_of(model)
    return [i for operator in operators(model) for i in operator.outputs if _is_integer(graph.tensors[i])]


def with_tensors_out(content: bytes, indices: Sequence[int]) -> bytes:
    """A file that also outputs these tensors, after its other outputs."""
    model = read_model(content)
    graph_of(model).outputs = [*map(int, graph_of(model).outputs), *indices]
    model.signatureDefs = None
    return write_model(model)


def with_given_integers(content: bytes, integers: Mapping[int, np.ndarray]) -> tuple[bytes, list[np.ndarray]]:
    """A file in which the readers of some tensors read given integers: each step is then computed by itself.

    Args:
        content: the file.
        integers: int8 values by the index of a tensor that an operator computes, in the layout of the file.

    Returns:
        The file, whose further outputs are what is computed for these tensors; and the values of its further inputs.
    """
    model = read_model(with_tensors_out(content, list(integers)))
    graph = graph_of(model)
    given = {index: _add_copy(graph, index, "given") for index in integers}
    for operator in graph.operators:
        operator.inputs = [given.get(int(i), int(i)) for i in operator.inputs]
    graph.inputs = [*map(int, graph.inputs), *given.values()]
    return write_model(model), list(integers.values())


def _is_integer(tensor: Any) -> bool:
    return tensor.type == schema().TensorType.INT8 and quantization_of(tensor) is not None


def _add_copy(graph: Any, index: int, ending: str) -> int:
    """Add a tensor of the shape of another one, ``"given"`` with its integers or ``"float"``; the index of the new."""
    tensor = copy.copy(graph.tensors[index])
    tensor.name, tensor.buffer = tensor.name + f"_{ending}".encode(), 0
    if ending == "float":
        tensor.type, tensor.quantization = schema().TensorType.FLOAT32, None
    graph.tensors.append(tensor)
    return len(graph.tensors) - 1


def _operator(model: Any, code: int, source: int, result: int) -> Any:
    """An operator without options that reads one tensor and computes one."""
    classes = schema()
    entry, operator = classes.OperatorCodeT(), classes.OperatorT()
    entry.builtinCode = entry.deprecatedBuiltinCode = code
    model.operatorCodes.append(entry)
    operator.opcodeIndex = len(model.operatorCodes) - 1
    operator.inputs, operator.outputs = [source], [result]
    return operator
