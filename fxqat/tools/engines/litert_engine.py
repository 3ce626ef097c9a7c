"""LiteRT: runs the ``.tflite`` files of ``export_tflite``, whose certificate has compared them step by step."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np

from fxqat.errors import ExportError
from fxqat.tflite.flatbuffer import INSTALL, operators, read_model
from fxqat.tools.engines.base import CompiledFile, Engine, Operator, needed


class LiteRtFile(CompiledFile):
    """An interpreter of LiteRT."""

    def __init__(self, interpreter: Any, content: bytes) -> None:
        self.interpreter, self.content = interpreter, content

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs by name; ``ExportError`` if LiteRT cannot run the file."""
        try:
            for detail in self.interpreter.get_input_details():
                self.interpreter.set_tensor(detail["index"], inputs[detail["name"]])
            self.interpreter.invoke()
        except (KeyError, RuntimeError, ValueError) as cause:
            raise ExportError(f"LiteRT cannot run the file: {cause}") from cause
        details = self.interpreter.get_output_details()
        return {detail["name"]: self.interpreter.get_tensor(detail["index"]) for detail in details}

    def input_names(self) -> list[str]:
        """The names of the inputs, in the order of the file."""
        return [detail["name"] for detail in self.interpreter.get_input_details()]

    def operators(self) -> tuple[Operator, ...]:
        """The operators of the file, except conversions between integers and floats."""
        found = enumerate(operators(read_model(self.content)))
        kept = [(place, op) for place, op in found if op.name not in ("QUANTIZE", "DEQUANTIZE")]
        return tuple(Operator(f"{op.name} {place}", op.name, not op.is_float) for place, op in kept)


class LiteRtEngine(Engine):
    """LiteRT with its default kernels."""

    name = "litert"

    def __init__(self, threads: int = 1) -> None:
        super().__init__(threads)
        with needed("ai-edge-litert", self.name, INSTALL):
            from ai_edge_litert import interpreter
        self.package: Any = interpreter

    @property
    def version(self) -> str:
        """The version of ai-edge-litert."""
        return version("ai-edge-litert")

    def compile(self, content: bytes) -> CompiledFile:
        """Load a ``.tflite`` file; ``ExportError`` if LiteRT cannot."""
        try:
            made = self.package.Interpreter(model_content=content, num_threads=self.threads)
            made.allocate_tensors()
        except (RuntimeError, ValueError) as cause:
            raise ExportError(f"LiteRT cannot load the file: {cause}") from cause
        return LiteRtFile(made, content)
