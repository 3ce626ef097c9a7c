"""Flags: every public function refuses what is not a bool, with the name of the flag."""

import inspect

import numpy as np
import pytest
import torch
from torch import nn

import fxqat
import fxqat.tools
from fxqat.errors import ConfigError, ExportError, FxqatError
from fxqat.tools import NaNGuard, Reconstruction
from fxqat.tools.recipe import Recipe
from fxqat.utils.flags import check_flags


def _takers():
    """Every public function with flags, and every method of a public class with them."""
    for package in (fxqat, fxqat.tools):
        for name in package.__all__:
            found = getattr(package, name)
            if inspect.isfunction(found):
                yield name, found


FLAGS = [
    pytest.param(function, parameter.name, id=f"{name}-{parameter.name}")
    for name, function in _takers()
    for parameter in inspect.signature(function).parameters.values()
    if parameter.annotation == "bool"
]


@pytest.mark.parametrize(("function", "flag"), FLAGS)
@pytest.mark.parametrize("wrong", ["no", 1, None, np.True_], ids=repr)
def test_a_public_function_refuses_a_flag_that_is_no_bool_before_it_does_anything(function, flag, wrong):
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    error = ExportError if function in (fxqat.convert_export, fxqat.export_tflite) else ConfigError
    with pytest.raises(
        error, match=rf"^{function.__name__}: {flag} must be True or False, got .* Write {flag}=True"
    ) as caught:
        function(*(None for _ in required), **{flag: wrong})
    assert repr(wrong) in str(caught.value)


def test_the_flags_are_those_that_users_know():
    found = {parameter.id for parameter in FLAGS}
    assert {"prepare_by_platform-is_qat", "convert_export-dynamic_batch", "calibrate-keep", "ptq-equalize"} <= found
    assert len(found) >= 22


def test_the_message_says_what_came():
    with pytest.raises(FxqatError, match=r"is_qat must be True or False, got 'no' \(str\)") as caught:
        fxqat.prepare_by_platform(nn.Linear(2, 2), is_qat="no")
    assert str(caught.value).endswith("Write is_qat=True or is_qat=False")
    with pytest.raises(ConfigError, match=r"f: x must be True or False, got \['a', 'a', .*\.\.\.\] \(list\)"):
        check_flags(ConfigError, "f", y=False, x=["a"] * 100)


def test_flags_of_settings_and_methods_are_checked_too():
    gm = fxqat.prepare_by_platform(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="NaNGuard.accepts: gradients must be True or False, got 'no'"):
        NaNGuard(gm).accepts(torch.ones(()), gradients="no")
    with pytest.raises(ConfigError, match="gptq must be True or False, got 1"):
        Reconstruction(gptq=1)
    with pytest.raises(ConfigError, match="equalize must be True or False, got 'yes'"):
        Recipe(equalize="yes")


def test_a_step_of_the_ladder_with_a_wrong_flag_is_refused_before_the_first_trial():
    steps = [("first", ({},)), ("second", ({"correct_bias": "no"},))]
    measured = []
    with pytest.raises(ConfigError, match="correct_bias must be True or False, got 'no'"):
        fxqat.quantize(nn.Linear(2, 2), [torch.ones(1, 2)], evaluate=measured.append, max_drop=0.0, steps=steps)
    assert measured == []


def test_true_is_no_number_of_batches():
    gm = fxqat.prepare_by_platform(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="max_batches must be at least 1, or None for all batches, got True"):
        fxqat.calibrate(gm, [torch.ones(1, 2)], True)
    assert fxqat.calibrate(gm, [torch.ones(1, 2)], 1) == 1
