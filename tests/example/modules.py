"""The examples' modules, which import each other by bare names: those of one example at a time."""

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).resolve().parents[2] / "example"
COMMON = EXAMPLES / "common"


@contextmanager
def modules_of(example: Path, main: str) -> Iterator[ModuleType]:
    """An example's main module; afterwards its modules, and those it shares, are as if they had not been imported.

    So is the logging that it sets up.
    """
    before = set(sys.modules)
    loggers = [logging.getLogger(name) for name in ("example", "fxqat")]
    settings = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    sys.path[:0] = [str(example), str(COMMON)]
    try:
        yield importlib.import_module(main)
    finally:
        sys.path[:] = [place for place in sys.path if place not in (str(example), str(COMMON))]
        for name in set(sys.modules) - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "").parent in (example, COMMON):
                del sys.modules[name]
        for logger, (handlers, level, propagate) in zip(loggers, settings, strict=True):
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(level)
