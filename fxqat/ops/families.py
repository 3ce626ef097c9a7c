"""A row of the op table, and the families of ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

# Families: the kinds of ops that backends tell apart when they place Q/DQ.
WEIGHTED = "weighted"  # a layer with a weight
MATMUL = "matmul"  # a product of two activations
BINARY = "binary"  # elementwise, two operands
CONCAT = "concat"  # joins tensors without changing a value
PASS_THROUGH = "pass_through"  # moves or selects values without changing one, or inserts zeros
IDENTITY = "identity"  # does nothing in the deployed graph
POOL = "pool"  # averages
ACTIVATION = "activation"
NORM = "norm"
MATH = "math"
RESIZE = "resize"
LOOKUP = "lookup"
CONSTRUCTOR = "constructor"  # creates a tensor from sizes and constants
UNBOUNDED = "unbounded"  # inserts values that stand for infinity
NOT_FLOAT = "not_float"  # returns sizes, indices, booleans
RECURRENT = "recurrent"
OPAQUE = "opaque"  # not in the table

WITH_WEIGHT = (WEIGHTED, LOOKUP)
"""Families of layers whose weight can be stored as integers."""

GATED = MappingProxyType({"sigmoid": "silu", "hardsigmoid": "hardswish"})
"""By the name of ``gate``, that of the op which computes ``x * gate(x)``."""


@dataclass(frozen=True)
class Op:
    """One op and its spellings.

    Args:
        name: the op's name in fusions, backends and reports.
        family: one of the families above.
        modules: ``nn.Module`` types.
        functions: ``torch``, functional and operator functions.
        methods: ``Tensor`` method names, in-place ones included.
        inputs: number of leading arguments that can be quantized values (a list of tensors counts as one).
        keeps_output: whether the backward pass reads the output, which therefore stays in memory.
        gives_tuple: whether it returns several tensors. Of values and indices, the first are the values.
        poles: positions of the operands for which the op or its derivative is infinite at zero.
    """

    name: str
    family: str
    modules: tuple[type, ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()
    methods: tuple[str, ...] = ()
    inputs: int = 1
    keeps_output: bool = False
    gives_tuple: bool = False
    poles: tuple[int, ...] = ()


def named(namespace: Any, names: str) -> tuple[Callable[..., Any], ...]:
    """The functions of a namespace by their names, separated by blanks.

    Example:
        >>> import operator
        >>> named(operator, "add sub") == (operator.add, operator.sub)
        True
    """
    return tuple(getattr(namespace, name) for name in names.split())


def methods(names: str) -> tuple[str, ...]:
    """Method names, separated by blanks.

    Example:
        >>> methods("relu relu_")
        ('relu', 'relu_')
    """
    return tuple(names.split())
