"""OpenVINO: FakeQuantize where the CPU and GPU plugins have integer kernels, as NNCF's description of both says."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from fxqat.custom_quantizer.backends.schemes import INT8_WEIGHT, SCALE_BITS_OF_SUMS, UINT8_ACTIVATION_EVEN
from fxqat.custom_quantizer.spec import BackendSpec, LegalSchemes, Rule
from fxqat.scheme import TensorQConfig

LEGAL_WEIGHTS = LegalSchemes(frozenset({7, 8}), symmetric=True, signed=True)

READS = Rule(
    output=False,
    reason="in NNCF's list of ops with quantized inputs",
    why_float_output="the plugin decides where its output is rounded",
)
RESIDUAL = replace(
    READS,
    inputs="residual",
    scale_bits=SCALE_BITS_OF_SUMS,
    reason=f"{READS.reason}; the output of a layer that it is fused into is added before it is rounded",
)
PRODUCTS = replace(
    READS, symmetric=True, reason=f"{READS.reason}; with another zero point than 0 the plugin computes it in float"
)
RESIZES = Rule(output=False, share="all", reason="stays within the range of its input and keeps its scale")
JOINS = Rule(share="all", keeps_relu_apart=True, reason="unified scales: copies integers")
FOLLOWS = Rule(inputs="none", output=False, share="all", reason="moves values: runs in the type of its input")

OPENVINO = BackendSpec(
    name="OpenVINO",
    weight=TensorQConfig(INT8_WEIGHT, observer="MinMax", fake_quantize="Learnable"),
    activation=TensorQConfig(UINT8_ACTIVATION_EVEN, observer="EMAMinMax", fake_quantize="Learnable"),
    rules=MappingProxyType(
        dict.fromkeys(("weighted", "pool"), READS)
        | dict.fromkeys(("sub", "div", "maximum", "minimum", "remainder"), READS)
        | dict.fromkeys(("pow", "square", "sum", "normalize"), READS)
        | dict.fromkeys(("group_norm", "instance_norm"), READS)
        | {
            "matmul": PRODUCTS,
            "add": RESIDUAL,
            "mul": replace(READS, scale_bits=SCALE_BITS_OF_SUMS),
            "interpolate": RESIZES,
            "cat": JOINS,
            "stack": JOINS,
            "pass_through": FOLLOWS,
            "identity": FOLLOWS,
        }
    ),
    left_float=MappingProxyType(
        dict.fromkeys(("binary", "concat", "math", "norm", "resize"), "not in NNCF's list of ops with quantized inputs")
        | {
            "activation": "not in NNCF's list of ops with quantized inputs",
            "scaled_dot_product_attention": "NNCF wants symmetric inputs for it; those of this table are asymmetric",
            "layer_norm": "as NNCF in transformers: rounding what it reads saves no time and costs accuracy",
            "recurrent": "in NNCF's list, but what the plugin rounds inside is not documented",
            "lookup": "a lookup multiplies nothing: integers would only make its table smaller",
        }
    ),
    legal_weights=(LEGAL_WEIGHTS,),
    legal_activations=(
        LegalSchemes(frozenset({8}), even_zero_point=True),
        LegalSchemes(frozenset({8}), symmetric=True, signed=True),
    ),
    runtime="openvino",
    source="NNCF, src/nncf/common/hardware/setups/cpu.py and gpu.py (ops, schemes, unified scales), qspaces.py (narrow "
    "symmetric weights per channel, activations per tensor); measured in OpenVINO 2026.4: convolutions of other widths "
    "and of asymmetric weights run in float, the zero point is added before the rounding, what a layer gives to a "
    "residual addition is not rounded, products of activations run on integers with zero points 0, and a LayerNorm is "
    "no faster on integers, unlike a GroupNorm",
)

OPENVINO_AVX2 = replace(
    OPENVINO,
    name="OpenVINO_AVX2",
    weight=OPENVINO.weight.with_scheme(bit_width=7, narrow_range=False),
    legal_weights=(replace(LEGAL_WEIGHTS, bit_widths=frozenset({7})),),
    source=f"{OPENVINO.source}; OpenVINO documentation, 'Saturation (overflow) issue workaround': weights of 7 bits on "
    "CPUs without VNNI",
)
"""Half range: two products of uint8 and -64 to 63 fit into the int16 sum of ``pmaddubsw``, those of int8 do not."""
