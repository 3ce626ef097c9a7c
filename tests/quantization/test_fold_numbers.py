"""Numbers that a model keeps in buffers are constants in the file."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxqat
from fxqat.quantization.lower import lower


class Buffers(nn.Module):
    """A convolution, and a function of its output and of buffers."""

    def __init__(self, call):
        super().__init__()
        self.call = call
        self.conv = nn.Conv2d(2, 4, 1)
        self.register_buffer("factors", torch.tensor([1.0, 1.0, 2.0, 3.0]))
        self.register_buffer("sizes", torch.tensor([1, 3]))
        self.register_buffer("start", torch.tensor(1))

    def forward(self, x):
        return self.call(self, self.conv(x))


CALLS = {
    "list": lambda m, x: F.interpolate(x, scale_factor=m.factors.tolist()[2:]),
    "item": lambda m, x: x * (m.factors[3] * 2).item(),
    "sizes": lambda m, x: torch.cat(x.split(m.sizes.tolist(), 1)[::-1], 1),
    "slice": lambda m, x: x[:, m.start : m.sizes[1]] * 2,
    "index": lambda m, x: x[:, m.start] * 2,
    "shape": lambda m, x: x.reshape(m.start, m.sizes[1] + 1, -1) * 2,
    "permutation": lambda m, x: x.permute(*torch.cat((torch.tensor([0, 2]), torch.arange(3, 4), m.sizes[:1]))) * 2,
    "transposition": lambda m, x: x.transpose(m.start, torch.argsort(torch.arange(4))[-1]) * 2,
    "tensor": lambda m, x: x * m.factors.view(1, -1, 1, 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_file_has_the_numbers_of_the_model(name, tmp_path):
    torch.manual_seed(0)
    model, x = Buffers(CALLS[name]), torch.randn(1, 2, 4, 4)
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    fxqat.calibrate(gm, [x], progress=False)
    fxqat.enable_quantization(gm)
    report = fxqat.convert_export(gm.eval(), (x,), tmp_path / "model.onnx")
    assert report.certificate.passed
    assert report.certificate.outputs[0].cosine > 0.9999


def test_buffers_that_the_model_updates_are_not_folded():
    class Counts(Buffers):
        def forward(self, x):
            self.start += 1
            return self.conv(x) * self.start

    model, x = Counts(None), torch.randn(1, 2, 4, 4)
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    fxqat.calibrate(gm, [x], progress=False)
    fxqat.enable_quantization(gm)
    before = gm.start.clone()
    lowered = lower(gm.eval()).module
    assert torch.equal(gm.start, before)
    torch.testing.assert_close(lowered(x), gm(x))
