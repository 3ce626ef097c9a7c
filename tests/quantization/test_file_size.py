"""The size of the file is known before the export."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fxqat import prepare_by_platform
from fxqat.convert_export import convert_export
from fxqat.errors import ExportError
from fxqat.quantization.file_size import check_size

SIZE = importlib.import_module("fxqat.quantization.file_size")


class Tied(nn.Module):
    """An embedding of 1000 floats, a linear layer of its 1000 integers, and 100 integers with 10 floats of bias."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(100, 10)
        self.hidden = nn.Linear(10, 10)
        self.unread = nn.Linear(1000, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.hidden(self.emb(tokens)), self.emb.weight)


@pytest.mark.parametrize(("weights", "size"), [("integer", 4000 + 1000 + 100 + 40), ("float", 4000 + 400 + 40)])
def test_what_is_in_the_file_is_counted(weights: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gm = prepare_by_platform(Tied(), example_inputs=(torch.zeros(2, 3, dtype=torch.long),))
    monkeypatch.setattr(SIZE, "MAX_BYTES", size)
    check_size(gm, weights)
    monkeypatch.setattr(SIZE, "MAX_BYTES", size - 1)
    with pytest.raises(ExportError, match="at most"):
        check_size(gm, weights)


def test_more_than_2_gib_of_floats_are_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, which holds no data and is refused otherwise; it is not even calibrated."""
    monkeypatch.setattr(sys.modules["fxqat.prepare_by_platform"], "check_model", lambda *_: None)
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(300_000, 2_000), nn.Linear(2_000, 10))
    gm = prepare_by_platform(model, "TensorRT")
    with pytest.raises(
        ExportError, match=r"would hold 2\.24 GiB, 2\.24 GiB of it in float tensors.*Quantize more"
    ) as caught:
        convert_export(gm, torch.zeros(1, 3, dtype=torch.long), tmp_path / "model.onnx")
    assert "integers" in str(caught.value)
    assert not list(tmp_path.iterdir())
