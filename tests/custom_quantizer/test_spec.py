"""A backend is a frozen value; the name of an op wins over its family."""

import dataclasses

import pytest

from fxqat.custom_quantizer.backend_type import BACKENDS, BackendType, backend_spec
from fxqat.custom_quantizer.spec import BackendSpec, Rule
from fxqat.errors import ConfigError
from fxqat.fake_quantize.fake_quantizes import not_learned
from fxqat.ops import families
from fxqat.ops.identify import op_named
from fxqat.ops.table import OPS
from fxqat.quantization.split_ops import SPLITS
from fxqat.scheme import QuantizeScheme, TensorQConfig

FAMILIES = {value for name, value in vars(families).items() if name.isupper() and isinstance(value, str)}
INT8 = TensorQConfig(QuantizeScheme())
SCALE_BITS = {"ONNXRuntime": (6, 4), "ONNXRuntime_AVX2": (6, 4), "QNN_A16": (5, 12), "Vitis": (1, 1)}
SCALE_BITS["LiteRT"] = (24, 24)
ALWAYS_FLOAT = (families.CONSTRUCTOR, families.NOT_FLOAT)
RANGES = {
    ("int8", False): (-128, 127),
    ("int8", True): (-127, 127),
    ("int7", False): (-64, 63),
    ("int7", True): (-63, 63),
    ("uint8", False): (0, 255),
    ("uint16", False): (0, 65535),
}


def test_the_name_wins_over_the_family():
    own, family = Rule(reason="own"), Rule(reason="family")
    spec = BackendSpec("Mine", INT8, INT8, {"conv2d": own, "weighted": family})
    assert spec.rule("conv2d", "weighted") is own
    assert spec.rule("linear", "weighted") is family
    assert spec.rule("relu", "activation") is None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rules", {"hard_sigmoid": Rule()}, "'hard_sigmoid' in 'rules' .* did you mean 'hardsigmoid'"),
        ("left_float", {"activations": "no kernel"}, "'activations' in 'left_float' .* did you mean 'activation'"),
        ("fixed_ranges", {"sigmoidal": (0.0, 1.0)}, "did you mean 'sigmoid'"),
        ("fuses_into", frozenset({"conv2d"}), "'conv2d' in 'fuses_into'"),
        ("split", frozenset({"gelu"}), "'gelu' in 'split'"),
    ],
)
def test_a_name_in_a_table_that_does_not_exist_is_refused(field, value, message):
    spec = dataclasses.replace(BACKENDS[BackendType.TSQAT], name="Mine", **{field: value})
    with pytest.raises(ConfigError, match=f"backend 'Mine': .*{message}"):
        backend_spec(spec)
    assert backend_spec(BACKENDS[BackendType.LiteRT]) is BACKENDS[BackendType.LiteRT]


@pytest.mark.parametrize("backend", BackendType)
def test_a_table_speaks_of_known_ops_and_gives_reasons(backend):
    spec = BACKENDS[backend]
    assert spec.name == backend.value
    keys = {*spec.rules, *spec.left_float, *spec.weights}
    assert {key for key in keys if op_named(key) is None} <= FAMILIES
    expected = SCALE_BITS.get(backend.value, (5, 4))
    assert (spec.weight.scheme.scale_bits, spec.activation.scheme.scale_bits) == expected
    assert set(spec.fixed_ranges) | spec.fused_activations <= {op.name for op in OPS}
    assert spec.fuses_into <= FAMILIES
    assert spec.split <= set(SPLITS)
    assert all(rule.reason for rule in spec.rules.values())
    assert spec.source


@pytest.mark.parametrize("backend", BackendType)
def test_a_table_says_why_of_every_op_that_it_leaves_float(backend):
    spec = BACKENDS[backend]
    left = [op for op in OPS if op.family not in ALWAYS_FLOAT and spec.rule(op.name, op.family) is None]
    assert [op.name for op in left if not (spec.left_float.get(op.name) or spec.left_float.get(op.family))] == []
    for key in spec.left_float:
        assert key not in spec.rules
        assert any(key in (op.name, op.family) for op in left), key


def test_the_reason_for_an_op_without_a_rule_is_that_of_its_name_then_of_its_family():
    spec = BackendSpec("Mine", INT8, INT8, {}, left_float={"math": "slow", "exp": "wrong"})
    assert spec.why_float("exp", "math") == "wrong"
    assert spec.why_float("log", "math") == "slow"
    assert spec.why_float("relu", "activation") == ""


def test_the_weight_of_an_op_can_have_a_scheme_of_its_own():
    own = INT8.with_scheme(per_channel=True)
    spec = BackendSpec("Mine", INT8, INT8, {}, weights={"conv2d": own})
    assert spec.weight_of("conv2d") is own
    assert spec.weight_of("linear") is INT8
    changed = spec.with_configs(lambda config: config.with_scheme(bit_width=4), not_learned)
    assert str(changed.weight_of("conv2d").scheme) == "int4 sym per-channel"
    assert str(changed.weight_of("linear").scheme) == "int4 sym per-tensor"
    assert (changed.activation.fake_quantize, changed.weight.fake_quantize) == ("Fixed", "Learnable")
    assert changed.rules is spec.rules


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
        (BackendType.OpenVINO, "int8 sym per-channel narrow", "uint8 asym per-tensor", "Learnable"),
        (BackendType.QNN, "int8 sym per-channel narrow", "uint8 asym per-tensor", "Learnable"),
        (BackendType.Vitis, "int8 sym per-tensor pot", "int8 sym per-tensor pot", "TQT"),
        (BackendType.ArmCPU, "int8 sym per-channel narrow", "int8 sym per-tensor", "Learnable"),
        (BackendType.X86, "int8 sym per-channel narrow", "int8 sym per-tensor", "Learnable"),
        (BackendType.ONNXRuntime_AVX2, "int7 sym per-channel narrow", "uint8 asym per-tensor", "Learnable"),
        (BackendType.OpenVINO_AVX2, "int7 sym per-channel", "uint8 asym per-tensor", "Learnable"),
        (BackendType.QNN_A16, "int8 sym per-channel narrow", "uint16 asym per-tensor", "Learnable"),
    ],
)
def test_the_schemes_are_those_of_the_design(backend, weight, activation, learned):
    spec = BACKENDS[backend]
    assert str(spec.weight.scheme) == weight
    assert str(spec.activation.scheme) == activation
    assert (spec.weight.fake_quantize, spec.activation.fake_quantize) == (learned, learned)
    for scheme in (spec.weight.scheme, spec.activation.scheme):
        assert (scheme.quant_min, scheme.quant_max) == RANGES[str(scheme).split()[0], scheme.narrow_range]


def test_two_products_of_the_half_range_fit_into_int16_and_those_of_int8_do_not():
    """``pmaddubsw`` adds two products of uint8 and int8 in int16."""
    limit, largest = 2**15 - 1, 255
    for kind in ("ONNXRuntime", "OpenVINO"):
        weights = [BACKENDS[BackendType(name)].weight.scheme for name in (kind, f"{kind}_AVX2")]
        sums = [2 * largest * max(-scheme.quant_min, scheme.quant_max) for scheme in weights]
        assert sums[0] > limit >= sums[1]
