"""The vocabulary: derived ranges, checks, copies and the JSON entry."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from fxqat.errors import ConfigError
from fxqat.scheme import QConfig, QuantizedTensor, QuantizeScheme, TensorQConfig


@pytest.mark.parametrize(
    ("arguments", "quant_min", "quant_max", "storage"),
    [
        ({}, -128, 127, "int8"),
        ({"narrow_range": True}, -127, 127, "int8"),
        ({"signed": False}, 0, 255, "uint8"),
        ({"signed": False, "narrow_range": True}, 1, 255, "uint8"),
        ({"bit_width": 2}, -2, 1, "int4"),
        ({"bit_width": 3, "narrow_range": True}, -3, 3, "int4"),
        ({"bit_width": 4, "signed": False}, 0, 15, "uint4"),
        ({"bit_width": 5}, -16, 15, "int8"),
        ({"bit_width": 9}, -256, 255, "int16"),
        ({"bit_width": 16}, -32768, 32767, "int16"),
        ({"bit_width": 16, "signed": False}, 0, 65535, "uint16"),
    ],
)
def test_range_follows_from_width_and_sign(
    arguments: dict[str, object], quant_min: int, quant_max: int, storage: str
) -> None:
    scheme = QuantizeScheme(**arguments)
    assert (scheme.quant_min, scheme.quant_max) == (quant_min, quant_max)
    assert scheme.storage(21) == storage


@pytest.mark.parametrize("opset", [18, 21, 25])
@pytest.mark.parametrize("bits", range(2, 17))
def test_every_width_fits_its_storage_and_fills_it_or_no_smaller_one_is_there(bits: int, opset: int) -> None:
    widths = [width for width in ((2, 4, 8, 16) if opset == 25 else (4, 8, 16)) if width >= bits]
    for signed in (True, False):
        scheme = QuantizeScheme(bit_width=bits, signed=signed)
        assert scheme.quant_max - scheme.quant_min + 1 == 2**bits
        assert scheme.storage_width(opset) == widths[0]
        assert scheme.storage(opset) == ("int" if signed else "uint") + str(widths[0])
        assert scheme.fills_storage(opset) == (bits in widths and bits > 2)
        assert not dataclasses.replace(scheme, narrow_range=True).fills_storage(opset)


@pytest.mark.parametrize(("bits", "signed", "expected"), [(8, True, 0), (8, False, 128), (4, False, 8), (16, True, 0)])
def test_symmetric_zero_point_is_the_middle(bits: int, signed: bool, expected: int) -> None:
    scheme = QuantizeScheme(bit_width=bits, signed=signed)
    assert scheme.symmetric_zero_point == expected
    assert scheme.symmetric_zero_point == (scheme.quant_min + scheme.quant_max + 1) // 2


@pytest.mark.parametrize("bits", [1, 17, 0, -8, 32, True, 8.0, "8"])
def test_bad_bit_width_is_named(bits: object) -> None:
    with pytest.raises(ConfigError, match="bit_width") as caught:
        QuantizeScheme(bit_width=bits)
    assert str(bits) in str(caught.value)


@pytest.mark.parametrize("fixed_range", [(1.0, 1.0), (2.0, -2.0), (0.0, float("nan"))])
def test_empty_fixed_range_is_refused(fixed_range: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="fixed_range") as caught:
        QuantizeScheme(fixed_range=fixed_range)
    assert str(fixed_range) in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "zero_point", "step"),
    [
        ({}, 0, 1),
        ({"signed": False}, 128, 1),
        ({"signed": False, "symmetric": False}, None, 1),
        ({"signed": False, "symmetric": False, "even_zero_point": True}, None, 2),
        ({"signed": False, "symmetric": False, "even_zero_point": True, "nonnegative": True}, 0, 1),
        ({"symmetric": False, "nonnegative": True}, -128, 1),
        ({"even_zero_point": True, "nonnegative": True}, 0, 1),
    ],
)
def test_zero_points_are_fixed_or_multiples_of_a_step(
    scheme: dict[str, bool], zero_point: int | None, step: int
) -> None:
    found = QuantizeScheme(**scheme)
    assert found.fixed_zero_point == zero_point
    assert found.zero_point_step == step


def test_text_names_every_choice() -> None:
    scheme = QuantizeScheme(4, signed=False, symmetric=False, per_channel=True, narrow_range=True, scale_bits=1)
    assert str(scheme) == "uint4 asym per-channel narrow pot"
    assert str(QuantizeScheme(fixed_range=(0.0, 1.0))) == "int8 sym per-tensor fixed[0,1]"


def test_with_scheme_changes_a_copy() -> None:
    config = TensorQConfig(QuantizeScheme(), observer="MSE")
    changed = config.with_scheme(bit_width=4, per_channel=True)
    assert (changed.scheme.bit_width, changed.scheme.per_channel, changed.observer) == (4, True, "MSE")
    assert (config.scheme.bit_width, config.scheme.per_channel) == (8, False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        changed.scheme.bit_width = 2
    with pytest.raises(ConfigError):
        config.with_scheme(bit_width=99)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_config_survives_copy_and_pickle(again: object) -> None:
    weight = TensorQConfig(QuantizeScheme(4, per_channel=True), observer_args={"p": 2.4})
    config = QConfig(weight, TensorQConfig(QuantizeScheme()), None)
    result = again(config)
    assert result == config
    assert dict(result.weight.observer_args) == {"p": 2.4}


def test_default_arguments_are_not_shared_state() -> None:
    config = TensorQConfig(QuantizeScheme())
    with pytest.raises(TypeError):
        config.observer_args["p"] = 1.0
    assert dict(TensorQConfig(QuantizeScheme()).observer_args) == {}


def test_json_entry_of_an_activation() -> None:
    scale = float(np.float32(0.1))
    tensor = QuantizedTensor("x", "activation", "q", "uint8", QuantizeScheme(6, False, False), None, (scale,), (31,))
    entry = tensor.as_json()
    assert {key: entry[key] for key in ("dtype", "bit_width", "signed", "symmetric", "axis")} == {
        "dtype": "uint8",
        "bit_width": 6,
        "signed": False,
        "symmetric": False,
        "axis": None,
    }
    assert (entry["quant_min"], entry["quant_max"], entry["zero_point"]) == (0, 63, [31])
    assert np.float32(entry["scale"][0]) == np.float32(0.1)


def test_json_entry_of_a_bias_is_int32() -> None:
    entry = QuantizedTensor("b", "bias", "conv", "int32", None, 0, (0.5, 0.25), (0, 0)).as_json()
    assert (entry["quant_min"], entry["quant_max"], entry["bit_width"]) == (-(2**31), 2**31 - 1, 32)
    assert (entry["axis"], entry["scale"], entry["zero_point"]) == (0, [0.5, 0.25], [0, 0])


@pytest.mark.parametrize("size", [1, 0, True, 2.0])
def test_a_block_has_at_least_two_values(size):
    with pytest.raises(ConfigError, match="block_size must be an integer of at least 2, or None"):
        QuantizeScheme(per_channel=True, block_size=size)


def test_blocks_are_of_channels():
    with pytest.raises(ConfigError, match="block_size=8 divides the scales of output channels"):
        QuantizeScheme(block_size=8)
    assert str(QuantizeScheme(4, per_channel=True, block_size=8)) == "int4 sym per-channel in blocks of 8"
