"""Medians, running extremes and what else depends on the order of values: the file selects what torch selects."""

import numpy as np
import pytest
import torch
from torch import nn

import fxqat
from tests.export_models import run_file

FUNCTIONS = {
    "kthvalue": lambda x: torch.kthvalue(input=x, k=2),
    "kthvalue along the first": lambda x: x.kthvalue(3, 0, True),
    "median": lambda x: (x.median(),),
    "median along the last": lambda x: x.median(-1),
    "median of an even number": lambda x: torch.median(x, 1, keepdim=True),
    "median of one number": lambda x: x[0, 0, 0].median(0),
    "cummax": lambda x: torch.cummax(x, 1),
    "cummax of a row": lambda x: x[0, 0].cummax(0),
    "cummax along the first": lambda x: x.cummax(0),
    "cummin": lambda x: x.cummin(-1),
    "fmax": lambda x: (torch.fmax(x, x.flip(1)),),
    "fmin with one row": lambda x: (torch.fmin(x, x[:1]),),
    "fmax with what is no number": lambda x: (torch.fmax(torch.where(x > 1, torch.nan, x), x * 2),),
    "masked_select": lambda x: (torch.masked_select(x, x > 0),),
    "masked_select with a mask of a row": lambda x: (x.masked_select(x[:1] > 0),),
    "masked_select of a row": lambda x: (x[:1].masked_select(x > 0),),
}


class Ordered(nn.Module):
    """A function of an input as it is, and of a layer's output, whose quantized values are often equal."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(6, 6), function

    def forward(self, x):
        return *self.function(x), *self.function(self.layer(x))


def export(model, x, path, **options):
    """The certificate compares what is selected of the layer's output, values and indices."""
    gm = fxqat.prepare_by_platform(model.eval(), "TSQAT", {"overrides": [COARSE]}, example_inputs=(x,))
    fxqat.calibrate(gm, [x], progress=False)
    fxqat.enable_quantization(gm)
    assert fxqat.convert_export(gm, (x,), path, **options).certificate.passed
    return gm


COARSE = {"match": {"node": "layer"}, "output": {"bit": 4}}
"""With 16 steps, hardly a row has different values only."""


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_file_selects_what_torch_selects(name, is_open, tmp_path):
    generator = torch.Generator().manual_seed(0)
    first, other = (torch.randn(size, 6, 6, generator=generator) for size in (4, 7 if is_open else 4))
    gm = export(Ordered(FUNCTIONS[name]), first, tmp_path / "file.onnx", dynamic_batch=is_open)
    with torch.no_grad():
        expected = gm(other)[: len(FUNCTIONS[name](other))]
    for found, own in zip(run_file(tmp_path / "file.onnx", (other,)), expected, strict=False):
        np.testing.assert_array_equal(found, own.numpy())


@pytest.mark.parametrize("function", [torch.cummax, torch.cummin])
def test_of_equal_values_the_last_is_selected(function, tmp_path):
    x = torch.tensor([[3.0, 1.0, 3.0, 1.0, 3.0, 1.0]]).repeat(6, 1)[None]
    export(Ordered(lambda x: function(x, -1)), x, tmp_path / "file.onnx")
    np.testing.assert_array_equal(run_file(tmp_path / "file.onnx", (x,))[1], function(x, -1).indices.numpy())


@pytest.mark.parametrize(
    "function",
    [
        torch.cummax,
        torch.cummin,
        lambda x, dim: x.kthvalue(2, dim),
        lambda x, _: (torch.fmax(x, -x), torch.fmin(x, -x)),
    ],
)
def test_integers(function, tmp_path):
    def of_integers(x):
        return function((x * 10).long(), 1)

    x = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0))
    export(Ordered(of_integers), x, tmp_path / "file.onnx")
    for ours, theirs in zip(run_file(tmp_path / "file.onnx", (x,)), of_integers(x), strict=False):
        np.testing.assert_array_equal(ours, theirs.numpy())
