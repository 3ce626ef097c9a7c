"""What a leaf returns has, in the file, the sizes of the example inputs."""

import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxqat
from fxqat.errors import ExportError

SIZES_ARE_FIXED = torch.__version__ < (2, 15)
"""Whether torch's exporter cannot go on with a size that depends on values."""


def padding_mask(lengths):
    longest = int(torch.max(lengths).item())
    return torch.arange(longest).expand(len(lengths), longest) >= lengths.unsqueeze(1)


class Padded(nn.Module):
    """Attention to what is not longer than its sample."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x, lengths):
        y, mask = self.fc(x)[:, None], padding_mask(lengths).logical_not()
        return F.scaled_dot_product_attention(y, y, y, mask[:, None, None])


@pytest.fixture(scope="module")
def calibrated():
    torch.manual_seed(0)
    x, lengths = torch.randn(2, 5, 3), torch.tensor([5, 3])
    gm = fxqat.prepare_by_platform(Padded(), "TSQAT", example_inputs=(x, lengths))
    fxqat.calibrate(gm, [(x, lengths)], progress=False)
    fxqat.enable_quantization(gm)
    return gm.eval(), x, lengths


def test_a_size_that_depends_on_values_is_exported_and_told(calibrated, tmp_path):
    gm, x, lengths = calibrated
    report = fxqat.convert_export(gm, (x, lengths), tmp_path / "model.onnx")
    assert report.certificate.passed
    told = ["the sizes of what padding_mask_leaf returns" in warning for warning in report.warnings]
    assert told == [True] * SIZES_ARE_FIXED
    other = torch.tensor([2, 5])
    session = ort.InferenceSession(tmp_path / "model.onnx")
    names = [value.name for value in session.get_inputs()]
    assert names == ["x", "lengths"]
    (found,) = session.run(None, dict(zip(names, (x.numpy(), other.numpy()), strict=True)))
    torch.testing.assert_close(torch.from_numpy(found), gm(x, other))


@pytest.mark.skipif(not SIZES_ARE_FIXED, reason="torch's exporter can: see the next test")
def test_with_an_open_batch_it_is_refused(calibrated, tmp_path):
    gm, x, lengths = calibrated
    with pytest.raises(ExportError, match="torch.onnx.export failed") as failure:
        fxqat.convert_export(gm, (x, lengths), tmp_path / "model.onnx", dynamic_batch=True)
    assert "\x1b" not in str(failure.value)  # torch colours its messages
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(SIZES_ARE_FIXED, reason="torch's exporter cannot: see the test before")
def test_with_an_open_batch_it_follows_the_batch(calibrated, tmp_path):
    gm, x, lengths = calibrated
    fxqat.convert_export(gm, (x, lengths), tmp_path / "model.onnx", dynamic_batch=True)
    x, lengths = torch.randn(3, 5, 3), torch.tensor([1, 5, 4])
    (found,) = ort.InferenceSession(tmp_path / "model.onnx").run(None, {"x": x.numpy(), "lengths": lengths.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), gm(x, lengths))
