"""ONNXRuntime: what the int8 kernels of ONNX Runtime's CPU provider take."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from fxqat.custom_quantizer.backends.schemes import INT8_WEIGHT, SCALE_BITS_OF_SUMS, UINT8_ACTIVATION_EVEN
from fxqat.custom_quantizer.spec import BackendSpec, LegalSchemes, Rule
from fxqat.scheme import TensorQConfig

INT8_WEIGHT_CLOSE_RANGE = replace(INT8_WEIGHT, scale_bits=6)
"""A range at most 1/32 wider than the weights: on uint8 activations it kept MobileNetV2's accuracy, 1/16 did not."""

LEAST_WORK = 64
"""Of 0, 16, 32, 64 and 128, 32 and 64 gave the fastest MobileNetV3, small and large, on AVX512 VNNI.

Against 128, MobileNetV3 large took .79 of the CPU time with 64, ConvNeXt tiny .93, YOLOv5n .96. With 0, MobileNetV3
small took 1.36 times as long as with 64. ``docs/evidence/ort_latency.rst`` compares with other quantizers.
"""

UP_TO_8_BITS = frozenset(range(2, 9))

CONV = Rule(reason="QLinearConv: integers in and out")
GEMM = Rule(
    output=False, reason="QGemm or MatMulIntegerToFloat: integers in", why_float_output="the kernel gives floats"
)
ADD = Rule(scale_bits=SCALE_BITS_OF_SUMS, reason="QLinearAdd: integers in and out")
MUL = Rule(scale_bits=SCALE_BITS_OF_SUMS, reason="QLinearMul: integers in and out")
SIGMOID = Rule(reason="QLinearSigmoid: a table of 256 integers")
AVERAGE = Rule(
    scale_bits=SCALE_BITS_OF_SUMS, reason="QLinearGlobalAveragePool or QLinearAveragePool: integers in and out"
)
CONCAT = Rule(
    share="all",
    keeps_relu_apart=True,
    reason="QLinearConcat: copies integers, or converts those that have a scale of their own",
)
MOVES = Rule(inputs="none", share="all", reason="moves values: copies the integers of its input")

ONNXRUNTIME = BackendSpec(
    name="ONNXRuntime",
    weight=TensorQConfig(INT8_WEIGHT_CLOSE_RANGE, observer="MinMax", fake_quantize="Learnable"),
    activation=TensorQConfig(UINT8_ACTIVATION_EVEN, observer="EMAMinMax", fake_quantize="Learnable"),
    rules=MappingProxyType(
        {
            "conv1d": CONV,
            "conv2d": CONV,
            "conv3d": CONV,
            "linear": GEMM,
            "matmul": GEMM,
            "add": ADD,
            "mul": MUL,
            "sigmoid": SIGMOID,
            "adaptive_avg_pool2d": AVERAGE,
            "avg_pool2d": AVERAGE,
            "concat": CONCAT,
            "where": Rule(share="all", keeps_relu_apart=True, reason="QLinearWhere: integers in and out"),
            "pass_through": MOVES,
            "identity": MOVES,
        }
    ),
    split=frozenset({"silu"}),
    left_float=MappingProxyType(
        dict.fromkeys(
            ("weighted", "binary", "pool", "activation", "norm", "math", "resize", "recurrent"),
            "ONNX Runtime has no int8 kernel for it that is faster than float, Q/DQ included",
        )
        | {"silu": "split into sigmoid and mul, which are integer operators"}
        | {"lookup": "a lookup multiplies nothing: integers would only make its table smaller"}
    ),
    legal_weights=(LegalSchemes(UP_TO_8_BITS, blocks=True),),
    legal_activations=(LegalSchemes(frozenset({8}), even_zero_point=True),),
    dynamic=frozenset({"linear", "conv1d", "conv2d", "conv3d", "lstm"}),
    least_work=LEAST_WORK,
    runtime="onnxruntime",
    source="onnxruntime/core/optimizer/qdq_transformer/selectors_actions/qdq_selector_action_transformer.cc and "
    "qdq_selectors.cc (8-bit activations; weights of fewer bits run in float); core/providers/cpu/quantization/"
    "qlinearconv.cc (no zero points per channel) and core/mlas/lib/qladd.cpp (adds the zero "
    "point before it rounds)",
)

ONNXRUNTIME_AVX2 = replace(
    ONNXRUNTIME,
    name="ONNXRuntime_AVX2",
    weight=ONNXRUNTIME.weight.with_scheme(bit_width=7),
    legal_weights=(LegalSchemes(UP_TO_8_BITS - {8}, blocks=True),),
    source=f"{ONNXRUNTIME.source}; ONNX Runtime documentation, 'Quantize ONNX models', reduce_range: weights of 7 bits "
    "on CPUs without VNNI; microsoft/onnxruntime#14642",
)
"""Reduced range: two products of uint8 and -63 to 63 fit into the int16 sum of ``pmaddubsw``, those of int8 do not."""
