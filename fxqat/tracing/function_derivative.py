"""Whether the backward of a custom ``torch.autograd.Function`` is the derivative of its forward.

Such Functions save memory or time and nothing else: activations that are computed again, reversible layers,
checkpointing of one's own, normalization whose backward is written by hand. Others define a gradient of their own:
straight-through estimators, gradient reversal, clipped gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxqat.utils.contexts import attributes_kept, buffers_kept, in_mode, random_state_kept
from fxqat.utils.gradients import gradients_of
from fxqat.utils.tensors import flatten_tensors, is_close, map_tensors, versions_in

TOLERANCE = 1e-4
"""By how much two gradients may differ, relative to each value and to the largest: kernels round differently."""
NEAR, FAR = 3, 10
"""Standard deviations of the powers of two by which values are multiplied, so that they lie on all sides of limits."""


class Context:
    """What the forward of a Function gets as ``ctx`` when autograd differentiates it; keeps nothing for a backward."""

    def __init__(self, count: int) -> None:
        self.needs_input_grad = (True,) * count

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Autograd keeps what it needs."""

    save_for_forward = save_for_backward

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Autograd knows."""

    def set_materialize_grads(self, value: bool) -> None:
        """There is no backward that reads it."""


def apply_forward(cls: type[torch.autograd.Function], forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The forward of a Function as ordinary code, which autograd differentiates.

    Args:
        cls: the Function.
        forward: its forward.
        args: what ``apply`` gets.
        kwargs: the same, by name.
    """
    has_context = cls.setup_context is torch.autograd.Function.setup_context
    with torch.enable_grad(), _no_grad_ignored():
        return forward(*((Context(len(args)), *args) if has_context else args), **kwargs)


@contextmanager
def _no_grad_ignored() -> Iterator[None]:
    """``torch.no_grad`` has no effect in the block, as in a forward, which ``apply`` runs without gradients.

    Other threads use it as always.
    """
    thread = threading.get_ident()
    members = {name: vars(torch.no_grad)[name] for name in ("__enter__", "__exit__")}

    def elsewhere(member: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: None if threading.get_ident() == thread else member(*args)

    for name, member in members.items():
        setattr(torch.no_grad, name, elsewhere(member))
    try:
        yield
    finally:
        for name, member in members.items():
            setattr(torch.no_grad, name, member)


def has_derivative_as_backward(
    root: nn.Module, cls: type[torch.autograd.Function], forward: Callable[..., Any], args: Any, kwargs: Any
) -> bool:
    """Whether a Function has the gradients of its forward: for these arguments, and with their values scaled at random.

    The gradients are those of its arguments and of the model's parameters. The model is left as it was. Of a Function
    that writes to its arguments, raises on scaled ones, or counts batches in its backward, too (a BatchNorm that runs
    again), the answer is no.

    Args:
        root: the model.
        cls: the Function.
        forward: its forward.
        args: what ``apply`` gets, as values.
        kwargs: the same, by name.
    """

    def differentiated(*args: Any, **kwargs: Any) -> Any:
        return apply_forward(cls, forward, args, kwargs)

    def is_equal(octaves: int) -> bool:
        exact, state = _results(root, cls.apply, args, kwargs, octaves)
        found, left = _results(root, differentiated, args, kwargs, octaves)
        may_overflow = octaves == FAR
        return (
            len(exact) == len(found) > 0
            and all(_is_close(*pair, may_overflow) for pair in zip(exact, found, strict=True))
            and all(is_close(*pair, TOLERANCE) for pair in zip(state, left, strict=True))
        )

    trials = ((False, 0), (True, NEAR), (True, FAR))
    try:
        with random_state_kept(root), torch.enable_grad():
            for training, octaves in trials:
                with in_mode(root, training):
                    if not is_equal(octaves):
                        return False
    except Exception:  # noqa: BLE001  a user's code raises anything; the Function is called as it is
        return False
    return True


def _is_close(exact: Tensor | None, found: Tensor | None, may_overflow: bool) -> bool:
    """Whether two tensors are equal; None is a gradient of zeros, and NaN alone shows nothing."""
    if exact is None or found is None:
        return all(tensor is None or not tensor.any() for tensor in (exact, found))
    return (may_overflow or bool(exact.isfinite().any())) and is_close(exact, found, TOLERANCE)


def _scaled(tensor: Tensor, octaves: int) -> Tensor:
    """A tensor with each value multiplied by a random power of two and a random sign."""
    return tensor * torch.exp2(octaves * torch.randn_like(tensor)) * torch.randn_like(tensor).sign()


def _results(
    root: nn.Module, call: Any, args: Any, kwargs: Any, octaves: int
) -> tuple[list[Tensor | None], list[Tensor]]:
    """The float outputs of a Function and the gradients of its arguments and the model's parameters; then the buffers.

    Raises:
        ValueError: it writes to an argument.
    """
    torch.manual_seed(0)
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        if isinstance(tensor, nn.Parameter):
            tensor.data = _scaled(tensor.data, octaves) if octaves else tensor.data.clone()
            return tensor
        leaves.append((_scaled(tensor.detach(), octaves) if octaves else tensor.detach().clone()).requires_grad_())
        return leaves[-1]

    with buffers_kept(root), attributes_kept(root), _data_kept(flatten_tensors((args, kwargs))):
        given = map_tensors((args, kwargs), leaf)
        versions = versions_in(given)
        outputs = [output for output in flatten_tensors(call(*given[0], **given[1])) if output.is_floating_point()]
        if versions != versions_in(given):
            raise ValueError(f"{call} writes to its arguments")
        losses = [_scaled(output, octaves or NEAR).sum() for output in outputs if output.requires_grad]
        read = [*leaves, *(parameter for parameter in root.parameters() if parameter.requires_grad)]
        gradients = gradients_of(torch.stack(losses).sum(), read) if losses and read else []
        state = [buffer.detach().clone() for buffer in root.buffers()]
    return [*(output.detach() for output in outputs), *gradients], state


@contextmanager
def _data_kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Parameters among the given tensors have their own data after the block, at the same place and version."""
    data = [(tensor, tensor.data) for tensor in tensors if isinstance(tensor, nn.Parameter)]
    try:
        yield
    finally:
        for tensor, value in data:
            tensor.data = value
