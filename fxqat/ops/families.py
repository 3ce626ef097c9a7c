"""What an op of the table is: its families, and a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Families: what the value of an op is, as far as placement is concerned.
WEIGHTED = "weighted"  # a layer with a weight of its own
MATMUL = "matmul"  # a product of two activations
BINARY = "binary"  # element by element on two operands
CONCAT = "concat"  # puts tensors together without changing a value
PASS_THROUGH = "pass_through"  # moves or selects values without changing one, or puts in zeros
IDENTITY = "identity"  # is no operation in the deployed graph
POOL = "pool"  # averages
ACTIVATION = "activation"
NORM = "norm"
MATH = "math"
RESIZE = "resize"
LOOKUP = "lookup"
CONSTRUCTOR = "constructor"  # makes a tensor that depends on no value
UNBOUNDED = "unbounded"  # puts in values that stand for infinity
NOT_FLOAT = "not_float"  # gives sizes, indices, booleans
RECURRENT = "recurrent"
OPAQUE = "opaque"  # not in the table


@dataclass(frozen=True)
class Op:
    """One op and its spellings.

    Args:
        name: the op's name in fusions, backends and reports.
        family: one of the families above.
        modules: ``nn.Module`` types.
        functions: ``torch``, functional and operator functions.
        methods: ``Tensor`` method names, in-place ones included.
        inputs: how many leading arguments can be quantized values (a list of tensors counts as one).
        keeps_output: its backward pass reads its output, which therefore stays in memory.
        poles: positions, among these arguments, of those at whose zero the op or its derivative is infinite.
        gives_tuple: it gives several tensors; of values and their indices the first one.
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
    """The functions of a namespace with these names, separated by blanks.

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
