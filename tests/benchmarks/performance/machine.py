"""The machine that a benchmark runs on, in words."""

from __future__ import annotations

import platform
from pathlib import Path

INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
"""Sets of instructions that kernels for integers use."""


def processor() -> str:
    """The processor, with its family, model and instructions where Linux says so."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    numbers = [f"{name.removeprefix('cpu ')} {said[name]}" for name in ("cpu family", "model") if name in said]
    flags = [flag for flag in INSTRUCTIONS if flag in said.get("flags", "").split()]
    return f"{', '.join([said.get('model name', platform.machine()), *numbers])} ({', '.join(flags)})"
