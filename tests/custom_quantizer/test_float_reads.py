"""What must not be rounded: values made of constants, and values that decide."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fxqat
from fxqat.custom_quantizer.float_reads import DECIDES, LOSS, PRECISE
from fxqat.custom_quantizer.reasons import COMPUTED_FLOAT, EXACT, IS_WIDE
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.utils.fx_graph import called_module

LENGTH = 512


class Rotary(nn.Module):
    """Attention scores of rotated queries and keys; the phase has values up to 511."""

    def __init__(self, positions):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("frequencies", 1 / 10000 ** (torch.arange(0, 16, 2) / 16))
        self.positions = positions

    def forward(self, x, ids=None):
        places = {"sizes": torch.arange(x.shape[1], device=x.device), "ids": ids}[self.positions]
        phase = places.float()[:, None] * self.frequencies
        phase = torch.cat([phase, phase], -1)
        cos, sin = phase.cos(), phase.sin()

        def rotated(y):
            half = y.chunk(2, -1)
            return y * cos + torch.cat([-half[1], half[0]], -1) * sin

        return rotated(self.query(x)) @ rotated(self.key(x)).transpose(-1, -2)


@pytest.mark.parametrize("backend", ["TSQAT", "QNN", "ONNXRuntime"])
@pytest.mark.parametrize("positions", ["sizes", "ids"])
def test_positions_stay_exact(positions, backend):
    model = Rotary(positions).eval()
    inputs = (torch.randn(1, LENGTH, 16), torch.arange(LENGTH))[: 1 + (positions == "ids")]
    gm = fxqat.prepare_by_platform(model, backend, example_inputs=inputs)
    rows = {row.node: row for row in gm.quant_report}
    assert [rows[name].reason for name in rows if rows[name].op in ("cat",)][0].endswith(EXACT)
    for op in ("cos", "sin"):
        (row,) = (row for row in rows.values() if row.op == op)
        assert EXACT in row.reason
        node = next(node for node in gm.graph.nodes if node.name == row.node)
        assert not isinstance(called_module(node.args[0]), FakeQuantizeBase)
    fxqat.calibrate(gm, [inputs])
    fxqat.enable_quantization(gm)
    expected, found = model(*inputs).flatten(), gm(*inputs).flatten()
    assert float(torch.cosine_similarity(expected, found, dim=0)) > 0.99


class Decides(nn.Module):
    def __init__(self, decide):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.score, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.decide = decide

    def forward(self, x):
        y = self.first(x)
        return self.last(self.decide(y, self.score(y)))


CASES = {
    "topk": lambda y, s: y.gather(-1, s.sigmoid().topk(3).indices.repeat(1, 3)[:, :8]),
    "argmax": lambda y, s: y * (s * 2 + 1).argmax(-1, keepdim=True),
    "index": lambda y, s: y[:, (s.abs().mean(0) * 7).clamp(0, 7).long()],
    "sort": lambda y, s: y.gather(-1, torch.sort(s.softmax(-1)).indices),
    "comparison": lambda y, s: torch.where(s.tanh() > 0.1, y, -y),
    "max along a dimension": lambda y, s: y * torch.max(s + 1, 1, keepdim=True)[1],
}


@pytest.mark.parametrize("backend", ["TSQAT", "QNN"])
@pytest.mark.parametrize("name", CASES)
def test_what_decides_is_computed_in_float_back_to_the_last_layer(name, backend):
    model, x = Decides(CASES[name]).eval(), torch.randn(64, 8)
    gm = fxqat.prepare_by_platform(model, backend, example_inputs=(x,))
    row = gm.quant_report.row("score")
    assert row.output == ""
    assert row.weight != ""
    assert DECIDES in row.reason
    node = next(node for node in gm.graph.nodes if node.target == "score")
    assert not any(isinstance(called_module(user), FakeQuantizeBase) for user in node.users)
    assert isinstance(called_module(node.args[0]), FakeQuantizeBase)
    assert gm.quant_report.row("last").status != "float"


def test_values_of_a_sort_whose_indices_are_not_read_keep_their_scale():
    model, x = Decides(lambda y, s: y + s.topk(8).values).eval(), torch.randn(4, 8)
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert gm.quant_report.row("score").status == "shares"
    assert [row.status for row in gm.quant_report if row.op == "topk"] == ["shares"]


def test_an_override_has_the_last_word():
    model, x = Decides(CASES["comparison"]).eval(), torch.randn(4, 8)
    config = {"overrides": [{"match": {"module": "score"}, "output": {"bit": 8}}]}
    gm = fxqat.prepare_by_platform(model, "TSQAT", config, example_inputs=(x,))
    assert gm.quant_report.row("score").output != ""
    assert "changed by" in gm.quant_report.row("score").reason


class Phases(nn.Module):
    """Positions become phases in float64, as in diffusers' FluxPosEmbed; besides, their device is read."""

    def __init__(self):
        super().__init__()
        self.embed, self.linear = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, text_ids):
        ids = torch.cat((self.embed(x), text_ids), 0)
        phase = torch.outer(ids.float()[:, 0], torch.arange(3, dtype=torch.float64)).cos().sum(1)
        return self.linear(x) * phase.float().to(ids.device)[:2, None]


@pytest.mark.parametrize("backend", ["TSQAT", "OpenVINO", "QNN"])
def test_a_read_of_the_device_is_no_quantized_read(backend, tmp_path):
    torch.manual_seed(0)
    inputs = (torch.randn(2, 4), torch.zeros(2, 4))
    gm = fxqat.prepare_by_platform(Phases().eval(), backend, example_inputs=inputs)
    rows = {row.node: row for row in gm.quant_report}
    assert rows["cat"].status == "float"
    assert PRECISE in rows["cat"].reason
    fxqat.calibrate(gm, [inputs], progress=False)
    fxqat.enable_quantization(gm)
    report = fxqat.convert_export(gm, inputs, tmp_path / "phases.onnx")
    assert "cat" not in {tensor.name for tensor in report.tensors}


IN_FLOAT64 = {
    "value": lambda y, s: y + (s.sigmoid().double() / 3).float(),
    "parts": lambda y, s: y + torch.cat([part.float() / 3 for part in s.sigmoid().double().chunk(2, 1)], 1),
}


@pytest.mark.parametrize("backend", ["TSQAT", "QNN"])
@pytest.mark.parametrize("name", IN_FLOAT64)
def test_what_the_model_computes_in_float64_stays_float_back_to_the_last_layer(name, backend, tmp_path):
    model, x = Decides(IN_FLOAT64[name]).eval(), torch.randn(4, 8)
    gm = fxqat.prepare_by_platform(model, backend, example_inputs=(x,))
    rows = {row.op: row for row in gm.quant_report if row.node not in ("first", "score", "last")}
    assert (rows["sigmoid"].status, rows["sigmoid"].reason) == ("float", PRECISE)
    assert IS_WIDE in {row.reason for row in gm.quant_report}
    assert DECIDES not in " ".join(row.reason for row in gm.quant_report)
    assert PRECISE in gm.quant_report.row("score").reason
    assert rows["add"].status != "float"
    fxqat.calibrate(gm, [(x,)], progress=False)
    fxqat.enable_quantization(gm)
    assert fxqat.convert_export(gm, (x,), tmp_path / "double.onnx").certificate.passed


def test_a_value_that_layers_and_float64_read_is_quantized_for_the_layers():
    model, x = Decides(lambda y, s: y * s.relu() + (s.relu().double().cumsum(1) / 3).float()).eval(), torch.randn(4, 8)
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    (cumsum,) = (row for row in gm.quant_report if row.node == "cumsum")
    assert cumsum.reason == IS_WIDE
    row = gm.quant_report.row("score")
    assert row.weight != ""
    assert row.status != "float"
    assert not any(COMPUTED_FLOAT[PRECISE] in row.reason for row in gm.quant_report if row.status == "float")


def rotate(y):
    pairs = torch.view_as_complex(y.reshape(-1, 4, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones(4), torch.arange(4.0))).flatten(1)


COMPLEX = {"rotation": rotate, "spectrum": lambda y: torch.fft.fft(y).abs()}


@pytest.mark.parametrize("backend", ["TSQAT", "Experimental"])
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_are_computed_in_float_from_values_that_are_quantized(name, backend, tmp_path):
    model, x = Decides(lambda y, s: COMPLEX[name](y * s.sigmoid())).eval(), torch.randn(4, 8)
    gm = fxqat.prepare_by_platform(model, backend, example_inputs=(x,))
    rows = {row.op: row for row in gm.quant_report}
    assert rows["sigmoid"].status == "quantized"
    product = next(row for row in gm.quant_report if row.op == "mul")
    assert product.status != "float"
    wide = [row for row in gm.quant_report if row.reason == IS_WIDE]
    assert wide
    assert all(row.status == "float" for row in wide)
    assert gm.quant_report.row("last").weight != ""
    fxqat.calibrate(gm, [(x,)], progress=False)
    fxqat.enable_quantization(gm)
    report = fxqat.convert_export(gm, (x,), tmp_path / "complex.onnx")
    assert report.certificate.passed
    assert product.node in {tensor.name for tensor in report.tensors}


@pytest.mark.parametrize("kind", [torch.complex64, torch.float64])
def test_an_input_of_the_model_in_wide_numbers_is_no_constant(kind):
    class Magnitude(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x):
            return self.linear(x.abs().float().sigmoid())

    x = torch.randn(4, 8, dtype=kind)
    gm = fxqat.prepare_by_platform(Magnitude().eval(), "TSQAT", example_inputs=(x,))
    assert gm.quant_report.row("sigmoid").status == "quantized"
    assert not any(EXACT in row.reason for row in gm.quant_report)
    assert gm.quant_report.row("linear").status == "quantized"


class VectorQuantizer(nn.Module):
    """Returns its result and the loss of its codebook, as a VQ-VAE does in training."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.decode = nn.Linear(4, 8), nn.Linear(8, 4)
        self.codes = nn.Parameter(torch.randn(5, 8))

    def forward(self, x):
        z = self.encode(x)
        code = self.codes[torch.cdist(z, self.codes).argmin(1)]
        loss = ((code.detach() - z) ** 2).mean() + 0.25 * ((code - z.detach()) ** 2).mean()
        return self.decode(z + (code - z).detach()), loss


@pytest.mark.parametrize("with_inputs", [True, False])
@pytest.mark.parametrize("backend", ["TSQAT", "OpenVINO", "TensorRT"])
def test_a_loss_that_forward_computes_trains_the_model(backend, with_inputs):
    model, x = VectorQuantizer().eval(), torch.randn(6, 4)
    gm = fxqat.prepare_by_platform(model, backend, example_inputs=(x,) if with_inputs else None)
    fxqat.calibrate(gm, [(x,)], progress=False)
    fxqat.enable_quantization(gm)
    larger = 1.2 * x  # the loss is larger than in calibration
    gm.train()(larger)[1].backward()
    model.train()(larger)[1].backward()
    found = dict(gm.named_parameters())
    for name in ("codes", "encode.weight"):
        expected = model.get_parameter(name).grad
        assert torch.cosine_similarity(found[name].grad.flatten(), expected.flatten(), dim=0) > 0.9
    rows = {row.node: row for row in gm.quant_report}
    assert rows["pow_1"].status == rows["mean"].status == rows["add"].status == "float"
    if backend != "TensorRT":  # it has no rule for them
        assert LOSS in rows["pow_1"].reason


@dataclass
class Output:
    sample: torch.Tensor
    loss: torch.Tensor


class InADataclass(VectorQuantizer):
    """As in diffusers' VQModel."""

    def forward(self, x):
        return Output(*super().forward(x))


def test_a_loss_in_a_dataclass_trains_the_model():
    x = torch.randn(6, 4)
    gm = fxqat.prepare_by_platform(InADataclass().eval(), "TSQAT", example_inputs=(x,))
    fxqat.calibrate(gm, [(x,)], progress=False)
    fxqat.enable_quantization(gm)
    gm.train()(1.2 * x).loss.backward()
    assert dict(gm.named_parameters())["codes"].grad.abs().max() > 0
    assert {row.node: row.status for row in gm.quant_report}["add"] == "float"
