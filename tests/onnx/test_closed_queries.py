"""Attention whose mask leaves a query no key: the file gives 0 there, as torch does, whatever it was made with."""

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxqat
from tests.export_models import node_types, run_file

BACKENDS = ["TSQAT", "ONNXRuntime", "LiteRT"]


class Attending(nn.Module):
    """Two heads, whose mask is an input or, without one, held by the model."""

    def __init__(self):
        super().__init__()
        self.projected, self.out = nn.Linear(16, 48), nn.Linear(16, 4)
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).tril())

    def forward(self, x, mask=None):
        heads = [part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.projected(x).chunk(3, -1)]
        attended = F.scaled_dot_product_attention(*heads, attn_mask=self.mask if mask is None else mask)
        return self.out(attended.transpose(1, 2).flatten(2))


def exported(model, inputs, backend, path):
    gm = fxqat.prepare_by_platform(model.eval(), backend, example_inputs=inputs)
    fxqat.calibrate(gm, [inputs], progress=False)
    fxqat.enable_quantization(gm)
    assert fxqat.convert_export(gm, inputs, path).certificate.passed
    return gm


def as_floats(mask):
    return torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))


@pytest.mark.parametrize("kind", ["booleans", "floats"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_without_a_key_gets_zero_from_a_file_that_was_exported_without_one(backend, kind, tmp_path):
    x, mask = torch.randn(2, 5, 16), torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[..., 4:] = False
    closed = mask.clone()
    closed[1, :, 3] = False
    mask, closed = (mask, closed) if kind == "booleans" else (as_floats(mask), as_floats(closed))
    gm = exported(Attending(), (x, mask), backend, tmp_path / "m.onnx")
    with torch.no_grad():
        for given in (mask, closed):
            [found] = run_file(tmp_path / "m.onnx", (x, given))
            np.testing.assert_allclose(found, gm(x, given).numpy(), atol=1e-6)


def test_a_padded_sample_of_multi_head_attention_gets_zero(tmp_path):
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.out = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 4)

        def forward(self, x, padding):
            return self.out(self.attention(x, x, x, padding, need_weights=False)[0])

    x, padding = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    gm = exported(Padded(), (x, padding), "ONNXRuntime", tmp_path / "m.onnx")
    padding[1] = True
    [found] = run_file(tmp_path / "m.onnx", (x, padding))
    with torch.no_grad():
        np.testing.assert_allclose(found, gm(x, padding).numpy(), atol=1e-6)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("leaves_keys", [True, False])
def test_a_mask_that_the_model_holds_costs_nothing_where_it_leaves_keys(leaves_keys, tmp_path):
    model, x = Attending(), torch.randn(2, 5, 16)
    model.mask[2] &= leaves_keys
    gm = exported(model, (x,), "TSQAT", tmp_path / "m.onnx")
    types = node_types(onnx.load(tmp_path / "m.onnx"))
    assert "ReduceMax" not in types
    after = types[types.index("Softmax") :]
    assert after.count("Where") == (1 if leaves_keys else 2)  # one is the exporter's own
    [found] = run_file(tmp_path / "m.onnx", (x,))
    with torch.no_grad():
        np.testing.assert_allclose(found, gm(x).numpy(), atol=1e-6)
