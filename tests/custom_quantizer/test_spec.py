"""A backend is a frozen value; the name of an op wins over its family."""

import dataclasses

import pytest

from fxqat.custom_quantizer.spec import BackendSpec, Rule
from fxqat.custom_quantizer.table import BACKENDS, BackendType
from fxqat.quantization import op_table
from fxqat.quantization.op_table import OPS
from fxqat.quantization.ops import op_named
from fxqat.scheme import QuantizeScheme, TensorQConfig

FAMILIES = {value for name, value in vars(op_table).items() if name.isupper() and isinstance(value, str)}
INT8 = TensorQConfig(QuantizeScheme())


def test_the_name_wins_over_the_family():
    own, family = Rule(reason="own"), Rule(reason="family")
    spec = BackendSpec("Mine", INT8, INT8, {"conv2d": own, "weighted": family})
    assert spec.rule("conv2d", "weighted") is own
    assert spec.rule("linear", "weighted") is family
    assert spec.rule("relu", "activation") is None


@pytest.mark.parametrize("backend", BackendType)
def test_a_table_speaks_of_known_ops_and_gives_reasons(backend):
    spec = BACKENDS[backend]
    assert spec.name == backend.value
    assert {key for key in spec.rules if op_named(key) is None} <= FAMILIES
    expected = (6, 4) if backend is BackendType.ONNXRuntime else (5, 4)
    assert (spec.weight.scheme.scale_bits, spec.activation.scheme.scale_bits) == expected
    assert set(spec.fixed_ranges) | spec.fused_activations <= {op.name for op in OPS}
    assert spec.fuses_into <= FAMILIES
    assert all(rule.reason for rule in spec.rules.values())
    assert spec.source


@pytest.mark.parametrize("backend", BackendType)
def test_a_table_cannot_be_changed(backend):
    spec = BACKENDS[backend]
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "other"
    with pytest.raises(TypeError):
        spec.rules["conv2d"] = Rule()
    with pytest.raises(TypeError):
        spec.fixed_ranges["relu"] = (0.0, 1.0)
    assert "relu" not in spec.fixed_ranges


@pytest.mark.parametrize(
    ("backend", "weight", "activation", "learned"),
    [
        (BackendType.TSQAT, "int8 sym per-channel narrow", "int8 sym per-tensor", "Learnable"),
        (BackendType.Experimental, "int8 sym per-channel narrow", "uint8 asym per-tensor", "Learnable"),
        (BackendType.ONNXRuntime, "int8 sym per-channel narrow", "uint8 asym per-tensor", "Learnable"),
        (BackendType.TensorRT, "int8 sym per-channel narrow", "int8 sym per-tensor", "Learnable"),
    ],
)
def test_the_schemes_are_those_of_the_design(backend, weight, activation, learned):
    spec = BACKENDS[backend]
    assert str(spec.weight.scheme) == weight
    assert str(spec.activation.scheme) == activation
    assert (spec.weight.fake_quantize, spec.activation.fake_quantize) == (learned, learned)
    if not spec.activation.scheme.symmetric:
        assert (spec.activation.scheme.quant_min, spec.activation.scheme.quant_max) == (0, 255)
    else:
        assert (spec.activation.scheme.quant_min, spec.activation.scheme.quant_max) == (-128, 127)
