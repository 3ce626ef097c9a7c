"""The torch operators of fxqat, in the namespace ``fxqat``.

With ``quantize_dequantize``, ``dequantize`` and ``dynamic_quantize_dequantize`` the exporter sees one opaque node for
each Q/DQ pair, for each stored integer tensor, and for each value that is quantized at run time. The first two do not
compute: they take the place of a part of the lowered graph, whose number they have, while ``torch.export`` traces it;
:mod:`fxqat.quantization.exported_parts` translates them to ONNX. ``keep`` is for compiled training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fxqat import numerics


@torch.library.custom_op("fxqat::dynamic_quantize_dequantize", mutates_args=())
def dynamic_quantize_dequantize(x: Tensor) -> Tensor:
    """A tensor rounded at run time by its own range: see :func:`fxqat.numerics.dynamic_quantize`."""
    q, scale, zero_point = numerics.dynamic_quantize(x)
    return (q - zero_point) * scale


@dynamic_quantize_dequantize.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _rounded(x: Tensor, part: int) -> Tensor:
    return torch.empty_like(x)


def _dequantized(q: Tensor, part: int) -> Tensor:
    return torch.empty_like(q, dtype=torch.float32)


def _stored(part: int, shape: Sequence[int]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32)


_OPERATORS: tuple[tuple[str, Callable[..., Tensor] | None, Callable[..., Tensor]], ...] = (
    ("quantize_dequantize(Tensor x, int part)", None, _rounded),
    ("dequantize(Tensor q, int part)", None, _dequantized),
    ("dequantize.stored(int part, int[] shape)", None, _stored),
    ("keep(Tensor x)", torch.clone, torch.empty_like),
)
"""The arguments of each operator, what computes it, and what gives an empty tensor of its shape and dtype."""

_LIBRARY = torch.library.Library("fxqat", "FRAGMENT")
for _arguments, _computed, _empty in _OPERATORS:
    _name = _arguments.partition("(")[0]
    # Of a constant, as torch.tensor(0.5) in forward, torch.export computes the results of all that is not random.
    _LIBRARY.define(f"{_arguments} -> Tensor", tags=() if _computed else (torch.Tag.nondeterministic_seeded,))
    if _computed is not None:
        _LIBRARY.impl(_name, _computed, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxqat::{_name}", _empty, lib=_LIBRARY)


def keep(x: Tensor) -> Tensor:
    """A copy that a compiler does not recompute in the backward pass.

    Values derived from BatchNorm's running statistics must not be recomputed: the forward pass has updated the
    statistics by then. This operator is defined at a lower level than the first, because a compiled training step
    calls it once per layer.
    """
    result: Tensor = torch.ops.fxqat.keep(x)
    return result
