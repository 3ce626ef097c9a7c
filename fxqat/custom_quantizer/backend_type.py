"""The backends by name."""

from __future__ import annotations

import difflib
from enum import Enum

from fxqat.custom_quantizer.backends.arm_cpu import ARM_CPU
from fxqat.custom_quantizer.backends.experimental import EXPERIMENTAL
from fxqat.custom_quantizer.backends.litert import LITERT
from fxqat.custom_quantizer.backends.onnxruntime import ONNXRUNTIME, ONNXRUNTIME_AVX2
from fxqat.custom_quantizer.backends.openvino import OPENVINO, OPENVINO_AVX2
from fxqat.custom_quantizer.backends.qnn import QNN, QNN_A16
from fxqat.custom_quantizer.backends.tensorrt import TENSORRT
from fxqat.custom_quantizer.backends.tsqat import TSQAT
from fxqat.custom_quantizer.backends.vitis import VITIS
from fxqat.custom_quantizer.backends.x86 import X86
from fxqat.custom_quantizer.spec import BackendSpec
from fxqat.errors import ConfigError
from fxqat.ops.table import OPS
from fxqat.quantization.split_ops import SPLITS


class BackendType(Enum):
    """The deployment targets; the value is the name to write in text.

    A name with an underscore is a variant: the target before the underscore with other schemes.
    """

    TSQAT = "TSQAT"
    Experimental = "Experimental"
    ONNXRuntime = "ONNXRuntime"
    TensorRT = "TensorRT"
    OpenVINO = "OpenVINO"
    QNN = "QNN"
    Vitis = "Vitis"
    ArmCPU = "ArmCPU"
    X86 = "X86"
    LiteRT = "LiteRT"
    ONNXRuntime_AVX2 = "ONNXRuntime_AVX2"
    OpenVINO_AVX2 = "OpenVINO_AVX2"
    QNN_A16 = "QNN_A16"


TABLES = (
    *(TSQAT, EXPERIMENTAL, ONNXRUNTIME, TENSORRT, OPENVINO, QNN, VITIS, ARM_CPU, X86, LITERT),
    *(ONNXRUNTIME_AVX2, OPENVINO_AVX2, QNN_A16),
)
BACKENDS: dict[BackendType, BackendSpec] = {BackendType(spec.name): spec for spec in TABLES}


def backend_spec(backend: BackendType | BackendSpec | str) -> BackendSpec:
    """The table of a backend, given as an enum member, its name, or a table.

    Raises:
        ConfigError: no backend has that name, or the table names an operation that does not exist.
    """
    if isinstance(backend, BackendSpec):
        _check_names(backend)
        return backend
    if isinstance(backend, BackendType):
        return BACKENDS[backend]
    names = [member.value for member in BackendType]
    if backend in names:
        return BACKENDS[BackendType(backend)]
    by_lower, given = {name.lower(): name for name in names}, str(backend).lower()
    longer = [name for name in by_lower if name.startswith(given)]
    short = [lower for lower, name in by_lower.items() if "".join(filter(str.isupper, name)).lower() == given]
    close = longer or short or difflib.get_close_matches(given, by_lower, n=1, cutoff=0.4)
    hint = f"; did you mean {by_lower[close[0]]!r}?" if close else "."
    raise ConfigError(f"unknown backend {backend!r}{hint} Known: {', '.join(names)}")


def _check_names(spec: BackendSpec) -> None:
    """Check that a table, which may be a user's, names known operations only; others would have no effect."""
    families = {op.family for op in OPS}
    ops = {op.name for op in OPS} | families
    fields = (
        *((name, ops) for name in ("rules", "left_float", "weights", "fixed_ranges", "fused_activations")),
        ("fuses_into", families),
        ("split", set(SPLITS)),
    )
    for name, known in fields:
        for key in getattr(spec, name):
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.4)
                hint = f"; did you mean {close[0]!r}?" if close else "."
                raise ConfigError(
                    f"backend {spec.name!r}: {key!r} in {name!r} is none of fxqat's names of operations and of their "
                    f"families{hint} The page of the op table has all of them"
                )
