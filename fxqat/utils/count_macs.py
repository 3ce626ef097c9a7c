"""Count multiply-accumulates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fxqat.utils.torch_compat import FUSED_RECURRENT

T = TypeVar("T")


def count_macs(function: Callable[[], T]) -> tuple[T, float]:
    """What a function returns, and the multiply-accumulates of its products of matrices and convolutions."""
    from torch.utils.flop_counter import FlopCounterMode  # here, because importing it makes loggers

    with FlopCounterMode(display=False, custom_mapping=dict.fromkeys(FUSED_RECURRENT, _recurrent_flops)) as counter:
        result = function()
    return result, counter.get_total_flops() / 2


def _recurrent_flops(x: Sequence[int], *others: Any, out_shape: Any = None, **named: Any) -> int:
    """Of a recurrent layer that is computed by one kernel: each row of its input is multiplied with all its weights.

    Args:
        x: shape of the input.
        others: its other arguments, with shapes for tensors: matrices of weights first, one by one or in a list.
        out_shape: shapes of its outputs.
        named: not used.
    """
    shapes = others[0] if isinstance(others[0][0], Sequence) else others[:2]
    per_row: int = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    return 2 * math.prod(x[:-1]) * per_row
