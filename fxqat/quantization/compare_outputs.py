"""Compares the outputs of a prepared model with those of the float model, fake-quant being off."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxqat.errors import TraceError
from fxqat.utils.contexts import buffers_kept, eval_mode
from fxqat.utils.tensors import flatten_tensors, map_tensors

TOLERANCE = 1e-3
"""Relative to each value, and to the largest value of its tensor; in half precision, 8 units in the last place."""


@dataclass(frozen=True)
class Reference:
    """The float model, and its outputs before any pass has run.

    Args:
        model: the float model.
        inputs: its inputs; None for one that is left out.
        fixed: arguments that tracing fixed to a value, by name.
        outputs: the tensors that it computes of them in eval mode.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    fixed: Mapping[str, Any]
    outputs: list[Tensor]


def run_reference(model: nn.Module, inputs: tuple[Any, ...], fixed: Mapping[str, Any] | None = None) -> Reference:
    """Run the float model in eval mode; it is not changed."""
    return Reference(model, inputs, fixed or {}, _outputs(model, inputs, fixed))


def check_same_outputs(prepared: nn.Module, reference: Reference) -> None:
    """Check that a prepared model computes what the float model computes, in eval mode; neither is changed.

    1. In the models' own precision.
    2. In float64, because a deep model with random weights can magnify the rounding of a float32 sum without bound.
    3. If the float model magnifies even the last digits of float64, nothing can be compared: that is logged.

    Args:
        prepared: the model with its fake-quants off.
        reference: the float model and its outputs.

    Raises:
        TraceError: the outputs differ.
    """
    model, inputs, fixed = reference.model, reference.inputs, reference.fixed
    if _agree(reference.outputs, _outputs(prepared, _given(inputs))):
        return
    name = type(model).__name__
    try:
        wide_inputs = map_tensors(inputs, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
        wide_model = copy.deepcopy(model).double()
        expected = _outputs(copy.deepcopy(wide_model), wide_inputs, fixed)
        if _agree(expected, _outputs(copy.deepcopy(prepared).double(), _given(wide_inputs))):
            return
        with torch.no_grad():
            for tensor in (*wide_model.parameters(), *wide_model.buffers()):
                tensor.copy_(_perturbed(tensor))
        chaotic = not _agree(expected, _outputs(wide_model, map_tensors(wide_inputs, _perturbed), fixed))
    except Exception:  # noqa: BLE001  not every model runs in float64
        chaotic = False
    if not chaotic:
        raise TraceError(
            f"the traced {name} computes something else than the model on example_inputs: its forward takes another "
            "branch for these inputs than it took while tracing, or overwrites part of a tensor through a view. Fix "
            "the deciding argument with 'concrete_args', or keep the module that does it whole with 'leaf_module'."
        )
    logging.getLogger("fxqat").warning(
        "%s: the traced model could not be compared with the model on example_inputs: even in float64 the model's own "
        "outputs change with the last digit of its inputs and weights (random weights?)",
        name,
    )


def _outputs(model: nn.Module, inputs: tuple[Any, ...], fixed: Mapping[str, Any] | None = None) -> list[Tensor]:
    """The outputs in eval mode, with the same random numbers each time."""
    with torch.no_grad(), buffers_kept(model), eval_mode(model), _same_random_numbers():
        return flatten_tensors(model(*copy.deepcopy(inputs), **(fixed or {})))


def _given(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs that the prepared model has: arguments left out are fixed in its graph."""
    return tuple(value for value in inputs if value is not None)


def _perturbed(tensor: Tensor) -> Tensor:
    """A tensor with other last digits in float64."""
    if not tensor.is_floating_point():
        return tensor
    with _same_random_numbers():
        return tensor * (1 + 2.0**-50 * torch.randn_like(tensor))


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Seed the random generators, and restore them afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def _agree(expected: list[Tensor], actual: list[Tensor]) -> bool:
    return len(expected) == len(actual) and all(_is_close(a, b) for a, b in zip(expected, actual, strict=True))


def _is_close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.is_meta or not a.numel():
        return a.shape == b.shape
    tolerance = max(TOLERANCE, 8 * torch.finfo(a.dtype).eps) if a.is_floating_point() else TOLERANCE
    finite = torch.nan_to_num(a.float(), nan=0.0, posinf=0.0, neginf=0.0)
    limit = tolerance * float(finite.abs().max())
    return torch.allclose(a.float(), b.float(), rtol=tolerance, atol=limit, equal_nan=True)
