"""The names that backends and users write."""

import re

import pytest

import fxqat.tools
from fxqat.config.config import parse_config
from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.fake_quantize.fake_quantizes import ALIASES, FAKE_QUANTIZES, HINTS, not_learned
from fxqat.fake_quantize.fixed import FixedFakeQuantize
from fxqat.observer.observers import OBSERVERS
from fxqat.scheme import QuantizeScheme, TensorQConfig
from tests.builders import make_suitable

LEARNED = {"Learnable", "PACT", "DSQ", "TQT", "EWGS", "Oscillation"}


def test_names_and_classes() -> None:
    assert set(FAKE_QUANTIZES) == LEARNED | {"Fixed", "DoReFa"}
    assert all(issubclass(kind, FakeQuantizeBase) for kind in FAKE_QUANTIZES.values())


def test_a_class_is_called_as_its_name_says() -> None:
    assert [kind.__name__ for kind in FAKE_QUANTIZES.values()] == [f"{name}FakeQuantize" for name in FAKE_QUANTIZES]
    assert len(set(FAKE_QUANTIZES.values())) == len(FAKE_QUANTIZES)


@pytest.mark.parametrize("name", FAKE_QUANTIZES)
def test_learned_rows_are_those_with_parameters(name: str) -> None:
    parameters = list(make_suitable(FAKE_QUANTIZES[name]).parameters())
    assert bool(parameters) == FAKE_QUANTIZES[name].learned == (name in LEARNED)


@pytest.mark.parametrize("name", FAKE_QUANTIZES)
def test_without_training_what_is_learned_is_fixed(name: str) -> None:
    config = TensorQConfig(QuantizeScheme(4), fake_quantize=name, fake_quantize_args={"grad_factor": 2.0})
    found = not_learned(config)
    assert found.fake_quantize == ("Fixed" if name in LEARNED else name)
    assert dict(found.fake_quantize_args) == ({} if name in LEARNED else {"grad_factor": 2.0})


def test_without_training_a_class_of_the_users_own_stays() -> None:
    class Own(FixedFakeQuantize):
        learned = True

    config = TensorQConfig(QuantizeScheme(), fake_quantize=Own)
    assert not_learned(config) is config
    assert not_learned(TensorQConfig(QuantizeScheme(), fake_quantize="Mine")).fake_quantize == "Mine"


@pytest.mark.parametrize(
    ("spelling", "row"),
    [
        ("LSQ", "Learnable"),
        ("LSQFakeQuantize", "Learnable"),
        ("LSQPlusFakeQuantize", "Learnable"),
        ("LearnableFakeQuantize", "Learnable"),
        ("FixedFakeQuantize", "Fixed"),
        ("PACTFakeQuantize", "PACT"),
        ("DSQFakeQuantize", "DSQ"),
        ("DoReFaFakeQuantize", "DoReFa"),
        ("TqtFakeQuantize", "TQT"),
        ("EWGS", "EWGS"),
        ("PACTQuanter", "PACT"),
        ("lsq", "Learnable"),
    ],
)
def test_spellings_of_other_libraries_are_translated_at_the_door(spelling: str, row: str) -> None:
    change = parse_config({"extra_qconfig_dict": {"w_fakequantize": spelling}}).weight
    assert change.modules["fake_quantize"] == row
    assert row in FAKE_QUANTIZES
    assert set(ALIASES.values()) <= set(FAKE_QUANTIZES)


@pytest.mark.parametrize("spelling", HINTS)
def test_what_is_spelled_in_another_way_here_is_answered_with_a_hint(spelling: str) -> None:
    with pytest.raises(ConfigError, match="unknown fake_quantize") as caught:
        parse_config({"extra_qconfig_dict": {"w_fakequantize": spelling}})
    assert HINTS[spelling] in str(caught.value)
    rows = set(re.findall(r"'(\w+)'", HINTS[spelling]))
    assert rows <= {*FAKE_QUANTIZES, *OBSERVERS}
    tools = re.findall(r"fxqat\.tools\.(\w+)", HINTS[spelling])
    assert rows
    assert all(hasattr(fxqat.tools, tool) for tool in tools)
