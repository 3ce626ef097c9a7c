"""The errors: one base, so that a user can catch all of them, and export failures in one class."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxqat import convert_export, errors, prepare_by_platform
from fxqat.errors import BUNDLE, ExportError, FxqatError, ParityError, TraceError, tells_of_the_bundle

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_an_fxqat_error_with_a_meaning(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.FxqatError)
    assert kind.__doc__


def test_a_parity_failure_is_an_export_failure() -> None:
    assert issubclass(errors.ParityError, errors.ExportError)
    assert not issubclass(errors.ConfigError, errors.ExportError)
    with pytest.raises(errors.ExportError, match="off by 3"):
        raise errors.ParityError("off by 3")


class Untraceable(nn.Module):
    """Has a branch on values."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("call", "is_told"),
    [
        (lambda: prepare_by_platform(Untraceable(), untraceable="error"), True),
        (lambda: prepare_by_platform(nn.Linear(2, 2), "no backend"), False),
        (lambda: convert_export(nn.Linear(2, 2), torch.ones(2), "x.onnx"), False),
    ],
    ids=["a model that cannot be traced", "a wrong backend", "a wrong model"],
)
def test_the_front_doors_tell_of_the_bundle(call: Callable[[], Any], is_told: bool) -> None:
    with pytest.raises(FxqatError) as caught:
        call()
    assert (BUNDLE in getattr(caught.value, "__notes__", ())) is is_told


def caused_by(cause: Exception) -> ExportError:
    error = ExportError("failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (ParityError("differs"), True),
        (TraceError("no graph"), True),
        (caused_by(RuntimeError("in torch")), True),
        (IndexError("inside"), True),
        (caused_by(OSError("disk full")), False),
        (ExportError("a wrong argument"), False),
        (TypeError("missing argument"), False),
    ],
    ids=repr,
)
def test_only_failures_tell_of_it_and_once(error: Exception, is_told: bool) -> None:
    with pytest.raises(type(error)), tells_of_the_bundle(), tells_of_the_bundle():
        raise error
    assert getattr(error, "__notes__", []) == [BUNDLE] * is_told
