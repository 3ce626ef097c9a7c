"""Opsets: which versions can be asked for, and which one a file needs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import onnx
import onnx_ir as ir

from fxqat.errors import ExportError
from fxqat.scheme import BLOCKS_OPSET, STORAGE_OPSETS, QuantizedTensor, QuantizeScheme

OLDEST = 13
"""The first opset whose QuantizeLinear and DequantizeLinear work per channel."""

DEFAULT = 18
"""The opset of a file when none is asked for and no tensor needs a newer one."""


def newest() -> int:
    """The newest opset the installed onnx package knows."""
    return int(onnx.defs.onnx_opset_version())


def check_opset(opset_version: int) -> None:
    """Check that a version can be asked for at all.

    Raises:
        ExportError: it is not an integer, older than per-channel Q/DQ nodes, or newer than the installed onnx.
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
    needs = [(_needs(t.scheme), t) for t in tensors if t.scheme is not None]
    if opset_version is None:
        return max([DEFAULT, *(need for need, _ in needs)])
    for need, tensor in needs:
        if need > opset_version:
            raise ExportError(
                f"{tensor.name} is {tensor.scheme}, stored as {tensor.dtype}, which QuantizeLinear and "
                f"DequantizeLinear take since opset {need}; opset_version is {opset_version}. Leave opset_version out "
                f"or give {need} or more; or give this tensor 5 to 8 bits and no blocks."
            )
    return opset_version


def _needs(scheme: QuantizeScheme) -> int:
    """The first opset in which a tensor of a scheme can be stored."""
    return max(STORAGE_OPSETS[scheme.storage_width(DEFAULT)], BLOCKS_OPSET if scheme.block_size is not None else OLDEST)


def newer_operators(op_types: Iterable[str], opset_version: int) -> dict[str, int]:
    """The operators of ONNX among ``op_types`` that came after an opset, and the opset of each."""
    first = _first_opsets()
    return {name: first[name] for name in op_types if first.get(name, 0) > opset_version}


@functools.cache
def _first_opsets() -> Mapping[str, int]:
    """The first opset of each operator of ONNX."""
    first: dict[str, int] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            first[schema.name] = min(schema.since_version, first.get(schema.name, schema.since_version))
    return MappingProxyType(first)


def opset_with_operators(model: ir.Model, opset_version: int, asked: int | None) -> int:
    """The opset of a file that has the operators of a model: at least ``opset_version``.

    Raises:
        ExportError: an operator is newer than the opset that was asked for.
    """
    written = max(opset_version, DEFAULT)  # to an older opset, onnx's converter leads
    newer = newer_operators({node.op_type for node in model.graph if node.domain == ""}, written)
    if not newer:
        return opset_version
    name, needed = max(newer.items(), key=lambda item: item[1])
    if asked is not None:
        raise ExportError(
            f"the model becomes the operator {name}, which ONNX has since opset {needed}; opset_version is {asked}. "
            f"Leave opset_version out or give {needed} or more."
        )
    return needed


def opset_of(model: onnx.ModelProto) -> int:
    """The version of the default operator set of a model."""
    return next(int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
