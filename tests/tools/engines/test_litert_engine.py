"""A file of ``export_tflite`` in LiteRT: its outputs and its operators. Needs ``pip install "fxqat[litert]"``."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxqat
from fxqat.errors import ExportError
from fxqat.tools.engines import load_engine

pytest.importorskip("litert_torch", exc_type=ImportError)


class Joined(nn.Module):
    """A convolution with a ReLU beside one without, joined, a third one, and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.left(x), self.right(x).relu()], 1)) + x


def test_small_graphs_run_on_integers_and_match(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 8, 8)
    gm = fxqat.prepare_by_platform(Joined().eval(), "LiteRT", example_inputs=(x,), is_qat=False)
    fxqat.calibrate(gm, [x], progress=False)
    fxqat.enable_quantization(gm)
    path = tmp_path / "model.tflite"
    report = fxqat.export_tflite(gm, (x,), path)
    compiled = load_engine("litert").compile(path.read_bytes())
    (output,) = compiled.run(dict.fromkeys(compiled.input_names(), x.numpy())).values()
    step = max(max(t.scale) for t in report.tensors if t.kind == "activation")
    assert np.abs(output - gm(x).detach().numpy()).max() <= step * 1.001
    kinds = [operator.kind for operator in compiled.operators()]
    assert kinds.count("CONV_2D") == 3
    assert {"CONCATENATION", "ADD"} <= set(kinds)
    assert all(operator.integers for operator in compiled.operators())
    with pytest.raises(ExportError, match="LiteRT cannot run the file"):
        compiled.run({})
