"""The integer program against exhaustive search."""

import itertools
import random

import pytest

from fxqat.errors import ConfigError
from fxqat.tools.mixed_precision.choose import solve
from fxqat.tools.mixed_precision.costs import Cost, Row

WIDTHS = (2, 4, 8)
LAYERS = [f"layer{i}" for i in range(6)]


def table(seed):
    """Scores of six layers, and costs of three kinds: linear, the largest of several rows, products of two layers."""
    draw = random.Random(seed)
    scores = {name: {bits: draw.random() * 4.0**-bits * 100 for bits in WIDTHS} for name in LAYERS}

    def rising(most):
        """The cost of a unit at each width: random and rising."""
        return dict(zip(WIDTHS, sorted(draw.uniform(0, most) for _ in WIDTHS), strict=True))

    size = Cost("size", "bytes", (Row({name: rising(800) for name in LAYERS}),))
    cuts = [Row({name: rising(72) for name in draw.sample(LAYERS, 3)}, fixed=draw.uniform(0, 5)) for _ in range(4)]
    pairs = {
        pair: {(one, other): draw.uniform(1, 50) * one * other for one, other in itertools.product(WIDTHS, WIDTHS)}
        for pair in itertools.pairwise(LAYERS)
    }
    return scores, (size, Cost("peak", "bytes", tuple(cuts)), Cost("work", "operations", (Row(pairs=pairs),)))


def exhaustive(scores, budgets):
    """The best of all choices within the budgets."""
    found = []
    for bits in itertools.product(WIDTHS, repeat=len(LAYERS)):
        widths = dict(zip(LAYERS, bits, strict=True))
        if all(cost.of(widths) <= limit for cost, limit in budgets):
            found.append(sum(scores[name][width] for name, width in widths.items()))
    return min(found)


@pytest.mark.parametrize("seed", range(20))
def test_it_is_as_good_as_exhaustive_search(seed):
    scores, costs = table(seed)
    least, most = (dict.fromkeys(LAYERS, bits) for bits in (2, 8))
    share = random.Random(seed + 100).uniform(0.3, 0.8)
    budgets = [(cost, cost.of(least) + share * (cost.of(most) - cost.of(least))) for cost in costs]
    found = solve(scores, budgets)
    assert found.score == pytest.approx(exhaustive(scores, budgets), rel=1e-6)
    assert found.score == pytest.approx(sum(scores[name][bits] for name, bits in found.widths.items()))
    for cost, limit in budgets:
        assert found.costs[cost.name] == cost.of(found.widths) <= limit * (1 + 1e-9)


def test_without_budgets_each_unit_gets_its_least_loss():
    scores, _ = table(0)
    scores["layer2"][4] = -1.0
    found = solve(scores, [])
    assert found.widths == {**dict.fromkeys(LAYERS, 8), "layer2": 4}
    assert found.costs == {}


def test_a_cost_of_other_widths_is_refused():
    scores, (size, _, work) = table(0)
    less = {name: {bits: loss for bits, loss in losses.items() if bits < 8} for name, losses in scores.items()}
    assert set(solve(less, [(size, 1e9), (work, 1e9)]).widths.values()) <= {2, 4}
    with pytest.raises(
        ConfigError, match="'size' has layer0 at 2, 4, 8 bits, the scores have it at 2, 4, 8, 16: compute"
    ):
        solve({name: losses | {16: 0.0} for name, losses in scores.items()}, [(size, 1e9)])
    with pytest.raises(ConfigError, match="cost 'work' has layer0 at 2, 4, 8 bits, the scores have it at none"):
        solve({name: losses for name, losses in scores.items() if name != "layer0"}, [(work, 1e9)])


def test_too_small_a_budget_is_an_error_that_says_the_least():
    scores, (size, peak, _) = table(0)
    least = dict.fromkeys(LAYERS, 2)
    with pytest.raises(ConfigError, match=f"size: budget 1 bytes, at least {size.of(least):g} needed"):
        solve(scores, [(size, 1.0)])
    assert solve(scores, [(size, size.of(least) * (1 + 1e-9))]).widths == least
    with pytest.raises(ConfigError, match="peak: budget 0.5 bytes"):
        solve(scores, [(size, 1e9), (peak, 0.5)])
