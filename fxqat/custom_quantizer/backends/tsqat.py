"""TSQAT, the default: an int8 accelerator that runs the whole op table in integers."""

from __future__ import annotations

from types import MappingProxyType

from fxqat.custom_quantizer.backends.schemes import INT8_ACTIVATION, INT8_WEIGHT
from fxqat.custom_quantizer.spec import BackendSpec, Rule
from fxqat.scheme import TensorQConfig

COMPUTES = Rule(reason="in the op table: inputs and output are integers")
MOVES = Rule(share="all", reason="moves values without changing them: output has the scale of its input")
JOINS = Rule(share="all", reason="operands and result have one scale, so joining them copies integers")

WHOLE_OP_TABLE = MappingProxyType(
    {
        "weighted": COMPUTES,
        "matmul": COMPUTES,
        "binary": COMPUTES,
        "pool": COMPUTES,
        "activation": COMPUTES,
        "norm": COMPUTES,
        "math": COMPUTES,
        "resize": COMPUTES,
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
    left_float=MappingProxyType({"lookup": "a table that is looked up is not multiplied: only its size would shrink"}),
    source="the seed's usage guide: op table of 62 rows, backend note 4",
)
