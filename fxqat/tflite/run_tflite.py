"""Run a .tflite file in LiteRT's interpreter, in a process of its own: some files make LiteRT abort the process."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from fxqat.errors import ExportError
from fxqat.tflite.flatbuffer import missing

Kernels = Literal["reference", "default"]
"""LiteRT's reference kernels, or what it uses by default: the XNNPACK delegate where it can, else optimized kernels."""

ABORTS = "Seen with a softmax of a tensor that was 0 in all of calibration, which calibrate warns of."

PROGRAM = Path(__file__).with_name("interpret.py")


def run_tflite(
    content: bytes, inputs: Sequence[np.ndarray], kernels: Kernels = "default", threads: int = 1
) -> list[np.ndarray]:
    """The outputs of a file.

    Args:
        content: the file.
        inputs: its inputs in the order, layout and type of the file.
        kernels: which kernels run.
        threads: number of threads.

    Raises:
        ExportError: ``ai_edge_litert`` cannot be imported, or cannot load or run the file.
    """
    try:
        import ai_edge_litert.interpreter  # noqa: F401  the process imports it, too
    except ImportError as cause:
        raise missing(cause) from cause
    given = pickle.dumps((content, list(inputs), kernels == "reference", threads), pickle.HIGHEST_PROTOCOL)
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, PROGRAM], input=given, capture_output=True, env=paths)
    if done.returncode < 0:
        answer = f"LiteRT aborted its process with {signal.Signals(-done.returncode).name}. {ABORTS}"
    elif done.returncode:
        answer = done.stderr.decode(errors="replace")[-500:]
    else:
        answer = pickle.loads(done.stdout)  # noqa: S301  from the program above
    if isinstance(answer, str):
        raise ExportError(f"LiteRT cannot run the .tflite file with its {kernels} kernels: {answer}")
    return answer
