"""Tables of embeddings as quantized layers, from training to the file."""

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxqat
from fxqat.nn.embedding import QATEmbedding, embedding_bag
from fxqat.tools import ptq, to_float
from tests.export_models import constants, node_types, run_file

ROWS, FEATURES = 11, 6


class Reader(nn.Module):
    """A lookup in any spelling, and a layer that reads the rows."""

    def __init__(self, look_up, table):
        super().__init__()
        self.look_up = look_up
        self.table = table
        self.fc = nn.Linear(FEATURES, 3)

    def forward(self, *inputs):
        return self.fc(self.look_up(self.table, *inputs))


def call(table, *inputs):
    return table(*inputs)


IDS = torch.tensor([[0, 3, 2], [2, 2, 2]])
SPELLINGS = {
    "module": (call, nn.Embedding(ROWS, FEATURES, padding_idx=2), (IDS,)),
    "per_tensor": (call, nn.Embedding(ROWS, FEATURES), (IDS,)),
    "scale_grad_by_freq": (call, nn.Embedding(ROWS, FEATURES, scale_grad_by_freq=True), (IDS,)),
    "functional": (lambda t, i: F.embedding(i, t.weight, padding_idx=-1), nn.Embedding(ROWS, FEATURES), (IDS,)),
    "torch": (lambda t, i: torch.embedding(t.weight, i), nn.Embedding(ROWS, FEATURES), (IDS,)),
    "bag": (call, nn.EmbeddingBag(ROWS, FEATURES), (IDS,)),
    "bag_of_padding": (call, nn.EmbeddingBag(ROWS, FEATURES, mode="max", padding_idx=2), (IDS,)),
    "bag_with_offsets": (call, nn.EmbeddingBag(ROWS, FEATURES, mode="sum"), (IDS.reshape(-1), torch.tensor([0, 4]))),
    "functional_bag": (
        lambda t, i, w: F.embedding_bag(i, t.weight, mode="sum", per_sample_weights=w),
        nn.EmbeddingBag(ROWS, FEATURES),
        (IDS, torch.rand(2, 3)),
    ),
}


def test_in_training_the_range_of_a_table_follows_it():
    look_up, table, inputs = SPELLINGS["per_tensor"]
    gm = fxqat.prepare_by_platform(Reader(look_up, table), "TSQAT", example_inputs=inputs)
    fxqat.calibrate(gm, [inputs])
    fxqat.enable_quantization(gm)
    (layer,) = {id(m): m for m in gm.modules() if isinstance(m, QATEmbedding)}.values()
    before = layer.weight_fake_quant.qparams()[0]
    gm.train()(*inputs)
    assert torch.equal(layer.weight_fake_quant.qparams()[0], before)
    with torch.no_grad():
        layer.weight.mul_(4.0)
    gm(*inputs)
    torch.testing.assert_close(layer.weight_fake_quant.qparams()[0], 4 * before)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_table_is_stored_as_integers(name, tmp_path):
    torch.manual_seed(0)
    look_up, table, inputs = SPELLINGS[name]
    model = Reader(look_up, table)
    per_row = name != "per_tensor"
    change = {"match": {"type": type(table).__name__}, "weight": {"per_channel": per_row}}
    gm = fxqat.prepare_by_platform(model, "TSQAT", {"overrides": [change]}, example_inputs=inputs)
    fxqat.calibrate(gm, [inputs])
    fxqat.enable_quantization(gm)
    (layer,) = {id(m): m for m in gm.modules() if isinstance(m, QATEmbedding)}.values()
    scale, _ = layer.weight_fake_quant.qparams()
    assert scale.shape == ((ROWS,) if per_row else ())
    rounded = table.weight.div(scale.reshape(-1, 1) if per_row else scale).round().clamp(-127, 127)
    assert (layer.weight_fake_quant.quantize(table.weight) == rounded * scale.reshape(-1, 1)).all()

    gm.train()
    gm(*inputs).square().sum().backward()
    assert layer.weight.grad.abs().sum() > 0
    assert layer.weight_fake_quant.relative_scale.grad.isfinite().all()
    assert layer.weight_fake_quant.relative_scale.grad.abs().sum() > 0
    if table.padding_idx is not None:
        assert not layer.weight.grad[table.padding_idx].any()

    report = fxqat.convert_export(gm.eval(), inputs, tmp_path / "m.onnx", tmp_path / "m.json")
    proto = onnx.load(tmp_path / "m.onnx")
    held = constants(proto)
    (stored,) = (value for key, value in held.items() if value.shape == (ROWS, FEATURES))
    assert stored.dtype == np.int8
    assert np.array_equal(stored, rounded.detach().numpy().astype(np.int8))
    assert report.certificate.passed
    if name != "bag_with_offsets":  # whose lookup is in a loop of torch's exporter
        assert node_types(proto)[0] == "Gather"
        assert node_types(proto).count("DequantizeLinear") == (4 if per_row else 5)
    found = run_file(tmp_path / "m.onnx", inputs)[0]
    with torch.no_grad():
        assert np.allclose(found, gm(*inputs).numpy(), atol=2 * float(gm.fc_act_fake_quant.qparams()[0]))

    back = to_float(gm)
    assert set(back.state_dict()) == set(model.state_dict())
    assert torch.equal(back(*inputs), model(*inputs))


def test_a_row_of_zeros_stays_zero():
    model = nn.Sequential(nn.Embedding(4, 3, padding_idx=1), nn.Linear(3, 2))
    gm = fxqat.prepare_by_platform(model, "TSQAT")
    fxqat.calibrate(gm, [torch.tensor([[0, 1]])])
    fxqat.enable_quantization(gm)
    table = gm.get_submodule("0")
    assert not table(torch.tensor([1])).any()
    assert table(torch.tensor([0])).any()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_the_deployed_bag_is_torchs(mode, padding_idx):
    weight = torch.randn(ROWS, FEATURES)
    wanted = F.embedding_bag(IDS, weight, mode=mode, padding_idx=padding_idx)
    found = embedding_bag(IDS, weight, mode=mode, padding_idx=padding_idx)
    assert torch.allclose(found, wanted, atol=1e-6)
    assert found.shape == (2, FEATURES)
    flat = embedding_bag(IDS.reshape(-1), weight, torch.tensor([0, 3]), mode=mode, padding_idx=padding_idx)
    assert torch.allclose(flat, wanted, atol=1e-6)


@pytest.mark.parametrize("method", ["GPTQ", "AdaRound"])
def test_post_training_methods_keep_a_tied_table(method, tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(ROWS, FEATURES)
            self.mix = nn.Linear(FEATURES, FEATURES)
            self.head = nn.Linear(FEATURES, ROWS, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids):
            return self.head(torch.relu(self.mix(self.table(ids))))

    torch.manual_seed(0)
    model = Tied()
    gm = ptq(model, [(IDS,)] * 2, equalize=True, reconstruct=method, correct_bias=True)
    fxqat.disable_all(gm)
    assert torch.allclose(gm(IDS), model(IDS), atol=0.3)
    fxqat.enable_quantization(gm)
    assert gm.table.weight is gm.head.weight
    assert gm.table.weight_fake_quant is gm.head.weight_fake_quant
    assert fxqat.convert_export(gm, (IDS,), tmp_path / "m.onnx").certificate.passed
    held = constants(onnx.load(tmp_path / "m.onnx"))
    assert [key for key, value in held.items() if value.shape == (ROWS, FEATURES)] == ["table.weight_quantized"]
