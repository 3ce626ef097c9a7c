"""The runtimes that a file can be written for: which passes rewrite it.

Every pass changes no value that the model computes; its docstring has the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import onnx_ir as ir

from fxqat.errors import ExportError
from fxqat.onnx.global_averages import GlobalAverages
from fxqat.onnx.integer_clamps import ClampIntegers
from fxqat.onnx.keep_integers import KeepIntegers
from fxqat.onnx.unsigned_activations import UnsignedActivations

RUNTIMES: Mapping[str, tuple[Callable[[], ir.passes.InPlacePass], ...]] = MappingProxyType(
    {
        # its integer kernels take uint8 activations, and convolutions with a zero point at the end of a ReLU's range;
        # it has none for ReduceMean
        "onnxruntime": (UnsignedActivations, ClampIntegers, GlobalAverages),
        # it computes a signed Concat before a convolution wrongly, drops the rounding of a branch, crashes at two
        # roundings behind a Concat, and rejects sums with quantized constants (seen in 2026.4),
        # and multiplies two activations on integers only if they have zero points 0
        "openvino": (partial(UnsignedActivations, keep_products=True), KeepIntegers),
    }
)


def passes_for(runtime: str) -> list[ir.passes.InPlacePass]:
    """The passes that rewrite a file for a runtime; none for a runtime, or a chip, that needs no rewriting."""
    return [each() for each in RUNTIMES.get(runtime, ())]


def check_runtime(runtime: object) -> None:
    """Refuse what is neither None nor a runtime of the table.

    Raises:
        ExportError: the runtime is unknown.
    """
    if runtime is not None and (not isinstance(runtime, str) or runtime not in RUNTIMES):
        raise ExportError(f"runtime must be None or one of {', '.join(map(repr, RUNTIMES))}, got {runtime!r}")
