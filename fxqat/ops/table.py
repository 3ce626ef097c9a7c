"""The op table: one row per op, with its name, its family and its spellings.

Fusions and backends use these names and families. A row says nothing about quantization: the backends decide that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from fxqat.ops.assign_item import assign_item
from fxqat.ops.families import OPAQUE, Op
from fxqat.ops.rows_computing import COMPUTING
from fxqat.ops.rows_moving import MOVING

OPS: tuple[Op, ...] = (*COMPUTING, *MOVING)

UNKNOWN = Op("opaque", OPAQUE)

IN_PLACE_OPERATORS = ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod", "matmul")
"""Operators that also have an in-place form, such as ``iadd`` and ``__iadd__``."""


def _out_of_place() -> dict[Any, Callable[..., Any]]:
    found = {getattr(operator, f"i{name}"): getattr(operator, name) for name in IN_PLACE_OPERATORS}
    known = {function for op in OPS for function in op.functions}
    for namespace in (F, torch):
        for name in sorted(vars(namespace)):
            function = getattr(namespace, name.removesuffix("_"), None)
            if name.endswith("_") and not name.startswith("_") and function in known:
                found[getattr(namespace, name)] = function
    return found | {operator.setitem: assign_item}


OUT_OF_PLACE = _out_of_place()
"""Functions that overwrite their first operand, with the functions that compute the same without overwriting."""
