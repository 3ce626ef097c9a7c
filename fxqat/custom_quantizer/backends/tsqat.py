"""TSQAT, the default: an int8 accelerator that computes the whole op table in integers."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from fxqat.custom_quantizer.backends.schemes import INT8_ACTIVATION, INT8_WEIGHT, SCALE_BITS_OF_SUMS
from fxqat.custom_quantizer.spec import BackendSpec, Rule
from fxqat.scheme import TensorQConfig

COMPUTES = Rule(reason="in the op table: computed in integers")
SUMS = replace(COMPUTES, scale_bits=SCALE_BITS_OF_SUMS)
RECURRENT = Rule(reason="one operator with integer weights, input, states and output; computed in float inside")
MOVES = Rule(share="all", reason="moves values: keeps the scale of its input")
JOINS = Rule(share="all", reason="copies integers: operands and result have one scale")

LOOKS_UP = Rule(
    inputs="none",
    output=False,
    reason="in the op table: its table is stored as integers",
    why_float_output="no quantized op reads it",
)

WHOLE_OP_TABLE = MappingProxyType(
    {
        "weighted": COMPUTES,
        "lookup": LOOKS_UP,
        "matmul": COMPUTES,
        "add": SUMS,
        "adaptive_avg_pool2d": SUMS,
        "binary": COMPUTES,
        "pool": COMPUTES,
        "activation": COMPUTES,
        "norm": COMPUTES,
        "math": COMPUTES,
        "resize": COMPUTES,
        "lstm": RECURRENT,
        "gru": RECURRENT,
        "rnn": RECURRENT,
        "concat": JOINS,
        "pass_through": MOVES,
        "identity": MOVES,
    }
)

TSQAT = BackendSpec(
    name="TSQAT",
    weight=TensorQConfig(INT8_WEIGHT, observer="MinMax", fake_quantize="Learnable"),
    activation=TensorQConfig(INT8_ACTIVATION, observer="EMAMinMax", fake_quantize="Learnable"),
    rules=WHOLE_OP_TABLE,
    fixed_ranges=MappingProxyType(
        {"sigmoid": (0.0, 1.0), "hardsigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "tanh": (-1.0, 1.0)}
    ),
    left_float=MappingProxyType({"recurrent_cell": "ONNX has operators for whole sequences only"}),
    source="fxqat's reference table: every op of docs/reference/op_table.rst in integers",
)
