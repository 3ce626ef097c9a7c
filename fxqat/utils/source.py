"""Find the line of the user's code that something comes from."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import re
import traceback
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import fx, nn

NOT_THE_USERS = (
    f"{Path(torch.__file__).parent}/",
    f"{Path(__file__).parents[1] / 'tracing'}/",
    contextlib.__file__,
    "<",
)
"""Prefixes of the names of files that are not the user's: torch's, the tracers', Python's, generated code."""

FRAME = re.compile(r'File "(.+)", line (\d+)')
"""A line of a stack trace."""


UNKNOWN_LINE = "unknown source line"
"""Stands for a line that is not known."""


def is_user_file(filename: str) -> bool:
    """Whether a file belongs neither to torch nor to the tracers."""
    return not filename.startswith(NOT_THE_USERS)


def innermost_line(frame: FrameType | None, until: CodeType | None = None) -> str:
    """The user's line in a frame or its nearest caller, ``"file.py:12"``; the search stops at the code ``until``."""
    while frame is not None and frame.f_code is not until:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def line_of_node(node: fx.Node) -> str:
    """The user's line that made a node, ``"file.py:12"``, or an empty string."""
    trace = node.meta.get("stack_trace") or node.stack_trace or ""
    frames = [(file, line) for file, line in FRAME.findall(str(trace)) if is_user_file(file)]
    return ":".join(frames[-1]) if frames else ""


def takes_dtype_of_another(line: str) -> bool:
    """Whether a line ``"file.py:12"`` casts to the type of another value: it names a ``dtype``, and no type."""
    file, _, number = line.rpartition(":")
    text = linecache.getline(file, int(number)) if file else ""
    return "dtype" in text and not any(name in text for name in ("float", "half", "double", "torch.int"))


def line_of_forward(module: nn.Module) -> str:
    """The line at which the forward of a module begins, ``"file.py:12"``."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else UNKNOWN_LINE


def line_of_failure(cause: BaseException) -> str:
    """The user's line that raised an exception, ``"file.py:12: text of the line"``."""
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if is_user_file(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else UNKNOWN_LINE
