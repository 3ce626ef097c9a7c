"""The errors that fxqat raises: one class for each stage at which a user can act."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

BUNDLE = "To show this failure to somebody else: fxqat bundle FILE.py:FACTORY --input SHAPE -b BACKEND -o bundle.zip"


class FxqatError(Exception):
    """Base of every error that fxqat raises on purpose."""


class ConfigError(FxqatError):
    """An argument or a configuration entry is unknown, out of range, or contradicts another one."""


class TraceError(FxqatError):
    """The model could not be traced into a graph; the message gives the module, the source line and the remedy."""


class CalibrationError(FxqatError):
    """Quantization was enabled on a model whose ranges are missing or not finite."""


class CheckpointError(FxqatError):
    """A checkpoint or parameter file does not fit the model it is loaded into."""


class ExportError(FxqatError):
    """The model cannot be exported with the given options."""


class ParityError(ExportError):
    """The exported file and the fake-quant model compute different results."""


@contextmanager
def tells_of_the_bundle() -> Iterator[None]:
    """Add to a failure in the block, or in the decorated function, how to make the debug bundle.

    A failure is a model that cannot be traced, a file that differs from its model, an export that failed because
    something else did, or an error that is not fxqat's. Wrong arguments are none. The sentence is a note of the error
    (Python 3.11), which tracebacks show below the message; before 3.11 it is part of the message.
    """
    try:
        yield
    except Exception as error:
        caused = isinstance(error, ExportError) and not isinstance(error.__cause__, (OSError, FxqatError, type(None)))
        if isinstance(error, (TraceError, ParityError)) or caused or not isinstance(error, (FxqatError, TypeError)):
            _add_note(error)
        raise


def _add_note(error: Exception) -> None:
    if not hasattr(error, "add_note"):
        error.args = (f"{error}\n{BUNDLE}",)
    elif BUNDLE not in getattr(error, "__notes__", ()):
        error.add_note(BUNDLE)
