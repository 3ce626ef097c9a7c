"""``int`` of sizes stays open where code works with that, and is a number where it does not."""

import numpy as np
import pytest
import torch
from torch import nn

from fxqat import convert_export, enable_calibration, enable_quantization, prepare_by_platform
from fxqat.errors import TraceError
from fxqat.tracing.open_int import OpenInt


class Model(nn.Module):
    """A linear layer; :meth:`reshape` is what differs."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x):
        return self.reshape(self.lin(x))

    def reshape(self, y):
        """Reshape what the layer computed, N x 4 x 8 x 6."""
        return y


class Windows(Model):
    """The number of images from that of their windows, as in Swin transformers."""

    def reshape(self, y):
        height, width, side = y.shape[1], y.shape[2], 4
        windows = y.view(-1, height // side, side, width // side, side, 6).permute(0, 1, 3, 2, 4, 5)
        windows = windows.reshape(-1, side, side, 6)
        count = int(windows.shape[0] / (height * width / side / side))
        back = windows.view(count, height // side, width // side, side, side, -1).permute(0, 1, 3, 2, 4, 5)
        return back.reshape(count, height, width, -1)


class WindowsOfOneSize(Windows):
    """The sizes of the images are numbers."""

    def reshape(self, y):
        windows = y.reshape(-1, 4, 4, 6)
        return windows.view(int(windows.shape[0] / (4 * 8 / 4.0 / 4)), -1, 6)


class Itself(Model):
    """A size that is a size already, halves of sizes, and the type as a dtype."""

    def reshape(self, y):
        batch, height, width = map(int, y.shape[:3])
        y = y.view(batch, height * width, 6)[:, : int(height * width / 2), : int(0.5 * y.shape[3])]
        ones = torch.from_numpy(np.ones(3, int)) * torch.ones(3, dtype=int) * torch.ones(3).to(float)
        return y * ones.float()


class AsksForTheType(Model):
    """A type that is not ``int`` itself is refused."""

    def reshape(self, y):
        if type(len(y.shape)) is not int:
            raise TypeError("int is not int")
        return y.view(int(y.shape[0]), -1)


class InALayer(nn.Sequential):
    """The same in a module that could be kept whole instead."""

    def __init__(self):
        super().__init__(nn.Linear(6, 6), AsksForTheType(), nn.ReLU())


OPEN = {"windows": Windows, "one_size": WindowsOfOneSize, "itself": Itself}


@pytest.mark.parametrize("name", OPEN)
def test_the_graph_and_the_file_run_with_any_batch(name, tmp_path):
    model, x = OPEN[name]().eval(), torch.randn(2, 4, 8, 6)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert (gm.quant_report.forced, gm.quant_report.leaves) == ((), ())
    for batch in (1, 3):
        other = torch.randn(batch, 4, 8, 6)
        torch.testing.assert_close(gm(other), model(other))
    enable_calibration(gm)
    gm(x)
    enable_quantization(gm)
    assert convert_export(gm, (x,), tmp_path / "model.onnx", dynamic_batch=True).certificate.passed
    assert "int" not in globals()


@pytest.mark.parametrize("kind", [AsksForTheType, InALayer])
def test_code_that_needs_the_type_itself_gets_a_number(kind):
    model, x = kind().eval(), torch.randn(2, 4, 8, 6)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert gm.quant_report.leaves == ()
    assert [forced.value for forced in gm.quant_report.forced] == [2]
    assert any(row.weight for row in gm.quant_report)
    torch.testing.assert_close(gm(x), model(x))
    assert "int" not in globals()


@torch.fx.wrap
def scaled(y, kind):
    """A function of the user that gets a type."""
    return y * 2 if kind is int else y * 3


class GivesAType(Model):
    """To a function that is one node, a type is no dtype."""

    def reshape(self, y):
        return scaled(y.view(int(y.shape[0]), -1), int)


def test_a_type_for_a_function_of_the_user_is_refused_and_not_made_a_dtype():
    with pytest.raises(TraceError, match=r"cannot hold a value of the type builtins\.type"):
        prepare_by_platform(GivesAType().eval(), "TSQAT", example_inputs=(torch.randn(2, 4, 8, 6),), check="off")


class Other(Model):
    """Numbers that are no quotients of positive sizes, and one that divides by a rounded quotient."""

    def reshape(self, y):
        side = int((y.shape[1] * y.shape[2] / 2) ** 0.5)
        side += int(y.shape[1] / (y.shape[3] / 9))
        return y.flatten(1, 2)[:, : int(y.shape[1] * 1.6) + int(-y.shape[1] / 2) + side]


def test_other_numbers_are_fixed_and_told():
    model, x = Other().eval(), torch.randn(2, 4, 8, 6)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert {forced.value for forced in gm.quant_report.forced} == {4.0, 6.0, 6.4}
    torch.testing.assert_close(gm(x), model(x))


def test_it_is_int_for_everything_else():
    assert [OpenInt("7"), OpenInt("11", 2), OpenInt("11", base=2), OpenInt(), OpenInt(True)] == [7, 3, 3, 0, 1]
    assert OpenInt.from_bytes(b"\x01", "big") == 1
    assert isinstance(3, OpenInt)
    assert isinstance(True, (OpenInt, str))
    assert not isinstance(3.0, OpenInt)
    assert issubclass(bool, OpenInt)
    assert not issubclass(float, OpenInt)
    assert {int: "a"}[OpenInt] == "a"
    with pytest.raises(ValueError, match="invalid literal"):
        OpenInt("x")
