"""The runtimes that a file can be written for: which passes rewrite it.

Every pass changes no value that the model computes; its docstring has the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import onnx_ir as ir

from fxqat.errors import ExportError
from fxqat.onnx.foldable_weights import FoldableWeights
from fxqat.onnx.global_averages import GlobalAverages
from fxqat.onnx.integer_clamps import ClampIntegers
from fxqat.onnx.keep_integers import KeepIntegers
from fxqat.onnx.unsigned_activations import UnsignedActivations
from fxqat.onnx.unsigned_weights import UnsignedWeights


class Rewriting(NamedTuple):
    """The passes that rewrite a file for a runtime.

    Args:
        types: those that choose the types of integers, before operators on integers are chosen.
        operators: those that choose operators.
    """

    types: tuple[ir.passes.InPlacePass, ...] = ()
    operators: tuple[ir.passes.InPlacePass, ...] = ()


def _onnxruntime(in_float: Collection[str], *, unsigned_weights: bool = False) -> Rewriting:
    # its integer kernels take uint8 activations, and convolutions with a zero point at the end of a ReLU's range;
    # it has none for ReduceMean. On x86 without VNNI, its sums of products of uint8 and int8 saturate
    weights = (UnsignedWeights(),) if unsigned_weights else ()
    return Rewriting((UnsignedActivations(), *weights), (ClampIntegers(), GlobalAverages(), FoldableWeights(in_float)))


def _openvino(in_float: Collection[str]) -> Rewriting:
    # it computes a signed Concat before a convolution wrongly, drops the rounding of a branch, crashes at two roundings
    # behind a Concat, and rejects sums with quantized constants (seen in 2026.4), and multiplies two activations on
    # integers only if they have zero points 0
    return Rewriting((UnsignedActivations(keep_products=True),), (KeepIntegers(),))


RUNTIMES: Mapping[str, Callable[[Collection[str]], Rewriting]] = MappingProxyType(
    {
        "onnxruntime": _onnxruntime,
        "onnxruntime_avx2": partial(_onnxruntime, unsigned_weights=True),
        "openvino": _openvino,
    }
)


def rewriting_for(runtime: str | None, in_float: Collection[str] = ()) -> Rewriting:
    """The passes for a runtime; none for None, or for a chip that needs no rewriting.

    Args:
        runtime: the name of the runtime.
        in_float: paths, in the lowered graph, of the weights of layers in float.
    """
    make = RUNTIMES.get(runtime or "")
    return Rewriting() if make is None else make(in_float)


def check_runtime(runtime: object) -> None:
    """Refuse what is neither None nor a runtime of the table.

    Raises:
        ExportError: the runtime is unknown.
    """
    if runtime is not None and (not isinstance(runtime, str) or runtime not in RUNTIMES):
        raise ExportError(f"runtime must be None or one of {', '.join(map(repr, RUNTIMES))}, got {runtime!r}")
