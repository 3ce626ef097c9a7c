"""What torch's exporter does anew for each export, and which is much of the time that a small model takes: in the tests
it does so once in each process, and again when there are new operators.
"""

import typing

import torch
from torch._export import utils as export_utils
from torch.onnx._internal.exporter import _decomp


def build_once() -> None:
    """Make torch's exporter look for composite operators once (its translations: ``shorter_export``)."""
    _composite_operators_once()
    _table_once()
    torch._ops.Callable = typing.Callable  # torch evaluates an annotation thousands of times: this one is cached


def _composite_operators() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))


def _composite_operators_once() -> None:
    """torch.export looks for new composite operators when there are some, not twice for each namespace of operators."""
    look, seen = export_utils._materialize_cpp_cia_ops, set()

    def look_once() -> None:
        found = _composite_operators()
        if found not in seen:
            look()
            seen.add(found)

    export_utils._materialize_cpp_cia_ops = look_once


def _table_once() -> None:
    """torch's exporter makes the table of decompositions once for each set of operators that have a translation."""
    make, tables = _decomp.create_onnx_friendly_decomposition_table, {}

    def make_once(translated):
        key = (frozenset(translated), _composite_operators(), len(torch._decomp.decomposition_table))
        if key not in tables:
            tables[key] = make(translated)
        return dict(tables[key])

    _decomp.create_onnx_friendly_decomposition_table = make_once
