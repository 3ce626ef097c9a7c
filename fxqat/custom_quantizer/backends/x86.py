"""X86: the int8 kernels of MKL-DNN in Paddle on x86 processors; ArmCPU's table plus products of activations."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from fxqat.custom_quantizer.backends.arm_cpu import ARM_CPU, READS

X86 = replace(
    ARM_CPU,
    name="X86",
    rules=MappingProxyType({**ARM_CPU.rules, "matmul": READS}),
    left_float=MappingProxyType({key: why for key, why in ARM_CPU.left_float.items() if key != "matmul"}),
    source="PaddleSlim's quantization FAQ, table of platforms, row x86 (MKL-DNN): activations moving_average_abs_max, "
    "ops conv2d, depthwise_conv2d, mul, matmul; Paddle, quantization/quant2_int8_mkldnn_pass.py, "
    "_compute_weight_scales: a scale for each output channel; oneDNN documentation, 'Quantization': scales per channel",
)
