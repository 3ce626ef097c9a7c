"""Every flag of the example's command line has an effect that can be seen."""

import argparse
import csv
import json
import re
import shutil
import sys

import onnx
import onnxruntime as ort
import pytest
import torch
import torchvision
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fxqat.tools import WidthBank, average_weight_bits, sensitivity, solve
from tests.example.imagenet_example.conftest import MODELS, TINY

GUIDE = [
    "-h",
    "--data",
    "--model-zoo",
    "-a",
    "--arch",
    "--teacher-arch",
    "-nc",
    "--num-classes",
    "-j",
    "--workers",
    "--epochs",
    "--start-epoch",
    "-b",
    "--batch-size",
    "--lr",
    "--momentum",
    "--wd",
    "-p",
    "--print-freq",
    "--resume",
    "-e",
    "--evaluate",
    "--pretrained",
    "--world-size",
    "--rank",
    "--dist-url",
    "--dist-backend",
    "--seed",
    "--gpu",
    "--multiprocessing-distributed",
    "--model-path",
    "--teacher-path",
    "--backend",
    "--optim",
    "--not-qat",
    "-l",
    "--log-level",
    "--profile",
    "--distill-method",
    "--distill-alpha",
    "--temperature",
    "--amp",
    "--onnx-batch",
    "--opset-version",
    "--device",
    "--config",
    "--calib-batches",
    "--compile",
    "--amp-dtype",
    "--ema",
    "--lr-schedule",
    "--warmup-epochs",
    "--label-smoothing",
    "--quant-config",
    "--tensorboard",
]


def rates(run) -> list[float]:
    return run.training["scheduler"]["_last_lr"]


def losses(run) -> list[float]:
    return [float(value) for value in re.findall(r"Epoch: .* Loss (\S+)", run.printed)]


def test_help_names_every_flag(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["-h"])
    printed = capsys.readouterr().out
    assert [flag for flag in GUIDE if not re.search(rf"(?<![\w-]){flag}(?![\w-])", printed)] == []
    options = [action for action in sys.modules["flags"].build_parser()._actions if action.help != argparse.SUPPRESS]
    assert all(action.help for action in options)


def test_guide_defaults(example):
    """The defaults of the guide's table, where the data is an ImageFolder."""
    options = sys.modules["options"].parse_options(["--data", "somewhere"])
    found = {name: getattr(options, name) for name in ("arch", "model_zoo", "epochs", "start_epoch", "batch_size")}
    assert found == {"arch": "resnet18", "model_zoo": "torchvision", "epochs": 90, "start_epoch": 0, "batch_size": 256}
    assert (options.lr, options.momentum, options.wd, options.print_freq) == (0.1, 0.9, 1e-4, 100)
    assert (options.world_size, options.rank, options.log_level, options.backend) == (-1, -1, 1, "TSQAT")
    assert (options.optim, options.distill_method, options.distill_alpha, options.temperature) == ("sgd", None, 0.95, 6)
    assert (options.onnx_batch, options.opset_version) == (1, None)  # 18, or what the widths need


@pytest.mark.parametrize("flag", ["--momentum 0.5", "--wd 0.25", "--lr 3e-4"])
def test_numbers_of_the_optimizer(run, flag):
    group = run("--lr-schedule", "constant", *flag.split()).training["optimizer"]["param_groups"][0]
    name = {"--momentum": "momentum", "--wd": "weight_decay", "--lr": "lr"}[flag.split()[0]]
    assert group[name] == float(flag.split()[1])


def test_optimizer(run):
    adam = run("--optim", "adam", "--momentum", "0.7")
    assert adam.training["optimizer"]["param_groups"][0]["betas"] == (0.7, 0.999)
    assert "momentum" in run("--optim", "sgd").training["optimizer"]["param_groups"][0]


def test_schedule_warmup_and_first_epoch(run):
    assert rates(run()) == pytest.approx([0, 0], abs=1e-9)  # a cosine ends at 0
    assert rates(run("--lr-schedule", "constant")) == [1e-3, 1e-3]
    slow = run("--lr-schedule", "constant", "--warmup-epochs", "2")
    assert rates(slow) == pytest.approx([0.5e-3, 0.5e-3])  # one of two epochs of warmup is done
    late = run("--lr-schedule", "step", "--start-epoch", "30", "--epochs", "31")
    assert rates(late) == pytest.approx([1e-4, 1e-4])
    assert "Epoch: [30][0/4]" in late.printed
    assert "Epoch: [0]" not in late.printed


def test_epochs_batch_and_print_freq(run):
    found = run("--epochs", "2", "-b", "4", "-p", "3")
    steps = re.findall(r"Epoch: (\[\d\]\[\d/8\])", found.printed)
    assert steps == [f"[{epoch}][{step}/8]" for epoch in (0, 1) for step in (0, 3, 6, 7)]


def test_seed(run):
    assert losses(run("--seed", "1")) == losses(run("--seed", "1")) != losses(run("--seed", "2"))


def test_label_smoothing(run):
    assert losses(run("--label-smoothing", "0.3"))[0] != losses(run())[0]


def test_averaged_weights_are_what_is_evaluated(run):
    found = run("--ema", "0.9", "--lr", "0.05")
    trained, best = found.checkpoint()["state_dict"], found.checkpoint("model_best")["state_dict"]
    assert trained.keys() == best.keys()
    assert not torch.equal(trained["fc.weight"], best["fc.weight"])
    plain = run("--lr", "0.05")
    assert torch.equal(plain.checkpoint()["state_dict"]["fc.weight"], trained["fc.weight"])


@pytest.mark.parametrize("method", ["logits", "dkd", "hints", "attention"])
def test_distillation(run, method):
    plain, taught = run(), run("--distill-method", method)
    assert losses(plain) != losses(taught)
    own = run("--distill-method", method, "--distill-alpha", "0")
    assert losses(own) == pytest.approx(losses(plain), rel=1e-6)


def test_temperature_and_teacher(run, weights, tmp_path):
    default = run("--distill-method", "logits")
    assert losses(run("--distill-method", "logits", "--temperature", "0.1")) != losses(default)
    state = torch.load(weights)["state_dict"]
    torch.save({name: value * 1.5 for name, value in state.items()}, tmp_path / "teacher.pth")
    other = run("--distill-method", "logits", "--teacher-path", str(tmp_path / "teacher.pth"))
    assert losses(other) != losses(default)


def test_teacher_of_another_architecture(run, tmp_path, example):
    wide = sys.modules["model_zoo"].build_model("torchvision", f"{MODELS}:Wide", 2, 32)
    torch.save(wide.state_dict(), tmp_path / "wide.pth")
    teacher = ["--teacher-arch", f"{MODELS}:Wide", "--teacher-path", str(tmp_path / "wide.pth")]
    for method in ("logits", "hints", "attention"):
        assert losses(run("--distill-method", method, *teacher)) != losses(run("--distill-method", method))


def test_image_size_onnx_batch_and_opset(run):
    found = run("-e", "--image-size", "48", "--onnx-batch", "3", "--opset-version", "21")
    (path,) = found.folder.glob("*_onnx_quantization.onnx")
    assert ort.InferenceSession(path).get_inputs()[0].shape == [3, 3, 48, 48]
    assert onnx.load(path).opset_import[0].version == 21


def test_backend_and_quant_config(run, tmp_path):
    (tmp_path / "quant.yaml").write_text("extra_qconfig_dict: {w_qscheme: {bit: 4}}\n")
    config = str(tmp_path / "quant.yaml")
    found = run("-e", "--backend", "ONNXRuntime", "--quant-config", config)
    (path,) = found.folder.glob("*_onnx_quantization.onnx")
    types = {tensor.data_type for tensor in onnx.load(path).graph.initializer}
    assert {onnx.TensorProto.INT4, onnx.TensorProto.UINT8} <= types
    assert onnx.load(path).opset_import[0].version == 21
    (path,) = run("-e").folder.glob("*_onnx_quantization.onnx")
    assert onnx.load(path).opset_import[0].version == 18


def test_quant_config_takes_widths_that_were_solved(run, weights, tmp_path):
    model = sys.modules["model_zoo"].build_model("torchvision", TINY, 2, 32, pretrained=False)
    sys.modules["model_zoo"].load_weights(model, weights)
    batches = [torch.rand(8, 3, 32, 32)]
    bank = WidthBank(model.eval(), batches, (4, 8), (8,), "ONNXRuntime")
    choice = solve(sensitivity(bank, batches, "fisher").scores, [(average_weight_bits(bank), 6.0)])
    choice.write_yaml(bank.units, tmp_path / "widths.yaml")
    found = run("-e", "--backend", "ONNXRuntime", "--quant-config", str(tmp_path / "widths.yaml"))
    (path,) = found.folder.glob("*_onnx_quantization.json")
    tensors = json.loads(path.read_text())["tensors"]
    widths = {name: tensor["bit_width"] for name, tensor in tensors.items() if tensor["kind"] == "weight"}
    assert set(widths.values()) == {4, 8}
    assert widths == {name: bits for name, bits in choice.widths.items() if name.endswith(".weight")}


def test_calib_batches(run, monkeypatch):
    seen = []
    job = sys.modules["quantized_job"]

    def calibrate(gm, loader, device):
        seen.append(len(loader))
        original(gm, loader, device)

    original = job.calibrate
    monkeypatch.setattr(job, "calibrate", calibrate)
    run("-e", "--calib-batches", "2")
    run("-e")
    assert seen == [2, 4]


def test_profile(run):
    found = run("-e", "--profile")
    rows = list(csv.DictReader((found.folder / "Tiny_profile.csv").open()))
    assert {row["name"] for row in rows} >= {"stem.0.weight", "fc"}
    assert "<h2>Findings</h2>" in (found.folder / "Tiny_profile.html").read_text()
    assert "own: dB" in found.printed


def test_float_only(run):
    found = run("--not-qat")
    assert list(found.table) == ["model", "float"]
    assert not list(found.folder.glob("*quantization*"))


def test_pretrained_weights_with_another_head(run, monkeypatch):
    torch.manual_seed(7)
    state = torchvision.models.get_model("squeezenet1_1").state_dict()
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *args, **options: state)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *args, **options: state)
    found = run("--not-qat", "-a", "squeezenet1_1", "--pretrained", "--image-size", "64", "--lr", "1e-9", model=False)
    best = found.checkpoint("model_best")["state_dict"]
    assert torch.allclose(best["features.0.weight"], state["features.0.weight"], atol=1e-5)
    assert best["classifier.1.weight"].shape[0] == 2


def test_a_file_with_a_dataclass(example, tmp_path):
    lines = [
        "from __future__ import annotations",
        "import dataclasses",
        "from torch import nn",
        "@dataclasses.dataclass",
    ]
    lines += ["class Width:", "    out: int = 1", "def make(num_classes: int): return nn.Linear(3, num_classes)"]
    (tmp_path / "engine.py").write_text("\n".join(lines))
    own = sys.modules["model_zoo"].own_model(f"{tmp_path / 'engine.py'}:make")
    assert own(5).out_features == 5
    assert hasattr(sys.modules["engine"], "evaluate")  # the example's own module of that name


def test_timm(run):
    found = run("--not-qat", "--model-zoo", "timm", "-a", "test_resnet.r160_in1k", "--image-size", "64", model=False)
    assert "layer1.0.conv1.weight" in found.checkpoint()["state_dict"]


def test_mixed_precision(run):
    plain, mixed = losses(run()), losses(run("--amp", "--amp-dtype", "bfloat16"))
    assert plain != mixed
    assert mixed == pytest.approx(plain, rel=0.05)
    scaled = run("--amp", "--amp-dtype", "float16")
    assert scaled.training["scaler"]["scale"] > 1


def test_compile(run, monkeypatch):
    compiled = []

    def compiler(model):
        compiled.append(model)
        return original(model, backend="eager")

    original = torch.compile
    monkeypatch.setattr(torch, "compile", compiler)
    assert losses(run("--compile")) == pytest.approx(losses(run()), rel=1e-4)
    assert len(compiled) == 1


def test_workers(run, monkeypatch):
    seen = set()
    data = sys.modules["data"]

    class Loader(data.DataLoader):
        def __init__(self, *args, **options):
            seen.add(options["num_workers"])
            super().__init__(*args, **options)

    monkeypatch.setattr(data, "DataLoader", Loader)
    one, two = run("-j", "0"), run("-j", "2")
    assert seen == {0, 2}
    assert losses(one) == losses(two)  # augmentation does not depend on who loads an image


def test_log_level(run):
    assert "Epoch: " not in run("-l", "2").printed
    assert "Epoch: " in run("-l", "0").printed


def test_tensorboard(run, tmp_path):
    run("--tensorboard", str(tmp_path / "board"), "-p", "1")
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert len(events.Scalars("train/loss")) == 4
    assert len(events.Scalars("val/acc1")) == 1


def test_config_file_and_command_line(run, tmp_path):
    (tmp_path / "flags.yaml").write_text("momentum: 0.25\nwd: 0.5\nnot-qat: true\namp: false\nresume:\n")
    group = run("--config", str(tmp_path / "flags.yaml"), "--wd", "0.125").training["optimizer"]["param_groups"][0]
    assert (group["momentum"], group["weight_decay"]) == (0.25, 0.125)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--device cuda:7", "no such device"),
        ("--gpu 7", "no such device"),
        ("-nc 3", "has 2 classes"),
        ("--config nowhere.yaml", "cannot be read"),
        ("--distill-alpha 0.5", "no effect without --distill-method"),
        ("--amp-dtype float16", "no effect without --amp"),
        ("--gpu 0 --device cpu", "no effect beside --gpu"),
        ("--not-qat --profile", "no effect with --not-qat"),
        ("-e --ema 0.9", "no effect with -e"),
        ("--sync-bn", "has no effect in one process"),
        ("--world-size 2", "without --multiprocessing-distributed"),
        (
            "--multiprocessing-distributed --world-size 2 --rank 2 --dist-url tcp://127.0.0.1:1",
            "--rank 2: the nodes of --world-size 2 are numbered from 0",
        ),
        (f"-a {MODELS}:Nothing", "has no attribute 'Nothing'"),
        (f"-a {MODELS}:not_a_classifier", "as a classifier does"),
        ("--quant-config nowhere.yaml", "nowhere.yaml"),
        ("--distill-method logits --teacher-path nowhere.pth", "nowhere.pth cannot be read"),
    ],
)
def test_errors_are_one_line(run, flags, message):
    with pytest.raises(SystemExit) as caught:
        run(*flags.split())
    assert str(caught.value).startswith("error: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_training_that_is_not_finite_keeps_the_last_good_checkpoint(run, monkeypatch, tmp_path):
    training = sys.modules["training"].Training
    steps = iter(range(100))

    def step(self, accepted):
        original(self, accepted)
        if next(steps) == 9:  # the second of the second epoch
            with torch.no_grad():
                self.model.get_parameter("body.0.weight")[0] = torch.nan

    original = training.step
    monkeypatch.setattr(training, "step", step)
    message = (
        "the last 5 steps were not finite, see the warnings above: lower the learning rate, or leave the layer "
        "named there float"
    )
    with pytest.warns(RuntimeWarning, match="first appears in .*body.0"), pytest.raises(SystemExit, match=message):
        run("--epochs", "2", "-b", "4")
    state = torch.load(tmp_path / "run0" / "Tiny_checkpoint.pth", weights_only=True)
    assert state["extra"]["training"]["epochs_done"] == 1
    assert all(value.isfinite().all() for value in state["state_dict"].values())


def test_corrupt_image(run, image_tree, tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(image_tree, tree)
    (tree / "train" / "dark" / "3.png").write_bytes(b"not an image")
    for workers in ("0", "1"):
        with pytest.raises(SystemExit, match=r"^error: .*dark/3.png is not an image that can be read") as caught:
            run("--data", str(tree), "-j", workers)
        assert "\n" not in str(caught.value)
