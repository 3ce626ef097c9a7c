"""Run a .tflite file in LiteRT's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from fxqat.errors import ExportError
from fxqat.tflite.flatbuffer import missing

Kernels = Literal["reference", "default"]
"""LiteRT's reference kernels, or what it uses by default: the XNNPACK delegate where it can, else optimized kernels."""


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
        from ai_edge_litert.interpreter import Interpreter, OpResolverType
    except ImportError as cause:
        raise missing(cause) from cause
    resolver = OpResolverType.BUILTIN_REF if kernels == "reference" else OpResolverType.AUTO
    try:
        interpreter = Interpreter(model_content=content, num_threads=threads, experimental_op_resolver_type=resolver)
        interpreter.allocate_tensors()
        for detail, array in zip(interpreter.get_input_details(), inputs, strict=True):
            interpreter.set_tensor(detail["index"], array)
        interpreter.invoke()
        return [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]
    except (RuntimeError, ValueError) as cause:
        raise ExportError(f"LiteRT cannot run the .tflite file with its {kernels} kernels: {cause}") from cause
