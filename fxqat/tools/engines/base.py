"""What every engine can do: compile a file, run it, and say which operators ran on integers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import onnx

from fxqat.errors import ExportError


@dataclass(frozen=True)
class Operator:
    """One operator of the compiled file, as the engine runs it.

    Args:
        name: the engine's name for it.
        kind: the engine's kind of operator, such as ``QLinearConv`` or ``Convolution``.
        integers: whether it reads integers.
        nodes: names of the file's nodes that it computes, as far as the engine says.
    """

    name: str
    kind: str
    integers: bool
    nodes: tuple[str, ...] = ()


class CompiledFile(ABC):
    """A file that an engine has loaded."""

    @abstractmethod
    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs by name.

        Args:
            inputs: the inputs of the file, by name.

        Raises:
            ExportError: the engine cannot run the file.
        """

    @abstractmethod
    def input_names(self) -> list[str]:
        """The names of the inputs, in the order of the file."""

    @abstractmethod
    def operators(self) -> tuple[Operator, ...]:
        """The operators that it runs; constants, inputs and outputs are left out."""


class Engine(ABC):
    """Compiles files.

    Args:
        threads: number of CPU threads.
    """

    name: str
    """Its name, as users write it."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads

    @property
    @abstractmethod
    def version(self) -> str:
        """The version of the engine."""

    @abstractmethod
    def compile(self, content: bytes) -> CompiledFile:
        """Compile the content of a file.

        Args:
            content: an ONNX file; for LiteRT a ``.tflite`` file.

        Raises:
            ExportError: the engine cannot load it.
        """


@contextmanager
def needed(package: str, engine: str, install: str) -> Iterator[None]:
    """Turn the error of a missing package, imported in the block, into one with the command that installs it.

    Raises:
        ExportError: the package is not installed.
    """
    try:
        yield
    except ImportError as cause:
        raise ExportError(f"the engine {engine} needs the package {package}: {install}") from cause


def node_name(node: onnx.NodeProto) -> str:
    """The name of a node of the file, or of its first output."""
    return str(node.name or node.output[0])


def known_names(content: bytes) -> dict[str, str]:
    """The name of the node that each name of the file stands for: its own, or that of a tensor that it computes."""
    nodes = onnx.load_model_from_string(content).graph.node
    return {name: node_name(node) for node in nodes for name in (*node.output, node.name) if name}


def nodes_in(names: Iterable[str], known: Mapping[str, str], separator: str) -> tuple[str, ...]:
    """The nodes of the file that an engine names.

    Args:
        names: what the engine says.
        known: see :func:`known_names`.
        separator: what the engine puts behind the name of a node that it rewrites.
    """
    starts = (start for name in names for start in (name, name.partition(separator)[0]))
    return tuple(dict.fromkeys(known[start] for start in starts if start in known))
