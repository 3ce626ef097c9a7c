"""Post-processing that decodes positions stays float; nothing else does."""

import operator

import pytest
import torch
from torch import Tensor, nn

import fxqat
from fxqat import prepare_by_platform
from fxqat.custom_quantizer.position_decoding import holds_grid
from fxqat.custom_quantizer.reasons import DECODES_POSITIONS
from tests.export_models import run_session, session


class Head(nn.Module):
    """Boxes of a grid, as YOLO heads decode them."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.last = nn.Conv2d(6, 6, 1)

    def forward(self, x):
        y = self.last(self.conv(x).relu())
        y = y.view(y.shape[0], 6, -1).permute(0, 2, 1)
        scores = y.sigmoid()
        return torch.cat(((scores[..., :2] * 2 + self.grid(x)) * 8, scores[..., 2:]), -1), y

    def grid(self, x) -> Tensor:
        rows, columns = (torch.arange(size) for size in x.shape[2:])
        return torch.stack((columns.repeat(len(rows)), rows.repeat_interleave(len(columns))), 1)


class StoredGrid(Head):
    def __init__(self):
        super().__init__()
        self.register_buffer("stored", super().grid(torch.zeros(1, 3, 8, 8)).float() - 0.5)

    def grid(self, x):
        return self.stored


class OneDimension(Head):
    """The positions along one axis, in a buffer of one dimension."""

    def __init__(self):
        super().__init__()
        self.register_buffer("stored", torch.arange(64.0))

    def grid(self, x):
        return self.stored.unsqueeze(1)


class Anchored(Head):
    """Sizes as well: factors of one row of a table."""

    def __init__(self):
        super().__init__()
        self.register_buffer("anchors", torch.tensor([[10.0, 373.0], [30.0, 61.0]]))

    def forward(self, x):
        _, y = super().forward(x)
        scores = y.sigmoid()
        sizes = scores[..., 2:4] * self.anchors[1]
        return torch.cat(((scores[..., :2] * 2 + self.grid(x)) * 8, sizes, scores[..., 4:]), -1), y


class Denormalised(nn.Module):
    """After the last layer, but without positions: the mean and deviation of each channel."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.register_buffer("mean", torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1))

    def forward(self, x):
        return torch.sigmoid(self.conv(x)) * 2 + self.mean


class Encoded(nn.Module):
    """Positions, but read by a further layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 4)

    def forward(self, x):
        y = self.conv(x).flatten(2).permute(0, 2, 1)
        return self.last(y + torch.arange(y.shape[1]).view(1, -1, 1))


def image(batch=2):
    torch.manual_seed(0)
    return torch.randn(batch, 3, 8, 8)


def calibrated(head, backend):
    model = head().eval()
    gm = prepare_by_platform(model, backend, example_inputs=(image(),)).eval()
    fxqat.calibrate(gm, [image()])
    fxqat.enable_quantization(gm)
    return model, gm


def decoding(gm):
    return [row.op for row in gm.quant_report if row.reason == DECODES_POSITIONS]


@pytest.mark.parametrize("backend", ["TSQAT", "ONNXRuntime"])
@pytest.mark.parametrize("head", [Head, StoredGrid, OneDimension])
def test_boxes_are_decoded_in_float_of_quantized_maps(head, backend):
    model, gm = calibrated(head, backend)
    grid = ["unsqueeze"] if head is OneDimension else []
    assert decoding(gm) == ["sigmoid", "getitem", "mul", *grid, "add", "mul", "getitem", "cat"]
    boxes, maps = gm(image())
    scores = maps.sigmoid()
    expected = torch.cat(((scores[..., :2] * 2 + model.grid(image()) + 0.0) * 8, scores[..., 2:]), -1)
    torch.testing.assert_close(boxes, expected)


@pytest.mark.parametrize(("head", "backend"), [(Head, "TSQAT"), (StoredGrid, "ONNXRuntime"), (OneDimension, "TSQAT")])
def test_exported_boxes_are_those_of_the_model(head, backend, tmp_path):
    _, gm = calibrated(head, backend)
    fxqat.convert_export(gm, (image(),), tmp_path / "model.onnx")
    boxes, maps = (torch.from_numpy(array) for array in run_session(session(tmp_path / "model.onnx"), [image()]))
    torch.testing.assert_close(boxes, gm(image())[0].detach(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(maps, gm(image())[1].detach(), rtol=1e-4, atol=1e-3)


def test_the_anchors_of_decoded_boxes_stay_float():
    gm = prepare_by_platform(Anchored(), "TSQAT", example_inputs=(image(),)).eval()
    anchors = next(node for node in gm.graph.nodes if node.target == "anchors")
    assert [user.target for user in anchors.users] == [operator.getitem]
    fxqat.enable_calibration(gm)
    gm(image())
    fxqat.enable_quantization(gm)
    boxes, maps = gm(image())
    torch.testing.assert_close(boxes[..., 2:4], maps[..., 2:4].sigmoid() * torch.tensor([30.0, 61.0]))


@pytest.mark.parametrize(
    ("tensor", "is_grid"),
    [
        (torch.tensor(3.0), False),
        (torch.zeros(0, 4), False),
        (torch.ones(8), False),
        (torch.tensor([1.0, 2.0, 3.0]), False),
        (torch.tensor([1.0, 2.0, 3.0, 5.0]), False),
        (torch.arange(4), True),
        (torch.arange(4.0) / 3, True),
        (torch.arange(16.0).view(1, 4, 4, 1) / 2, True),
        (torch.ones(4, dtype=torch.bool), False),
        (nn.Parameter(torch.arange(4.0)), False),
    ],
)
def test_what_a_grid_is(tensor, is_grid):
    assert holds_grid(tensor) is is_grid


@pytest.mark.parametrize("model", [Denormalised(), Encoded()])
def test_nothing_else_is_post_processing(model):
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(image(),))
    assert decoding(gm) == []
    assert all(row.status != "float" for row in gm.quant_report if row.op in ("add", "mul", "sigmoid"))


def test_what_the_user_adds_is_quantized():
    config = {"extra_quantizer_dict": {"additional_function_type": [operator.add, operator.mul]}}
    gm = prepare_by_platform(Head(), "TSQAT", config, example_inputs=(image(),))
    rows = {row.op: row.status for row in gm.quant_report}
    assert rows["add"] != "float"
    assert rows["mul"] != "float"
    assert rows["sigmoid"] == "float"
