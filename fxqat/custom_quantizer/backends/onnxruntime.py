"""ONNXRuntime: what the int8 kernels of ONNX Runtime's CPU provider take."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from fxqat.custom_quantizer.backends.schemes import INT8_WEIGHT, UINT8_ACTIVATION
from fxqat.custom_quantizer.spec import BackendSpec, Rule
from fxqat.scheme import TensorQConfig

INT8_WEIGHT_CLOSE_RANGE = replace(INT8_WEIGHT, scale_bits=6)
"""A range at most 1/32 wider than the weights: on uint8 activations it kept MobileNetV2's accuracy, 1/16 did not."""

CONV = Rule(reason="QLinearConv: integers in and out")
GEMM = Rule(output=False, reason="QGemm / MatMulIntegerToFloat: integers in, the output needs no rounding")
ADD = Rule(reason="QLinearAdd: integers in and out")
AVERAGE = Rule(reason="QLinearGlobalAveragePool / QLinearAveragePool: integers in and out")
CONCAT = Rule(share="all", reason="QLinearConcat on one scale copies integers")
MOVES = Rule(inputs="none", share="all", reason="runs on the integers of its input, which it does not change")

ONNXRUNTIME = BackendSpec(
    name="ONNXRuntime",
    weight=TensorQConfig(INT8_WEIGHT_CLOSE_RANGE, observer="MinMax", fake_quantize="Learnable"),
    activation=TensorQConfig(UINT8_ACTIVATION, observer="EMAMinMax", fake_quantize="Learnable"),
    rules=MappingProxyType(
        {
            "conv1d": CONV,
            "conv2d": CONV,
            "conv3d": CONV,
            "linear": GEMM,
            "matmul": GEMM,
            "add": ADD,
            "adaptive_avg_pool2d": AVERAGE,
            "avg_pool2d": AVERAGE,
            "concat": CONCAT,
            "where": Rule(share="all", reason="QLinearWhere: integers in and out"),
            "pass_through": MOVES,
            "identity": MOVES,
        }
    ),
    source="onnxruntime/core/optimizer/qdq_transformer/selectors_actions/qdq_selector_action_transformer.cc",
)
