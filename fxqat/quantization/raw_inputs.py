"""Raw inputs: the exported file takes images as they come from a camera, and normalizes them itself.

A quantized input is normalized in integers. There are only 256 bytes, so each form is proven with all of them, in every
channel:

1. the byte is the integer of the quantized value: the file reads it through DequantizeLinear alone;
2. an int8 convolution of size 1 for each channel with an int32 bias, ``(weight * x + bias) * scale`` with
   ``weight * scale = 1 / std``, gives the integers that the model computes from ``(x - mean) / std``. Of the weights 1
   to 127 the one is taken for which ``-weight * mean`` is nearest to an integer: 40 for ImageNet's mean of 123.675.
   The result is quantized as in the model, so nothing else changes, and zero padding stays exact;
3. otherwise, and for an input that something reads in float: ``(x - mean) / std`` in float.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxqat.errors import ExportError
from fxqat.nn.deployed import Normalize, NormalizeIntegers
from fxqat.numerics import quantize
from fxqat.scheme import QuantizeScheme
from fxqat.utils.fx_graph import unique_name
from fxqat.utils.tensors import flatten_tensors

InputStats = Sequence[tuple[Any, Any] | None]
Normalizers = tuple[Normalize | None, ...]
_BYTES = torch.arange(256, dtype=torch.float32, device="cpu")
_LARGEST_BIAS = 2**23
"""Sums of a larger bias and a product would be rounded in float32."""


def parse_input_stats(input_stats: InputStats | None, inputs: tuple[Any, ...]) -> Normalizers:
    """The normalization of each input, None for an input that stays as it is.

    Args:
        input_stats: ``(mean, std)`` of each input, in units of the raw values, or None; numbers, or one number per
            channel (dimension 1).
        inputs: example inputs.

    Raises:
        ExportError: there is not one entry per input, an entry is not such a pair, or it does not fit its input.
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
    """Example inputs as the file takes them: raw inputs as uint8.

    Raises:
        ExportError: a raw input does not hold integers from 0 to 255.
    """
    pairs = zip(inputs, normalizers, strict=True)
    return tuple(x if normalize is None else _as_uint8(i, x) for i, (x, normalize) in enumerate(pairs))


def normalize_inputs(gm: fx.GraphModule, normalizers: Sequence[Normalize | None]) -> None:
    """Let a graph take raw inputs, in place: they are normalized before anything reads them.

    Args:
        gm: the graph; a quantized input ``x`` is named ``x_normalized`` afterwards.
        normalizers: what each input passes through, None for nothing.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, normalizer in zip(placeholders, normalizers, strict=False):  # optional arguments may be left out
        if normalizer is None:
            continue
        path = unique_name(gm, f"{node.target}_normalized")
        gm.add_submodule(path, normalizer)
        for user in list(node.users):
            if "tensor_name" in user.kwargs:
                user.update_kwarg("tensor_name", f"{user.kwargs['tensor_name']}_normalized")
        with gm.graph.inserting_after(placeholders[-1]):
            value = gm.graph.call_module(path, (node,))
        node.replace_all_uses_with(value, delete_user_cb=lambda user, value=value: user is not value)


def reads_bytes(normalizer: Normalize, scheme: QuantizeScheme, scale: Tensor, zero_point: Tensor) -> bool:
    """Whether each byte is the integer of its quantized value in every channel (form 1).

    Args:
        normalizer: of the input.
        scheme: of the normalized input.
        scale: ``()``.
        zero_point: ``()``.
    """
    if scheme.signed or scheme.bit_width != 8:
        return False
    integers = _quantized_bytes(normalizer, scheme, scale, zero_point)
    return torch.equal(integers, _BYTES.expand_as(integers))


def normalize_integers(
    normalizer: Normalize, scheme: QuantizeScheme, scale: Tensor, zero_point: Tensor
) -> NormalizeIntegers | None:
    """The normalization in integers (form 2), None if no integers give those of the model for every byte.

    The products and their sum are rounded as ONNX Runtime rounds them: in float with and without fused addition, and
    in its integer kernel. All three must give the integers of the model.

    Args:
        normalizer: of the input.
        scheme: of the normalized input.
        scale: ``()``.
        zero_point: ``()``.
    """
    dims = len(normalizer.shape) - 2
    if dims not in (1, 2, 3):
        return None
    expected = _quantized_bytes(normalizer, scheme, scale, zero_point).unsqueeze(1)
    mean, std = (values.reshape(-1, 1).double() for values in torch.broadcast_tensors(normalizer.mean, normalizer.std))
    weights = torch.arange(1, 128, dtype=torch.float64, device="cpu")
    biases = (-mean * weights).round()
    scales = (1 / (std * weights)).float()

    x, weight, bias = _BYTES, weights.float().unsqueeze(1), biases.float().unsqueeze(2)
    factor, step = weight * scales.unsqueeze(2), scales.unsqueeze(2)
    fused = (x.double() * factor.double() + (bias * step).double()).float()
    in_steps = (x * weight + bias) * (step / scale)  # what the integer kernel rounds
    results = ((x * factor + bias * step, scale), (fused, scale), (in_steps, torch.ones_like(scale)))
    limits = (scheme.quant_min, scheme.quant_max)
    right = [(quantize(value, one, zero_point, *limits) == expected).all(dim=2) for value, one in results]
    usable = torch.stack(right).all(dim=0) & (biases.abs() < _LARGEST_BIAS)
    if not usable.any(dim=1).all():
        return None
    error = ((biases + mean * weights).abs() / weights).masked_fill(~usable, torch.inf)
    best = error.argmin(dim=1, keepdim=True)
    found = (values.expand_as(biases).gather(1, best) for values in (weights, biases, scales))
    chosen, shift, steps = (values.float().flatten().expand(normalizer.shape[1]) for values in found)
    return NormalizeIntegers(chosen, shift, steps, dims)


def stats_by_name(
    names: Sequence[str], inputs: tuple[Any, ...], normalizers: Normalizers
) -> dict[str, tuple[list[float], list[float]]]:
    """Mean and std of each raw input, by its name in the file.

    Args:
        names: names of the file's inputs; nested example inputs have several.
        inputs: example inputs.
        normalizers: one for each example input.
    """
    places = [place for place, value in enumerate(inputs) for _ in flatten_tensors(value)]
    pairs = [(name, normalizers[place]) for name, place in zip(names, places, strict=True)]
    return {name: (n.mean.reshape(-1).tolist(), n.std.reshape(-1).tolist()) for name, n in pairs if n is not None}


def _quantized_bytes(normalizer: Normalize, scheme: QuantizeScheme, scale: Tensor, zero_point: Tensor) -> Tensor:
    """The integers that the model computes from each byte: ``(channels, 256)``, or one row for all channels."""
    mean, std = torch.broadcast_tensors(normalizer.mean, normalizer.std)
    per_channel = Normalize(mean.reshape(-1, 1), std.reshape(-1, 1))
    return quantize(per_channel(_BYTES), scale, zero_point, scheme.quant_min, scheme.quant_max)


def _normalizer(place: int, stats: Any, x: Any) -> Normalize:
    where = f"input_stats[{place}]"
    if not isinstance(x, Tensor):
        raise ExportError(f"{where}: the input must be a tensor, example_inputs has {type(x).__name__}; give None")
    if not isinstance(stats, (list, tuple)) or len(stats) != 2:
        raise ExportError(f"{where} must be (mean, std) or None, got {stats!r}")
    mean, std = (_values(f"{name} of {where}", value, x) for name, value in zip(("mean", "std"), stats, strict=True))
    if not bool((std > 0).all()):
        raise ExportError(f"std of {where} must be positive, got {stats[1]!r}")
    return Normalize(mean, std, tuple(x.shape))


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
            f"example_inputs[{place}] must hold raw values, integers from 0 to 255, because the file normalizes this "
            f"input with input_stats[{place}]; got {x.dtype} from {float(x.min()):g} to {float(x.max()):g}. Give the "
            "images as they are before normalization."
        )
    return raw
