"""Scales of blocks in float16: half as large, and nothing else changes."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from fxqat import convert_export
from fxqat.errors import ExportError, ParityError
from fxqat.numerics import SCALE_MIN
from fxqat.onnx.half_scales import HALF, half_scales_of
from fxqat.onnx.quant_params import check_params
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools import ptq
from tests.export_models import session

INDICES = (torch.arange(24).reshape(2, 12),)


class Tagger(nn.Module):
    """An embedding, an LSTM and a linear layer, with a block of zeros and blocks of very different sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(24, 32)
        self.lstm = nn.LSTM(32, 48, batch_first=True)
        self.out = nn.Linear(48, 20)
        with torch.no_grad():
            self.out.weight[:, :16] = 0.0
            self.out.weight[:, 16:32] *= 1e-6

    def forward(self, words: Tensor) -> Tensor:
        """``(N, T)`` to ``(N, T, 20)``."""
        states, _ = self.lstm(self.table(words))
        return self.out(states)


def prepared(scale_bits: int, block_size: int | None = 16) -> QuantGraphModule:
    scheme = {"bit": 4, "block_size": block_size, "symmetry": False, "scale_bits": scale_bits}
    config = {
        "extra_qconfig_dict": {"w_qscheme": scheme},
        "extra_quantizer_dict": {"additional_module_type": ["Embedding"]},
    }
    return ptq(Tagger().eval(), [INDICES], "Experimental", config, compare=False)


@pytest.mark.parametrize("runtime", [None, "onnxruntime", "openvino"])
def test_the_file_is_smaller_and_computes_the_same(runtime: str | None, tmp_path: Path) -> None:
    gm = prepared(11)
    paths = {kind: tmp_path / f"{kind}.onnx" for kind in ("float32", "float16")}
    for kind, path in paths.items():
        report = convert_export(gm, INDICES, path, scales=kind, runtime=runtime)
        assert report.certificate is not None
        assert report.certificate.passed
    whole, half = (session(onnx.load(path)).run(None, {"words": INDICES[0].numpy()})[0] for path in paths.values())
    assert np.array_equal(whole, half)
    held = {t.name: t for t in onnx.load(paths["float16"]).graph.initializer}
    expected = {t.name: t for t in onnx.load(paths["float32"]).graph.initializer}
    names = [name for name in held if name.endswith(HALF)]
    assert sorted(names) == sorted(
        f"{name}_scale{HALF}" for name in ("table.weight", "lstm.weight_ih", "lstm.weight_hh", "out.weight")
    )
    scales = half_scales_of(onnx.load(paths["float16"]))
    saved = 0
    for name in names:
        assert held[name].data_type == onnx.TensorProto.FLOAT16
        in_full = numpy_helper.to_array(expected[name.removesuffix(HALF)])
        assert np.array_equal(scales[name.removesuffix(HALF)], in_full)
        saved += 2 * in_full.size
    difference = paths["float32"].stat().st_size - paths["float16"].stat().st_size
    assert saved - 300 * len(names) < difference < saved  # two nodes and two names each


def test_the_scale_of_a_block_of_zeros_is_held_beside_large_ones(tmp_path: Path) -> None:
    convert_export(prepared(11), INDICES, tmp_path / "m.onnx", scales="float16")
    scales = half_scales_of(onnx.load(tmp_path / "m.onnx"))["out.weight_scale"]
    assert scales.min() == SCALE_MIN
    assert scales.max() > 1e-3


def test_scales_that_float16_does_not_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r'float16 does not hold \d+ of its \d+ scales.*\n?.*"scale_bits": 11'):
        convert_export(prepared(24), INDICES, tmp_path / "m.onnx", scales="float16")
    assert not any(tmp_path.iterdir())


def test_a_model_without_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="the model has none"):
        convert_export(prepared(11, None), INDICES, tmp_path / "m.onnx", scales="float16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"scales": "half"}, "'float32' or 'float16'"), ({"scales": "float16", "weights": "float"}, "integer weights")],
)
def test_other_arguments_are_refused(arguments: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        convert_export(prepared(11), INDICES, tmp_path / "m.onnx", **arguments)


def test_another_scale_in_the_file_is_found(tmp_path: Path) -> None:
    report = convert_export(prepared(11), INDICES, tmp_path / "m.onnx", scales="float16")
    model = onnx.load(tmp_path / "m.onnx")
    constant = [tensor for tensor in report.tensors if tensor.kind != "dynamic"]
    check_params(model, constant)
    held = next(t for t in model.graph.initializer if t.name == f"out.weight_scale{HALF}")
    values = numpy_helper.to_array(held).copy()
    values[0, 0] *= 2
    held.CopyFrom(numpy_helper.from_array(values, held.name))
    with pytest.raises(ParityError, match="out.weight"):
        check_params(model, constant)
