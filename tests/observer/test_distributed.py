"""Two gloo processes: they end calibration with the same ranges, the union of what each saw."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import spawn

from fxqat.fake_quantize.functional import choose_qparams
from fxqat.scheme import QuantizeScheme
from tests.observer.gloo_worker import batches_of, work

Results = list[dict[str, Any]]
QUANTIZERS = ("MinMax", "EMAMinMax", "MSE", "per_channel")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What both ranks saved; rank 0 imports fxqat before the process group exists, rank 1 after."""
    folder = tmp_path_factory.mktemp("gloo")
    spawn(work, args=(2, str(folder)), nprocs=2)
    return [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", QUANTIZERS)
def test_ranks_agree_on_the_union_of_their_ranges(ranks: Results, name: str) -> None:
    first, second = (rank["quantizers"][name] for rank in ranks)
    assert not torch.equal(first["local_min"], second["local_min"])
    for key, union in (("min", torch.minimum), ("max", torch.maximum)):
        assert torch.equal(first[key], second[key])
        assert torch.equal(first[key], union(first[f"local_{key}"], second[f"local_{key}"]))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_scales_are_identical_and_those_of_the_union(ranks: Results, name: str) -> None:
    first, second = (rank["quantizers"][name] for rank in ranks)
    whole = QuantizeScheme(per_channel=True) if name == "per_channel" else QuantizeScheme(signed=False, symmetric=False)
    scale, zero_point = choose_qparams(first["min"], first["max"], whole)
    assert torch.equal(first["scale"], second["scale"])
    assert torch.equal(first["scale"], scale)
    assert torch.equal(first["zero_point"], zero_point)
    assert torch.equal(second["zero_point"], zero_point)


def test_min_max_is_that_of_all_data_though_ranks_had_different_numbers_of_batches(ranks: Results) -> None:
    batches = [batch for rank in range(2) for batch in batches_of(rank)]
    assert len(batches_of(0)) != len(batches_of(1))
    everything = torch.cat(batches)
    assert ranks[0]["quantizers"]["MinMax"]["min"] == everything.min()
    assert ranks[0]["quantizers"]["MinMax"]["max"] == everything.max()
    assert torch.equal(ranks[0]["quantizers"]["per_channel"]["max"], everything.amax((0, 2, 3)))


def test_nan_on_one_rank_is_an_error_on_both(ranks: Results) -> None:
    messages = [rank["nan"]["raised"] for rank in ranks]
    assert "NaN" in messages[0]
    assert "NaN" in messages[1]
