"""The model: published names and shapes, prepared as a whole, exported, equal in ONNX Runtime."""

import pickle
import sys
import types
from functools import partial

import onnxruntime as ort
import pytest
import torch
from torch import nn

import fxqat
from fxqat.fake_quantize.state import named_fake_quants

PARAMETERS = {  # millions, of the published models: the releases' tables, at 80 classes
    "v3.0": {"s": 7.5, "m": 21.8, "l": 47.8, "x": 89.0},
    "v6.0": {"n": 1.9, "s": 7.2, "m": 21.2, "l": 46.5, "x": 86.7},
}


@pytest.fixture
def yolo(example):
    return sys.modules["model"].Yolo


@pytest.mark.parametrize(("generation", "size"), [(g, s) for g in PARAMETERS for s in PARAMETERS[g]])
def test_as_many_parameters_as_published(yolo, generation, size):
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in yolo(size, 80, generation).parameters())
    assert count / 1e6 == pytest.approx(PARAMETERS[generation][size], rel=0.015)


@pytest.mark.parametrize(("generation", "backend"), [("v6.0", "TSQAT"), ("v3.0", "TSQAT"), ("v6.0", "ONNXRuntime")])
def test_the_whole_model_is_quantized_but_for_its_post_processing(yolo, generation, backend, tmp_path):
    torch.manual_seed(0)
    model, x = yolo("n", 2, generation).eval(), torch.rand(1, 3, 64, 96)
    gm = fxqat.prepare_by_platform(model, backend, example_inputs=(x,))
    report = gm.quant_report
    assert report.leaves == ()
    decoding = [row for row in report if row.reason.startswith("post-processing")]
    assert {row.op for row in decoding} == {"sigmoid", "getitem", "mul", "sub", "add", "pow", "cat", "reshape"}
    if backend == "TSQAT":
        kinds = ("conv2d", "cat", "add", "max_pool2d", "silu", "hardswish", "leaky_relu", "interpolate")
        left = [row for row in report if row.op in kinds and row.status == "float" and row not in decoding]
        assert left == []
        shared = [row for row in report if row.op == "cat" and row not in decoding]
        assert {row.status for row in shared} == {"shares"}

    maps = gm.train()(torch.rand(2, 3, 64, 64))
    assert [tuple(y.shape) for y in maps] == [(2, 3, side, side, 7) for side in (8, 4, 2)]
    fxqat.enable_calibration(gm.eval())
    gm(x)
    fxqat.enable_quantization(gm)
    detector = sys.modules["detector"]
    with_decode = generation == "v6.0"
    path = tmp_path / "yolo.onnx"
    runtime = "onnxruntime" if with_decode else None
    report = detector.export(gm, path, 64, ("a", "b"), with_decode, None, runtime)
    assert report.runtime == runtime
    assert report.certificate.passed
    assert path.with_suffix(".json").exists()
    images = torch.rand(3, 3, 64, 64)  # the batch is free
    boxes = detector.OnnxDetector(path, optimize=False)(images)
    with torch.no_grad():
        expected = gm(images)[0]
    assert boxes.shape == expected.shape == (3, 3 * (64 + 16 + 4), 7)
    assert (boxes - expected).abs().max() < 2  # px, and steps of a map of random weights
    assert (boxes - expected).abs().median() < 1e-3
    names = [output.name for output in ort.InferenceSession(path).get_outputs()]
    assert names == (["boxes"] if with_decode else ["map_8", "map_16", "map_32"])


@pytest.mark.parametrize("backend", [backend.name for backend in fxqat.BackendType])
def test_the_configuration_of_the_example_fits_every_backend(yolo, backend, monkeypatch):
    unchecked = partial(fxqat.prepare_by_platform, check="off")  # that it computes the same is tested above
    monkeypatch.setattr(sys.modules["detector"], "prepare_by_platform", unchecked)
    gm = sys.modules["detector"].prepared(yolo("n", 2), {"img": 64, "backend": backend, "quant_config": None})
    quants = dict(named_fake_quants(gm))
    weights = [quant for quant in quants.values() if quant.kind == "weight_fake_quant"]
    assert {type(quant.observer).__name__ for quant in weights} == {"MSEObserver"}
    ranges = [quant.scheme.fixed_range for name, quant in quants.items() if name.startswith("model_24_")]
    assert ranges == ([(-8.0, 8.0)] * 3 if backend in sys.modules["detector"].MAPS_IN_INTEGERS else [])


def test_boxes_are_where_the_maps_say(yolo):
    model = yolo("n", 2).eval()
    head = model.model[-1]
    maps = [torch.full((1, 3, side, side, 7), -20.0) for side in (8, 4, 2)]
    maps[1][0, 2, 3, 1] = torch.tensor([0.0, 0.0, 0.0, 0.0, 20.0, -20.0, 20.0])
    found = sys.modules["detection"].suppress(head.decode(maps)[0], 0.5, 0.6)
    x, y, (w, h) = (1 + 0.5) * 16, (3 + 0.5) * 16, (59, 119)
    torch.testing.assert_close(found, torch.tensor([[x - w / 2, y - h / 2, x + w / 2, y + h / 2, 1.0, 1.0]]))


@pytest.mark.parametrize("generation", list(PARAMETERS))
def test_weights_tell_which_model_they_are_of(yolo, generation, tmp_path):
    model = yolo("s", 3, generation)
    weights = sys.modules["weights"]
    state = {f"module.{name}": value.half() for name, value in model.state_dict().items()}
    torch.save({"state_dict": state, "names": ["a", "b", "c"]}, tmp_path / "weights.pt")
    content = weights.read_weights(tmp_path / "weights.pt")
    found = weights.build_for(content["state_dict"], "weights.pt")
    assert (found.size, found.generation, found.num_classes) == ("s", generation, 3)
    for name, value in found.state_dict().items():
        assert torch.equal(value, model.state_dict()[name].half().to(value.dtype))


def published(yolo, path, monkeypatch):
    """A pickle as upstream publishes it: of a model whose classes are in a module that is not here."""
    foreign = types.ModuleType("models.yolo")
    foreign.Model = type("Model", (nn.Module,), {"__module__": "models.yolo"})
    monkeypatch.setitem(sys.modules, "models", types.ModuleType("models"))
    monkeypatch.setitem(sys.modules, "models.yolo", foreign)
    source = yolo("n", 2).half()
    model = foreign.Model()
    model.names, model.model = ["a", "b"], source.model
    for kind in {type(module) for module in source.modules() if type(module).__module__ == "blocks"}:
        monkeypatch.setattr(kind, "__module__", "models.yolo")
        setattr(foreign, kind.__name__, kind)
    torch.save({"epoch": -1, "model": model, "optimizer": None}, path)
    monkeypatch.undo()
    return source


def test_a_published_pickle_is_read_without_its_classes(yolo, tmp_path, monkeypatch):
    source = published(yolo, tmp_path / "yolov5n.pt", monkeypatch)
    with pytest.raises(ModuleNotFoundError):
        torch.load(tmp_path / "yolov5n.pt", weights_only=False)
    content = sys.modules["weights"].read_weights(tmp_path / "yolov5n.pt")
    assert content["names"] == ["a", "b"]
    expected = source.float().state_dict()
    assert content["state_dict"].keys() == expected.keys()
    assert all(torch.equal(content["state_dict"][name], expected[name]) for name in expected)


class Bomb:
    def __reduce__(self):
        return (open, ("exploded", "w"))


def test_no_code_of_a_pickle_runs(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Bomb()}, "bomb.pt")
    user_error = sys.modules["errors"].UserError
    weights = sys.modules["weights"]
    assert weights.read_weights(tmp_path / "bomb.pt")["state_dict"] == {}
    with pytest.raises(user_error, match="its 0 tensors do not fit YOLOv5"):
        weights.build_for({}, "bomb.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"model": Bomb()}))
    with pytest.raises(user_error, match="neither a state dict nor a published model"):
        weights.read_weights(tmp_path / "plain.pt")
    assert not (tmp_path / "exploded").exists()
