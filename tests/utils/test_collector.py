"""Python's garbage collector is paused and goes on as it was."""

import gc

import pytest
from torch import nn

import fxqat
from fxqat.utils.collector import collector_paused


@pytest.fixture(autouse=True)
def collector_as_before():
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_paused_inside_and_as_before_outside(enabled):
    (gc.enable if enabled else gc.disable)()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is enabled


def test_an_error_does_not_leave_it_off():
    gc.enable()
    with pytest.raises(ValueError, match="no"), collector_paused():
        raise ValueError("no")
    assert gc.isenabled()
    with pytest.raises(fxqat.errors.ConfigError):
        fxqat.prepare_by_platform(nn.ReLU(), "no such backend")
    assert gc.isenabled()


def test_it_is_paused_while_a_model_is_prepared():
    seen = []

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            seen.append(gc.isenabled())
            return self.fc(x)

    gc.enable()
    fxqat.prepare_by_platform(Looks())
    assert seen == [False]
    assert gc.isenabled()
