"""Where the ops that read a value are flat, so that its range need not go further.

SiLU gives almost 0 for -9 and for -90, but a range down to -90 makes the steps of the values much coarser. The observer
of a value that only such ops read therefore sees the value clamped to the range in which their results differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxqat.custom_quantizer.value_kinds import reads_sizes_only
from fxqat.ops.families import GATED
from fxqat.ops.identify import identify
from fxqat.quantization.annotation import ValueQuant
from fxqat.utils.node_meta import Kind

Range = tuple[float, float]

EXACT: Mapping[str, Range] = MappingProxyType({"hardsigmoid": (-3.0, 3.0), "hardswish": (-3.0, math.inf)})
"""Ops that are constant outside of a range, or below it."""


SMOOTH: Mapping[str, tuple[Callable[[Tensor], Tensor], float, float | None]] = MappingProxyType(
    {
        "sigmoid": (torch.sigmoid, 0.0, 1.0),
        "tanh": (torch.tanh, -1.0, 1.0),
        "silu": (F.silu, 0.0, None),
        "gelu": (F.gelu, 0.0, None),
        "mish": (F.mish, 0.0, None),
    }
)
"""The function of an op, and its limits at minus and plus infinity; None if it has none."""

GRID, FARTHEST = 1 / 64, 40

GATE_MARGIN = 0.5
"""A range goes this much further than the end of a rounded gate. So its lowest step closes the gate also where it is
half a step higher, or where the gate stays below 1 and has finer steps.
"""


@cache
def flat_outside_of(name: str, bit_width: int) -> Range | None:
    """The range outside of which an op is flat: closer to its limit than half a step of a result in [0, 1].

    Args:
        name: the op.
        bit_width: of the result.

    Returns:
        ``(low, high)`` around 0, where one of them may be infinite; None if the op is flat nowhere.

    Example:
        >>> flat_outside_of("silu", 8), flat_outside_of("hardswish", 8), flat_outside_of("relu", 8)
        ((-8.359375, inf), (-3.0, inf), None)
    """
    if name not in SMOOTH:
        return EXACT.get(name)
    function, below, above = SMOOTH[name]

    def end(sign: int, limit: float | None) -> float:
        if limit is None:
            return sign * math.inf
        ends = sign * torch.arange(0, FARTHEST, GRID, dtype=torch.float64)
        return ends[(function(ends) - limit).abs() > 2.0 ** -(bit_width + 1)][-1].item()

    return end(-1, below), end(1, above)


def flat_outside(
    node: fx.Node, values: Mapping[fx.Node, ValueQuant], kinds: Mapping[fx.Node, Kind], bit_width: int
) -> Range | None:
    """The range outside of which every op that reads a value is flat.

    Args:
        node: the value.
        values: how this and the other values are quantized.
        kinds: of the nodes; a reader that only takes sizes does not count.
        bit_width: of the values.

    Returns:
        ``(low, high)``; None if a reader is flat nowhere, or if there is none.
    """
    reading = [user for user in node.users if values[node].is_read_by(user)]
    reading = [user for user in reading if user.op == "output" or not reads_sizes_only(user, kinds)]
    found = [_flat_for(user, node, values, bit_width) for user in reading]
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found):
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def _flat_for(user: fx.Node, value: fx.Node, values: Mapping[fx.Node, ValueQuant], bit_width: int) -> Range | None:
    """The range outside of which one reader is flat. ``x * sigmoid(x)`` is 0 where the sigmoid is rounded to 0."""
    name = identify(user).name
    others = [operand for operand in user.all_input_nodes if operand is not value]
    if name != "mul" or len(others) != 1 or others[0].all_input_nodes != [value]:
        return flat_outside_of(name, bit_width)
    gate = identify(others[0]).name
    if gate not in GATED:
        return None
    if others[0] not in values or not values[others[0]].is_read_by(user):
        return flat_outside_of(GATED[gate], bit_width)
    closed = flat_outside_of(gate, values[others[0]].config.scheme.bit_width)
    return None if closed is None else (closed[0] - GATE_MARGIN, math.inf)
