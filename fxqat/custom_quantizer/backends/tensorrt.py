"""TensorRT: explicit quantization, Q/DQ only where an int8 kernel reads its inputs."""

from __future__ import annotations

from types import MappingProxyType

from fxqat.custom_quantizer.backends.schemes import INT8_ACTIVATION, INT8_WEIGHT, ONLY_INT8
from fxqat.custom_quantizer.spec import BackendSpec, Rule
from fxqat.scheme import TensorQConfig

OUTPUT = "TensorRT decides where its output is rounded"
READS = Rule(output=False, reason="an int8 kernel reads its inputs", why_float_output=OUTPUT)
RESIDUAL = Rule(
    inputs="residual",
    output=False,
    reason="reads its operands as int8, except the output of a layer that it is fused into",
    why_float_output=OUTPUT,
)
FOLLOWS = Rule(inputs="none", output=False, share="all", reason="moves values: runs in the type of its input")
POOL = Rule(output=False, share="all", reason="int8 pooling keeps the scale of its input", why_float_output=OUTPUT)

TENSORRT = BackendSpec(
    name="TensorRT",
    weight=TensorQConfig(INT8_WEIGHT, observer="MinMax", fake_quantize="Learnable"),
    activation=TensorQConfig(INT8_ACTIVATION, observer="EMAMinMax", fake_quantize="Learnable"),
    rules=MappingProxyType(
        {
            "weighted": READS,
            "matmul": READS,
            "pool": READS,
            "max_pool1d": POOL,
            "max_pool2d": POOL,
            "max_pool3d": POOL,
            "add": RESIDUAL,
            "pass_through": FOLLOWS,
            "identity": FOLLOWS,
        }
    ),
    left_float=MappingProxyType(
        dict.fromkeys(
            ("binary", "concat", "activation", "norm", "math", "resize", "recurrent"),
            "TensorRT fuses it or chooses its precision; Q/DQ around it would prevent both",
        )
        | {"lookup": "a lookup multiplies nothing: integers would only make its table smaller"}
    ),
    legal_weights=ONLY_INT8,
    legal_activations=ONLY_INT8,
    source="NVIDIA TensorRT documentation, 'Working with quantized types': Q/DQ placement recommendations; symmetric "
    "int8, weights per tensor or per channel (int4 only for weights in blocks)",
)
