"""The names that backends and users write."""

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.fake_quantize.fixed import FixedFakeQuantize
from fxqat.fake_quantize.learnable import LearnableFakeQuantize
from fxqat.fake_quantize.table import FAKE_QUANTIZES


def test_names_and_classes() -> None:
    assert list(FAKE_QUANTIZES.items()) == [("Fixed", FixedFakeQuantize), ("Learnable", LearnableFakeQuantize)]
    assert all(issubclass(kind, FakeQuantizeBase) for kind in FAKE_QUANTIZES.values())


def test_a_class_is_called_as_its_name_says() -> None:
    assert [kind.__name__ for kind in FAKE_QUANTIZES.values()] == [f"{name}FakeQuantize" for name in FAKE_QUANTIZES]
    assert len(set(FAKE_QUANTIZES.values())) == len(FAKE_QUANTIZES)
