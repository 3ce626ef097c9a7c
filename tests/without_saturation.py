"""ONNX Runtime's optimizer on x86 without VNNI: kernels whose sums do not saturate.

Its own choice there, kernels for uint8 x int8 that add two products in 16 bits, computes something else than the file
says, and fxqat warns of it. Tests that compare with the optimizer are about files, not about processors.
"""

from typing import Any

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as errors


class InferenceSession(ort.InferenceSession):  # type: ignore[misc]  # onnxruntime has no types
    """A session in which the optimizer makes uint8 of int8 weights."""

    def __init__(self, model: Any, sess_options: ort.SessionOptions | None = None, *rest: Any, **options: Any) -> None:
        chosen = sess_options or ort.SessionOptions()
        chosen.add_session_config_entry("session.x64quantprecision", "1")
        try:
            super().__init__(model, chosen, *rest, **options)
        except (errors.Fail, errors.NotImplemented):  # several nodes read a zero point; int8 inputs (seen in 1.32)
            chosen.add_session_config_entry("session.x64quantprecision", "0")
            super().__init__(model, chosen, *rest, **options)


def use() -> None:
    """Let all sessions of this process be such."""
    ort.InferenceSession = InferenceSession
