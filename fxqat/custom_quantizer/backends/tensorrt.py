"""TensorRT: explicit quantization, Q/DQ only where an int8 kernel reads its inputs."""

from __future__ import annotations

from types import MappingProxyType

from fxqat.custom_quantizer.backends.schemes import INT8_ACTIVATION, INT8_WEIGHT
from fxqat.custom_quantizer.spec import BackendSpec, Rule
from fxqat.scheme import TensorQConfig

READS = Rule(output=False, reason="an int8 kernel reads its inputs; TensorRT places the output's rounding itself")
RESIDUAL = Rule(
    inputs="residual", output=False, reason="only the shortcut is quantized; the other branch fuses into the layer"
)
FOLLOWS = Rule(inputs="none", output=False, share="all", reason="runs in the type of its input")

TENSORRT = BackendSpec(
    name="TensorRT",
    weight=TensorQConfig(INT8_WEIGHT, observer="MinMax", fake_quantize="Learnable"),
    activation=TensorQConfig(INT8_ACTIVATION, observer="EMAMinMax", fake_quantize="Learnable"),
    rules=MappingProxyType(
        {
            "weighted": READS,
            "matmul": READS,
            "pool": READS,
            "max_pool1d": Rule(output=False, share="all", reason="int8 pooling keeps the scale of its input"),
            "max_pool2d": Rule(output=False, share="all", reason="int8 pooling keeps the scale of its input"),
            "max_pool3d": Rule(output=False, share="all", reason="int8 pooling keeps the scale of its input"),
            "add": RESIDUAL,
            "pass_through": FOLLOWS,
            "identity": FOLLOWS,
        }
    ),
    left_float=MappingProxyType(
        dict.fromkeys(
            ("binary", "concat", "activation", "norm", "math", "resize"),
            "TensorRT fuses it or chooses its type; Q/DQ around it would forbid both",
        )
        | {"lookup": "a table that is looked up is not multiplied: only its size would shrink"}
    ),
    source="NVIDIA TensorRT documentation, 'Working with quantized types', Q/DQ placement recommendations",
)
