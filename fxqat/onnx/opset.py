"""Opset: reaching the version that was asked for."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import numpy_helper, version_converter

from fxqat.errors import ExportError
from fxqat.scheme import STORAGE_OPSETS, QuantizedTensor

OLDEST = 13
"""Per-axis QuantizeLinear and DequantizeLinear exist since opset 13."""

DEFAULT = 18
"""What is written if none is asked for and no tensor needs a newer one."""

WIDENED_IN_14 = ("Add", "Div", "Mul", "Relu", "Sub")
"""Opset 14 let these take more integer types, and changed nothing else; ONNX's converter has no way back."""

KEPT = "fxqat.kept"
"""Domain of nodes that the converter is to leave as they are."""


def newest() -> int:
    """The newest opset the installed onnx package knows."""
    return int(onnx.defs.onnx_opset_version())


def check_opset(opset_version: int) -> None:
    """Check that a version can be asked for at all.

    Raises:
        ExportError: it is too low for Q/DQ nodes, or newer than the installed onnx.
    """
    if not isinstance(opset_version, int) or isinstance(opset_version, bool):
        raise ExportError(f"opset_version must be an integer, got {opset_version!r}")
    if opset_version < OLDEST:
        raise ExportError(
            f"opset_version {opset_version} is too low: per-channel QuantizeLinear needs opset {OLDEST}, "
            "the default is 18"
        )
    if opset_version > newest():
        raise ExportError(f"opset_version {opset_version} is newer than the installed onnx knows ({newest()})")


def opset_for(tensors: Iterable[QuantizedTensor], opset_version: int | None) -> int:
    """The opset of a file that holds these tensors: the one asked for, else the first that has all their types.

    Raises:
        ExportError: the one asked for does not have the type of a tensor.
    """
    needs = [(STORAGE_OPSETS[t.scheme.storage_width(DEFAULT)], t) for t in tensors if t.scheme is not None]
    if opset_version is None:
        return max([DEFAULT, *(need for need, _ in needs)])
    for need, tensor in needs:
        if need > opset_version:
            raise ExportError(
                f"{tensor.name} is {tensor.scheme} and is stored as {tensor.dtype}, which QuantizeLinear and "
                f"DequantizeLinear take since opset {need}; opset_version is {opset_version}. Leave opset_version out "
                f"or give {need} or more; or give this tensor 5 to 8 bits."
            )
    return opset_version


def opset_of(model: onnx.ModelProto) -> int:
    """The version of the default operator set of a model."""
    return next(int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx"))


def convert(model: onnx.ModelProto, opset_version: int) -> onnx.ModelProto:
    """Convert to another opset with ONNX's own converter.

    Three things are prepared for it: it reads what used to be attributes (axes) only from Constant nodes, so small
    integer initializers are turned into such nodes; it passes on attributes that an older operator does not have, so
    those that say no more than the default are dropped; and operators that are in opset 13 what they are in 14 are kept
    from it.

    Raises:
        ExportError: the converter cannot express the model in that version.
    """
    model = _without_default_attributes(_small_integers_as_constants(model))
    if opset_version < 14:
        _move_widened(model, "", KEPT)
    try:
        converted = version_converter.convert_version(model, opset_version)
    except Exception as cause:  # the converter raises whatever its C++ side does
        raise ExportError(
            f"this model cannot be expressed in opset {opset_version} (onnx's converter: {cause}). "
            "Use opset_version=18."
        ) from cause
    _move_widened(converted, KEPT, "")
    # what runtimes of that time read; version 13 has the types of 2 bits
    converted.ir_version = 8 if opset_version < 18 else 10 if opset_version < STORAGE_OPSETS[2] else 13
    return converted


def _move_widened(model: onnx.ModelProto, source: str, target: str) -> None:
    """Move the nodes of ``WIDENED_IN_14`` from a domain to another one, in place."""
    for node in model.graph.node:
        if node.op_type in WIDENED_IN_14 and node.domain == source:
            node.domain = target
    for entry in [entry for entry in model.opset_import if entry.domain == KEPT]:
        model.opset_import.remove(entry)
    if target == KEPT:
        model.opset_import.append(onnx.helper.make_opsetid(KEPT, 1))


def _small_integers_as_constants(model: onnx.ModelProto, limit: int = 16) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    small = [
        t for t in graph.initializer if t.data_type == onnx.TensorProto.INT64 and numpy_helper.to_array(t).size <= limit
    ]
    nodes = [onnx.helper.make_node("Constant", [], [t.name], value=t) for t in small]
    for tensor in small:
        graph.initializer.remove(tensor)
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *rest])
    return result


def _without_default_attributes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Drop ``noop_with_empty_axes=0``, which the reductions have since opset 18 (ReduceSum: 13)."""
    for node in model.graph.node:
        for attribute in list(node.attribute):
            if attribute.name == "noop_with_empty_axes" and attribute.i == 0:
                node.attribute.remove(attribute)
    return model
