"""Two gloo processes end calibration with the same ranges, the union over both."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from fxqat.fake_quantize.learnable import START
from fxqat.numerics import choose_qparams
from fxqat.observer.observers import OBSERVERS
from fxqat.scheme import QuantizeScheme
from tests.observer.gloo_worker import WHOLE, batches_of, quantizers

pytestmark = pytest.mark.xdist_group("ranks")
Results = list[dict[str, Any]]
UNITED = (*(name for name in OBSERVERS if name not in WHOLE), "per_channel")


@pytest.fixture(scope="module")
def results(ranks: Path) -> Results:
    """What both ranks saved; rank 0 imports fxqat before the process group exists, rank 1 after."""
    return [torch.load(ranks / f"observers{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", UNITED)
def test_ranks_agree_on_the_union_of_their_ranges(results: Results, name: str) -> None:
    first, second = (rank["quantizers"][name] for rank in results)
    assert not torch.equal(first["local_min"], second["local_min"])
    for key, union in (("min", torch.minimum), ("max", torch.maximum)):
        assert torch.equal(first[key], second[key])
        assert torch.equal(first[key], union(first[f"local_{key}"], second[f"local_{key}"]))


@pytest.mark.parametrize("name", UNITED)
def test_scales_are_identical_and_those_of_the_union(results: Results, name: str) -> None:
    first, second = (rank["quantizers"][name] for rank in results)
    whole = QuantizeScheme(per_channel=True) if name == "per_channel" else QuantizeScheme(signed=False, symmetric=False)
    scale, zero_point = choose_qparams(first["min"], first["max"], whole)
    assert torch.equal(first["scale"], second["scale"])
    assert torch.equal(first["scale"], scale)
    assert torch.equal(first["zero_point"], zero_point)
    assert torch.equal(second["zero_point"], zero_point)


def test_min_max_is_that_of_all_data_though_ranks_had_different_numbers_of_batches(results: Results) -> None:
    batches = [batch for rank in range(2) for batch in batches_of(rank)]
    assert len(batches_of(0)) != len(batches_of(1))
    everything = torch.cat(batches)
    assert results[0]["quantizers"]["MinMax"]["min"] == everything.min()
    assert results[0]["quantizers"]["MinMax"]["max"] == everything.max()
    assert torch.equal(results[0]["quantizers"]["per_channel"]["max"], everything.amax((0, 2, 3)))


def alone(batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state of the fake-quants in one process that sees all batches."""
    quants = quantizers(("MinMax", *WHOLE))
    for batch in batches:
        for quant in quants.values():
            quant.observe(batch)
    return {key: value for key, value in quants.state_dict().items() if not key.endswith("._extra_state")}


def assert_as_alone(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], name: str) -> None:
    """Range and parameters are equal; each of two ranks has half of every sum."""
    keys = [key for key in expected if key.startswith(f"{name}.")]
    assert len(keys) >= 4
    for key in keys:
        share = 2 if key.endswith((".count", ".histogram", ".votes")) else 1
        # a mean is summed up in another order
        rtol = 1e-6 if name == "Average" else 0.0
        torch.testing.assert_close(found[key] * share, expected[key], rtol=rtol, atol=0.0, msg=key)


def test_the_range_is_the_one_of_a_process_that_sees_all_data(results: Results) -> None:
    expected = alone([batch for rank in range(2) for batch in batches_of(rank)])
    for name in WHOLE:
        first, second = (rank["quantizers"][name] for rank in results)
        rtol = 1e-6 if name == "Average" else 0.0
        wanted = {key: expected[f"{name}.observer.{key}_val"] for key in ("min", "max")}
        wanted |= {
            "scale": expected[f"{name}.unit_scale"] * START,
            "zero_point": expected[f"{name}.calibrated_zero_point"],
        }
        for key, tensor in wanted.items():
            assert torch.equal(first[key], second[key]), f"{name}: {key}"
            torch.testing.assert_close(first[key], tensor, rtol=rtol, atol=0.0, msg=f"{name}: {key}")


def test_calibration_can_go_on_after_the_ranks_agreed(results: Results) -> None:
    everything = [batch for rank in range(2) for batch in batches_of(rank)]
    expected = alone([batch[half::2] * (half + 1) for half in range(2) for batch in everything])
    for rank, name in itertools.product(results, WHOLE):
        assert_as_alone(rank["again"], expected, name)


def test_calibration_can_start_anew_after_the_ranks_agreed(results: Results) -> None:
    expected = alone([batch[1::2] * 2 for rank in range(2) for batch in batches_of(rank)])
    for rank, name in itertools.product(results, WHOLE):
        assert_as_alone(rank["anew"], expected, name)


def test_a_rank_without_data_has_the_range_of_the_other(results: Results) -> None:
    expected = alone(batches_of(1))
    for rank, name in itertools.product(results, ("MinMax", *WHOLE)):
        assert_as_alone(rank["one_empty"], expected, name)


def test_a_fixed_range_stays(results: Results) -> None:
    for rank in results:
        assert (rank["one_empty"]["fixed.observer.min_val"], rank["one_empty"]["fixed.observer.max_val"]) == (0.0, 1.0)
        assert rank["one_empty"]["fixed.unit_scale"] == torch.tensor(1.0) / 127 / START


def test_nan_on_one_rank_is_an_error_on_both(results: Results) -> None:
    messages = [rank["nan"]["raised"] for rank in results]
    assert "NaN" in messages[0]
    assert "NaN" in messages[1]
