"""Margins: how often they cover the drop on all data."""

from collections.abc import Callable

import pytest
import torch

from fxqat.errors import ConfigError
from fxqat.tools.margin import jackknife_scores, margin_of, read_scores


def share_missed(chosen: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]], true: float) -> float:
    """How often, of 2000 samples, the true drop is above the measured one with its margin of 95 percent."""
    generator = torch.Generator().manual_seed(0)
    samples = (chosen(generator) for _ in range(2000))
    missed = [float((before - after).mean()) + margin_of(before, after, 0.95) < true for before, after in samples]
    return sum(missed) / len(missed)


@pytest.mark.parametrize(
    ("size", "only_before", "only_after"), [(200, 0.2, 0.17), (50, 0.05, 0.05), (500, 0.02, 0.01), (1000, 0.004, 0.0)]
)
def test_the_margin_covers_the_drop_of_hits_on_all_data(size: int, only_before: float, only_after: float) -> None:
    """A share of the data is right only before, another only after. Of rare ones, fewer are missed."""

    def chosen(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        kind = torch.rand(size, generator=generator)
        right = kind > only_before + only_after
        return 100.0 * ((kind < only_before) | right), 100.0 * ((kind >= only_before) | right)

    assert 0.005 < share_missed(chosen, 100 * (only_before - only_after)) < 0.06


@pytest.mark.parametrize("size", [6, 16, 200])
def test_the_margin_covers_the_drop_of_scores_on_all_data(size: int) -> None:
    def chosen(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        before = torch.randn(size, generator=generator)
        return before, before - 0.3 + torch.randn(size, generator=generator)

    assert 0.04 < share_missed(chosen, 0.3) < 0.06


def test_the_margin_covers_the_drop_of_a_metric_that_is_no_mean() -> None:
    """The share of positives among the samples that are found: a ratio, as in a precision."""
    finds, hits = (0.6, 0.5), (0.8, 0.7)

    def chosen(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        draws = torch.rand(2, 320, generator=generator)
        found, right = ((draws[i] < torch.tensor(shares)[:, None]).double() for i, shares in enumerate((finds, hits)))
        ratios = [
            jackknife_scores(lambda kept, i=i: float((found * right)[i, kept].sum() / found[i, kept].sum()), 320)
            for i in range(2)
        ]
        return ratios[0], ratios[1]

    generator = torch.Generator().manual_seed(1)
    scores = chosen(generator)[0]
    assert scores.shape == (16,)
    missed = 0
    for _ in range(300):
        before, after = chosen(generator)
        missed += float((before - after).mean()) + margin_of(before, after, 0.95) < hits[0] - hits[1]
    assert 0.02 < missed / 300 < 0.09


def test_scores_of_groups_have_the_metric_as_their_mean() -> None:
    values = torch.randn(37, generator=torch.Generator().manual_seed(0)).tolist()
    scores = jackknife_scores(lambda kept: max(values[i] for i in kept), 37, 5)
    assert float(scores.mean()) == pytest.approx(max(values))
    with pytest.raises(ConfigError, match="expected 2 to 37 groups, one sample or more in each, got 38"):
        jackknife_scores(lambda kept: 0.0, 37, 38)


def test_a_margin_is_larger_where_less_is_known() -> None:
    before = 100.0 * torch.ones(400)
    after = before.clone()
    after[:8] = 0
    margin = margin_of(before, after, 0.95)
    assert margin > 0
    assert margin_of(before, after, 0.99) > margin
    assert margin_of(before, after, 0.95, times=4) < margin
    assert margin_of(before, before, 0.95) < margin
    assert margin_of(before / 100, after / 100, 0.95) == pytest.approx(margin / 100)


@pytest.mark.parametrize("found", ["good", None, {"top1": 1.0}, float("nan"), [], [[1.0, 2.0], [3.0, 4.0]], [1.0, "x"]])
def test_what_is_no_score_is_refused(found: object) -> None:
    with pytest.raises(ConfigError, match="evaluate returned .* expected a finite number, or one for each sample"):
        read_scores(found)
    assert read_scores([True, False]).tolist() == [1.0, 0.0]
