"""LiteRT: the int8 kernels of LiteRT (TensorFlow Lite), as its 8-bit quantization specification says."""

from __future__ import annotations

from types import MappingProxyType

from fxqat.custom_quantizer.spec import BackendSpec, LegalSchemes, Rule
from fxqat.scheme import QuantizeScheme, TensorQConfig

WEIGHT = QuantizeScheme(bit_width=8, signed=True, symmetric=True, per_channel=True, narrow_range=True)
ACTIVATION = QuantizeScheme(bit_width=8, signed=True, symmetric=False)
"""Float32 scales: LiteRT adds integers, so sums are exact in any case. With scales of few bits many results would lie
on a rounding boundary, where LiteRT rounds up and torch to even."""

CONV = Rule(reason="CONV_2D or DEPTHWISE_CONV_2D: integers in and out")
TRANSPOSE_CONV = Rule(reason="TRANSPOSE_CONV on quantized values: LiteRT's converter writes it in float")
COMPUTES = Rule(reason="LiteRT has an int8 kernel for it")
NORMALIZE = Rule(reason="L2_NORMALIZATION along the last dimension; LiteRT's converter writes others in float")
ONE_SCALE = Rule(share="all", reason="LiteRT has an int8 kernel for it, whose inputs and output have one scale")
RELU = Rule(
    share="all",
    keeps_fixed_ranges_apart=True,
    reason="LiteRT has an int8 kernel for it, whose input and output have one scale here",
)
"""LiteRT's converter fuses a ReLU into the operator before it, and computes that twice if other ops read its value.
With one scale the results are the integers of that value that are not negative. With two scales the fused operator
rounds once, and the model twice. Nothing is fused into sigmoid, tanh and softmax, whose scales are fixed. Narrower
limits (relu6, hardtanh, clamp) keep their own scale: in the scale of a wide value they would have few steps."""
JOINS = Rule(share="all", reason="copies integers: operands and result have one scale")
MOVES = Rule(share="all", reason="moves values: keeps the scale of its input")

LITERT = BackendSpec(
    name="LiteRT",
    weight=TensorQConfig(WEIGHT, observer="MinMax", fake_quantize="Learnable"),
    activation=TensorQConfig(ACTIVATION, observer="EMAMinMax", fake_quantize="Learnable"),
    rules=MappingProxyType(
        dict.fromkeys(("conv1d", "conv2d"), CONV)
        | dict.fromkeys(("conv_transpose1d", "conv_transpose2d"), TRANSPOSE_CONV)
        | dict.fromkeys(("linear", "matmul", "mean"), COMPUTES)
        | dict.fromkeys(("add", "sub", "mul", "sigmoid", "tanh", "softmax", "log_softmax"), COMPUTES)
        | {"normalize": NORMALIZE}
        | {"relu": RELU}
        | dict.fromkeys(("relu6", "hardswish", "gelu"), COMPUTES)
        | dict.fromkeys(
            (
                "adaptive_avg_pool1d",
                "adaptive_avg_pool2d",
                "avg_pool1d",
                "avg_pool2d",
                "maximum",
                "minimum",
                "interpolate",
                "masked_fill",
            ),
            ONE_SCALE,
        )
        | {"cat": JOINS, "stack": JOINS, "where": JOINS, "pass_through": MOVES, "identity": MOVES}
    ),
    split=frozenset({"silu", "leaky_relu", "adaptive_avg_pool2d"}),
    fixed_ranges=MappingProxyType(
        {
            "sigmoid": (0.0, 255 / 256),  # scale 1/256, zero point -128
            "softmax": (0.0, 255 / 256),
            "tanh": (-1.0, 127 / 128),  # 1/128, 0
            "normalize": (-1.0, 127 / 128),  # L2_NORMALIZATION: 1/128, 0
            "log_softmax": (-255 / 16, 0.0),  # 1/16, 127
        }
    ),
    left_float=MappingProxyType(
        dict.fromkeys(
            ("weighted", "binary", "concat", "pool", "activation", "norm", "math", "resize", "recurrent"),
            "LiteRT's 8-bit specification has no such operator",
        )
        | {"silu": "split into sigmoid and mul, which are integer operators"}
        | {"leaky_relu": "split into mul and maximum; LEAKY_RELU of LiteRT 2.3 is off by one in up to 13 % of values"}
        | {"sum": "the reference kernel of LiteRT 2.3 for SUM on integers gives wrong values"}
        | {"lookup": "a lookup multiplies nothing: integers would only make its table smaller"}
    ),
    legal_weights=(LegalSchemes(frozenset({8}), symmetric=True, signed=True),),
    legal_activations=(LegalSchemes(frozenset({8}), signed=True),),
    source="LiteRT documentation, 'LiteRT 8-bit quantization specification' (schemes, shared scales, fixed ranges); "
    "google-ai-edge/ai-edge-quantizer, default_policy.py, static_wi8_ai8 (BATCH_MATMUL, GELU, "
    "HARD_SWISH, SELECT_V2, FULLY_CONNECTED per channel)",
)
