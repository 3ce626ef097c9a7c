"""Numbers that a model keeps in buffers are constants in the file."""

import numpy as np
import onnx
import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import fxqat
from fxqat.nn.qat import QATLayer
from fxqat.quantization.fold_constants import fold_constants
from fxqat.quantization.lower import lower
from tests.export_models import flat, run_file


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


class Codec(nn.Module):
    """Padding to a multiple of the stride, computed with tensors as in EnCodec, and read by Python code."""

    def __init__(self, last):
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(nn.Conv1d(i, 4, 5, stride=3) for i in (2, 4))
        self.last = last
        self.register_buffer("stride", torch.tensor(3), persistent=False)
        self.register_buffer("overlap", torch.tensor(2), persistent=False)

    def forward(self, x):
        for conv in self.convs:
            frames = torch.ceil((x.shape[-1] - self.overlap) / self.stride).to(torch.int64)
            extra = frames * self.stride + self.overlap - x.shape[-1]
            if max(self.overlap // 2, extra) >= x.shape[-1]:
                raise ValueError("too short")
            x = conv(F.pad(x, (self.overlap // 2, self.overlap - self.overlap // 2 + extra)))
        return self.last(x.permute(2, 0, 1))


@pytest.mark.parametrize("last", [nn.Linear(4, 3), nn.LSTM(4, 3)], ids=["linear", "recurrent"])
def test_sizes_that_are_computed_with_tensors_are_those_of_the_example_inputs(last, tmp_path):
    model, x, other = Codec(last).eval(), *torch.randn(2, 1, 2, 40)
    gm = fxqat.prepare_by_platform(model, "ONNXRuntime", example_inputs=(x,))
    assert gm.quant_report.leaves == ()
    assert len(gm.quant_report.forced) == 1
    fxqat.calibrate(gm, [x], progress=False)
    fxqat.enable_quantization(gm)
    fxqat.convert_export(gm.eval(), (x,), tmp_path / "model.onnx")
    for given in (x, other):
        expected = flat(gm(given))
        for found, value in zip(run_file(tmp_path / "model.onnx", [given]), expected, strict=True):
            np.testing.assert_allclose(found, value, atol=1e-5)


def test_open_sizes_are_computed_with_tensors_in_the_file(tmp_path):
    x, other = torch.randn(1, 2, 40), torch.randn(1, 2, 53)
    gm = fxqat.prepare_by_platform(Codec(nn.Linear(4, 3)).eval(), "ONNXRuntime", example_inputs=(x,))
    fxqat.calibrate(gm, [x], progress=False)
    fxqat.enable_quantization(gm)
    fxqat.convert_export(gm.eval(), (x,), tmp_path / "model.onnx", dynamic_shapes={"x": {2: "steps"}})
    (found,) = run_file(tmp_path / "model.onnx", [other])
    torch.testing.assert_close(torch.from_numpy(found), gm(other).detach())
    assert found.shape[0] > run_file(tmp_path / "model.onnx", [x])[0].shape[0]


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


class PositionBias(nn.Module):
    """Adds what an MLP computes from a grid to the values of a layer, as in the second Swin."""

    def __init__(self, mlp):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.mlp = nn.Conv2d(2, 6, 1), mlp
        self.register_buffer("grid", 4 * torch.randn(4, 4, 2))

    def forward(self, x):
        return torch.relu(self.conv(x)) + 2 * torch.sigmoid(self.mlp(self.grid)).permute(2, 0, 1)


MLPS = {
    "plain": lambda: nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 6)),
    "normalized": lambda: nn.Sequential(nn.Linear(2, 64), nn.LayerNorm(64), nn.PReLU(), nn.Linear(64, 6, bias=False)),
}


@pytest.mark.parametrize("backend", ["TSQAT", "OpenVINO"])
@pytest.mark.parametrize("name", MLPS)
def test_what_layers_compute_from_a_grid_is_a_constant_of_the_file(name, backend, tmp_path):
    torch.manual_seed(0)
    model, x = PositionBias(MLPS[name]()).eval(), torch.randn(1, 2, 4, 4)
    gm = fxqat.prepare_by_platform(model, backend, example_inputs=(x,))
    fxqat.calibrate(gm, [x], progress=False)
    fxqat.enable_quantization(gm)
    gm.train()(x).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in gm.mlp.parameters())
    report = fxqat.convert_export(gm.eval(), (x,), tmp_path / "model.onnx")
    assert report.certificate.passed
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert {node.op_type for node in graph.node} <= {
        "QuantizeLinear",
        "DequantizeLinear",
        "Conv",
        "Relu",
        "Add",
        "Clip",
    }
    stored = [onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer if list(tensor.dims) == [6, 4, 4]]
    expected = 2 * torch.sigmoid(model.mlp(model.grid)).permute(2, 0, 1)
    torch.testing.assert_close(torch.from_numpy(stored[0].copy()), expected.detach())


LARGE = {
    "too large": (600, lambda row: torch.exp(row[:, None] * row), "exp"),
    "repeated": (60, lambda row: row[:, None].expand(60, 60).contiguous(), "expand"),
    "read at an index": (60, lambda row: row[torch.arange(3600) % 60].view(60, 60), "getitem"),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_constant_is_computed_from_the_last_one_that_is_not(name):
    size, enlarge, last = LARGE[name]

    class Enlarged(nn.Module):
        def __init__(self):
            super().__init__()
            self.row = nn.Parameter(torch.randn(size))

        def forward(self, x):
            return x + enlarge(torch.sin(self.row * 2))

    gm = fx.symbolic_trace(Enlarged())
    x = torch.randn(1, 1, size, size)
    expected, row = gm(x), torch.sin(gm.row * 2)
    fold_constants(gm)
    gm.recompile()
    torch.testing.assert_close(gm(x), expected)
    assert {buffer.numel() for buffer in gm.buffers()} <= {size, 3600 if last == "getitem" else size}
    assert any(torch.equal(buffer.flatten(), row) for buffer in gm.buffers())
    assert last in {getattr(node.target, "__name__", node.target) for node in gm.graph.nodes}


def test_a_layer_that_inputs_reach_as_well_is_quantized():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("grid", torch.randn(3, 4))

        def forward(self, x):
            return self.linear(x) + torch.relu(self.linear(self.grid))

    x = torch.randn(3, 4)
    gm = fxqat.prepare_by_platform(Shared(), "TSQAT", example_inputs=(x,))
    assert [row.status for row in gm.quant_report if row.op == "linear"] == ["quantized"] * 2
    assert isinstance(gm.linear, QATLayer)
