"""The check of arguments that are True or False."""

from __future__ import annotations

import reprlib

from fxqat.errors import FxqatError


def check_flags(error: type[FxqatError], caller: str, **flags: object) -> None:
    """Refuse flags that are not bools: Python takes any text, also ``"no"``, for true.

    Args:
        error: the class of the error.
        caller: the function that takes the flags, for the message.
        flags: by name, what the user gave.

    Raises:
        error: one is neither True nor False.

    Example:
        >>> from fxqat.errors import ConfigError
        >>> check_flags(ConfigError, "calibrate", keep=True)
        >>> check_flags(ConfigError, "calibrate", keep="no")
        Traceback (most recent call last):
        fxqat.errors.ConfigError: calibrate: keep must be True or False, got 'no' (str). Write keep=True or keep=False
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise error(
                f"{caller}: {name} must be True or False, got {reprlib.repr(value)} ({type(value).__name__}). "
                f"Write {name}=True or {name}=False"
            )
