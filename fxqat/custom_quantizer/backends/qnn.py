"""QNN: the Hexagon tensor processor of Qualcomm's AI Engine Direct, which runs whole graphs in integers."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from fxqat.custom_quantizer.backends.schemes import (
    INT8_WEIGHT,
    INT8_WEIGHT_PER_TENSOR,
    UINT8_ACTIVATION,
    UINT16_ACTIVATION,
)
from fxqat.custom_quantizer.spec import BackendSpec, LegalSchemes, Rule
from fxqat.scheme import TensorQConfig

COMPUTES = Rule(reason="QNN computes it in integers")
RESIZES = Rule(
    share="all", reason="QNN computes it in integers; stays within the range of its input and keeps its encoding"
)
RECURRENT = Rule(reason="one operator of QNN with integer weights, input, states and output")
JOINS = Rule(
    share="all",
    keeps_relu_apart=True,
    reason="copies integers, or converts those that have an encoding of their own",
)
MOVES = Rule(share="all", reason="moves values: keeps the encoding of its input")

BINARY = ("add", "sub", "mul", "div", "maximum", "minimum")
ACTIVATIONS = ("relu", "relu6", "clamp", "hardtanh", "prelu", "leaky_relu", "elu", "gelu", "hardswish", "hardsigmoid")
NORMS = ("layer_norm", "group_norm", "instance_norm", "rms_norm", "local_response_norm", "normalize")
BATCH_NORMS = ("batch_norm", "batch_norm1d", "batch_norm2d", "batch_norm3d")
MATHS = ("abs", "neg", "sign", "floor", "ceil", "round", "exp", "log", "sqrt", "rsqrt", "reciprocal", "pow", "square")
MORE_MATHS = ("sin", "cos", "asin", "atan", "sum", "prod", "cumsum")

QNN = BackendSpec(
    name="QNN",
    weight=TensorQConfig(INT8_WEIGHT, observer="MinMax", fake_quantize="Learnable"),
    activation=TensorQConfig(UINT8_ACTIVATION, observer="EMAMinMax", fake_quantize="Learnable"),
    rules=MappingProxyType(
        dict.fromkeys(("weighted", "matmul", "pool"), COMPUTES)
        | dict.fromkeys((*BINARY, *NORMS, *BATCH_NORMS, *MATHS, *MORE_MATHS, "grid_sample"), COMPUTES)
        | dict.fromkeys((*ACTIVATIONS, "sigmoid", "tanh", "softmax", "log_softmax"), COMPUTES)
        | dict.fromkeys(("lstm", "gru"), RECURRENT)
        | {"interpolate": RESIZES, "concat": JOINS, "pass_through": MOVES, "identity": MOVES}
    ),
    fixed_ranges=MappingProxyType({"sigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0)}),
    weights=MappingProxyType(
        dict.fromkeys(
            ("linear", "lstm", "gru"),
            TensorQConfig(INT8_WEIGHT_PER_TENSOR, observer="MinMax", fake_quantize="Learnable"),
        )
    ),
    left_float=MappingProxyType(
        dict.fromkeys(
            ("binary", "activation", "norm", "math", "resize", "recurrent"),
            "not among the ops that QNN computes in integers",
        )
        | {"lookup": "a lookup multiplies nothing: integers would only make its table smaller"}
    ),
    legal_weights=(LegalSchemes(frozenset({4, 8}), symmetric=True, signed=True),),
    legal_activations=(LegalSchemes(frozenset({8, 16}), signed=False),),
    source="ONNX Runtime documentation, 'QNN Execution Provider', supported operators; onnxruntime/quantization/"
    "execution_providers/qnn/quant_config.py (MatMul per tensor; sigmoid and tanh on fixed scales); "
    "onnxruntime-qnn, LSTM and GRU in QDQ form; ExecuTorch, "
    "backends/qualcomm/builders (ops) and quantizer/qconfig.py (int4 or int8 weights without the smallest integer, "
    "uint8 or uint16 activations)",
)

QNN_A16 = replace(
    QNN, name="QNN_A16", activation=TensorQConfig(UINT16_ACTIVATION, observer="EMAMinMax", fake_quantize="Learnable")
)
"""Activations of 16 bits on weights of 8. As QNN requires, sigmoid is on the scale 1/65536, tanh on 1/32768."""
