"""The errors: one base, so that a user can catch all of them, and export failures in one class."""

import inspect

import pytest

from fxqat import errors

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_an_fxqat_error_with_a_meaning(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.FxqatError)
    assert kind.__doc__


def test_a_parity_failure_is_an_export_failure() -> None:
    assert issubclass(errors.ParityError, errors.ExportError)
    assert not issubclass(errors.ConfigError, errors.ExportError)
    with pytest.raises(errors.ExportError, match="off by 3"):
        raise errors.ParityError("off by 3")
