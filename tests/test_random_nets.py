"""Some networks of random topology, from prepare to export; ``tests/benchmarks/zoo/random_nets.py`` runs hundreds."""

import pytest
import torch

from fxqat import BackendType
from tests.benchmarks.zoo.random_nets import failures, page, run, summary
from tests.random_net import OPS, RandomNet, RandomRecurrentNet

# Chosen among 1000 to 1079: most kinds of steps and layers in few steps, on eight backends.
SEEDS = (1036, 1064, 1001, 1046, 1079, 1074, 1070, 1038)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_network_is_prepared_trained_and_exported(seed, tmp_path):
    outcome = run(seed, tmp_path)
    assert (outcome.stage, outcome.failure) == ("", "")
    assert outcome.quantized > 0
    assert outcome.backend in [backend.value for backend in BackendType]


@pytest.mark.parametrize("seed", range(5000, 5008))
def test_a_random_network_with_recurrent_modules_is_prepared_trained_and_exported(seed, tmp_path):
    outcome = run(seed, tmp_path, RandomRecurrentNet)
    assert (outcome.stage, outcome.failure) == ("", "")
    assert outcome.quantized > 0


def test_a_seed_gives_the_same_network():
    first, second, other = RandomNet(3), RandomNet(3), RandomNet(4)
    assert first.describe() == second.describe() != other.describe()
    for (name, a), (_, b) in zip(first.state_dict().items(), second.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert all(torch.equal(a, b) for a, b in zip(first.inputs(3, seed=7), second.inputs(3, seed=7), strict=True))


def test_the_networks_are_varied():
    networks = [RandomNet(seed) for seed in range(60)]
    ops = {step.op for network in networks for step in network.plan}
    assert ops >= {*OPS, "conv", "linear", "mha", "shared", "norm", "act"}
    assert {len(network.outputs) for network in networks} >= {1, 2, 3}
    assert {network.as_dict for network in networks} == {True, False}
    read = {step: {i for step in network.plan for i in step.reads} for step, network in enumerate(networks)}
    dead = [set(range(max(n.outputs))) - read[i] - set(n.outputs) for i, n in enumerate(networks)]
    assert sum(bool(values) for values in dead) > 20


def test_a_failure_is_in_the_table_with_its_seed(tmp_path, monkeypatch):
    monkeypatch.setattr("fxqat.enable_calibration", lambda gm: 1 / 0)
    outcome = run(1000, tmp_path)
    assert (outcome.seed, outcome.stage) == (1000, "calibrate")
    assert outcome.failure == "ZeroDivisionError: division by zero"
    assert "ZeroDivisionError" in failures([outcome]).get_string()
    assert summary([outcome]).rows[-1][1:3] == [1, 0]
    assert "Failures\n--------" in page([outcome], RandomNet)
