"""Adaptive pools as ONNX operators, for the table of translations of torch's exporter.

The windows of an axis follow from its size: of ``out`` windows, window i is ``[i * size // out, ceil((i + 1) * size /
out))``. In this order:

1. one window for all: ReduceMean or ReduceMax;
2. windows of one size, without overlap: AveragePool or MaxPool;
3. else, axis after axis: a Slice for each window, reduced, and Concat. The windows are rectangles, so that the mean of
   the means of their rows is their mean.

Source: ONNX AveragePool 11, MaxPool 12, ReduceMean and ReduceMax 18, ArgMax 13, Slice 13, GatherElements 13.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from onnxscript import opset18 as op


class OpenWindowsError(ValueError):
    """The windows depend on a size that is to be open.

    Args:
        kind: ``"avg"`` or ``"max"``.
        output_size: of the pool.
    """

    def __init__(self, kind: str, output_size: Sequence[int]) -> None:
        self.kind = kind
        super().__init__(
            f"the windows of an adaptive pool to {tuple(output_size)} depend on the size of its input, which was to be "
            "open. Leave only the batch open, pool to size 1, or use a pool with a fixed kernel_size"
        )


def adaptive_avg_pool(x: Any, output_size: Sequence[int]) -> Any:
    """The mean of each window.

    Args:
        x: ``(batch, channels, *sizes)`` or ``(channels, *sizes)``.
        output_size: one number for each of the sizes.

    Raises:
        OpenWindowsError: the file would need other windows for another size.
    """
    if set(output_size) == {1}:
        return op.ReduceMean(x, _last_axes(output_size), keepdims=True)
    sizes = _fixed_sizes(x, output_size, "avg")
    if not _equal_windows(output_size, sizes):
        return _means_of_slices(x, output_size, sizes)
    batch = _batch_of(x, sizes)
    return batch.removed(op.AveragePool(batch.added(x), **_kernel(output_size, sizes)))


def adaptive_max_pool(x: Any, output_size: Sequence[int]) -> tuple[Any, Any]:
    """The maximum of each window and its place, counted through the last axes.

    Args and errors: as :func:`adaptive_avg_pool`.
    """
    if set(output_size) == {1}:
        ends: Any = op.Constant(value_ints=[0] * (len(x.shape) - len(output_size)) + [-1])
        place: Any = op.ArgMax(op.Reshape(x, ends), axis=-1, keepdims=True)
        if output_size[1:]:
            place = op.Unsqueeze(place, _last_axes(output_size[1:]))
        return op.ReduceMax(x, _last_axes(output_size), keepdims=True), place
    sizes = _fixed_sizes(x, output_size, "max")
    if not _equal_windows(output_size, sizes):
        return _maxima_of_slices(x, output_size, sizes)
    batch = _batch_of(x, sizes)
    found: tuple[Any, Any] = op.MaxPool(batch.added(x), **_kernel(output_size, sizes))
    area: Any = op.Constant(value_int=math.prod(sizes))
    return batch.removed(found[0]), batch.removed(op.Mod(found[1], area))  # ONNX counts on from channel to channel


class _Batch:
    """Adds the batch that ONNX's pools need, and removes it again."""

    def __init__(self, missing: bool) -> None:
        self.missing = missing

    def added(self, x: Any) -> Any:
        axis: Any = op.Constant(value_ints=[0])
        return op.Unsqueeze(x, axis) if self.missing else x

    def removed(self, x: Any) -> Any:
        axis: Any = op.Constant(value_ints=[0])
        return op.Squeeze(x, axis) if self.missing else x


def _batch_of(x: Any, sizes: Sequence[int]) -> _Batch:
    return _Batch(len(x.shape) == len(sizes) + 1)


def _last_axes(sizes: Sequence[int]) -> Any:
    return op.Constant(value_ints=list(range(-len(sizes), 0)))


def _fixed_sizes(x: Any, output_size: Sequence[int], kind: str) -> list[int]:
    sizes = list(x.shape)[-len(output_size) :]
    if not all(isinstance(size, int) for size in sizes):
        raise OpenWindowsError(kind, output_size)
    return sizes


def _equal_windows(output_size: Sequence[int], sizes: Sequence[int]) -> bool:
    return all(size % out == 0 for size, out in zip(sizes, output_size, strict=True))


def _kernel(output_size: Sequence[int], sizes: Sequence[int]) -> dict[str, Any]:
    kernel = [size // out for size, out in zip(sizes, output_size, strict=True)]
    return {"kernel_shape": kernel, "strides": kernel}


def _windows(x: Any, axis: int, size: int, out: int) -> Iterator[tuple[int, Any]]:
    """The start of each window of an axis, and its slice."""
    dim: Any = op.Constant(value_ints=[axis])
    for i in range(out):
        start: Any = op.Constant(value_ints=[i * size // out])
        end: Any = op.Constant(value_ints=[-(-(i + 1) * size // out)])
        yield i * size // out, op.Slice(x, start, end, dim)


def _means_of_slices(x: Any, output_size: Sequence[int], sizes: Sequence[int]) -> Any:
    for number, (size, out) in enumerate(zip(sizes, output_size, strict=True)):
        axis = number - len(sizes)
        dim: Any = op.Constant(value_ints=[axis])
        means = [op.ReduceMean(window, dim, keepdims=True) for _, window in _windows(x, axis, size, out)]
        x = op.Concat(*means, axis=axis)
    return x


def _maxima_of_slices(x: Any, output_size: Sequence[int], sizes: Sequence[int]) -> tuple[Any, Any]:
    """From the last axis to the first, so that of equal maxima the first one counts, as in torch."""
    places: Any = None
    for number in reversed(range(len(sizes))):
        axis, size, out = number - len(sizes), sizes[number], output_size[number]
        dim: Any = op.Constant(value_ints=[axis])
        step: Any = op.Constant(value_int=math.prod(sizes[number + 1 :]))
        before = [None] * out if places is None else [window for _, window in _windows(places, axis, size, out)]
        maxima: list[Any] = []
        found: list[Any] = []
        for (start, window), known in zip(_windows(x, axis, size, out), before, strict=True):
            maxima.append(op.ReduceMax(window, dim, keepdims=True))
            index: Any = op.ArgMax(window, axis=axis, keepdims=True)
            first: Any = op.Constant(value_int=start)
            place: Any = op.Mul(op.Add(index, first), step)
            found.append(place if known is None else op.Add(op.GatherElements(known, index, axis=axis), place))
        x, places = op.Concat(*maxima, axis=axis), op.Concat(*found, axis=axis)
    return x, places
