"""Python in a process of its own whose oneDNN, and so OpenVINO, uses no AMX.

Some of what OpenVINO does wrong depends on the processor: with AMX it computes signed integers in another kernel.
"""

import os
import subprocess
import sys
from pathlib import Path

NO_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "CI": "true"}
"""oneDNN reads the first; with the second OpenVINO reports no use of it."""


def run_without_amx(program: str, *arguments: object) -> str:
    """What a program prints."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, env=os.environ | NO_AMX)
    assert done.returncode == 0, done.stderr
    return done.stdout
