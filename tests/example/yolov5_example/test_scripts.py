"""The scripts on a small set: float training, quantization, export, measuring, drawing, resuming; and their errors."""

import importlib
import json
import re
import sys

import pytest
import torch
from PIL import Image

from fxqat.tools.engines import runtime_here

SMALL = ("--img", "64", "--batch-size", "4", "--workers", "0", "--epochs", "1")


@pytest.fixture
def train(example, tree, tmp_path, capsys):
    """``train(folder, *flags)`` trains on the small set; returns what was printed."""

    def train(folder, *flags, data=True):
        capsys.readouterr()
        example.main([*(("--data", str(tree)) if data else ()), "--output_dir", str(tmp_path / folder), *flags])
        return capsys.readouterr().out

    return train


def scores(printed):
    return printed.strip().splitlines()[-1].split()


def test_from_float_training_to_pictures(train, tree, tmp_path, capsys, monkeypatch):
    printed = train("float", *SMALL)
    assert re.search(r"Epoch: \[0\]\[0/2\] Time .* Data .* Loss .* Box .* Obj .* Cls ", printed)
    assert printed.strip().splitlines()[-2].split() == ["Class", "Images", "Targets", "P", "R", "mAP@.5", "mAP@.5:.95"]
    assert scores(printed)[:3] == ["all", "4", "4"]
    weights = tmp_path / "float" / "yolov5n_model_best.pth"

    (tmp_path / "yolov5s.pt").write_bytes(weights.read_bytes())
    monkeypatch.chdir(tmp_path)  # without --weights, yolov5s.pt of the working directory
    printed = train("quantized", *SMALL, "--quantize", "--distill", "--with-decode", "--calib-pictures", "4")
    assert "weights: yolov5s.pt" in printed
    document = json.loads((tmp_path / "quantized" / "yolov5n_onnx_quantization.json").read_text())
    assert document["runtime"] == runtime_here()
    names = {path.name for path in (tmp_path / "quantized").iterdir()}
    pairs = [f"yolov5n_{kind}_quantization{end}" for kind in ("onnx", "bestonnx") for end in (".onnx", ".json")]
    assert {"yolov5n_checkpoint.pth", "yolov5n_model_best.pth", *pairs} <= names
    assert not [name for name in names if "partial" in name]

    test = importlib.import_module("test")
    found = []
    for name in ("yolov5n_model_best.pth", "yolov5n_bestonnx_quantization.onnx"):
        capsys.readouterr()
        flags = ["--img", "64", "--square", "--batch", "3", "--unoptimized", "--data", str(tree)]
        test.main(["--weights", str(tmp_path / "quantized" / name), *flags])
        found.append([float(figure) for figure in scores(capsys.readouterr().out)[3:]])
    assert found[0] == pytest.approx(found[1], abs=0.02)

    detect = importlib.import_module("detect")
    onnx = tmp_path / "quantized" / pairs[0]
    flags = ["--beside", str(onnx), "--img", "64", "--conf", "0.001", "--output", str(tmp_path / "found")]
    detect.main(["--weights", str(weights), *flags, "--source", str(tree / "images" / "val")])
    drawn = sorted((tmp_path / "found").iterdir())
    assert [path.name for path in drawn] == [f"{i}.jpg" for i in range(4)]
    assert Image.open(drawn[0]).size == (2 * 40, 64)


def test_a_resumed_training_is_the_uninterrupted_one(train, tmp_path, monkeypatch):
    flags = (*SMALL[:-1], "2", "--ema", "0.9")
    train("whole", *flags)
    arrived = sys.modules["interrupts"].Interrupt.arrived
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["interrupts"].Interrupt, "arrived", lambda self, step: 15 if step == 1 else 0)
        with pytest.raises(SystemExit) as caught:
            train("parts", *flags)
    assert caught.value.code == 128 + 15
    assert arrived is sys.modules["interrupts"].Interrupt.arrived
    train("parts", "--resume", str(tmp_path / "parts" / "yolov5n_checkpoint.pth"), data=False)
    whole, parts = (
        torch.load(tmp_path / kind / "yolov5n_checkpoint.pth", weights_only=True) for kind in ("whole", "parts")
    )
    for name, value in whole["state_dict"].items():
        assert torch.equal(value, parts["state_dict"][name]), name
    checkpoint = tmp_path / "whole" / "yolov5n_checkpoint.pth"
    train("elsewhere", "--resume", str(checkpoint), "--epochs", "3", data=False)
    assert (tmp_path / "elsewhere" / "yolov5n_model_best.pth").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--quantize", "--quantize needs --weights.* without --quantize, or download .*/v6.0/yolov5s.pt"),
        ("--quantize --generation v3.0", "/v3.0/yolov5s.pt"),
        ("--runtime none", "--runtime has no effect without --quantize"),
        ("--distill", "--distill has no effect without --quantize"),
        ("--img 100", "give a multiple of 32"),
        ("--weights nowhere.pt", "nowhere.pt cannot be read"),
        ("--resume nowhere.pt --seed 1", "--seed has no effect with --resume"),
        ("--hyp nowhere.yaml", "nowhere.yaml cannot be read"),
    ],
)
def test_errors_of_flags_are_one_line(train, flags, message):
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        train("nothing", *flags.split(), data="--resume" not in flags)


def test_hyperparameters_are_checked(train, tmp_path):
    (tmp_path / "hyp.yaml").write_text("lrr: 0.1")
    with pytest.raises(SystemExit, match="unknown name 'lrr' .did you mean lr"):
        train("nothing", "--hyp", str(tmp_path / "hyp.yaml"))
    (tmp_path / "hyp.yaml").write_text("lr: fast")
    with pytest.raises(SystemExit, match="lr is 'fast'; expected something like 0.001"):
        train("nothing", "--hyp", str(tmp_path / "hyp.yaml"))
    for text, message in (
        ("optim: rmsprop", "optim is 'rmsprop'; expected sgd or adam"),
        ("{lr: 0.1, lr0: 0.2}", "lr is given twice, here as lr0"),
        ("lrf: -4", "lrf is -4.0; expected the share of lr"),
        ("{lrf: 0.2, lr_schedule: constant}", "lrf has no effect with lr_schedule constant"),
        ("weight_decays: 0.1", "did you mean weight_decay"),
    ):
        (tmp_path / "hyp.yaml").write_text(text)
        with pytest.raises(SystemExit, match=message):
            train("nothing", "--hyp", str(tmp_path / "hyp.yaml"))


UPSTREAM = """
lr0: 0.004
lrf: 0.2
momentum: 0.9
weight_decay: 0.0002
warmup_epochs: 2.0
warmup_momentum: 0.8
giou: 0.06
cls: 0.4
cls_pw: 1.0
obj: 0.7
fl_gamma: 0.0
hsv_h: 0.015
anchor_t: 3.0
scale: 0.3
fliplr: 0.1
mosaic: 0.2
"""


def test_the_command_of_the_guide_with_hyperparameters_of_upstream(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yolov5s.pt").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "hyp.qat.yaml").write_text(UPSTREAM)
    sys.modules["logs"].set_up_logging(1, first=True)
    command = "--data data/coco.yaml --device cpu --epochs 10 --batch-size 49 --workers 6 --quantize"
    command += " --output_dir checkpoint_qat --hyp data/hyp.qat.yaml"
    options = sys.modules["options"].parse_options(command.split())
    assert capsys.readouterr().out.strip() == (
        "--hyp data/hyp.qat.yaml: this trainer does not have, and leaves out: warmup_momentum 0.8, hsv_h 0.015"
    )
    assert [str(options.weights), str(options.output_dir)] == ["yolov5s.pt", "checkpoint_qat"]
    assert (options.hyp.gains.box, options.hyp.gains.cls, options.hyp.gains.obj) == (0.06, 0.4, 0.7)
    assert (options.hyp.gains.anchor_t, options.hyp.mosaic, options.hyp.fliplr, options.hyp.scale) == (3, 0.2, 0.1, 0.3)

    training = sys.modules["training"]
    state = training.Training(torch.nn.Linear(2, 2), options, training.Precision("cpu", None), steps_per_epoch=1)
    weights, biases = state.optimizer.param_groups
    assert (weights["weight_decay"], biases["weight_decay"], weights["momentum"]) == (0.0002, 0, 0.9)
    rates = []
    for _ in range(11):
        rates.append(state.lr)
        state.optimizer.step()
        state.step(accepted=False)
    assert rates[0] == 0
    assert rates[5] == pytest.approx(0.004 * (0.2 + 0.8 / 2))  # half of the cosine
    assert rates[10] == pytest.approx(0.004 * 0.2)


def test_the_data_of_the_example_is_that_of_its_commands(example):
    folder = sys.modules["hyperparameters"].FOLDER
    description = sys.modules["dataset"].read_description(folder / "coco.yaml")
    assert (len(description.names), description.names[0], description.names[79]) == (80, "person", "toothbrush")
    for name in ("qat", "distill", "scratch"):
        assert sys.modules["hyperparameters"].read_hyperparameters(folder / f"hyp.{name}.yaml").optim == "adam"


def test_a_wrong_number_of_classes_is_an_error(train, tmp_path):
    model = sys.modules["model"].Yolo("n", 3)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "three.pt")
    with pytest.raises(SystemExit, match="three.pt has 3 classes, .*data.yaml has 2"):
        train("nothing", "--weights", str(tmp_path / "three.pt"))
    torch.save({"state_dict": torch.nn.Linear(2, 2).state_dict()}, tmp_path / "linear.pt")
    with pytest.raises(SystemExit, match="its 2 tensors do not fit YOLOv5"):
        train("nothing", "--weights", str(tmp_path / "linear.pt"))
