"""One chunk, and images without a batch that are unfolded and folded: the file has them as torch does."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxqat

FUNCTIONS = {
    "one chunk": lambda x: x.chunk(1, 1)[0] * 2,
    "one chunk of the batch": lambda x: x.chunk(1)[0] * 2,
    "a list of one chunk": lambda x: torch.cat([*x.chunk(1, -1), x], -1),
    "chunks of several sizes": lambda x: x.chunk(4, -1)[-1] * x.chunk(3, -1)[0],
    "chunks of the batch": lambda x: x.chunk(2)[1] - 1,
    "unfold": lambda x: F.unfold(x, 3, padding=1),
    "unfold of a batch": lambda x: F.unfold(x[:, None], 3, padding=1),
    "fold": lambda x: F.fold(F.unfold(x, 2), x.shape[1:], 2),
}
FIXED = ("one chunk of the batch", "chunks of the batch", "unfold", "fold")
"""Those that do not take any batch."""


class Pieces(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(6, 6), function

    def forward(self, x):
        return self.function(self.layer(x))


@pytest.mark.parametrize("backend", ["TSQAT", "ONNXRuntime"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_file_has_the_pieces(name, backend, tmp_path):
    x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
    gm = fxqat.prepare_by_platform(Pieces(FUNCTIONS[name]).eval(), backend, example_inputs=(x,))
    fxqat.calibrate(gm, [x], progress=False)
    fxqat.enable_quantization(gm)
    report = fxqat.convert_export(gm, (x,), tmp_path / "file.onnx", dynamic_batch=name not in FIXED)
    assert report.certificate.passed
    assert report.certificate.outputs[0].cosine > 0.9999
