"""Two processes under gloo: one range, one model, one file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fxqat
from tests.distributed_worker import CASES, CONFIG, SHARE, WORLD, calibrate, data, snapshot, targets, train_step
from tests.export_models import build, deployed_outputs, run_file

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(params=CASES)
def run(request: pytest.FixtureRequest, ranks: Path) -> tuple[str, Path, list[Any]]:
    """The backend, the folder of its files, and what each rank reports."""
    here = ranks / request.param
    return request.param, here, [torch.load(here / f"rank{rank}.pth") for rank in range(WORLD)]


def qparams(state: dict[str, Tensor]) -> dict[str, Tensor]:
    endings = (".scale", ".zero_point", "unit_scale", "calibrated_zero_point", ".min_val", ".max_val")
    return {key: value for key, value in state.items() if key.endswith(endings)}


def alone(backend: str) -> torch.nn.Module:
    """The same model calibrated in this process, on the batches of all ranks."""
    gm = fxqat.prepare_by_platform(build("residual"), backend, CONFIG)
    calibrate(fxqat, gm, [batch for rank in range(WORLD) for batch in data(rank, WORLD)], False)
    return gm


def test_ranks_end_calibration_with_the_same_ranges(run: tuple[str, Path, list[Any]]) -> None:
    first, second = (qparams(result["calibrated"]) for result in run[2])
    assert list(first) == list(second)
    assert len(first) == 4 * 9
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


def test_the_ranges_are_those_of_all_data(run: tuple[str, Path, list[Any]]) -> None:
    """The extremes are in the first batch of the last rank: neither its neighbour nor its second batch has them."""
    expected = qparams(snapshot(alone(run[0])))
    widest = max(float(batch.abs().max()) for rank in range(WORLD) for batch in data(rank, WORLD))
    low, high = expected["x_act_fake_quant.observer.min_val"], expected["x_act_fake_quant.observer.max_val"]
    assert max(-float(low), float(high)) == widest
    for result in run[2]:
        found = qparams(result["calibrated"])
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert torch.equal(found[key], value), key


def test_a_training_step_keeps_the_ranks_together(run: tuple[str, Path, list[Any]]) -> None:
    before, first, second = run[2][0]["calibrated"], run[2][0]["trained"], run[2][1]["trained"]
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
    moved = [key for key, value in first.items() if not torch.equal(value, before[key])]
    assert {
        "conv.weight",
        "head.bias",
        "conv.weight_fake_quant.relative_scale",
        "conv_act_fake_quant.relative_scale",
    } <= set(moved)
    assert run[2][0]["loss"] != run[2][1]["loss"]


def test_the_step_is_that_of_the_whole_batch(run: tuple[str, Path, list[Any]]) -> None:
    gm = fxqat.prepare_by_platform(build("residual"), run[0], CONFIG)
    gm.load_state_dict(run[2][0]["calibrated"], strict=False)
    fxqat.enable_quantization(gm)
    inputs = torch.cat([data(rank, WORLD)[1] for rank in range(WORLD)])
    loss = train_step(gm, inputs, torch.cat([targets(rank) for rank in range(WORLD)]))
    assert len(inputs) == WORLD * SHARE
    assert np.mean([result["loss"] for result in run[2]]) == pytest.approx(loss, rel=1e-5)
    for key, value in snapshot(gm).items():
        assert torch.allclose(value, run[2][0]["trained"][key], rtol=1e-4, atol=1e-6), key


def test_the_checkpoint_has_no_prefix_and_loads_everywhere(run: tuple[str, Path, list[Any]]) -> None:
    content = torch.load(run[1] / "ddp.pth", weights_only=True)
    keys = [*content["state_dict"], *content["qat_state_dict"]]
    assert not [key for key in keys if key.startswith("module.")]
    model = build("residual", seed=4)
    assert set(model.state_dict()) == set(content["state_dict"])
    assert model.load_state_dict(content["state_dict"], strict=True)
    fresh = fxqat.prepare_by_platform(build("residual", seed=4), run[0], CONFIG)
    assert fxqat.load_checkpoint(fresh, run[1] / "ddp.pth") == {"epoch": 1} == run[2][1]["extra"]
    for key, value in snapshot(fresh).items():
        assert torch.equal(value, run[2][0]["trained"][key]), key
        assert torch.equal(value, run[2][1]["loaded"][key]), key


def test_a_wrapped_model_is_exported(run: tuple[str, Path, list[Any]]) -> None:
    gm = fxqat.prepare_by_platform(build("residual"), run[0], CONFIG)
    fxqat.load_checkpoint(gm, run[1] / "ddp.pth")
    inputs = (data(0, WORLD)[1],)
    fxqat.convert_export(gm, inputs, run[1] / "here.onnx", run[1] / "here.json")
    assert (run[1] / "here.onnx").read_bytes() == (run[1] / "model.onnx").read_bytes()
    assert (run[1] / "here.json").read_bytes() == (run[1] / "model.json").read_bytes()
    assert (run[1] / "here.json").read_bytes() == (run[1] / "ddp.json").read_bytes()
    assert np.array_equal(run_file(run[1] / "model.onnx", inputs)[0], deployed_outputs(gm, inputs)[0])
