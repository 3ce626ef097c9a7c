"""The checks of ``convert_export``'s arguments, before any work is done."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fxqat.errors import ConfigError, ExportError
from fxqat.utils.batches import REAL_INPUTS, described, read_batch
from fxqat.utils.files import check_distinct, check_writable
from fxqat.utils.tensors import flatten_tensors, map_tensors
from fxqat.utils.unused_names import unused_name


def example_tuple(model: nn.Module, example_inputs: Any, kept: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
    """The example inputs as a tuple, on the CPU and without gradients.

    Args:
        model: the prepared model; a mapping holds its arguments by name.
        example_inputs: what the user gave; None takes those that the model keeps.
        kept: the example inputs that the model keeps from ``prepare_by_platform``.

    Raises:
        ExportError: there are none; they are neither a tensor, a sequence nor a mapping, or hold no tensor, or an empty
            one; or a mapping does not fit the model.
    """
    if example_inputs is None and kept is None:
        raise ExportError(
            "example_inputs is missing, and the prepared model keeps none: give them here, or give tensors and plain "
            "values as example_inputs of prepare_by_platform"
        )
    example_inputs = kept if example_inputs is None else example_inputs
    if not isinstance(example_inputs, (Tensor, tuple, list, Mapping)):
        raise ExportError(
            "example_inputs must be a tensor, a tuple of inputs or a dict of them by name, got "
            f"{type(example_inputs).__name__}"
        )
    if isinstance(example_inputs, Mapping):
        try:
            example_inputs = read_batch(model, example_inputs, "example_inputs")
        except ConfigError as cause:
            raise ExportError(str(cause)) from cause
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    tensors = flatten_tensors(inputs)
    if not tensors or any(tensor.numel() == 0 for tensor in tensors):
        raise ExportError("example_inputs must hold at least one tensor, and none of them may be empty")
    if any(tensor.is_meta for tensor in tensors):
        raise ExportError(f"example_inputs {described(inputs)} are on the meta device, without values: {REAL_INPUTS}")
    return map_tensors(inputs, lambda tensor: tensor.detach().cpu())  # type: ignore[no-any-return]


def check_weights(weights: str) -> None:
    """Check the kind of weights in the file.

    Raises:
        ExportError: it is neither ``"integer"`` nor ``"float"``.
    """
    if weights not in ("integer", "float"):
        raise ExportError(f"weights must be 'integer' or 'float', got {weights!r}")


def check_scales(scales: str, weights: str) -> None:
    """Check the kind of scales in the file.

    Args:
        scales: the argument of this name.
        weights: the kind of weights, checked.

    Raises:
        ExportError: it is unknown, or the weights are not integers.
    """
    if scales not in ("float32", "float16"):
        raise ExportError(f"scales must be 'float32' or 'float16', got {scales!r}")
    if scales == "float16" and weights == "float":
        raise ExportError("scales='float16' makes a file of integer weights smaller; weights='float' keeps floats")


def check_names(input_names: Sequence[str] | None, output_names: Sequence[str] | None) -> None:
    """Check names of inputs and outputs.

    Raises:
        ExportError: they are no sequences of strings, or two names are the same.
    """
    for what, names in (("input_names", input_names), ("output_names", output_names)):
        if names is None:
            continue
        if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
            raise ExportError(f"{what} must be a sequence of non-empty strings, got {names!r}")
        if len(set(names)) != len(names):
            raise ExportError(f"{what} must be different from each other, got {list(names)}")
    both = set(input_names or ()) & set(output_names or ())
    if both:
        raise ExportError(f"input_names and output_names have {both} in common")


def interface_names(
    inputs: Sequence[str], outputs: Sequence[str], input_names: Sequence[str] | None, output_names: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """The names of a file's inputs and outputs: those asked for, to the letter, or the default ones.

    Args:
        inputs: default names of the inputs, one for each tensor.
        outputs: default names of the outputs. A default name that is taken gets a number.
        input_names: names asked for, None for none.
        output_names: names asked for, None for none.

    Raises:
        ExportError: there is another number of names than of tensors; or a name for an output is the default name of an
            input.
    """
    for what, names, leaves in (("input", input_names, inputs), ("output", output_names, outputs)):
        if names is not None and len(names) != len(leaves):
            raise ExportError(
                f"{what}_names must have one name for each {what} tensor, {len(leaves)}: {', '.join(leaves)}; got "
                f"{len(names)}: {list(names)}"
            )
    of_inputs = list(inputs if input_names is None else input_names)
    if output_names is not None:
        both = [name for name in output_names if name in of_inputs]
        if both:
            raise ExportError(f"output_names: {', '.join(both)} names an input already. Give input_names, too")
        return of_inputs, list(output_names)
    taken: list[str | None] = [*of_inputs]
    for name in outputs:
        taken.append(unused_name(name, taken))
    return of_inputs, [str(name) for name in taken[len(of_inputs) :]]


def check_paths(**paths: str | os.PathLike[str] | None) -> None:
    """Check that every file can be written; None is a file that was not asked for.

    Raises:
        ExportError: two are the same file, one is no path, or one cannot be written.
    """
    check_distinct(paths, ExportError)
    for path in paths.values():
        if path is not None:
            check_writable(path, ExportError)
