"""Checkpoints: the float model loads them, and QAT resumes from them bit by bit."""

import copy
import io
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils import prune

from fxqat import (
    convert_export,
    disable_all,
    enable_calibration,
    enable_quantization,
    load_checkpoint,
    load_quant_params,
    prepare_by_platform,
    save_checkpoint,
)
from fxqat.checkpoint import FORMAT, float_state_dict
from fxqat.errors import CalibrationError, CheckpointError, ExportError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.fake_quantize.learnable import LearnableFakeQuantize
from fxqat.quantization.graph_module import QuantGraphModule
from tests.export_models import MODELS, build, calibrate, deployed_outputs, flat, inputs_of, prepared
from tests.fresh_process import FreshProcess

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}


def train_step(gm: nn.Module, optimizer: torch.optim.Optimizer, inputs: tuple[Tensor, ...]) -> float:
    """One step on a loss that reads every output; the loss before the step."""
    gm.train()
    torch.manual_seed(3)  # dropout
    outputs = gm(*inputs)
    loss = sum(((tensor - 0.5) ** 2).mean() for tensor in tensors_of(outputs))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def tensors_of(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    return [t for item in (outputs.values() if isinstance(outputs, dict) else outputs) for t in tensors_of(item)]


def same_state(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models have the same state bit by bit, switches included."""
    first, second = a.state_dict(), b.state_dict()
    assert list(first) == list(second)
    return all(torch.equal(v, second[k]) if isinstance(v, Tensor) else v == second[k] for k, v in first.items())


def trained(name: str, optimizer: str = "SGD", steps: int = 1) -> tuple[QuantGraphModule, torch.optim.Optimizer]:
    """A prepared model after some training steps, which change every parameter."""
    gm = prepared(name)
    made = OPTIMIZERS[optimizer](gm.parameters())
    for seed in range(steps):
        train_step(gm, made, inputs_of(name, 4, seed))
    return gm, made


# The float model's reading


@pytest.mark.parametrize("name", MODELS)
def test_the_float_model_loads_it_and_computes_what_was_trained(name: str, tmp_path: Path) -> None:
    gm, _ = trained(name)
    save_checkpoint(gm, tmp_path / "c.pth")
    state = torch.load(tmp_path / "c.pth", weights_only=True)["state_dict"]
    model, start = build(name, seed=7), build(name)
    assert set(state) == set(model.state_dict())
    assert model.load_state_dict(state, strict=True)
    disable_all(gm)
    gm.eval()
    inputs = inputs_of(name, 3, seed=5)
    with torch.no_grad():
        pairs = list(zip(flat(model(*inputs)), flat(gm(*inputs)), strict=True))
        before = flat(start(*inputs))
    for a, b in pairs:
        assert np.allclose(a, b, rtol=1e-4, atol=1e-5)
    assert any(not np.array_equal(a, b) for (a, _), b in zip(pairs, before, strict=True))


def test_tied_and_unread_tensors_are_in_it(tmp_path: Path) -> None:
    gm, _ = trained("several")
    save_checkpoint(gm, tmp_path / "c.pth")
    state = torch.load(tmp_path / "c.pth", weights_only=True)["state_dict"]
    start = build("several").state_dict()
    assert torch.equal(state["first.weight"], state["second.weight"])
    assert not torch.equal(state["first.weight"], start["first.weight"])
    assert torch.equal(state["auxiliary.weight"], start["auxiliary.weight"])
    model = build("several", seed=7)
    model.load_state_dict(state, strict=True)
    assert model.first.weight is model.second.weight


def test_functional_and_unread_parameters_are_in_it(tmp_path: Path) -> None:
    gm, _ = trained("branches")
    save_checkpoint(gm, tmp_path / "c.pth")
    state = torch.load(tmp_path / "c.pth", weights_only=True)["state_dict"]
    start = build("branches").state_dict()
    assert torch.equal(state["unread"], start["unread"])
    assert not torch.equal(state["weight"], start["weight"])
    assert not torch.equal(state["bias"], start["bias"])


@pytest.mark.parametrize("name", MODELS)
def test_before_training_the_weights_are_the_given_ones(name: str) -> None:
    model = build(name)
    state = float_state_dict(prepare_by_platform(model, "TSQAT"))
    assert set(state) == set(model.state_dict())
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert not any(tensor.requires_grad for tensor in state.values())


def test_a_compiled_model_is_saved_as_the_model_inside(tmp_path: Path) -> None:
    gm, _ = trained("residual")
    save_checkpoint(torch.compile(gm, backend="eager"), tmp_path / "compiled.pth")
    save_checkpoint(gm, tmp_path / "plain.pth")
    compiled, plain = (torch.load(tmp_path / f"{kind}.pth", weights_only=True) for kind in ("compiled", "plain"))
    assert list(compiled["qat_state_dict"]) == list(plain["qat_state_dict"]) == list(gm.state_dict())
    assert all(torch.equal(compiled["state_dict"][key], value) for key, value in plain["state_dict"].items())


def test_the_weights_are_in_the_file_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval()
    gm = calibrate(prepare_by_platform(model, "TSQAT"), (torch.randn(4, 256),))
    save_checkpoint(gm, tmp_path / "c.pth")
    torch.save(model.state_dict(), tmp_path / "float.pth")
    sizes = [(tmp_path / name).stat().st_size for name in ("c.pth", "float.pth")]
    assert sizes[0] < 1.2 * sizes[1]
    assert sizes[0] > sizes[1]


# Resuming


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["residual", "mobile", "several"])
def test_the_next_step_is_bit_identical(name: str, optimizer: str, tmp_path: Path) -> None:
    gm, made = trained(name, optimizer, steps=2)
    extra = {"epoch": 2, "optimizer": made.state_dict()}
    save_checkpoint(gm, tmp_path / "c.pth", extra=extra)
    fresh = prepare_by_platform(build(name, seed=9), "TSQAT")
    tensors = [id(tensor) for tensor in fresh.parameters()]
    resumed = OPTIMIZERS[optimizer](fresh.parameters())
    loaded = load_checkpoint(fresh, tmp_path / "c.pth")
    assert loaded["epoch"] == 2
    resumed.load_state_dict(loaded["optimizer"])
    assert same_state(gm, fresh)
    assert [id(tensor) for tensor in fresh.parameters()] == tensors  # an optimizer made before still holds them
    for seed in (10, 11):
        losses = [train_step(*pair, inputs_of(name, 4, seed)) for pair in ((gm, made), (fresh, resumed))]
        assert losses[0] == losses[1]
        assert same_state(gm, fresh)


@pytest.mark.parametrize("batches", [0, 1, 2], ids=["before calibration", "amid calibration", "after calibration"])
def test_calibration_resumes_too(batches: int, tmp_path: Path) -> None:
    data = [inputs_of("residual", 4, seed) for seed in range(3)]
    gm = prepare_by_platform(build("residual"), "Experimental").eval()
    if batches:
        enable_calibration(gm)
    with torch.no_grad():
        for batch in data[:batches]:
            gm(*batch)
    save_checkpoint(gm, tmp_path / "c.pth")
    fresh = prepare_by_platform(build("residual", seed=9), "Experimental").eval()
    load_checkpoint(fresh, tmp_path / "c.pth")
    assert same_state(gm, fresh)
    for model in (gm, fresh):
        enable_calibration(model)
        with torch.no_grad():
            for batch in data[batches:]:
                model(*batch)
        enable_quantization(model)
    assert same_state(gm, fresh)
    losses = [train_step(m, OPTIMIZERS["SGD"](m.parameters()), data[0]) for m in (gm, fresh)]
    assert losses[0] == losses[1]
    assert same_state(gm, fresh)


@pytest.mark.parametrize("mode", ["freeze", 1])
def test_the_count_of_frozen_batch_norm_steps_resumes(mode: str | int, tmp_path: Path) -> None:
    config = {"bn_mode": mode}
    gm = calibrate(prepare_by_platform(build("residual"), "TSQAT", config), inputs_of("residual"))
    made = OPTIMIZERS["SGD"](gm.parameters())
    for seed in range(2):
        train_step(gm, made, inputs_of("residual", 4, seed))
    save_checkpoint(gm, tmp_path / "c.pth", extra={"optimizer": made.state_dict()})
    fresh = prepare_by_platform(build("residual", seed=9), "TSQAT", config)
    resumed = OPTIMIZERS["SGD"](fresh.parameters())
    resumed.load_state_dict(load_checkpoint(fresh, tmp_path / "c.pth")["optimizer"])
    statistics = fresh.conv.bn.running_mean.clone()
    for model, optimizer in ((gm, made), (fresh, resumed)):
        train_step(model, optimizer, inputs_of("residual", 4, 5))
    assert same_state(gm, fresh)
    assert torch.equal(fresh.conv.bn.running_mean, statistics)


SCRIPT = """
import sys, torch
from fxqat import convert_export, load_checkpoint, prepare_by_platform
from tests.export_models import build, inputs_of
from tests.test_checkpoint import OPTIMIZERS, train_step
gm = prepare_by_platform(build("residual", seed=9), "TSQAT")
optimizer = OPTIMIZERS["Adam"](gm.parameters())
optimizer.load_state_dict(load_checkpoint(gm, sys.argv[1] + "/c.pth")["optimizer"])
convert_export(gm, inputs_of("residual"), sys.argv[1] + "/there.onnx", sys.argv[1] + "/there.json", verify=False)
loss = train_step(gm, optimizer, inputs_of("residual", 4, 10))
torch.save({"loss": loss, "state": gm.state_dict()}, sys.argv[1] + "/result.pth")
"""


def test_the_next_step_and_the_export_are_the_same_in_another_process(tmp_path: Path) -> None:
    gm, made = trained("residual", "Adam", steps=2)
    save_checkpoint(gm, tmp_path / "c.pth", extra={"optimizer": made.state_dict()})
    threads = f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"  # they decide the order of sums
    there = FreshProcess(["-c", threads + SCRIPT, tmp_path])  # runs beside the export here
    convert_export(gm, inputs_of("residual"), tmp_path / "here.onnx", tmp_path / "here.json", verify=False)
    done = there.wait()
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "here.onnx").read_bytes() == (tmp_path / "there.onnx").read_bytes()
    assert (tmp_path / "here.json").read_bytes() == (tmp_path / "there.json").read_bytes()
    loss = train_step(gm, made, inputs_of("residual", 4, 10))
    result = torch.load(tmp_path / "result.pth", weights_only=True)
    assert result["loss"] == loss
    for key, value in gm.state_dict().items():
        assert torch.equal(value, result["state"][key]) if isinstance(value, Tensor) else value == result["state"][key]


def test_saving_does_not_change_the_model(tmp_path: Path) -> None:
    gm, _ = trained("residual")
    gm.train()
    options = {"file_path_onnx": tmp_path / "c.onnx", "example_inputs": inputs_of("residual")}
    twin, random = copy.deepcopy(gm), torch.get_rng_state()
    save_checkpoint(gm, tmp_path / "c.pth", tmp_path / "c.json", **options)
    assert same_state(gm, twin)
    assert gm.training
    assert torch.equal(random, torch.get_rng_state())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.json", "c.onnx", "c.parity.json", "c.pth"]


def test_what_else_is_saved_comes_back(tmp_path: Path) -> None:
    gm = prepared("residual")
    extra = {
        "epoch": 3,
        "best": 0.91,
        "names": ["a", "b"],
        "tensor": torch.arange(3.0),
        "none": None,
        "nested": {1: (2,)},
    }
    save_checkpoint(gm, tmp_path / "c.pth", extra=extra)
    loaded = load_checkpoint(gm, tmp_path / "c.pth")
    assert {key: loaded[key] for key in extra if key != "tensor"} == {k: v for k, v in extra.items() if k != "tensor"}
    assert torch.equal(loaded["tensor"], extra["tensor"])
    save_checkpoint(gm, tmp_path / "c.pth")
    assert load_checkpoint(gm, tmp_path / "c.pth") == {}


def as_saved_at_first(content: dict[str, Any], gm: nn.Module) -> dict[str, Any]:
    """The content of a checkpoint in the form of the first version: switches as dicts, schemes as text."""
    state = dict(content["qat_state_dict"])
    quants = {name: module for name, module in gm.named_modules() if isinstance(module, FakeQuantizeBase)}
    for name, quant in quants.items():
        switches = {"observer_enabled": quant.observer_enabled, "fake_quant_enabled": quant.fake_quant_enabled}
        state[f"{name}._extra_state"] = switches
        state.pop(f"{name}.magnitude", None)
        if isinstance(quant, LearnableFakeQuantize):
            state |= {f"{name}.scale": quant.scale.detach(), f"{name}.zero_point": quant.zero_point.detach()}
            for key in ("relative_scale", "unit_scale", "calibrated_zero_point", "shift"):
                state.pop(f"{name}.{key}", None)
    return {
        "format": "fxqat.checkpoint.1",
        "backend": content["backend"],
        "state_dict": content["state_dict"],
        "schemes": {name: repr(quant.scheme) for name, quant in quants.items()},
        "bias_corrected": False,
        "qat_state_dict": state,
        "extra": content["extra"],
    }


def change_file(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the content of a checkpoint; a dict that the change returns replaces it."""
    content = torch.load(path, weights_only=True)
    changed = change(content)
    torch.save(changed if isinstance(changed, dict) else content, path)


def test_a_checkpoint_of_the_first_version_is_read(tmp_path: Path) -> None:
    gm, _ = trained("residual")
    save_checkpoint(gm, tmp_path / "c.pth", extra={"epoch": 7})
    change_file(tmp_path / "c.pth", lambda content: as_saved_at_first(content, gm))
    fresh = prepare_by_platform(build("residual"), "TSQAT")
    assert load_checkpoint(fresh, tmp_path / "c.pth") == {"epoch": 7}
    own = gm.state_dict()
    assert all(
        torch.equal(v, own[k]) for k, v in fresh.state_dict().items() if k.endswith(("weight", "max_val", "state"))
    )
    quants = ([q for q in m.modules() if isinstance(q, FakeQuantizeBase)] for m in (gm, fresh))
    pairs = zip(*quants, strict=True)
    assert all(torch.equal(a, b) for one, two in pairs for a, b in zip(one.qparams(), two.qparams(), strict=True))
    other = prepare_by_platform(build("residual"), "TSQAT", {"extra_qconfig_dict": {"a_qscheme": {"signed": False}}})
    refused(other, tmp_path / "c.pth", "other schemes, of .*act_fake_quant")


@pytest.mark.parametrize(
    "change",
    [
        lambda scheme: scheme.pop("signed"),
        lambda scheme: scheme.pop("fixed_range"),
        lambda scheme: scheme.update(of_a_later_version=3),
    ],
)
def test_a_scheme_is_compared_in_the_fields_that_both_versions_know(
    change: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    gm = prepared("residual")
    save_checkpoint(gm, tmp_path / "c.pth")
    change_file(tmp_path / "c.pth", lambda content: [change(scheme) for scheme in content["schemes"].values()])
    fresh = prepare_by_platform(build("residual"), "TSQAT")
    load_checkpoint(fresh, tmp_path / "c.pth")
    assert same_state(gm, fresh)
    coarse = {"extra_qconfig_dict": {"w_qscheme": {"scale_bits": 8}}}
    save_checkpoint(prepare_by_platform(build("residual"), "TSQAT", coarse), tmp_path / "coarse.pth")
    refused(fresh, tmp_path / "coarse.pth", "other schemes, of .*weight_fake_quant")


# What does not fit


def test_a_model_that_was_pruned_after_prepare_is_refused_by_name(tmp_path: Path) -> None:
    gm = calibrate(prepare_by_platform(nn.Sequential(nn.Linear(3, 2)), "TSQAT"), (torch.randn(4, 3),))
    prune.l1_unstructured(gm.get_submodule("0"), "weight", 0.5)
    with pytest.raises(CheckpointError, match=r"no longer has 0\.weight: .*prune.remove"):
        save_checkpoint(gm, tmp_path / "model.pth")
    prune.remove(gm.get_submodule("0"), "weight")
    save_checkpoint(gm, tmp_path / "model.pth")
    assert torch.load(tmp_path / "model.pth", weights_only=True)["state_dict"]["0.weight"].eq(0).sum() == 3


def test_what_cannot_be_pickled_is_refused_as_extra(tmp_path: Path) -> None:
    gm = calibrate(prepare_by_platform(nn.Sequential(nn.Linear(3, 2)), "TSQAT"), (torch.randn(4, 3),))
    with pytest.raises(CheckpointError, match="extra may hold tensors and plain Python values only"):
        save_checkpoint(gm, tmp_path / "model.pth", extra={"schedule": lambda step: step})
    assert not list(tmp_path.iterdir())


def refused(gm: QuantGraphModule, path: Path, message: str) -> str:
    """Check that loading raises and does not change the model; the message."""
    twin = copy.deepcopy(gm)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(gm, path)
    assert same_state(gm, twin)
    return str(caught.value)


@pytest.mark.parametrize("backend", ["Experimental", "ONNXRuntime", "TensorRT"])
def test_another_backend_is_refused(backend: str, tmp_path: Path) -> None:
    save_checkpoint(prepared("residual"), tmp_path / "c.pth")
    message = refused(prepare_by_platform(build("residual"), backend), tmp_path / "c.pth", "backend TSQAT")
    assert backend in message
    assert "c.pth" in message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bn_mode": 3}, "missing .*bn_steps"),
        ({"overrides": [{"match": {"module": "head"}, "weight": None}]}, "unexpected .*head"),
        ({"extra_qconfig_dict": {"w_qscheme": {"per_channel": False}}}, "shapes .*conv.weight_fake_quant"),
        ({"extra_qconfig_dict": {"w_qscheme": {"bit": 4}}}, "conv.weight_fake_quant|int4|bit"),
        ({"extra_qconfig_dict": {"a_qscheme": {"signed": False}}}, "x_act_fake_quant|uint8|signed"),
    ],
    ids=["bn_mode", "left float", "per tensor", "4 bit", "unsigned"],
)
def test_another_configuration_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_checkpoint(prepared("residual"), tmp_path / "c.pth")
    text = refused(prepare_by_platform(build("residual"), "TSQAT", config), tmp_path / "c.pth", message)
    assert "configuration" in text


def with_methods(weight: str, **arguments: Any) -> QuantGraphModule:
    """A prepared linear layer whose weight has this fake-quant."""
    torch.manual_seed(0)
    config = {"extra_qconfig_dict": {"w_fakequantize": weight} | arguments}
    return prepare_by_platform(nn.Sequential(nn.Linear(4, 3)).eval(), "TSQAT", config)


PERCENTILE = {"w_observer": "Percentile", "w_observer_extra_args": {"percentile": 99.0}}


@pytest.mark.parametrize(
    ("saved", "other", "message"),
    [
        (("Fixed", {}), ("DoReFa", {}), "class 'FixedFakeQuantize' instead of 'DoReFaFakeQuantize'"),
        (("Learnable", {}), ("EWGS", {}), "class 'LearnableFakeQuantize' instead of 'EWGSFakeQuantize'"),
        (("EWGS", {}), ("EWGS", {"w_fakeq_params": {"delta": 0.5}}), "delta 0.001 instead of 0.5"),
        (("Fixed", {}), ("Fixed", {"w_observer": "MSE"}), "observer: class 'MinMaxObserver' instead of 'MSEObserver'"),
        (("Fixed", {"w_observer": "Percentile"}), ("Fixed", PERCENTILE), "percentile 99.99 instead of 99.0"),
    ],
    ids=["same state", "learned", "argument", "observer", "argument of the observer"],
)
def test_another_fake_quant_or_observer_is_refused(
    saved: tuple[str, dict[str, Any]], other: tuple[str, dict[str, Any]], message: str, tmp_path: Path
) -> None:
    save_checkpoint(with_methods(saved[0], **saved[1]), tmp_path / "c.pth")
    text = refused(with_methods(other[0], **other[1]), tmp_path / "c.pth", f"0.weight_fake_quant, .*{message}")
    assert "configuration" in text
    again = with_methods(saved[0], **saved[1])
    assert load_checkpoint(again, tmp_path / "c.pth") == {}
    change_file(tmp_path / "c.pth", lambda content: [content.pop("methods")])
    assert load_checkpoint(again, tmp_path / "c.pth") == {}  # a file of the first version does not say


@pytest.mark.parametrize("methods", [3, {"x_act_fake_quant": 3}, {"x_act_fake_quant": {}}])
def test_damaged_methods_are_refused(methods: Any, tmp_path: Path) -> None:
    gm = prepared("residual")
    save_checkpoint(gm, tmp_path / "c.pth")
    change_file(tmp_path / "c.pth", lambda content: content.update(methods=methods))
    assert "damaged" in refused(gm, tmp_path / "c.pth", "Save it again")


@pytest.mark.parametrize("state", [{}, {"observer_enabled": True}, torch.zeros(5), 3, None], ids=str)
def test_a_damaged_extra_state_is_refused_before_anything_changes(state: Any, tmp_path: Path) -> None:
    gm, _ = trained("residual")
    save_checkpoint(gm, tmp_path / "c.pth")
    change_file(
        tmp_path / "c.pth",
        lambda content: content["qat_state_dict"].update({"head_act_fake_quant._extra_state": state}),
    )
    message = refused(prepared("residual"), tmp_path / "c.pth", "head_act_fake_quant._extra_state")
    assert "must be a tensor" in message


class Counting(nn.Module):
    """A module of the user's with an extra state that it checks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return x * 2

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Any) -> None:
        if int(state) < 0:
            raise ValueError("negative calls")
        self.calls = int(state)


def test_a_module_that_refuses_its_extra_state_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), Counting(), nn.Linear(3, 2))
    config = {"leaf_module": [Counting]}
    gm, other = (prepare_by_platform(model, "TSQAT", config) for _ in range(2))
    with torch.no_grad():
        gm.get_submodule("2").weight.mul_(2)
    gm.get_submodule("1").calls = 5
    save_checkpoint(gm, tmp_path / "c.pth")
    assert load_checkpoint(copy.deepcopy(other), tmp_path / "c.pth") == {}
    change_file(
        tmp_path / "c.pth", lambda content: content["qat_state_dict"].update({"1._extra_state": torch.tensor(-1)})
    )
    refused(other, tmp_path / "c.pth", "ValueError: negative calls")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("conv.weight_fake_quant.unit_scale", math.nan, "NaN or infinite"),
        ("conv.weight_fake_quant.relative_scale", math.inf, "NaN or infinite"),
        ("conv.weight_fake_quant.unit_scale", 0.0, "zero or negative"),
        ("conv.weight_fake_quant.relative_scale", -0.1, "zero or negative"),
        ("x_act_fake_quant.scale", -0.1, "zero or negative"),
        ("x_act_fake_quant.zero_point", math.nan, "NaN or infinite"),
        ("head_act_fake_quant.observer.max_val", math.nan, "NaN"),
    ],
)
def test_values_that_are_not_valid_are_refused_by_name(name: str, value: float, message: str, tmp_path: Path) -> None:
    gm = prepared("residual")
    save_checkpoint(gm, tmp_path / "c.pth")
    change_file(tmp_path / "c.pth", lambda content: content["qat_state_dict"][name].fill_(value))
    text = refused(gm, tmp_path / "c.pth", f"not valid: {name} .{message}.")
    assert text.count("fake_quant") == 1


def test_a_learned_scale_that_training_made_negative_is_loaded(tmp_path: Path) -> None:
    """It counts by its magnitude: refusing it would end a training that can go on."""
    gm, fresh = prepared("residual"), prepare_by_platform(build("residual"), "TSQAT")
    with torch.no_grad():
        gm.conv.weight_fake_quant.relative_scale[0] *= -1.0
    save_checkpoint(gm, tmp_path / "c.pth")
    load_checkpoint(fresh, tmp_path / "c.pth")
    assert same_state(gm, fresh)
    change_file(tmp_path / "c.pth", lambda content: as_saved_at_first(content, gm))
    assert load_checkpoint(fresh, tmp_path / "c.pth") == {}


def test_every_flipped_byte_is_refused(tmp_path: Path) -> None:
    gm = with_methods("Learnable")
    save_checkpoint(gm, tmp_path / "c.pth", extra={"epoch": 3, "momentum": torch.ones(5)})
    whole = (tmp_path / "c.pth").read_bytes()
    positions = {*range(0, len(whole), 97), *range(len(whole) - 110, len(whole), 7)}
    twin = copy.deepcopy(gm)
    for position in sorted(positions):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        (tmp_path / "c.pth").write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"c\.pth"):
            load_checkpoint(gm, tmp_path / "c.pth")
    assert same_state(gm, twin)
    (tmp_path / "c.pth").write_bytes(whole)
    assert load_checkpoint(gm, tmp_path / "c.pth")["epoch"] == 3


def test_a_file_written_again_by_torch_is_read(tmp_path: Path) -> None:
    gm = prepared("residual")
    save_checkpoint(gm, tmp_path / "c.pth", extra={"epoch": 3})
    change_file(tmp_path / "c.pth", lambda content: content.update(extra={}))
    assert load_checkpoint(gm, tmp_path / "c.pth") == {}
    assert set(torch.load(tmp_path / "c.pth", weights_only=True)["state_dict"]) == set(build("residual").state_dict())


def test_another_model_is_refused(tmp_path: Path) -> None:
    save_checkpoint(prepared("mobile"), tmp_path / "c.pth")
    message = refused(prepared("residual"), tmp_path / "c.pth", "does not fit the model: missing .* unexpected")
    assert "Prepare the model with the backend and configuration" in message
    wider = nn.Sequential(nn.Linear(8, 9)).eval()
    save_checkpoint(prepare_by_platform(wider, "TSQAT"), tmp_path / "c.pth")
    narrow = prepare_by_platform(nn.Sequential(nn.Linear(8, 5)).eval(), "TSQAT")
    assert "(9, 8) instead of (5, 8)" in refused(narrow, tmp_path / "c.pth", "shapes")


@pytest.mark.parametrize("what", ["missing", "folder", "garbage", "cut short", "empty"])
def test_a_file_that_cannot_be_read_is_refused(what: str, tmp_path: Path) -> None:
    gm, path = prepared("residual"), tmp_path / "c.pth"
    if what == "folder":
        path.mkdir()
    elif what in ("garbage", "empty"):
        path.write_bytes(b"no checkpoint" if what == "garbage" else b"")
    elif what == "cut short":
        save_checkpoint(gm, path)
        path.write_bytes(path.read_bytes()[:-2000])
    message = refused(gm, path, "cannot read a checkpoint")
    assert str(path) in message


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {"state_dict": {}},
        {"format": "fxqat.checkpoint.0"},
        {"format": FORMAT},
        {"format": FORMAT, "backend": "TSQAT"},
        {"format": FORMAT, "backend": "TSQAT", "qat_state_dict": {}},
        {"format": FORMAT, "backend": "TSQAT", "qat_state_dict": [], "extra": {}},
    ],
    ids=["list", "a state dict", "another format", "format only", "no state", "no extra", "state is a list"],
)
def test_a_file_of_something_else_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "c.pth")
    message = refused(prepared("residual"), tmp_path / "c.pth", r"c\.pth")
    assert len(message) < 1000


@pytest.mark.parametrize("load", [load_checkpoint, load_quant_params])
@pytest.mark.parametrize("given", [io.BytesIO(b"content"), {"state_dict": {}}])
def test_what_is_no_path_is_refused(load: Callable[..., Any], given: Any) -> None:
    with pytest.raises(CheckpointError, match=f"must be the path of a file, got {type(given).__name__}:"):
        load(prepared("residual", "TSQAT"), given)


def test_a_value_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    gm = prepared("residual")
    save_checkpoint(gm, tmp_path / "c.pth")
    content = torch.load(tmp_path / "c.pth", weights_only=True)
    content["qat_state_dict"]["conv.weight"] = 3
    torch.save(content, tmp_path / "c.pth")
    message = refused(gm, tmp_path / "c.pth", r"conv\.weight")
    assert "fit" in message


@pytest.mark.parametrize("function", [save_checkpoint, load_checkpoint, load_quant_params])
def test_a_model_that_was_not_prepared_is_refused(function: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"prepare_by_platform.*Residual"):
        function(build("residual"), tmp_path / "c.pth")
    assert list(tmp_path.iterdir()) == []


# Writing


def test_an_export_needs_inputs(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="file_path_onnx needs example_inputs"):
        save_checkpoint(prepared("residual"), tmp_path / "c.pth", file_path_onnx=tmp_path / "c.onnx")
    assert list(tmp_path.iterdir()) == []


def test_parameters_of_an_uncalibrated_model_are_not_written(tmp_path: Path) -> None:
    """Its scales are the initial ones: a JSON file of them would be wrong without a message."""
    gm = prepare_by_platform(build("residual"), "TSQAT")
    with pytest.raises(CalibrationError, match="9 of 9 fake-quants saw no data"):
        save_checkpoint(gm, tmp_path / "c.pth", tmp_path / "c.json")
    assert list(tmp_path.iterdir()) == []


def test_with_example_inputs_a_json_path_also_writes_the_proven_onnx_file(tmp_path: Path) -> None:
    inputs = inputs_of("residual")
    gm = calibrate(prepare_by_platform(build("residual"), "TSQAT", example_inputs=inputs, check="off"), inputs)
    save_checkpoint(gm, tmp_path / "each_epoch.pth")
    save_checkpoint(gm, tmp_path / "alone.pth", tmp_path / "alone.json", file_path_onnx=False)
    assert {path.name for path in tmp_path.iterdir()} == {"each_epoch.pth", "alone.pth", "alone.json"}
    save_checkpoint(gm, tmp_path / "last.pth", tmp_path / "model.quant.json")
    assert {path.name for path in tmp_path.iterdir()} == {
        *("each_epoch.pth", "alone.pth", "alone.json", "last.pth"),
        *("model.quant.json", "model.quant.onnx", "model.quant.parity.json"),
    }
    session = onnxruntime.InferenceSession(tmp_path / "model.quant.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: inputs[0].numpy()})
    expected = deployed_outputs(gm, inputs)[0]
    assert np.abs(found - expected).max() <= np.abs(expected).max() / 100
    alone, beside = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", "model.quant"))
    assert alone == beside


def test_an_option_of_the_onnx_file_without_it_is_refused(tmp_path: Path) -> None:
    gm = prepared("residual")
    for options in ({"example_inputs": inputs_of("residual")}, {"file_path_onnx": True}):
        with pytest.raises(CheckpointError, match="file_path_onnx"):
            save_checkpoint(gm, tmp_path / "c.pth", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("extra", [{"path": Path("x")}, {"best": np.float64(0.5)}, {"f": len}])
def test_what_could_not_be_read_back_is_not_written(extra: dict[str, Any], tmp_path: Path) -> None:
    """``torch.load(weights_only=True)`` refuses such values: the file would be lost, and the old one with it."""
    gm = prepared("residual")
    save_checkpoint(gm, tmp_path / "c.pth", extra={"epoch": 1})
    before = (tmp_path / "c.pth").read_bytes()
    with pytest.raises(CheckpointError, match="extra"):
        save_checkpoint(gm, tmp_path / "c.pth", extra=extra)
    assert (tmp_path / "c.pth").read_bytes() == before
    assert load_checkpoint(gm, tmp_path / "c.pth") == {"epoch": 1}


@pytest.mark.parametrize(
    ("first", "second"),
    [("file_path", "file_path_json"), ("file_path", "file_path_onnx"), ("file_path_json", "file_path_onnx")],
)
@pytest.mark.parametrize("how", ["equal", "relative", "a link"])
def test_two_paths_of_one_file_are_refused_before_anything_is_written(
    first: str, second: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("kept")
    (tmp_path / "link").symlink_to("a")
    paths = {name: tmp_path / name for name in ("file_path", "file_path_json", "file_path_onnx")}
    paths |= {first: tmp_path / "a", second: {"equal": tmp_path / "a", "relative": "./a", "a link": "link"}[how]}
    with pytest.raises(CheckpointError, match=f"{first} and {second} are the same file"):
        save_checkpoint(prepared("residual"), **paths, example_inputs=inputs_of("residual"))
    assert {path.name for path in tmp_path.iterdir()} == {"a", "link"}
    assert (tmp_path / "a").read_text() == "kept"


def test_a_link_stays_a_link_to_the_new_checkpoint(tmp_path: Path) -> None:
    gm = prepared("residual")
    (tmp_path / "runs").mkdir()
    (tmp_path / "last.pth").symlink_to("runs/1.pth")
    for epoch in (1, 2):  # the file it points to does not exist at first
        save_checkpoint(gm, tmp_path / "last.pth", extra={"epoch": epoch})
        assert load_checkpoint(gm, tmp_path / "runs" / "1.pth") == {"epoch": epoch}
    assert (tmp_path / "last.pth").is_symlink()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["1.pth"]


@pytest.mark.parametrize("how", ["missing folder", "a folder", "below a file"])
def test_a_path_that_cannot_be_written_is_refused(how: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    bad = {"missing folder": "none/c.pth", "a folder": "folder", "below a file": "file/c.pth"}[how]
    gm = prepared("residual")
    for paths in ((tmp_path / bad,), (tmp_path / "c.pth", tmp_path / bad)):
        with pytest.raises(CheckpointError, match="cannot write") as caught:
            save_checkpoint(gm, *paths)
        assert bad in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} <= {"folder", "file", "c.pth"}
    assert (tmp_path / "file").read_text() == "kept"
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize("crash", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("cut")])
def test_a_crash_while_writing_leaves_the_old_file(
    crash: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gm = prepared("residual")
    save_checkpoint(gm, tmp_path / "c.pth", extra={"epoch": 1})
    before, write = (tmp_path / "c.pth").read_bytes(), torch.save

    def half(content: Any, target: Any) -> None:
        write(content, target)
        if isinstance(target, Path):
            target.write_bytes(target.read_bytes()[:1000])
            raise crash

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises((CheckpointError, type(crash))):
        save_checkpoint(gm, tmp_path / "c.pth", extra={"epoch": 2})
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["c.pth"]
    assert (tmp_path / "c.pth").read_bytes() == before
    assert load_checkpoint(gm, tmp_path / "c.pth") == {"epoch": 1}


# Sharded models


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def sharded_by_fsdp1(gm: QuantGraphModule) -> nn.Module:
    FullyShardedDataParallel(gm, device_id=torch.device("cpu"))
    return gm


def sharded_with_names(gm: QuantGraphModule) -> nn.Module:
    FullyShardedDataParallel(gm, device_id=torch.device("cpu"), use_orig_params=True)
    return gm


FIXED = {"a_fakequantize": "Fixed"}  # FSDP takes no scale of a whole tensor as a parameter


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("flatten", [sharded_by_fsdp1, sharded_with_names])
@pytest.mark.usefixtures("one_rank")
def test_a_flattened_model_is_refused_before_anything_is_written(
    flatten: Callable[[QuantGraphModule], nn.Module], tmp_path: Path
) -> None:
    """Its file would hold a part of the model, or tensors that the float model cannot load."""
    whole, gm = (with_methods("Learnable", **FIXED) for _ in range(2))
    save_checkpoint(whole, tmp_path / "c.pth")
    before = (tmp_path / "c.pth").read_bytes()
    model = flatten(gm)
    for function in (save_checkpoint, load_checkpoint):
        with pytest.raises(CheckpointError, match="flattened .*weight|flattened .*_flat_param"):
            function(model, tmp_path / "c.pth")
    assert (tmp_path / "c.pth").read_bytes() == before


@pytest.mark.usefixtures("one_rank")
def test_the_checkpoint_of_a_sharded_model_is_that_of_the_whole_one(tmp_path: Path) -> None:
    """More ranks: ``tests/tools/training/test_sharding.py``."""
    whole, gm = (with_methods("Learnable", **FIXED) for _ in range(2))
    save_checkpoint(whole, tmp_path / "whole.pth")
    model = fully_shard(gm)
    save_checkpoint(model, tmp_path / "sharded.pth")
    found, expected = (torch.load(tmp_path / name, weights_only=True) for name in ("sharded.pth", "whole.pth"))
    assert found.keys() == expected.keys()
    for key in ("state_dict", "qat_state_dict"):
        assert list(found[key]) == list(expected[key])
        assert all(torch.equal(found[key][name], value) for name, value in expected[key].items())
    assert load_checkpoint(model, tmp_path / "whole.pth") == {}


@pytest.mark.usefixtures("one_rank")
def test_fsdp_refuses_a_learned_scale_of_a_whole_tensor_before_training() -> None:
    with pytest.raises(ValueError, match="scalar parameters") as caught:
        fully_shard(with_methods("Learnable"))
    assert "scale" in str(caught.value)


# Parameters alone


@pytest.fixture
def parameters(tmp_path: Path) -> tuple[QuantGraphModule, Path]:
    """A calibrated model and the JSON of its parameters."""
    gm = prepared("residual", "Experimental")
    save_checkpoint(gm, tmp_path / "c.pth", tmp_path / "c.json")
    return gm, tmp_path / "c.json"


def test_parameters_come_back_bit_for_bit(parameters: tuple[QuantGraphModule, Path]) -> None:
    gm, path = parameters
    fresh = prepare_by_platform(build("residual"), "Experimental").eval()
    load_quant_params(fresh, path)
    enable_quantization(fresh)  # calibrated: it does not raise
    quants = {name: module for name, module in gm.named_modules() if isinstance(module, FakeQuantizeBase)}
    for name, quant in quants.items():
        scale, zero_point = fresh.get_submodule(name).qparams()
        assert torch.equal(scale, quant.qparams()[0])
        assert torch.equal(zero_point, quant.qparams()[1])
    inputs = inputs_of("residual")
    with torch.no_grad():
        assert np.array_equal(fresh(*inputs).numpy(), deployed_outputs(gm, inputs)[0])


def test_parameters_of_a_layer_called_with_two_repaired_biases_come_back(tmp_path: Path) -> None:
    """The two calls of a shared layer with a dead channel need two weight scales; the file lists both."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.shared(self.shared(x) * 0.01)

    torch.manual_seed(0)
    model, inputs = Twice().eval(), (torch.randn(4, 8) * 50,)
    with torch.no_grad():
        model.shared.weight[0] *= 1e-9
        model.shared.bias[0] = 3.0
    gm = calibrate(prepare_by_platform(model, "TSQAT"), inputs)
    convert_export(gm, inputs, tmp_path / "c.onnx", tmp_path / "c.json")
    entries = json.loads((tmp_path / "c.json").read_text())["tensors"]
    assert len({entry["scale"][0] for entry in entries.values() if entry["kind"] == "weight"}) == 2
    fresh = prepare_by_platform(model, "TSQAT").eval()
    load_quant_params(fresh, tmp_path / "c.json")
    convert_export(fresh, inputs, tmp_path / "d.onnx", tmp_path / "d.json")
    assert json.loads((tmp_path / "d.json").read_text())["tensors"] == entries
    assert np.array_equal(deployed_outputs(fresh, inputs)[0], deployed_outputs(gm, inputs)[0])


def test_a_file_for_a_runtime_is_written_on_request(tmp_path: Path) -> None:
    gm, inputs = prepared("residual"), inputs_of("residual")
    paths = {"file_path_json": tmp_path / "c.json", "file_path_onnx": tmp_path / "c.onnx"}
    save_checkpoint(gm, tmp_path / "c.pth", **paths, example_inputs=inputs, runtime="onnxruntime")
    document = json.loads((tmp_path / "c.json").read_text())
    assert document["runtime"] == "onnxruntime"
    assert document["tensors"]["conv"]["zero_point"] == [128]
    fresh = prepare_by_platform(build("residual"), "TSQAT")
    load_quant_params(fresh, tmp_path / "c.json")
    for name, quant in gm.named_modules():
        if isinstance(quant, FakeQuantizeBase):
            assert all(map(torch.equal, fresh.get_submodule(name).qparams(), quant.qparams()))
    document["tensors"]["conv"]["zero_point"] = [127]
    (tmp_path / "c.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="must be 0, found \\[-1\\]"):
        load_quant_params(fresh, tmp_path / "c.json")


@pytest.mark.parametrize(("runtime", "error"), [("openvino", CheckpointError), ("cuda", ExportError)])
def test_a_runtime_without_an_onnx_file_or_of_an_unknown_name_is_refused(
    runtime: str, error: type[Exception], tmp_path: Path
) -> None:
    options = {"file_path_onnx": tmp_path / "c.onnx", "example_inputs": inputs_of("residual")}
    options = options if runtime == "cuda" else {}
    with pytest.raises(error, match=f"runtime.*{runtime}"):
        save_checkpoint(prepared("residual"), tmp_path / "c.pth", runtime=runtime, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("backend", ["TSQAT", "ONNXRuntime"])
def test_parameters_of_another_backend_are_refused(
    backend: str, parameters: tuple[QuantGraphModule, Path], tmp_path: Path
) -> None:
    gm = prepare_by_platform(build("residual"), backend)
    twin = copy.deepcopy(gm)
    with pytest.raises(CheckpointError, match=f"for backend Experimental, but the model was prepared for {backend}"):
        load_quant_params(gm, parameters[1])
    assert same_state(gm, twin)


def test_the_zero_point_of_a_symmetric_unsigned_tensor_is_its_middle(tmp_path: Path) -> None:
    config = {"extra_qconfig_dict": {"a_qscheme": {"signed": False}}}
    gm = prepared("residual", "TSQAT", config)
    save_checkpoint(gm, tmp_path / "c.pth", tmp_path / "c.json")
    fresh = prepare_by_platform(build("residual"), "TSQAT", config)
    load_quant_params(fresh, tmp_path / "c.json")
    assert torch.equal(fresh.x_act_fake_quant.qparams()[1], torch.tensor(128.0))
    document = json.loads((tmp_path / "c.json").read_text())
    document["tensors"]["conv"]["zero_point"] = [0]
    (tmp_path / "c.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="must be 128, found"):
        load_quant_params(fresh, tmp_path / "c.json")


def test_zero_points_that_a_scheme_excludes_are_refused(tmp_path: Path) -> None:
    """On ONNXRuntime they are even, and after a ReLU the smallest integer."""
    gm = prepared("residual", "ONNXRuntime")
    save_checkpoint(gm, tmp_path / "c.pth", tmp_path / "c.json")
    document = json.loads((tmp_path / "c.json").read_text())
    for name, zero_point, message in (("x", 127, "must be even, found .127"), ("stem.0", 2, "must be 0, found .2")):
        changed = copy.deepcopy(document)
        assert changed["tensors"][name]["zero_point"] != [zero_point]
        changed["tensors"][name]["zero_point"] = [zero_point]
        (tmp_path / "c.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=message):
            load_quant_params(prepare_by_platform(build("residual"), "ONNXRuntime"), tmp_path / "c.json")


def drop_scale(entry: dict[str, Any]) -> None:
    del entry["scale"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("conv"), "1 fake-quants without an entry .*conv_act_fake_quant"),
        (lambda tensors: tensors.update(more={**tensors["conv"], "module": "more"}), "1 entries without .*more"),
        (lambda tensors: tensors["conv"].update(bit_width=4), "conv_act_fake_quant .*expected .*8.* found .*4"),
        (lambda tensors: tensors["conv"].update(signed=True), "conv_act_fake_quant"),
        (lambda tensors: tensors["conv.weight"]["scale"].pop(), r"conv \(weight\).*8.* found .*7"),
        (lambda tensors: tensors["conv"]["zero_point"].append(3), "conv"),
        (lambda tensors: drop_scale(tensors["conv"]), "conv"),
        (lambda tensors: tensors["conv"].update(scale=["x"]), "conv"),
        (lambda tensors: tensors["conv"].update(scale=[-1.0]), "conv"),
        (lambda tensors: tensors["conv"].update(zero_point=[300]), "conv"),
        (lambda tensors: tensors["conv"].update(quant_min=1), "conv_act_fake_quant .*smallest"),
        (
            lambda tensors: tensors["conv.weight"].update(zero_point=[1] * 8),
            r"conv \(weight\): zero points .* be 0, found .1",
        ),
    ],
    ids=[
        "missing",
        "surplus",
        "bits",
        "signed",
        "scales",
        "zero points",
        "no scale",
        "text",
        "negative scale",
        "out of range",
        "another range",
        "zero point of a symmetric tensor",
    ],
)
def test_parameters_that_do_not_fit_are_refused(
    change: Callable[[dict[str, Any]], Any], message: str, parameters: tuple[QuantGraphModule, Path]
) -> None:
    gm, path = parameters
    document = json.loads(path.read_text())
    change(document["tensors"])
    path.write_text(json.dumps(document))
    twin = copy.deepcopy(gm)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_quant_params(gm, path)
    assert str(path) in str(caught.value)
    assert same_state(gm, twin)
