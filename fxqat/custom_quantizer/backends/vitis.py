"""Vitis: the DPU of Vitis AI, whose scales are powers of two, one per tensor.

Their thresholds are learned (TQT): the gradient of LSQ is for a scale that moves in small steps. Not simulated are the
DPU's biases of 8 bits, its rounding of halves upwards, and its averages by a multiplication and a shift.
"""

from __future__ import annotations

from types import MappingProxyType

from fxqat.custom_quantizer.backends.schemes import INT8_POWER_OF_TWO
from fxqat.custom_quantizer.spec import BackendSpec, LegalSchemes, Rule
from fxqat.scheme import TensorQConfig

COMPUTES = Rule(reason="runs on the DPU, in integers")
RESIZES = Rule(share="all", reason="runs on the DPU; stays within the range of its input and keeps its scale")
JOINS = Rule(share="all", reason="copies integers: operands and result have one scale")
MOVES = Rule(share="all", reason="moves values: keeps the scale of its input")

LEAST_SQUARES = TensorQConfig(
    INT8_POWER_OF_TWO, observer="MSE", fake_quantize="TQT", observer_args=MappingProxyType({"p": 2.0})
)

LEGAL = (LegalSchemes(frozenset({8}), symmetric=True, signed=True, per_channel=False, scale_bits=1),)

VITIS = BackendSpec(
    name="Vitis",
    weight=LEAST_SQUARES,
    activation=LEAST_SQUARES,
    rules=MappingProxyType(
        dict.fromkeys(("conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d", "linear"), COMPUTES)
        | dict.fromkeys(("add", "mul", "avg_pool2d", "adaptive_avg_pool2d", "mean"), COMPUTES)
        | dict.fromkeys(("relu", "relu6", "leaky_relu", "hardsigmoid", "hardswish"), COMPUTES)
        | {"interpolate": RESIZES, "cat": JOINS, "pass_through": MOVES, "identity": MOVES}
    ),
    fused_activations=frozenset({"relu", "relu6", "leaky_relu"}),
    left_float=MappingProxyType(
        dict.fromkeys(
            ("weighted", "binary", "concat", "pool", "activation", "norm", "math", "resize", "lookup", "recurrent"),
            "not an op of the DPU: runs on the host processor",
        )
        | {"matmul": "the DPU multiplies by constant weights only: runs on the host processor"}
    ),
    legal_weights=LEGAL,
    legal_activations=LEGAL,
    source="AMD PG338 and PG389 (features of the DPU), UG1414 'Operators supported by PyTorch' (fused activations) and "
    "'Quantizing with float scale' (power-of-two, symmetric, per tensor); MQBench documentation, 'Vitis' (-128 to 127)",
)
