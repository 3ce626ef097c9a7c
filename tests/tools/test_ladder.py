"""The ladder: which recipe is taken, and when it ends."""

from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch import nn

import fxqat
from fxqat.errors import ConfigError
from fxqat.tools.ladder import STEPS, margin_of, quantize
from tests.cli.programs import Net, batches, closeness

LOW = {"extra_qconfig_dict": {"w_qscheme": {"bit": 3}, "a_qscheme": {"bit": 4}}}


def test_it_ends_at_the_first_recipe_within_the_budget() -> None:
    result = quantize(Net().eval(), batches(), "Experimental", closeness, 5.0, progress=False)
    assert result.reached
    assert [trial.step for trial in result.trials] == ["calibration"]
    assert result.float_metric == 0
    assert result.metric == pytest.approx(closeness(result.model))


def test_each_step_is_better_or_not_taken() -> None:
    config = LOW
    result = quantize(
        Net().eval(), batches(), "Experimental", closeness, 2.5, prepare_custom_config_dict=config, progress=False
    )
    metrics = [trial.metric for trial in result.trials]
    assert result.reached
    assert result.metric == pytest.approx(closeness(result.model))
    assert result.metric > metrics[0]
    assert {trial.step for trial in result.trials} == {"wider tensors", *(step for step, _ in STEPS)}
    taken = [trial for trial in result.trials if trial.recipe == result.recipe]
    assert [trial.metric for trial in taken] == [result.metric]
    assert result.recipe.overrides
    assert any("8" in row.weight + row.output for row in result.model.quant_report)
    assert "| taken" in str(result)


def test_what_the_configuration_sets_stays() -> None:
    config = {"extra_qconfig_dict": {"w_observer": "MinMax", "a_observer": "MinMax"}}
    result = quantize(Net().eval(), batches(), evaluate=closeness, max_drop=0.0, prepare_custom_config_dict=config)
    assert not [trial for trial in result.trials if trial.recipe.w_observer or trial.recipe.a_observer]


def test_the_model_is_not_changed_and_needs_no_metric() -> None:
    model = Net().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = fxqat.quantize(model, batches(), "ONNXRuntime")
    assert result.reached
    assert result.metric is None
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "cosine" in str(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_drop": 1.0}, "needs evaluate"),
        ({"max_drop": -1.0, "evaluate": closeness}, "at least 0, got -1"),
        ({"max_drop": float("nan"), "evaluate": closeness}, "at least 0, got nan"),
        ({"evaluate": lambda model: []}, "expected a finite number"),
        ({"confidence": 0.3}, "at least 0.5 and below 1, got 0.3"),
        ({"evaluate": lambda model: float("nan")}, "returned nan; expected a finite number"),
    ],
)
def test_wrong_budgets_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quantize(Net().eval(), batches(), **arguments)


def lossy(samples: int, lost: float) -> Callable[[nn.Module], torch.Tensor]:
    """Scores of samples of which calibration alone loses a share, and every other recipe nothing."""
    models = count()

    def evaluate(_: nn.Module) -> torch.Tensor:
        scores = torch.full((samples,), 100.0)
        scores[: round(samples * lost) if next(models) == 1 else 0] = 0
        return scores

    return evaluate


@pytest.mark.parametrize(("samples", "steps"), [(1000, ["calibration", "observers"]), (100_000, ["calibration"])])
def test_a_small_sample_must_leave_a_margin(samples: int, steps: list[str]) -> None:
    """A loss of .8 points is within 1 point if it is sure enough."""
    result = quantize(Net().eval(), batches(), evaluate=lossy(samples, 0.008), max_drop=1.0, progress=False)
    assert [trial.step for trial in result.trials] == steps
    assert result.reached
    assert (result.trials[0].margin < 0.2) == (len(steps) == 1)
    assert f"with a margin of {result.margin:.3g}" in str(result)


def test_without_confidence_there_is_no_margin() -> None:
    evaluate = lossy(1000, 0.008)
    result = quantize(Net().eval(), batches(), evaluate=evaluate, max_drop=1.0, confidence=0, progress=False)
    assert [(trial.step, trial.margin) for trial in result.trials] == [("calibration", 0.0)]
    assert result.reached


def test_the_margin_covers_the_drop_on_all_data() -> None:
    """Of 1000 samples of 200, about 5 percent have a drop so much smaller than that of all data."""
    generator = torch.Generator().manual_seed(0)
    before, after = (100.0 * (torch.rand(100_000, generator=generator) < share) for share in (0.8, 0.77))
    true = float((before - after).mean())
    missed = 0
    for _ in range(1000):
        chosen = torch.randint(0, len(before), (200,), generator=generator)
        drop = float((before[chosen] - after[chosen]).mean())
        missed += drop + margin_of(before[chosen], after[chosen], 0.95) < true
    assert 0.02 < missed / 1000 < 0.07


def test_a_single_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="Put a single batch into a list"):
        quantize(nn.Linear(2, 2), torch.zeros(1, 2))
