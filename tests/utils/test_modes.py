"""Eval mode for a while."""

import pytest
from torch import nn

from fxqat.utils.modes import eval_mode


def mixed_modes() -> nn.Module:
    """A model in training mode with one frozen part."""
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
    model[1][0].eval()
    return model


def test_every_module_evaluates_and_gets_its_own_mode_back() -> None:
    model = mixed_modes()
    before = [module.training for module in model.modules()]
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before
    assert before == [True, True, True, False, True]


def test_modes_come_back_after_a_failure() -> None:
    model = mixed_modes()

    def fail() -> None:
        with eval_mode(model):
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert model.training
    assert not model[1][0].training
