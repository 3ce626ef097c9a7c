"""A file with an open batch size: which inputs have a batch, and whether the model's outputs follow its size.

The batch size is the first dimension of the first tensor that has one. Every input with this first dimension has a
batch; others (scalars, masks of another size) keep their shape.

The model runs on the batch and on the batch twice, one behind the other. Then:

1. an output with a row per sample has twice the rows;
2. its first rows are those of the single batch, unless the model mixes the samples;
3. no number that the model's code took from a size is the batch size: the graph would have this number at every size.

Rule 2 cannot be demanded: it is reported. Rules 1 and 3 are, if the model's code took numbers from sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxqat.errors import ExportError
from fxqat.onnx.output_parity import compare
from fxqat.utils.node_meta import ForcedNumber
from fxqat.utils.tensors import flatten_tensors, map_tensors

SAME_ROWS = 0.99
"""Cosine similarity, or share of equal integers, from which rows count as the same: sums may round differently."""


def batch_size(inputs: tuple[Any, ...]) -> int:
    """The batch size of inputs.

    Raises:
        ExportError: no input has a first dimension.
    """
    for tensor in flatten_tensors(inputs):
        if tensor.dim():
            return int(tensor.shape[0])
    raise ExportError("dynamic_batch was asked for, but every input is a scalar")


def has_batch(tensor: Tensor, size: int) -> bool:
    """Whether the first dimension of an input is the batch."""
    return tensor.dim() > 0 and tensor.shape[0] == size


def twice(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The batch twice, one behind the other."""
    size = batch_size(inputs)
    return map_tensors(inputs, lambda t: torch.cat([t, t]) if has_batch(t, size) else t)  # type: ignore[no-any-return]


def check_batch(
    single: Mapping[str, np.ndarray],
    double: Mapping[str, np.ndarray],
    size: int,
    forced: Iterable[ForcedNumber],
) -> tuple[str, ...]:
    """Check that outputs follow the batch size.

    Args:
        single: outputs of the batch, by name.
        double: outputs of the batch twice, by name.
        size: the batch size.
        forced: the numbers that the model's code took from sizes.

    Returns:
        What the user must know: outputs that mix the samples, or do not follow the batch.

    Raises:
        ExportError: an output does not follow the batch size, and the model's code took numbers from sizes.
    """
    numbers = [f for f in forced if isinstance(f.value, int) and not isinstance(f.value, bool)]
    outputs = [(name, array, double[name]) for name, array in single.items()]
    stuck = [name for name, a, b in outputs if a.ndim and a.shape[0] == size and b.shape == a.shape]
    if numbers and stuck:
        raise ExportError(
            f"dynamic_batch was asked for, but outputs do not follow the batch size: {', '.join(stuck)} with {size} "
            f"rows for {2 * size} samples. {cause_of(numbers)}"
        )
    taken = [number for number in numbers if number.value == size > 1]
    if taken:
        raise ExportError(
            f"dynamic_batch was asked for, but the graph holds the number {size}, which is the batch size of "
            f"example_inputs. {cause_of(taken)} If it is another size of the model, give example_inputs with another "
            "batch size."
        )
    notes = [f"dynamic_batch: output {name} has {size} rows for {size} and for {2 * size} samples" for name in stuck]
    notes += [
        f"dynamic_batch: output {name} mixes the samples of a batch: its rows change with the batch size"
        for name, a, b in outputs
        if a.ndim and a.shape[0] == size and b.shape == (2 * size, *a.shape[1:]) and not _same_rows(a, b)
    ]
    if numbers:
        notes.append(
            f"dynamic_batch: the file is right for other batch sizes only if none of them is: {_lines(numbers)}"
        )
    return tuple(notes)


def cause_of(numbers: Sequence[ForcedNumber]) -> str:
    """The sentence that names the lines of the model at fault, or the remedy if none is known."""
    remedy = "Use the size itself (x.shape[0], without int(), range() or len()), or export with dynamic_batch=False."
    return f"Its code took numbers from sizes: {_lines(numbers)}. {remedy}" if numbers else remedy


def _lines(numbers: Sequence[ForcedNumber]) -> str:
    return ", ".join(f"{number.value} at {number.source or number.expression}" for number in numbers)


def _same_rows(single: np.ndarray, double: np.ndarray) -> bool:
    found = double[: len(single)]
    if single.dtype.kind != "f":
        return float(np.mean(found == single)) >= SAME_ROWS
    difference = compare(found, single)
    return difference.mismatches == 0 and difference.cosine >= SAME_ROWS
