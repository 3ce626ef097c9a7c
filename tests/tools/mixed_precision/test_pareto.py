"""A sweep of budgets, its files, and the rules as YAML."""

import json

import pytest
import torch

import fxqat
from fxqat.errors import ConfigError
from fxqat.tools.mixed_precision.costs import average_weight_bits
from fxqat.tools.mixed_precision.pareto import sweep
from fxqat.tools.mixed_precision.sensitivity import sensitivity


@pytest.fixture(scope="module")
def pareto(bank, batches):
    return sweep(sensitivity(bank, batches).scores, average_weight_bits(bank), 8)


def test_each_choice_costs_more_and_loses_less(pareto):
    costs = [choice.costs["average weight"] for choice in pareto.choices]
    losses = [choice.score for choice in pareto.choices]
    assert len(costs) >= 4
    assert costs == sorted(set(costs))
    assert losses == sorted(set(losses), reverse=True)
    assert costs[0] == pytest.approx(2.0)


def test_files(pareto, tmp_path):
    pareto.write_json(tmp_path / "pareto.json")
    content = json.loads((tmp_path / "pareto.json").read_text())
    assert content["unit"] == "bits"
    assert [row["widths"] for row in content["choices"]] == [choice.widths for choice in pareto.choices]
    pareto.plot(tmp_path / "pareto.svg")
    assert (tmp_path / "pareto.svg").read_text().rstrip().endswith("</svg>")
    with pytest.raises(ConfigError):
        pareto.plot(tmp_path / "nowhere" / "pareto.png")


def test_a_choice_as_a_file_prepares_the_model(bank, net, batches, pareto, tmp_path):
    choice = pareto.choices[2]
    choice.write_yaml(bank.units, tmp_path / "widths.yaml")
    gm = fxqat.prepare_by_platform(net, "TSQAT", tmp_path / "widths.yaml", example_inputs=(batches[0],))
    found = {name: unit.scheme(gm).bit_width for name, unit in bank.units.items()}
    assert found == choice.widths
    assert torch.equal(gm.b.weight, net.b.weight)


def test_a_sweep_needs_two_budgets(bank):
    with pytest.raises(ConfigError, match="count must be 2 or more, got 1"):
        sweep({name: dict.fromkeys(choice, 0.0) for name, choice in bank.widths.items()}, average_weight_bits(bank), 1)
