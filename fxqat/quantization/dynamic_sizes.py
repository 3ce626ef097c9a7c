"""A file with open sizes: which dimensions of the inputs are open, and whether the model follows them.

Dimensions are named as for ``torch.onnx.export(dynamic_shapes=...)``. ``dynamic_batch=True`` names the batch: the first
dimension of the first tensor that has one, and of every input with the same first dimension. Others (scalars, masks of
another size) keep their shape.

The model runs on the example inputs, and on inputs of a second size, which repeat them: every open dimension twice as
long, or as long as its bounds allow. Then:

1. an output with a row for each sample has one for each sample of the second batch;
2. its first rows are those of the first batch, unless the model mixes the samples (compared if only the batch is open);
3. no number that the model's code took from a size is the size of an open dimension: the graph would have this number
   at every size.

Rule 2 cannot be demanded: it is reported. Rules 1 and 3 are, if the model's code took numbers from sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim

from fxqat.errors import ExportError
from fxqat.onnx.output_parity import compare
from fxqat.utils.nearest_name import nearest
from fxqat.utils.node_meta import ForcedNumber
from fxqat.utils.tensors import flatten_tensors, map_tensors

SAME_ROWS = 0.99
"""Cosine similarity, or share of equal integers, from which rows count as the same: sums may round differently."""

REMEDY = "Use the size itself (x.shape[0], without float() or range()), or leave the dimension fixed."


@dataclass(frozen=True)
class OpenSizes:
    """The open dimensions of a file's inputs.

    Args:
        shapes: what ``torch.export`` takes, in the structure of the inputs.
        first: for each input tensor, the sizes of its open dimensions in the example inputs.
        second: their second sizes.
        forced: the numbers that the model's code took from sizes.
        before: sizes that the open dimensions had when the model was prepared.
    """

    shapes: Any
    first: tuple[Mapping[int, int], ...]
    second: tuple[Mapping[int, int], ...]
    forced: tuple[ForcedNumber, ...] = ()
    before: frozenset[int] = frozenset()

    @property
    def batch(self) -> int:
        """The size of the batch, 0 if it is not open."""
        return next((sizes[0] for sizes in self.first if 0 in sizes), 0)

    @property
    def only_batch(self) -> bool:
        """Whether nothing else is open."""
        return all(axis == 0 for sizes in self.first for axis in sizes)

    @property
    def cause(self) -> str:
        """The sentence that names the lines of the model at fault, or the remedy if none is known."""
        return _cause_of(self.forced)

    def second_inputs(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Inputs of the second size, which repeat the given ones."""
        sizes = iter(self.second)
        return map_tensors(inputs, lambda tensor: _repeated(tensor, next(sizes)))  # type: ignore[no-any-return]


def open_sizes(
    inputs: tuple[Any, ...],
    names: Sequence[str],
    dynamic_shapes: Any = None,
    dynamic_batch: bool = False,
    forced: Sequence[ForcedNumber] = (),
    kept: tuple[Any, ...] | None = None,
) -> OpenSizes | None:
    """Read the arguments of ``convert_export``; None if every size is fixed.

    Args:
        inputs: the example inputs.
        names: names of the arguments of the model, in order.
        dynamic_shapes: a dict by the names of arguments, or a sequence with an entry for each. The entry of a tensor is
            a dict by dimension or a sequence with one entry for each: a name, a ``torch.export.Dim``, or None for a
            fixed size. The entry of a nested input has its structure; None fixes all of it.
        dynamic_batch: open the batch as well.
        forced: the numbers that the model's code took from sizes.
        kept: the inputs that the model was prepared with, None if there were none.

    Raises:
        ExportError: ``dynamic_shapes`` does not fit the inputs, two dimensions of one name have different sizes, or
            the batch is to be opened and every input is a scalar.
    """
    if dynamic_shapes is None and not dynamic_batch:
        return None
    leaves: list[tuple[Tensor, dict[int, Any], str]] = []
    given = _in_order(dynamic_shapes, inputs, names)
    titles = [*names, *(f"input {place}" for place in range(len(names), len(inputs)))]
    shapes = tuple(_read(*entry, leaves) for entry in zip(inputs, given, titles, strict=False))
    if dynamic_batch:
        size = next((tensor.shape[0] for tensor, _, _ in leaves if tensor.dim()), None)
        if size is None:
            raise ExportError("dynamic_batch was asked for, but every input is a scalar")
        for tensor, axes, _ in leaves:
            if tensor.dim() and tensor.shape[0] == size:
                axes.setdefault(0, Dim("batch"))
    if not any(axes for _, axes, _ in leaves):
        return None
    known: dict[str, tuple[int, str]] = {}
    first, second = [], []
    for tensor, axes, title in leaves:
        first.append({axis: int(tensor.shape[axis]) for axis in axes})
        second.append({axis: _second(dim, tensor.shape[axis], f"{title}[{axis}]", known) for axis, dim in axes.items()})
    numbers = tuple(f for f in forced if isinstance(f.value, int) and not isinstance(f.value, bool))
    tensors = flatten_tensors(kept or ())
    pairs = zip(tensors, first, strict=False) if len(tensors) == len(first) else ()
    before = frozenset(int(tensor.shape[axis]) for tensor, axes in pairs for axis in axes if axis < tensor.dim())
    return OpenSizes(shapes, tuple(first), tuple(second), numbers, before)


def check_sizes(
    sizes: OpenSizes,
    single: Mapping[str, np.ndarray],
    double: Mapping[str, np.ndarray],
) -> tuple[str, ...]:
    """Check that the model follows the open sizes.

    Args:
        sizes: the open sizes.
        single: outputs for the example inputs, by name.
        double: outputs for the inputs of the second size, by name.

    Returns:
        What the user must know: outputs that mix the samples, or do not follow the batch.

    Raises:
        ExportError: an output does not follow the batch size, and the model's code took numbers from sizes; or one of
            these numbers is an open size.
    """
    numbers = sizes.forced
    outputs = [(name, array, double[name]) for name, array in single.items()]
    batch, twice = sizes.batch, next((found[0] for found in sizes.second if 0 in found), 0)
    of_batch = [(name, a, b) for name, a, b in outputs if a.ndim and b.ndim and a.shape[0] == batch > 0]
    stuck = [name for name, _, b in of_batch if b.shape[0] == batch]
    if numbers and stuck:
        raise ExportError(
            f"an open batch size was asked for, but outputs do not follow it: {', '.join(stuck)} with {batch} rows for "
            f"{twice} samples. {sizes.cause}"
        )
    open_ones = {*sizes.before, *(size for found in sizes.first for size in found.values())} - {1}
    taken = [number for number in numbers if number.value in open_ones]
    if taken:
        values = ", ".join(sorted({str(number.value) for number in taken}))
        raise ExportError(
            f"an open size was asked for, but the graph holds the number {values}, which is its size in the example "
            f"inputs. {_cause_of(taken)} If it is another size of the model, prepare and export with example inputs of "
            "another size."
        )
    notes = [f"open batch size: output {name} has {batch} rows for {batch} and for {twice} samples" for name in stuck]
    notes += [
        f"open batch size: output {name} mixes the samples of a batch: its rows change with the batch size"
        for name, a, b in of_batch
        if sizes.only_batch and b.shape == (twice, *a.shape[1:]) and not _same_rows(a, b)
    ]
    if numbers:
        notes.append(f"open sizes: the file is right for other sizes only if none of them is: {_lines(numbers)}")
    return tuple(notes)


def _cause_of(numbers: Sequence[ForcedNumber]) -> str:
    return f"Its code took numbers from sizes: {_lines(numbers)}. {REMEDY}" if numbers else REMEDY


def _lines(numbers: Sequence[ForcedNumber]) -> str:
    return ", ".join(f"{number.value} at {number.source or number.expression}" for number in numbers)


def _same_rows(single: np.ndarray, double: np.ndarray) -> bool:
    found = double[: len(single)]
    if single.dtype.kind != "f":
        return float(np.mean(found == single)) >= SAME_ROWS
    difference = compare(found, single)
    return difference.mismatches == 0 and difference.cosine >= SAME_ROWS


def _in_order(given: Any, inputs: tuple[Any, ...], names: Sequence[str]) -> Sequence[Any]:
    """The entry of each input."""
    if given is None:
        return [None] * len(inputs)
    if isinstance(given, Mapping):
        unknown = next((key for key in given if key not in names), None)
        if unknown is not None:
            raise ExportError(f"dynamic_shapes: the model has no input {unknown!r}; {nearest(str(unknown), names)}")
        return [given.get(name) for name in names[: len(inputs)]] + [None] * (len(inputs) - len(names))
    if not isinstance(given, (tuple, list)) or len(given) != len(inputs):
        raise ExportError(
            "dynamic_shapes must be a dict by the names of inputs, or a tuple with an entry for each of the "
            f"{len(inputs)} inputs ({', '.join(names)}), got {given!r}"
        )
    return given


def _read(value: Any, given: Any, where: str, leaves: list[tuple[Tensor, dict[int, Any], str]]) -> Any:
    """The entry of an input as ``torch.export`` takes it; its tensors are appended to ``leaves``."""
    if isinstance(value, Tensor):
        axes = _axes(value, given, where)
        leaves.append((value, axes, where))
        return axes
    if isinstance(value, Mapping):
        if given is not None and not (isinstance(given, Mapping) and given.keys() <= value.keys()):
            raise ExportError(f"dynamic_shapes: {where} has the keys {list(value)}, got {given!r}")
        return {key: _read(item, (given or {}).get(key), f"{where}[{key!r}]", leaves) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        if given is not None and not (isinstance(given, (tuple, list)) and len(given) == len(value)):
            raise ExportError(f"dynamic_shapes: {where} has {len(value)} items, got {given!r}")
        entries = zip(value, given or [None] * len(value), strict=True)
        items = [_read(item, entry, f"{where}[{place}]", leaves) for place, (item, entry) in enumerate(entries)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if given is not None:
        raise ExportError(f"dynamic_shapes: {where} is no tensor but {type(value).__name__}, got {given!r}")
    return None


def _axes(tensor: Tensor, given: Any, where: str) -> dict[int, Any]:
    """The open dimensions of a tensor: what the user gave for each."""
    shape = tuple(tensor.shape)
    if isinstance(given, (tuple, list)) and len(given) == len(shape):
        given = dict(enumerate(given))
    if given is not None and not (isinstance(given, Mapping) and all(_is_axis(axis, shape) for axis in given)):
        raise ExportError(
            f"dynamic_shapes: the entry of {where}, of shape {shape}, must be a dict by dimension or a sequence of "
            f"{len(shape)} entries, got {given!r}"
        )
    axes = {}
    for axis, dim in (given or {}).items():
        axis %= len(shape)
        if dim is None or dim == Dim.STATIC or (type(dim) is int and dim == shape[axis]):
            continue
        if not isinstance(dim, (str, Dim, type(Dim.DYNAMIC))) or dim == "":
            raise ExportError(
                f"dynamic_shapes: {where}[{axis}], of size {shape[axis]}, must be a name, a torch.export.Dim, "
                f"Dim.DYNAMIC, or None for a fixed size; got {dim!r}"
            )
        axes[axis] = dim
    return axes


def _is_axis(axis: object, shape: tuple[int, ...]) -> bool:
    return type(axis) is int and -len(shape) <= axis < len(shape)


def _second(dim: Any, size: int, where: str, known: dict[str, tuple[int, str]]) -> int:
    """The second size of a dimension.

    Args:
        dim: what the user gave for it.
        size: its size in the example inputs.
        where: the dimension in words.
        known: the sizes of the dimensions so far, by name; this one is added.
    """
    root = getattr(dim, "root", dim)  # of a derived dimension such as 32 * Dim("h")
    derive = getattr(dim, "fn", lambda length: length)
    length = next((length for length in range(2 * size + 1) if derive(length) == size), None)
    if length is None:
        raise ExportError(f"dynamic_shapes: {where} must be {dim!r}, and is {size} in the example inputs")
    name = root if isinstance(root, str) else getattr(root, "__name__", where)
    before = known.setdefault(name, (length, where))
    if before[0] != length:
        raise ExportError(
            f"dynamic_shapes: {name!r} is {before[0]} in {before[1]} and {length} in {where}. Give dimensions of "
            "different sizes different names"
        )
    low, high = getattr(root, "min", None) or 0, getattr(root, "max", None)
    candidates = (2 * length, length // 2 if length % 2 == 0 else 0, high or 0, low)
    for found in candidates:
        if found != length and found >= max(low, 2) and (high is None or found <= high):
            return int(derive(found))
    raise ExportError(f"dynamic_shapes: {where}, {dim!r}, has no other size than {size}: leave it fixed")


def _repeated(tensor: Tensor, sizes: Mapping[int, int]) -> Tensor:
    """A tensor with other sizes: repeated, and cut off."""
    for axis, size in sizes.items():
        times = -(-size // tensor.shape[axis])
        tensor = torch.cat([tensor] * times, axis).narrow(axis, 0, size).contiguous()
    return tensor
