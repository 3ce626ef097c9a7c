"""Raw inputs: the exported file takes images as they come from a camera, and normalises them itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxqat.errors import ExportError
from fxqat.nn.deployed import Normalize

InputStats = Sequence[tuple[Any, Any] | None]
Normalizers = tuple[Normalize | None, ...]


def parse_input_stats(input_stats: InputStats | None, inputs: tuple[Any, ...]) -> Normalizers:
    """What is done to each input; None where it is left as it is.

    Args:
        input_stats: ``(mean, std)`` of each input, in units of the raw values, or None; a number each, or one number
            per channel (dimension 1).
        inputs: example inputs.

    Raises:
        ExportError: there are not as many entries as inputs, an entry is no such pair, or does not fit its input.
    """
    if input_stats is None:
        return (None,) * len(inputs)
    if not isinstance(input_stats, (list, tuple)) or len(input_stats) != len(inputs):
        raise ExportError(
            f"input_stats must be a list with an entry for each of the {len(inputs)} inputs, (mean, std) or None; got "
            f"{input_stats!r}"
        )
    pairs = zip(input_stats, inputs, strict=True)
    return tuple(None if stats is None else _normalizer(i, stats, x) for i, (stats, x) in enumerate(pairs))


def raw_inputs(inputs: tuple[Any, ...], normalizers: Normalizers) -> tuple[Any, ...]:
    """Example inputs as the file takes them: uint8 where they are normalised.

    Raises:
        ExportError: such an input does not hold integers from 0 to 255.
    """
    pairs = zip(inputs, normalizers, strict=True)
    return tuple(x if normalize is None else _as_uint8(i, x) for i, (x, normalize) in enumerate(pairs))


def normalized_inputs(raw: tuple[Any, ...], normalizers: Normalizers) -> tuple[Any, ...]:
    """The inputs that the prepared model takes instead of raw ones."""
    return tuple(x if normalize is None else normalize(x) for x, normalize in zip(raw, normalizers, strict=True))


def _normalizer(place: int, stats: Any, x: Any) -> Normalize:
    where = f"input_stats[{place}]"
    if not isinstance(x, Tensor):
        raise ExportError(f"{where}: the input must be a tensor, example_inputs has {type(x).__name__}; give None")
    if not isinstance(stats, (list, tuple)) or len(stats) != 2:
        raise ExportError(f"{where} must be (mean, std) or None, got {stats!r}")
    mean, std = (_values(f"{name} of {where}", value, x) for name, value in zip(("mean", "std"), stats, strict=True))
    if not bool((std > 0).all()):
        raise ExportError(f"std of {where} must be positive, got {stats[1]!r}")
    return Normalize(mean, std)


def _values(what: str, value: Any, x: Tensor) -> Tensor:
    """A number as ``()``, numbers of channels as ``(channels, 1, ...)``."""
    try:
        values = torch.as_tensor(value, dtype=torch.float32).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as cause:
        raise ExportError(f"{what} must be a number or a list of numbers, got {value!r}") from cause
    if not bool(values.isfinite().all()):
        raise ExportError(f"{what} must be finite, got {value!r}")
    if values.dim() == 0:
        return values
    if x.dim() < 2 or values.shape != x.shape[1:2]:
        raise ExportError(
            f"{what} must be a number, or one for each channel (dimension 1) of an input of shape {tuple(x.shape)}; "
            f"got shape {tuple(values.shape)}"
        )
    return values.reshape(-1, *[1] * (x.dim() - 2))


def _as_uint8(place: int, x: Tensor) -> Tensor:
    raw = x.clamp(0, 255).to(torch.uint8)
    if not torch.equal(raw.to(x.dtype), x):
        raise ExportError(
            f"example_inputs[{place}] must hold raw values, integers from 0 to 255, because input_stats[{place}] says "
            f"how the file normalises it; got {x.dtype} from {float(x.min()):g} to {float(x.max()):g}. Give the images "
            "as they are before normalisation."
        )
    return raw
