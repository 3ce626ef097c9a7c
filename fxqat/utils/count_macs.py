"""Count multiply-accumulates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from fxqat.utils.contexts import without_fast_path
from fxqat.utils.torch_compat import CPU_ATTENTION, FUSED_RECURRENT, TRILINEAR

T = TypeVar("T")
Shape = Sequence[int]


def count_macs(function: Callable[[], T]) -> tuple[T, float]:
    """Run a function and count the multiply-accumulates of its products of matrices and its convolutions.

    The fast path of torch's transformers is off meanwhile: the counter does not know its operators.

    Args:
        function: takes no arguments.

    Returns:
        What the function returns, and the number.
    """
    from torch.utils.flop_counter import FlopCounterMode  # here, because importing it makes loggers

    with without_fast_path(), FlopCounterMode(display=False, custom_mapping=FLOPS) as counter:
        result = function()
    return result, counter.get_total_flops() / 2


def _recurrent(x: Shape, *others: Any, **_: Any) -> int:
    """A recurrent layer in one kernel: each row of its input meets all weights, given one by one or in a list."""
    weights = others[0] if isinstance(others[0][0], Sequence) else others[:2]
    per_row: int = sum(math.prod(shape) for shape in weights if len(shape) == 2)
    return 2 * math.prod(x[:-1]) * per_row


def _attention(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """Attention in one kernel: the product of queries and keys, and that of weights and values."""
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _trilinear(a: Shape, b: Shape, c: Shape, *expanded: Sequence[int], **_: Any) -> int:
    """``nn.Bilinear``: tensors get dimensions of size 1 at ``expanded``, and are multiplied and summed over some."""
    shapes = [list(shape) for shape in (a, b, c)]
    for shape, places in zip(shapes, expanded, strict=False):
        for place in places:
            shape.insert(place, 1)
    sizes: list[int] = [max(sizes) for sizes in zip(*shapes, strict=True)]
    return 2 * math.prod(sizes)


FLOPS: dict[Any, Callable[..., int]] = {
    **dict.fromkeys(FUSED_RECURRENT, _recurrent),
    CPU_ATTENTION: _attention,
    TRILINEAR: _trilinear,
    torch.ops.aten.dot: lambda a, b, **_: 2 * math.prod(a),
    torch.ops.aten.mv: lambda a, b, **_: 2 * math.prod(a),
    torch.ops.aten.addmv: lambda added, a, b, **_: 2 * math.prod(a),
    torch.ops.aten.addbmm: lambda added, a, b, **_: 2 * math.prod(a) * b[-1],
}
"""Operations, twice the multiply-accumulates, of what torch's counter leaves out, from shapes of the arguments."""
