"""The paths that users import from, and the package itself, give the same objects."""

import pytest

import fxqat
from fxqat import checkpoint
from fxqat.fake_quantize import state as defining
from fxqat.utils import state, utils

STATE = [
    "disable_all",
    "enable_all",
    "enable_calibration",
    "enable_calibration_quantization",
    "enable_calibration_woquantization",
    "enable_quantization",
]


@pytest.mark.parametrize("name", STATE)
def test_state_functions(name: str) -> None:
    assert getattr(state, name) is getattr(defining, name)
    assert getattr(fxqat, name) is getattr(defining, name)


@pytest.mark.parametrize("name", ["load_checkpoint", "save_checkpoint"])
def test_checkpoint_functions(name: str) -> None:
    assert getattr(utils, name) is getattr(checkpoint, name)
    assert getattr(fxqat, name) is getattr(checkpoint, name)


def test_nothing_else_is_exported() -> None:
    assert sorted(state.__all__) == STATE
    assert sorted(utils.__all__) == ["load_checkpoint", "save_checkpoint"]
    assert all(hasattr(fxqat, name) for name in fxqat.__all__)
