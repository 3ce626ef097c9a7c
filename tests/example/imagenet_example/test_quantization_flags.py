"""The effect of each flag about quantization and export: on fake-quants, calibration, files, and the whole job."""

import csv
import json
import sys

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fxqat.fake_quantize.state import named_fake_quants
from fxqat.tools import WidthBank, average_weight_bits, sensitivity, solve
from fxqat.tools.engines import runtime_here
from tests import models
from tests.example.imagenet_example.conftest import MODELS, TINY, losses
from tests.example.imagenet_example.tiny_models import Tiny, Wide


@pytest.fixture
def prepared(start):
    """``prepared(*flags)``: the quantized model before calibration."""

    def prepared(*flags):
        return sys.modules["quantized_job"].prepared(*start(*flags))

    return prepared


def weight_bits(gm) -> dict[str, int]:
    """The bit width of each weight."""
    quants = named_fake_quants(gm)
    return {name: quant.scheme.bit_width for name, quant in quants if quant.kind == "weight_fake_quant"}


def test_backend_and_quant_config(prepared, tmp_path):
    (tmp_path / "quant.yaml").write_text("extra_qconfig_dict: {w_qscheme: {bit: 4}}\n")
    plain, four = prepared(), prepared("--quant-config", str(tmp_path / "quant.yaml"))
    assert set(weight_bits(plain).values()) == {8}
    assert weight_bits(four) == dict.fromkeys(weight_bits(plain), 4)
    backends = [prepared("--backend", name).provenance.backend for name in ("TSQAT", "ONNXRuntime")]
    assert plain.provenance.backend == backends[0] == "TSQAT"
    assert backends[1] == "ONNXRuntime"


def test_quant_config_takes_widths_that_were_solved(prepared, weights, tmp_path):
    model = Tiny(2)
    state = torch.load(weights)["state_dict"]
    model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    batches = [torch.rand(8, 3, 16, 16)]
    bank = WidthBank(model.eval(), batches, (4, 8), (8,), "ONNXRuntime")
    choice = solve(sensitivity(bank, batches, "fisher").scores, [(average_weight_bits(bank), 6.0)])
    choice.write_yaml(bank.units, tmp_path / "widths.yaml")
    gm = prepared("--backend", "ONNXRuntime", "--quant-config", str(tmp_path / "widths.yaml"))
    found = {name.removesuffix("_fake_quant"): bits for name, bits in weight_bits(gm).items()}
    assert set(found.values()) == {4, 8}
    assert found == {name: bits for name, bits in choice.widths.items() if name.endswith(".weight")}


def test_calib_batches(train, monkeypatch):
    seen, job = [], sys.modules["quantized_job"]

    def calibrate(gm, loader, **options):
        seen.append([len(images) for images, _ in loader])
        return original(gm, loader, **options)

    original = job.calibrate
    monkeypatch.setattr(job, "calibrate", calibrate)
    train("-e", "--calib-batches", "2")
    train("-e")
    assert seen == [[8, 8], [8, 8, 8, 8]]  # all 32 images are fewer than 512


def test_calibration_images_are_not_augmented(start):
    job, _ = start("--calib-batches", "1")
    (images, labels), data = next(iter(job.loaders.calibration(1))), job.loaders.data
    known = {image.numpy().tobytes(): label for image, label in data.as_val}
    assert [known[image.numpy().tobytes()] for image in images] == labels.tolist()


def test_float_only(run, tmp_path):
    first = run("--not-qat", "--optim", "adam", "--onnx-batch", "4")
    assert list(first.table) == ["model", "float"]
    assert not list(first.folder.glob("*quantization*"))
    session = ort.InferenceSession(first.path("onnx_float.onnx"))
    assert session.get_inputs()[0].shape == [4, 3, 16, 16]
    state = first.checkpoint("model_best")["state_dict"]
    model = Tiny(2)
    model.load_state_dict(state)
    images = torch.rand(4, 3, 16, 16)
    (output,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    np.testing.assert_allclose(output, model.eval()(images).detach().numpy(), rtol=1e-3, atol=1e-5)
    best = str(first.path("model_best.pth"))
    again = run("--not-qat", "-e", "-a", TINY, "--model-path", best, model=False)
    assert again.table["float"][:2] == first.table["float"][:2]


def test_a_job_with_many_flags(run, tmp_path):
    """Distillation from a wider teacher, mixed precision, averaged weights, 4 bits, opset, batch, profile, curves."""
    (tmp_path / "quant.yaml").write_text("extra_qconfig_dict: {w_qscheme: {bit: 4}}\n")
    torch.manual_seed(1)
    torch.save(Wide(2).state_dict(), tmp_path / "wide.pth")
    flags = [
        "--distill-method",
        "hints",
        *("--teacher-arch", f"{MODELS}:Wide", "--teacher-path", str(tmp_path / "wide.pth")),
    ]
    flags += ["--backend", "ONNXRuntime", "--quant-config", str(tmp_path / "quant.yaml"), "--opset-version", "22"]
    flags += ["--onnx-batch", "3", "--profile", "--tensorboard", str(tmp_path / "board"), "-p", "1"]
    flags += ["--amp", "--amp-dtype", "bfloat16", "--ema", "0.9", "--lr", "0.01", "--momentum", "0.5", "--wd", "0.25"]
    found = run(*flags, "--lr-schedule", "constant")

    model = onnx.load(found.path("onnx_quantization.onnx"))
    assert model.opset_import[0].version == 22
    assert ort.InferenceSession(model.SerializeToString()).get_inputs()[0].shape == [3, 3, 16, 16]
    types = {tensor.data_type for tensor in model.graph.initializer}
    assert {onnx.TensorProto.INT4, onnx.TensorProto.UINT8} <= types
    tensors = json.loads(found.path("bestonnx_quantization.json").read_text())["tensors"].values()
    assert {tensor["bit_width"] for tensor in tensors if tensor["kind"] == "weight"} == {4}
    assert list(found.table) == [
        *("model", "float", "fake-quant, calibrated", "fake-quant, finetuned", "ONNX Runtime int8")
    ]
    assert found.table["model"][3] == "latency ms (batch 3)"

    rows = list(csv.DictReader(found.path("profile.csv").open()))
    assert {row["name"] for row in rows} >= {"stem.0.weight", "fc.weight"}
    assert "<h2>Findings</h2>" in found.path("profile.html").read_text()
    assert "own dB" in found.printed

    state = found.training
    assert [(g["momentum"], g["lr"], g["weight_decay"]) for g in state["optimizer"]["param_groups"]] == [
        *((0.5, 0.01, 0.25), (0.5, 0.01, 0.0))
    ]
    assert (state["epochs_done"], state["steps_done"], state["scheduler"]["last_epoch"]) == (1, 0, 4)
    assert len(state["extra"]) == 6  # the linear maps from the model's channels to the teacher's
    options = found.checkpoint()["extra"]["options"]
    assert (options["distill_method"], options["amp"], options["ema"]) == ("hints", True, 0.9)
    trained, best = found.checkpoint()["state_dict"], found.checkpoint("model_best")["state_dict"]
    assert trained.keys() == best.keys()
    assert not torch.equal(trained["fc.weight"], best["fc.weight"])  # the averaged weights are the best
    torch.testing.assert_close(best["fc.weight"], state["average"]["module.fc.weight"])

    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses(found.printed), rel=1e-3)
    assert len(losses(found.printed)) == 4
    assert [event.value for event in events.Scalars("train/lr")] == pytest.approx(4 * [0.01])
    assert len(events.Scalars("val/acc1")) == 1


def test_quantized_training_takes_the_flags(train):
    """Each of the flags that `fit` gets reaches the quantized training, too."""
    plain = train()
    assert losses(train().printed) == losses(plain.printed)
    for flag in (["--distill-method", "logits"], ["--amp"], ["--label-smoothing", "0.3"], ["--seed", "6"]):
        assert losses(train(*flag).printed) != losses(plain.printed), flag


@pytest.mark.parametrize(
    ("backend", "asked", "runtime"),
    [
        ("OpenVINO", "auto", "openvino"),
        ("TSQAT", "auto", runtime_here()),
        ("ONNXRuntime", "auto", runtime_here()),
        ("TSQAT", "none", None),
        ("OpenVINO", "onnxruntime", "onnxruntime"),
    ],
)
def test_the_file_is_for_the_runtime_of_the_backend_unless_another_is_asked_for(example, backend, asked, runtime):
    assert sys.modules["onnx_files"].runtime_for(models.prepared("conv_bn_relu", backend), asked) == runtime
