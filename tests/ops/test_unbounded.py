"""Masks stay float: what is added to the scores of a softmax to remove some of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxqat import BackendType, calibrate, prepare_by_platform
from fxqat.custom_quantizer.value_kinds import NO_RANGE
from fxqat.fake_quantize.base import FakeQuantizeBase

WINDOW = torch.tensor([[0.0, -100.0], [-100.0, 0.0]]).repeat(4, 4)


class Attention(nn.Module):
    """Attention of one head over 8 tokens, whose scores get a mask in different ways."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.qkv = nn.Linear(6, 18)
        self.proj = nn.Linear(6, 4)
        self.register_buffer("mask", WINDOW)
        self.register_buffer("hidden", WINDOW != 0)

    def scores(self, scores, given):
        if self.form == "buffer":
            return scores + self.mask
        if self.form == "reshaped buffer":
            return (scores.view(2, 1, 8, 8) + self.mask.unsqueeze(0).unsqueeze(0)).view(2, 8, 8)
        if self.form == "masked_fill of the scores":
            return scores.masked_fill(self.hidden, -100.0)
        if self.form == "masked_fill of a new tensor":
            return scores + torch.zeros(8, 8).masked_fill(self.hidden, value=-100.0)
        if self.form == "where":
            return scores + torch.where(self.hidden, -100.0, 0.0)
        if self.form == "product":
            return scores + (1 - given) * -100.0
        if self.form == "subtracted product":
            return scores + self.hidden.float() * -100.0
        if self.form == "assigned":
            mask = torch.zeros(8, 8)
            mask[:4, 4:] = -100.0
            return scores + mask
        return scores + given

    def forward(self, x, given):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.form == "scaled_dot_product_attention":
            return self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask + given))
        return self.proj(self.scores(q @ k.transpose(-2, -1), given).softmax(-1) @ v)


FORMS = {
    "buffer": (WINDOW != 0).float(),
    "reshaped buffer": (WINDOW != 0).float(),
    "masked_fill of the scores": (WINDOW != 0).float(),
    "masked_fill of a new tensor": (WINDOW != 0).float(),
    "where": (WINDOW != 0).float(),
    "product": (WINDOW == 0).float(),
    "subtracted product": (WINDOW != 0).float(),
    "assigned": (WINDOW != 0).float(),
    "input": WINDOW,
    "scaled_dot_product_attention": torch.randn(8, 8, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", [BackendType.TSQAT, BackendType.OpenVINO], ids=lambda backend: backend.name)
def test_no_fake_quant_has_a_range_of_the_mask(form, backend):
    torch.manual_seed(0)
    inputs = (torch.randn(2, 8, 6), FORMS[form])
    gm = prepare_by_platform(Attention(form).eval(), backend, example_inputs=inputs)
    calibrate(gm, [inputs])
    scales = {name: part.scale.max().item() for name, part in gm.named_modules() if isinstance(part, FakeQuantizeBase)}
    assert len(scales) >= 4
    assert max(scales.values()) < 0.1, scales  # -100 in 8 bits is a scale of .39 or .79
    assert NO_RANGE in {row.reason for row in gm.quant_report}


@pytest.mark.parametrize(("number", "kept_float"), [(-100.0, True), (-30.0, True), (-20.0, False)])
def test_a_bias_of_small_numbers_is_quantized(number, kept_float):
    model = Attention("buffer").eval()
    model.mask.copy_(torch.linspace(number, 0, 64).view(8, 8))
    gm = prepare_by_platform(model, BackendType.TSQAT, example_inputs=(torch.randn(2, 8, 6), WINDOW))
    assert (NO_RANGE in {row.reason for row in gm.quant_report}) is kept_float
    assert len([part for part in gm.modules() if isinstance(part, FakeQuantizeBase)]) > 4


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer((-100.0 * self.layer(x).square()).unsqueeze(0).softmax(-1))


def test_a_temperature_is_no_mask():
    gm = prepare_by_platform(Temperature().eval(), BackendType.TSQAT, example_inputs=(torch.randn(2, 6),))
    assert NO_RANGE not in {row.reason for row in gm.quant_report}
    assert gm.quant_report.row("mul").status == "shares"


class NoSoftmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("offset", torch.tensor([-100.0, 0, 1, 2, 3, 4]))

    def forward(self, x):
        return self.layer(self.layer(x) + self.offset)


def test_large_numbers_elsewhere_are_quantized():
    gm = prepare_by_platform(NoSoftmax().eval(), BackendType.TSQAT, example_inputs=(torch.randn(2, 6),))
    assert NO_RANGE not in {row.reason for row in gm.quant_report}
    calibrate(gm, [torch.randn(2, 6)])
    assert max(part.scale.max().item() for part in gm.modules() if isinstance(part, FakeQuantizeBase)) > 0.3
