"""A prepared model that is converted: casts to the type of its tensors follow, others are told."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import fxqat


class Casts(nn.Module):
    """Between two layers, a cast to the type of a tensor, a new tensor of it, and a fixed type."""

    def __init__(self, fixed=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.fixed = nn.Linear(4, 4), nn.Linear(4, 4), fixed

    def forward(self, x):
        kept_dtype = x.dtype
        y = self.first(x)
        if self.fixed:
            y = y.to(torch.float32)  # the fixed type
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(kept_dtype)
        y = y + torch.arange(4, device=y.device).to(y.dtype) + torch.ones(4, dtype=x.dtype)
        return self.last(y)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("given", [(X,), None], ids=["inputs", "no inputs"])
def test_casts_follow_the_model_to_another_type_and_back(given, fixed, caplog):
    model = Casts(fixed).eval()
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=given, check="off")
    before = gm(X)
    half = copy.deepcopy(gm).bfloat16()
    expected = copy.deepcopy(model).bfloat16()(X.bfloat16())
    assert half(X.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(half(X.bfloat16()), expected)
    assert ("its graph casts to torch.float32 as before" in caplog.text) is fixed
    line = next(
        i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("the fixed type")
    )
    assert (f"{Path(__file__).name}:{line}" in caplog.text) is fixed
    assert torch.equal(gm(X), before)
    caplog.clear()
    assert half.float()(X).dtype == torch.float32
    assert caplog.text == ""
