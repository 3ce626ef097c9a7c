"""The command line: every flag is documented, defaults, the file of flags, and errors in one line."""

import argparse
import re
import sys
from pathlib import Path

import pytest
import torch
import torchvision

from tests.example.imagenet_example.conftest import MODELS

FLAGS = [
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
    "--profile-step",
    "--distill-method",
    "--distill-alpha",
    "--temperature",
    "--amp",
    "--onnx-batch",
    "--opset-version",
    "--runtime",
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
    "--image-size",
    "--sync-bn",
    "--output-dir",
]


@pytest.fixture
def parse(example):
    return sys.modules["options"].parse_options


def test_help_names_every_flag(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["-h"])
    printed = capsys.readouterr().out
    assert [flag for flag in FLAGS if not re.search(rf"(?<![\w-]){flag}(?![\w-])", printed)] == []
    options = [action for action in sys.modules["flags"].build_parser()._actions if action.help != argparse.SUPPRESS]
    assert all(action.help for action in options)
    assert {name for action in options for name in action.option_strings} - set(FLAGS) == {
        *("--help", "--learning-rate", "--weight-decay")
    }


def test_defaults_for_an_image_folder(parse):
    options = parse(["--data", "somewhere"])
    found = {name: getattr(options, name) for name in ("arch", "model_zoo", "epochs", "start_epoch", "batch_size")}
    assert found == {"arch": "resnet18", "model_zoo": "torchvision", "epochs": 90, "start_epoch": 0, "batch_size": 256}
    assert (options.lr, options.momentum, options.wd, options.print_freq) == (0.1, 0.9, 1e-4, 100)
    assert (options.world_size, options.rank, options.log_level, options.backend) == (-1, -1, 1, "TSQAT")
    assert (options.optim, options.distill_method, options.distill_alpha, options.temperature) == ("sgd", None, 0.95, 6)
    assert (options.onnx_batch, options.opset_version) == (1, None)  # 18, or what the widths need
    assert options.runtime == "auto"
    first = options.float_first
    assert (first.epochs, first.lr, first.optim) == (90, 0.1, "sgd")


def test_defaults_for_the_digits(parse):
    options = parse([])
    assert (options.arch, options.epochs, options.batch_size, options.lr, options.seed) == ("resnet18", 3, 32, 1e-3, 0)
    assert parse(["--optim", "adam"]).lr == 1e-4
    first = parse(["--optim", "adam", "--momentum", "0.5", "--epochs", "9", "--start-epoch", "2"]).float_first
    assert (first.epochs, first.start_epoch, first.lr, first.optim, first.momentum) == (6, 0, 0.01, "sgd", 0.9)
    alone = parse(["--not-qat"])
    assert (alone.epochs, alone.lr) == (6, 0.01)
    assert parse(["--not-qat", "--optim", "adam"]).lr == 1e-3


def test_the_default_model_and_images(start):
    job, model = start(model=False, small=False)
    assert type(model) is torchvision.models.ResNet
    assert [block.bn1.num_features for block in model.layer4] == [512, 512]  # resnet18
    assert model.fc.out_features == 10
    assert job.example.shape == (1, 3, 32, 32)
    data = job.loaders.data
    assert (len(data.train), len(data.val), data.workers) == (1437, 360, 0)


def test_image_size_and_workers_of_an_image_folder(start, image_tree):
    job, _ = start("--data", str(image_tree), "-b", "8", small=False)
    assert job.example.shape == (1, 3, 224, 224)
    assert 1 <= job.loaders.data.workers <= 4
    job, _ = start("--image-size", "48", "--onnx-batch", "3")
    assert job.example.shape == (3, 3, 48, 48)


def test_config_file_and_command_line(parse, tmp_path):
    (tmp_path / "flags.yaml").write_text("momentum: 0.25\nwd: 0.5\nnot-qat: true\namp: false\nresume:\n")
    options = parse(["--config", str(tmp_path / "flags.yaml"), "--wd", "0.125"])
    assert (options.momentum, options.wd) == (0.25, 0.125)  # the command line overrides the file
    assert (options.not_qat, options.amp, options.resume) == (True, False, None)
    (tmp_path / "flags.yaml").write_text("lr: [1, 2]")
    with pytest.raises(sys.modules["errors"].UserError, match="expected a single value for lr, got list"):
        parse(["--config", str(tmp_path / "flags.yaml")])


def test_pretrained_weights_with_another_head(start, monkeypatch):
    torch.manual_seed(7)
    state = torchvision.models.get_model("squeezenet1_1").state_dict()
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *args, **options: state)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *args, **options: state)
    _, model = start("-a", "squeezenet1_1", "--pretrained", "--image-size", "64", model=False)
    assert torch.equal(model.state_dict()["features.0.weight"], state["features.0.weight"])
    assert model.state_dict()["classifier.1.weight"].shape[0] == 2


def test_weights_of_a_file_and_of_the_seed(start, weights):
    _, model = start()
    expected = torch.load(weights)["state_dict"]
    assert all(torch.equal(value, expected[f"module.{name}"]) for name, value in model.state_dict().items())
    seeds = ("1", "1", "2")
    drawn = [start("-a", f"{MODELS}:Tiny", "--seed", seed, model=False)[1].fc.weight for seed in seeds]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


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
    assert hasattr(sys.modules["engine"], "Classification")  # the example's own module of that name


def test_timm(start):
    _, model = start("--model-zoo", "timm", "-a", "test_resnet.r160_in1k", "--image-size", "64", model=False)
    assert "layer1.0.conv1.weight" in model.state_dict()
    assert type(model).__module__.startswith("timm.")
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--device cuda:7", "no such device"),
        ("--gpu 7", "no such device"),
        ("-nc 3", "has 2 classes"),
        ("--config nowhere.yaml", "cannot be read"),
        ("--distill-alpha 0.5", "no effect without --distill-method"),
        ("--amp-dtype float16", "no effect without --amp"),
        ("--gpu 0 --device cpu", "no effect with --gpu"),
        ("--not-qat --profile", "no effect with --not-qat"),
        ("-e --ema 0.9", "no effect with -e"),
        ("--sync-bn", "has no effect in one process"),
        ("--world-size 2", "without --multiprocessing-distributed"),
        (
            "--multiprocessing-distributed --world-size 2 --rank 2 --dist-url tcp://127.0.0.1:1",
            "--rank 2: --world-size 2 numbers its nodes from 0 to 1",
        ),
        (f"-a {MODELS}:Nothing", "has no attribute 'Nothing'"),
        (f"-a {MODELS}:not_a_classifier", "a classifier returns (images, 2)"),
        ("--quant-config nowhere.yaml", "nowhere.yaml"),
        ("--distill-method logits --teacher-path nowhere.pth", "nowhere.pth cannot be read"),
    ],
)
def test_errors_are_one_line(train, flags, message):
    with pytest.raises(SystemExit) as caught:
        train(*flags.split())
    assert str(caught.value).startswith("error: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-e", "give --model-path, --pretrained or --resume"),
        ("-e --model-path x.pth --lr 1", "--lr has no effect with -e"),
        ("-e --model-path x.pth --profile-step", "--profile-step has no effect with -e"),
        ("--not-qat --backend TSQAT", "--backend has no effect with --not-qat"),
        ("-b 1", "give 2 or more"),
        ("-a resnet81", "similar: resnet18"),
        ("-a alexnet", "cannot take images of 32 px"),
        ("--data nowhere", "nowhere/train does not exist"),
        ("--model-path nowhere.pth", "nowhere.pth cannot be read"),
        ("--model-path text.pth", "text.pth is not a weight file"),
        ("--resume weights.pth", "weights.pth is not a checkpoint of this example"),
        ("--model-path weights.pth", "weights.pth has the weights of another model: conv1.weight is not in the file"),
        ("--output-dir text.pth/below", "cannot be written"),
    ],
)
def test_errors_of_data_weights_and_folders_are_one_line(example, flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.pth").write_text("no weights")
    torch.save({"weight": torch.zeros(1)}, "weights.pth")
    output = [] if "--output-dir" in flags else ["--output-dir", "out"]
    with pytest.raises(SystemExit) as caught:
        example.main([*flags.split(), *output])
    assert str(caught.value).startswith("error: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("out/*quantization*"))


@pytest.mark.parametrize("flags", ["--opset-version 12", "--onnx-batch 0", "--lr nan", "--seed -1", "--backend TSQUAT"])
def test_impossible_values_exit_with_status_2(example, flags, capsys):
    with pytest.raises(SystemExit) as caught:
        example.main(flags.split())
    assert caught.value.code == 2
    assert flags.split()[0] in capsys.readouterr().err.splitlines()[-1]
