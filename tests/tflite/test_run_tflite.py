"""LiteRT runs in a process of its own: what makes it abort is an error, and the user's process goes on."""

import numpy as np
import pytest
import torch
from torch import nn

from fxqat import calibrate, enable_quantization, export_tflite, prepare_by_platform
from fxqat.errors import ExportError
from fxqat.tflite.run_tflite import run_tflite
from tests.litert_models import needs_litert


class SoftmaxOfZeros(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x):
        return self.layer(x).softmax(-1)


def test_a_file_that_makes_litert_abort_is_an_error_and_leaves_nothing(tmp_path):
    needs_litert()
    inputs = (torch.randn(2, 8),)
    gm = prepare_by_platform(SoftmaxOfZeros(), "LiteRT", example_inputs=inputs).eval()
    calibrate(gm, [inputs], progress=False)
    enable_quantization(gm)
    assert torch.equal(gm(*inputs), torch.full((2, 8), 0.125))
    with pytest.raises(ExportError, match="LiteRT aborted its process with SIGABRT. Seen with a softmax"):
        export_tflite(gm, inputs, tmp_path / "model.tflite")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kernels", ["reference", "default"])
def test_what_litert_refuses_is_told_in_its_words(kernels):
    needs_litert()
    with pytest.raises(ExportError, match=f"cannot run the .tflite file with its {kernels} kernels: .*[Ff]latbuffer"):
        run_tflite(b"no flatbuffer", [np.zeros(3)], kernels)
