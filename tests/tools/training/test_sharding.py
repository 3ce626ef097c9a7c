"""DDP and FSDP2 on two and four processes train as one process does on all their data."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import fxqat
from fxqat.errors import ConfigError
from fxqat.tools.training.sharding import shard
from tests.fresh_process import run_fresh
from tests.tools.training.sharding_worker import (
    SAVED,
    STEPS,
    WHOLE,
    WORLDS,
    calibrate,
    data,
    network,
    optimizer_of,
    prepared,
    train,
)

pytestmark = pytest.mark.xdist_group("sharding")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the processes wrote."""
    path = tmp_path_factory.mktemp("sharding")
    done = run_fresh(["-m", "tests.tools.training.sharding_worker", path])
    assert done.returncode == 0, done.stderr[-3000:]
    return path


@pytest.fixture(scope="module")
def alone() -> tuple[nn.Module, list[float]]:
    """The model trained by one process on the data of all ranks, and its losses."""
    gm = calibrate(prepared())
    return gm, train(gm, optimizer_of(gm), range(STEPS))


def assert_same_training(path: Path, losses: list[float], alone: tuple[nn.Module, list[float]]) -> None:
    assert losses == pytest.approx(alone[1][-len(losses) :], abs=1e-5)
    gm = prepared()
    fxqat.load_checkpoint(gm, path)
    for name, expected in alone[0].state_dict().items():
        torch.testing.assert_close(gm.state_dict()[name], expected, rtol=1e-5, atol=1e-5, msg=name)


def reported(folder: Path, world: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{world}_rank{rank}.pth") for rank in range(world)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_ranks_train_as_one_process_on_all_data(
    folder: Path, alone: tuple[nn.Module, list[float]], way: str, world: int
) -> None:
    assert alone[1][-1] < alone[1][0]
    assert_same_training(folder / f"{way}{world}.pth", reported(folder, world)[0][way], alone)


@pytest.mark.parametrize("world", WORLDS)
def test_weights_rounded_once_for_all_micro_batches(folder: Path, world: int) -> None:
    ranks = reported(folder, world)
    for rank in ranks:
        for ours, theirs, first in zip(rank["once"], rank["each time"], ranks[0]["once"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            assert torch.equal(ours, first)  # gradients were averaged
        assert rank["flattened"].startswith("ConfigError: round_weights_once: the model is sharded")
        for option in ("find_unused_parameters", "static_graph"):
            assert rank[option].startswith("ConfigError: round_weights_once: DDP with find_unused_parameters")


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_holds_its_share_of_the_weights_and_all_scales(folder: Path, world: int) -> None:
    gm = prepared()
    scales = sum(p.numel() for name, p in gm.named_parameters() if "fake_quant" in name)
    weights = sum(p.numel() for p in gm.parameters()) - scales
    held = [rank["held"] for rank in reported(folder, world)]
    assert sum(held) == weights + world * scales
    assert max(held) < 1.2 * weights / world + scales  # 5 rows of the last layer are not divisible


def test_a_checkpoint_of_four_ranks_resumes_on_two(folder: Path, alone: tuple[nn.Module, list[float]]) -> None:
    losses = reported(folder, 2)[0]["resumed"]
    assert losses == pytest.approx(alone[1][SAVED:], abs=1e-5)


def test_a_checkpoint_of_four_ranks_resumes_on_one(folder: Path, alone: tuple[nn.Module, list[float]]) -> None:
    gm = prepared()
    extra = fxqat.load_checkpoint(gm, folder / f"fsdp4_{SAVED}.pth")
    optimizer = optimizer_of(gm)
    set_optimizer_state_dict(gm, optimizer, extra["optimizer"], options=WHOLE)
    assert train(gm, optimizer, range(SAVED, STEPS)) == pytest.approx(alone[1][SAVED:], abs=1e-5)


def test_a_checkpoint_of_a_sharded_model_is_exported_and_loads_into_the_float_model(folder: Path) -> None:
    gm, model = prepared(), network()
    fxqat.load_checkpoint(gm, folder / "fsdp4.pth")
    report = fxqat.convert_export(gm, (data()[0][0],), folder / "whole.onnx")
    assert report.certificate is not None
    assert report.certificate.passed
    model.load_state_dict(torch.load(folder / "fsdp4.pth", weights_only=True)["state_dict"])
    assert torch.equal(model[0].weight, gm.get_parameter("0.weight"))


def test_a_sharded_model_is_refused_by_the_export_and_nothing_is_written(folder: Path) -> None:
    result = reported(folder, 2)[0]
    assert result["export"].startswith("ExportError: the model is sharded")
    assert result["json"].startswith("CheckpointError: the model is sharded")
    assert result["accumulation"].startswith("ConfigError: round_weights_once: the model is sharded")
    assert not [path for name in ("model.onnx", "c.pth", "c.json") if (path := folder / name).exists()]


def test_errors_before_anything_is_sharded() -> None:
    gm = prepared()
    with pytest.raises(ConfigError, match="prepare_by_platform"):
        shard(network())
    with pytest.raises(ConfigError, match="inside a AveragedModel"):
        shard(torch.optim.swa_utils.AveragedModel(gm))
    with pytest.raises(ConfigError, match="no process group"):
        shard(gm)
