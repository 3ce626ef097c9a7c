"""Recurrent layers: the layout of ONNX, the float layer, gradients against float64, the file."""

import copy

import pytest
import torch
from torch import nn

from fxqat import (
    convert_export,
    enable_calibration,
    enable_quantization,
    load_checkpoint,
    prepare_by_platform,
    save_checkpoint,
)
from fxqat.nn.recurrent import QATRecurrentLayer, RecurrentLayer, unstacked
from fxqat.numerics import EDGE

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN, "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)}
STEPS, BATCH, FEATURES, HIDDEN = 4, 3, 5, 6


class WithStates(nn.Module):
    """A convolution, a recurrent module that gets and returns states, and slices of them."""

    def __init__(self, kind, **options):
        super().__init__()
        self.conv = nn.Conv1d(3, FEATURES, 1)
        self.rnn = kind(FEATURES, HIDDEN, **options)

    def forward(self, x, h, c):
        given = (h, c) if isinstance(self.rnn, nn.LSTM) else h
        y, states = self.rnn(self.conv(x).permute(2, 0, 1), given)
        return y, states, (states[0] if isinstance(self.rnn, nn.LSTM) else states)[-1]


def quantized(model, inputs, backend="TSQAT", **config):
    gm = prepare_by_platform(model, backend, config or None, example_inputs=inputs)
    enable_calibration(gm)
    gm(*inputs)
    enable_quantization(gm)
    return gm


def layer_of(gm):
    return next(module for module in gm.modules() if isinstance(module, QATRecurrentLayer))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_float_layer_and_its_stacked_tensors_compute_what_the_module_does(kind, bidirectional):
    module = KINDS[kind](FEATURES, HIDDEN, bidirectional=bidirectional)
    layer, x = RecurrentLayer(module), torch.randn(STEPS, BATCH, FEATURES)
    expected, states = module(x)
    y, *last = layer(x)
    assert torch.equal(y.transpose(1, 2).flatten(2), expected)
    assert torch.equal(last[0], states[0] if kind == "lstm" else states)
    w, r, b = layer.stacked()
    back = unstacked(module.mode, 1 + bidirectional, w, r, b)
    assert all(
        torch.equal(*pair)
        for d, names in enumerate(layer.names)
        for pair in zip(back[d], map(module.get_parameter, names), strict=True)
    )
    operator = torch.ops.fxqat.recurrent(x, w, r, b, None, None, None, module.mode, 1 + bidirectional)
    torch.testing.assert_close(operator[0], y, rtol=0, atol=1e-6)  # torch may have another kernel without gradients


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
@pytest.mark.parametrize(("bidirectional", "layers"), [(False, 1), (True, 3)])
def test_states_in_and_out_are_those_of_the_file(kind, bidirectional, layers, tmp_path):
    rows = layers * (1 + bidirectional)
    inputs = (torch.randn(BATCH, 3, STEPS), *(torch.randn(rows, BATCH, HIDDEN) / 2 for _ in range(2)))
    model = WithStates(KINDS[kind], bidirectional=bidirectional, num_layers=layers).eval()
    gm = quantized(model, inputs)
    report = convert_export(gm, inputs, tmp_path / "net.onnx")
    assert report.certificate.passed
    names = {tensor.name for tensor in report.tensors if tensor.kind == "weight"}
    paths = ["rnn"] if layers == 1 else [f"rnn.layer_{number}" for number in range(layers)]
    assert names >= {f"{path}.weight_{which}" for path in paths for which in ("ih", "hh")}
    assert (tmp_path / "net.onnx").stat().st_size > 0


class ReadsStates(nn.Module):
    """Reads outputs of a layer by operators whose second argument is none, or 0 or 1, as is the place of an item."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, (h, c) = self.lstm(x)
        return torch.relu(h), torch.stack([h, c]), y.sum(0), y.mean(1)


def test_what_reads_the_outputs_of_a_layer_is_none_of_them() -> None:
    gm = prepare_by_platform(ReadsStates().eval(), "TSQAT", example_inputs=(torch.randn(5, 2, 4),))
    rows = {row.node: row for row in gm.quant_report.rows}
    assert {"relu", "stack", "sum_1", "mean"} <= set(rows)
    assert rows["sum_1"].group is None or rows["sum_1"].group != rows["mean"].group


def test_output_and_hidden_state_share_a_scale_and_the_cell_state_has_its_own():
    inputs = (torch.randn(BATCH, 3, STEPS), torch.randn(1, BATCH, HIDDEN), torch.randn(1, BATCH, HIDDEN))
    report = quantized(WithStates(nn.LSTM), inputs).quant_report
    rows = {row.node.removeprefix("rnn_1_").removeprefix("rnn_"): row for row in report}
    assert rows["output"].group == rows["hidden"].group
    assert rows["cell"].group not in (None, rows["hidden"].group)
    assert report.row("rnn").weight == "int8 sym per-channel narrow"


@pytest.mark.parametrize("per_channel", [True, False])
def test_in_training_the_ranges_follow_the_weights(per_channel):
    x = torch.randn(STEPS, BATCH, FEATURES)
    gm = quantized(
        nn.Sequential(nn.GRU(FEATURES, HIDDEN)), (x,), extra_qconfig_dict={"w_qscheme": {"per_channel": per_channel}}
    )
    layer = layer_of(gm).train()
    quants = (layer.weight_ih_fake_quant, layer.weight_hh_fake_quant)
    before = [quant.qparams()[0] for quant in quants]
    layer(x)
    with torch.no_grad():
        layer.weight_ih_l0.mul_(4.0)
        layer.weight_hh_l0.mul_(0.5)
    layer(x)
    for quant, scale, ratio in zip(quants, before, (4.0, 0.5), strict=True):
        torch.testing.assert_close(quant.qparams()[0], ratio * scale)


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_gradients_equal_those_of_a_float64_reference(kind, per_channel):
    model = nn.Sequential(KINDS[kind](FEATURES, HIDDEN, bidirectional=True))
    x = torch.randn(STEPS, BATCH, FEATURES)
    gm = quantized(model, (x,), extra_qconfig_dict={"w_qscheme": {"per_channel": per_channel}})
    layer, bound = layer_of(gm), torch.randn(STEPS, 2, BATCH, HIDDEN)
    (layer(x)[0] * bound).sum().backward()
    w, r, b = (tensor.detach().double() for tensor in layer.stacked())
    quants = (layer.weight_ih_fake_quant, layer.weight_hh_fake_quant)
    scales = [quant.used_scale().double().requires_grad_() for quant in quants]
    inside, rounded = [], []
    for tensor, scale, quant in zip((w, r), scales, quants, strict=True):
        wide = scale.unsqueeze(1) if scale.dim() else scale
        steps = tensor / wide
        inside.append(steps.abs() <= quant.scheme.quant_max + EDGE)
        steps = steps.where(inside[-1], steps.clamp(quant.scheme.quant_min, quant.scheme.quant_max))
        rounded.append((steps + (steps.round() - steps).detach()) * wide)  # LSQ: straight through, scale by its formula
    leaves = [tensor.detach().requires_grad_() for tensor in rounded]
    module = copy.deepcopy(model[0]).double()
    given = unstacked(module.mode, 2, *leaves, b)
    tensors = {name: t for names, ts in zip(layer.names, given, strict=True) for name, t in zip(names, ts, strict=True)}
    y, _ = torch.func.functional_call(module, tensors, (x.double(),))
    (y.unflatten(2, (2, HIDDEN)).transpose(1, 2) * bound).sum().backward()
    back = unstacked(module.mode, 2, *(leaf.grad * ok for leaf, ok in zip(leaves, inside, strict=True)), None)
    for names, tensors in zip(layer.names, back, strict=True):
        for name, expected in zip(names[:2], tensors, strict=True):
            assert torch.allclose(getattr(layer, name).grad.double(), expected, rtol=1e-3, atol=1e-5), name
    for quant, leaf, value, scale in zip(quants, leaves, rounded, scales, strict=True):
        (value * leaf.grad).sum().backward()
        expected = scale.grad * quant.unit_scale * quant.grad_scale(leaf)
        assert torch.allclose(quant.relative_scale.grad.double(), expected, rtol=1e-2, atol=1e-5)


def test_a_checkpoint_loads_into_the_float_model_and_resumes(tmp_path):
    inputs = (torch.randn(BATCH, 3, STEPS), *(torch.randn(2, BATCH, HIDDEN) / 2 for _ in range(2)))
    model = WithStates(nn.LSTM, num_layers=2)
    gm, other = quantized(model, inputs), prepare_by_platform(model, "TSQAT", example_inputs=inputs)
    save_checkpoint(gm, tmp_path / "net.pth")
    state = torch.load(tmp_path / "net.pth")["state_dict"]
    assert model.load_state_dict(state, strict=True).missing_keys == []
    load_checkpoint(other, tmp_path / "net.pth")
    assert all(
        torch.equal(a, b)
        for a, b in zip((gm(*inputs)[0], gm(*inputs)[2]), (other(*inputs)[0], other(*inputs)[2]), strict=True)
    )


def test_an_input_without_batch_is_refused_unless_it_is_seen():
    module = nn.Sequential(nn.GRU(FEATURES, HIDDEN, batch_first=True)).eval()
    x = torch.randn(STEPS, FEATURES)
    y = quantized(module, (x,))(x)[0]
    assert y.shape == (STEPS, HIDDEN)
    assert (y - module(x)[0]).abs().max() < 0.05
    with pytest.raises(Exception, match="without a batch"):
        prepare_by_platform(module, "TSQAT")(x)
