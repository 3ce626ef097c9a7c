"""OpenVINO on the CPU. The first import of its package reports a use to Intel, see ``docs/howto/engines.rst``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from fxqat.errors import ExportError
from fxqat.tools.engines.base import CompiledFile, Engine, Operator, known_names, needed, nodes_in

INSTALL = 'pip install "fxqat[engines]"'
INTEGERS = ("i8", "u8", "i4", "u4", "i16", "u16")
NO_OPERATORS = ("Const", "Input", "Output", "Reorder")
"""Kinds of nodes of the compiled graph that compute nothing; Reorder changes layouts and types."""

SEPARATOR = "/"
"""What OpenVINO puts behind the name of a node that it splits or rewrites."""


class OpenVinoFile(CompiledFile):
    """A compiled model of OpenVINO."""

    def __init__(self, compiled: Any, content: bytes) -> None:
        self.compiled, self.content = compiled, content

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs by name; ``ExportError`` if OpenVINO cannot run the file."""
        with _explained():
            found = self.compiled(dict(inputs), share_outputs=False)
            return {name: found[output] for output in self.compiled.outputs for name in output.names}

    def input_names(self) -> list[str]:
        """The names of the inputs, in the order of the file."""
        return [value.get_any_name() for value in self.compiled.inputs]

    def operators(self) -> tuple[Operator, ...]:
        """The operators of the compiled graph; a fused one names all nodes that it computes."""
        found, known = [], known_names(self.content)
        for node in self.compiled.get_runtime_model().get_ordered_ops():
            about = {key: str(_plain(node.get_rt_info()[key])) for key in ("layerType", "runtimePrecision")}
            if about["layerType"] not in NO_OPERATORS:
                origins = str(_plain(node.get_rt_info()["originalLayersNames"])).split(",")
                nodes = nodes_in(origins, known, SEPARATOR)
                is_integer = about["runtimePrecision"] in INTEGERS
                found.append(Operator(node.get_friendly_name(), about["layerType"], is_integer, nodes))
        return tuple(found)


def _plain(value: Any) -> Any:
    """What OpenVINO wraps into an ``OVAny``, in some versions."""
    return getattr(value, "value", value)


class OpenVinoEngine(Engine):
    """OpenVINO's CPU plugin.

    Args:
        threads: number of CPU threads.
        precision: precision of what stays float: ``"f32"``; ``"bf16"`` or ``"f16"`` where the processor has them; None
            for OpenVINO's choice, which is bf16 where the processor has it.
    """

    name = "openvino"

    def __init__(self, threads: int = 1, precision: str | None = None) -> None:
        super().__init__(threads)
        with needed("openvino", self.name, INSTALL):
            import openvino
        self.package: Any = openvino
        self.settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if precision is not None:
            self.settings["INFERENCE_PRECISION_HINT"] = precision

    @property
    def version(self) -> str:
        """The version of OpenVINO."""
        return str(self.package.__version__)

    def compile(self, content: bytes) -> CompiledFile:
        """Compile an ONNX file for the CPU; ``ExportError`` if OpenVINO cannot."""
        with _explained():
            core = self.package.Core()
            compiled = core.compile_model(core.read_model(content), "CPU", self.settings)
        return OpenVinoFile(compiled, content)


@contextmanager
def _explained() -> Iterator[None]:
    """Turn errors of OpenVINO, which are plain RuntimeErrors, into an :class:`ExportError`."""
    try:
        yield
    except RuntimeError as cause:
        raise ExportError(f"OpenVINO cannot run the file: {cause}") from cause
