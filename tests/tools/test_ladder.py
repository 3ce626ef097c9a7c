"""The ladder: which recipe is taken, and when it ends."""

import functools
import logging
from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch import nn

import fxqat
from fxqat.errors import ConfigError
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools import ptq
from fxqat.tools.ladder import quantize
from fxqat.tools.mixed_precision.units import find_units
from fxqat.tools.recipe import STEPS
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


@pytest.mark.parametrize("backend", ["Experimental", "QNN", "ONNXRuntime", "ONNXRuntime_AVX2", "TensorRT", "Vitis"])
def test_in_the_end_all_tensors_but_one_are_float(backend: str) -> None:
    """Nothing that the last step tries is refused."""
    result = quantize(Net().eval(), batches(), backend, closeness, 0.0, steps=STEPS[:1], progress=False)
    assert [trial.note for trial in result.trials if trial.note] == []
    assert len(find_units(result.model)) <= 2
    assert result.metric > 0.2 * result.trials[0].metric


class Tagger(nn.Module):
    """A table, an LSTM whose weights matter most, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.lstm, self.head = nn.Embedding(20, 8), nn.LSTM(8, 16, bidirectional=True), nn.Linear(32, 4)
        with torch.no_grad():
            for parameter in self.lstm.parameters():
                parameter.mul_(4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.table(tokens))[0])


def test_weights_of_a_recurrent_layer_get_more_bits_together() -> None:
    torch.manual_seed(1)
    tokens = torch.randint(0, 20, (9, 16))
    model = Tagger().eval()
    expected = model(tokens).detach()

    @torch.no_grad()
    def score(other: nn.Module) -> float:
        return -float((other(tokens) - expected).square().mean())

    config = {"extra_qconfig_dict": {"w_qscheme": {"bit": 3}}}
    options = {"steps": STEPS[:1], "prepare_custom_config_dict": config, "progress": False}
    result = quantize(model, [(tokens,)] * 2, "Experimental", score, 0.0, **options)
    assert "lstm.weight" in result.worst
    assert not [trial.note for trial in result.trials if "overrides" in trial.note]
    narrow = quantize(model, [(tokens,)] * 2, "Experimental", score, 0.5 * -result.trials[0].metric, **options)
    assert narrow.reached
    assert {row.weight[:4] for row in narrow.model.quant_report if row.weight} == {"int4"}


def bits(weight: int, value: int) -> dict:
    return {"extra_qconfig_dict": {"w_qscheme": {"bit": weight}, "a_qscheme": {"bit": value}}}


@functools.cache
def uniformly(weight: int, value: int) -> float:
    """The metric with so many bits everywhere."""
    return closeness(ptq(Net().eval(), batches(), "Experimental", bits(weight, value)))


@pytest.mark.xdist_group("uniformly")
@pytest.mark.parametrize("low", [(3, 4), (4, 8), (4, 4)])
def test_a_wider_choice_is_never_below_a_uniform_one_of_its_cost(low: tuple[int, int]) -> None:
    """Of budgets that need wider tensors: each cheaper uniform choice, quantized here, is not within the budget."""

    uniform = {(w, a): uniformly(w, a) for w in range(low[0], 9) for a in range(low[1], 9) if w <= a}
    taken = []
    for drop in (0.5, 1.0, 2.0, 4.0):
        result = quantize(
            Net().eval(), batches(), "Experimental", closeness, drop, prepare_custom_config_dict=bits(*low),
            steps=[("calibration", [{}]), ("rounding", [{"equalize": True}])], progress=False,
        )  # fmt: skip
        cost = next(trial.cost for trial in result.trials if trial.recipe == result.recipe)
        assert result.reached
        cheaper = [metric for (w, a), metric in uniform.items() if w * a < 0.999 * cost * low[0] * low[1]]
        assert all(metric < -drop for metric in cheaper)
        taken.append((cost, len(cheaper), str(result.recipe)))
    assert any(number for _, number, _ in taken)


def test_wider_choices_come_in_the_order_of_their_cost() -> None:
    config = {"extra_qconfig_dict": {"w_qscheme": {"bit": 4}}}
    result = quantize(
        Net().eval(), batches(), "Experimental", closeness, 0.0, prepare_custom_config_dict=config, steps=STEPS[:1],
        progress=False,
    )  # fmt: skip
    uniform = [trial for trial in result.trials if trial.step == "wider, uniform"]
    assert [str(trial.recipe) for trial in uniform] == [f"2 tensors with {bits} bits" for bits in (5, 6, 7, 8)]
    assert [trial.cost for trial in uniform] == pytest.approx([5 / 4, 6 / 4, 7 / 4, 2])
    up = [trial.cost for trial in result.trials]
    assert up[: up.index(max(up)) + 1] == sorted(up[: up.index(max(up)) + 1])


class LargeChannels(nn.Module):
    """A LayerNorm, two channels of which are 100 times as large as what the layer behind it needs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.layer = nn.LayerNorm(16), nn.Linear(16, 4)
        with torch.no_grad():
            self.norm.weight[:2] *= 100
            self.layer.weight[:, :2] /= 100

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.norm(x))


def test_it_smooths_where_there_is_something_to_smooth(caplog: pytest.LogCaptureFixture) -> None:
    model, x = LargeChannels().eval(), torch.randn(64, 16)
    steps = [step for step in STEPS if step[0] in ("calibration", "biases and ranges")]

    def score(quantized: nn.Module) -> float:
        return -100 * float((quantized(x) - model(x)).norm() / model(x).norm())

    result = quantize(model, [x], "Experimental", score, 3.0, steps=steps, progress=False)
    assert result.reached
    assert result.recipe.smooth
    assert result.trials[0].metric < -10
    assert "smooth" in str(result)
    with caplog.at_level(logging.INFO, logger="fxqat"):
        quantize(Net().eval(), batches(), "Experimental", closeness, 0.0, steps=steps)
    assert "smooth: not tried, because no normalization of the model can take part" in caplog.text


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


MINE = {"steps": [("mine", [{"observer": "MSE"}])]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_drop": 1.0}, "needs evaluate"),
        ({"max_drop": -1.0, "evaluate": closeness}, "at least 0, got -1"),
        ({"max_drop": float("nan"), "evaluate": closeness}, "at least 0, got nan"),
        ({"evaluate": lambda model: []}, "expected a finite number"),
        ({"confidence": 0.3}, "at least 0.5 and below 1, got 0.3"),
        ({"steps": STEPS[:1]}, "steps need max_drop"),
        ({"steps": (), "max_drop": 1.0, "evaluate": closeness}, "steps must be names with changes of a_observer, "),
        ({**MINE, "max_drop": 1.0, "evaluate": closeness}, "steps must be names with changes of a_observer, "),
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


@pytest.mark.parametrize(
    ("lost", "steps", "told"),
    [
        (0.005, ["calibration"], "within the budget of 1 on this sample of 800 scores, by 0.5. For other data"),
        (0.0075, ["calibration", "observers"], "within the budget of 1, with a margin of"),
        (0.0125, ["calibration", "observers"], "within the budget of 1, with a margin of"),
    ],
)
def test_a_sample_that_is_too_small_for_a_recipe_is_told_of(lost: float, steps: list[str], told: str) -> None:
    """A margin above half of the budget is no reason to climb on, if the loss is at most the other half."""
    result = quantize(Net().eval(), batches(), evaluate=lossy(800, lost), max_drop=1.0, progress=False)
    assert [trial.step for trial in result.trials] == steps
    assert result.trials[0].margin > 0.5
    assert told in str(result)
    assert result.reached == (len(steps) > 1)
    assert (result.worst == ()) == result.reached


def test_so_many_samples_as_it_says_would_show_the_budget() -> None:
    result = quantize(Net().eval(), batches(), evaluate=lossy(400, 0.005), max_drop=1.0, progress=False)
    needed = result.samples_needed
    assert needed is not None
    assert not result.reached
    again = quantize(Net().eval(), batches(), evaluate=lossy(needed, 0.005), max_drop=1.0, progress=False)
    assert again.reached
    fewer = quantize(Net().eval(), batches(), evaluate=lossy(round(0.9 * needed), 0.005), max_drop=1.0, progress=False)
    assert len(fewer.trials) > 1  # calibration loses as much, and is not enough
    assert f"about {needed} scores would show it, with the same loss" in str(result)


def test_no_sample_can_show_a_budget_that_is_used_up() -> None:
    result = quantize(Net().eval(), batches(), evaluate=lossy(400, 0.0), max_drop=0.0, progress=False)
    assert (result.reached, result.samples_needed) == (False, None)
    assert "no number of scores would" in str(result)


def test_a_budget_that_rounding_alone_leaves_open_is_used_up() -> None:
    def loses(model: nn.Module) -> torch.Tensor:
        scores = torch.full((400,), 100.0)
        scores[: 2 if isinstance(model, QuantGraphModule) else 0] = 0
        return scores

    steps = [("calibration", [{}])]
    budget = 0.5 + 1e-14
    result = quantize(Net().eval(), batches(), evaluate=loses, max_drop=budget, steps=steps, progress=False)
    assert result.room is not None
    assert 0 < result.room < 1e-12
    assert result.samples_needed is None


def test_only_the_given_steps_are_tried() -> None:
    steps = [("calibration", [{}]), ("mine", [{"reconstruct": "GPTQ"}])]
    result = quantize(Net().eval(), batches(), evaluate=closeness, max_drop=0.0, steps=steps, progress=False)
    tried = [trial.step for trial in result.trials]
    assert [step for step in tried if step != "wider tensors"] == ["calibration", "mine"]


@pytest.mark.parametrize(("recipe", "told"), [({}, "cosine"), ({"reconstruct": "GPTQ"}, "not compared: reconstruct")])
def test_the_comparison_with_float_or_why_there_is_none(recipe: dict[str, str], told: str) -> None:
    steps = [("mine", [recipe])]
    result = quantize(Net().eval(), batches(), evaluate=closeness, max_drop=1.0, steps=steps, progress=False)
    assert told in result.against_float
    assert (result.model.quantization_noise is None) is bool(recipe)


def test_a_single_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="Put a single batch into a list"):
        quantize(nn.Linear(2, 2), torch.zeros(1, 2))
