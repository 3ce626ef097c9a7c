"""ArmCPU: the int8 kernels of Paddle-Lite on ARM processors."""

from __future__ import annotations

from types import MappingProxyType

from fxqat.custom_quantizer.backends.schemes import INT8_ACTIVATION, INT8_WEIGHT, ONLY_INT8
from fxqat.custom_quantizer.spec import BackendSpec, Rule
from fxqat.scheme import TensorQConfig

READS = Rule(
    output=False,
    reason="in the platform's list: the int8 kernel rounds its input",
    why_float_output="the kernel gives floats",
)
FOLLOWS = Rule(inputs="none", output=False, share="all", reason="moves values: keeps the rounding of its input")
NOT_LISTED = "not in the platform's list of quantized ops"

ARM_CPU = BackendSpec(
    name="ArmCPU",
    weight=TensorQConfig(INT8_WEIGHT, observer="MinMax", fake_quantize="Learnable"),
    activation=TensorQConfig(INT8_ACTIVATION, observer="EMAMinMax", fake_quantize="Learnable"),
    rules=MappingProxyType({"conv2d": READS, "linear": READS, "pass_through": FOLLOWS, "identity": FOLLOWS}),
    left_float=MappingProxyType(
        {
            "conv1d": "of convolutions the platform's list has only those over two dimensions",
            "conv3d": "of convolutions the platform's list has only those over two dimensions",
        }
        | dict.fromkeys(
            ("weighted", "matmul", "binary", "concat", "pool", "activation", "norm", "math", "resize")
            + ("lookup", "recurrent"),
            NOT_LISTED,
        )
    ),
    legal_weights=ONLY_INT8,
    legal_activations=ONLY_INT8,
    source="PaddleSlim's quantization FAQ, table of platforms, row ARM (Paddle-Lite): weights channel_wise_abs_max or "
    "abs_max, activations moving_average_abs_max, ops conv2d, depthwise_conv2d, mul",
)
