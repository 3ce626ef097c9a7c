"""Argument types for argparse."""

import argparse
from collections.abc import Callable
from typing import Any

import onnx

OPSETS = (13, onnx.defs.onnx_opset_version())
SWITCH: dict[str, Any] = {"action": "store_true", "default": None}


def integer(minimum: int, maximum: int = 2**31 - 1) -> Callable[[str], int]:
    """An argparse type: a whole number within the bounds."""

    def integer(text: str) -> int:
        value = int(text)
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{value} is not within {minimum} .. {maximum}")
        return value

    return integer


def number(minimum: float, maximum: float = float("inf"), *, above: bool = False) -> Callable[[str], float]:
    """An argparse type: a finite number within the bounds; `above` excludes the lower one."""

    def number(text: str) -> float:
        value = float(text)
        if not minimum <= value <= maximum or value == float("inf") or (above and value == minimum):
            bounds = f"{'above' if above else 'at least'} {minimum:g}" + (
                f", at most {maximum:g}" if maximum < 1e9 else ""
            )
            raise argparse.ArgumentTypeError(f"{text} is not a finite number {bounds}")
        return value

    return number
