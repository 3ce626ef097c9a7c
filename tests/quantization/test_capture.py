"""Capture: the integers of every quantized value, by a formula written here once more."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxqat import disable_all, prepare_by_platform
from fxqat.errors import ExportError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.quantization.capture import capture, has_effect
from fxqat.utils.fx_graph import called_module
from fxqat.utils.tensors import flatten_tensors
from tests.models import BACKENDS, TOYS, calibrate, calibrated, inputs


def quantizers(gm):
    """Tensor name -> quantizer."""
    calls = [node for node in gm.graph.nodes if isinstance(called_module(node), FakeQuantizeBase)]
    return {node.kwargs["tensor_name"]: called_module(node) for node in calls}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TOYS)
def test_every_value_is_captured_within_its_range(name, backend):
    gm = calibrated(name, backend)
    captured = capture(gm, inputs(name))
    integers, outputs = captured.integers, list(captured.outputs.values())
    quants = quantizers(gm)
    assert set(integers) == set(quants)
    for key, values in integers.items():
        scheme = quants[key].scheme
        assert values.dtype == np.int32
        assert scheme.quant_min <= values.min() <= values.max() <= scheme.quant_max
    with torch.no_grad():
        expected = flatten_tensors(gm(*inputs(name)))
    assert all(np.array_equal(a.numpy(), b) for a, b in zip(expected, outputs, strict=True))


def test_the_integers_are_those_of_the_formula():
    gm = calibrated("conv_bn_relu", "Experimental")
    (x,) = inputs("conv_bn_relu")
    captured = capture(gm, (x,))
    integers, outputs = captured.integers, list(captured.outputs.values())
    for name, tensor in (("x", x), ("fc", torch.from_numpy(outputs[0]))):
        scale, zero_point = (value.numpy() for value in quantizers(gm)[name].qparams())
        expected = np.clip(np.rint(tensor.numpy() / scale) + zero_point, 0, 255)
        assert np.array_equal(integers[name], expected)
    assert integers["x"].std() > 10
    assert captured.reals == {}
    assert np.array_equal(capture(gm, (x,), with_reals=True).reals["x"], x.numpy())


class Noisy(nn.Module):
    """A layer, random numbers, and a buffer that each run changes."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("state", torch.zeros(8))

    def forward(self, x):
        self.state.add_(1.0)
        return self.fc(x) + self.state + torch.rand(8) * 0.1


def test_in_float_it_runs_from_the_same_buffers_with_the_same_random_numbers():
    x = torch.randn(16, 8)
    gm = calibrate(prepare_by_platform(Noisy().eval(), "TSQAT", example_inputs=x), (x,))
    captured = capture(gm, (x,), with_float=True)
    (rounded,), (exact,) = captured.outputs.values(), captured.in_float.values()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        expected = F.linear(x, gm.fc.weight, gm.fc.bias) + gm.state + 1 + torch.rand(8) * 0.1
    torch.testing.assert_close(torch.from_numpy(exact), expected)
    assert np.abs(rounded - exact).max() > 0
    assert captured.in_float.keys() == captured.outputs.keys()
    assert capture(gm, (x,)).in_float == {}


def test_values_on_the_grid_are_copies():
    gm = calibrated("slices")
    integers = capture(gm, inputs("slices")).integers
    assert np.array_equal(integers["getitem"], integers["conv1"][:, :4])
    assert np.array_equal(integers["cat"][:, :2], integers["conv2"][:, :2])
    assert np.array_equal(integers["getitem_6"], integers["getitem_5"].reshape(4, 8, 64).transpose(0, 2, 1)[:, ::2])


def test_the_model_is_not_changed():
    gm = calibrated("residual").train()
    disable_all(gm)
    state = {key: value for key, value in gm.state_dict().items() if torch.is_tensor(value)}
    before = {key: value.clone() for key, value in state.items()}
    capture(gm, inputs("residual"))
    assert all(module.training for module in gm.modules())
    assert not any(quant.fake_quant_enabled for _, quant in named_fake_quants(gm))
    assert all(torch.equal(value, before[key]) for key, value in state.items())
    assert not any(module._forward_hooks for module in gm.modules())


def test_inputs_that_do_not_fit_are_an_export_error():
    gm = calibrated("residual")
    with pytest.raises(ExportError, match="does not run on example_inputs: .*channels") as caught:
        capture(gm, (inputs("residual")[0][:, :1],))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not any(module._forward_hooks for module in gm.modules())


# What the file does not have


def scale_by_three(module, args, output):
    return output * 3


def look_only(module, args, output):
    return None


@pytest.mark.parametrize("place", ["", "fc"])
def test_a_hook_that_changes_an_output_is_refused(place):
    gm = calibrated("conv_bn_relu")
    handle = gm.get_submodule(place).register_forward_hook(scale_by_three)
    with pytest.raises(ExportError, match=rf"{place or 'the model'}: scale_by_three.*handle\.remove"):
        capture(gm, inputs("conv_bn_relu"))
    handle.remove()
    assert capture(gm, inputs("conv_bn_relu")).hooks == ()


def test_a_hook_that_looks_on_is_named():
    gm = calibrated("conv_bn_relu")
    expected = capture(gm, inputs("conv_bn_relu"))
    handles = [gm.register_forward_hook(look_only), gm.fc.register_forward_pre_hook(lambda module, args: None)]
    captured = capture(gm, inputs("conv_bn_relu"))
    for handle in handles:
        handle.remove()
    assert captured.hooks[0] == "the model: look_only"
    assert captured.hooks[1].startswith("fc: test_a_hook_that_looks_on_is_named.<locals>.<lambda>")
    assert np.array_equal(list(captured.outputs.values())[0], list(expected.outputs.values())[0])


class Recurrent(nn.Module):
    """A state that the next outputs depend on, a counter that they do not, and a factor that counts first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("state", torch.zeros(4, 6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        y = torch.tanh(self.linear(x) + self.state)
        self.state.copy_(y)
        return y


def test_buffers_that_the_model_updates_are_named_and_stay_as_they_are():
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    gm = calibrate(prepare_by_platform(Recurrent().eval(), example_inputs=(x,)), (x,))
    with torch.no_grad():
        gm(x)
    before = {name: buffer.clone() for name, buffer in gm.named_buffers()}
    captured = capture(gm, (x,))
    assert set(captured.updated) == {"state", "calls"}
    assert captured.carried == ("state",)
    assert all(torch.equal(buffer, before[name]) for name, buffer in gm.named_buffers())
    assert capture(calibrated("conv_bn_relu"), inputs("conv_bn_relu")).updated == ()


class Decaying(nn.Module):
    """Overwrites its weight in each run: with another value, or with one that stays."""

    def __init__(self, factor):
        super().__init__()
        self.lin, self.factor = nn.Linear(6, 6), factor

    def forward(self, x):
        self.lin.weight.data.mul_(self.factor).clamp_(-0.2, 0.2)
        return self.lin(x)


@pytest.mark.parametrize(("factor", "carried"), [(0.5, ("0.lin.weight",)), (1.0, ())])
def test_parameters_that_the_model_overwrites_are_named_and_stay_as_they_are(factor, carried):
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    model = nn.Sequential(Decaying(factor), nn.ReLU(), nn.Linear(6, 2)).eval()
    gm = calibrate(prepare_by_platform(model, example_inputs=(x,), check="off"), (x,))
    with torch.no_grad():
        gm.get_parameter("0.lin.weight").fill_(0.3)
    captured = capture(gm, (x,), with_float=True)
    assert captured.updated == ("0.lin.weight",)
    assert captured.carried == carried
    assert gm.get_parameter("0.lin.weight").unique().item() == pytest.approx(0.3)


def test_a_state_with_a_gradient_is_captured():
    """A forward without ``no_grad`` leaves a buffer that torch does not copy."""
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    gm = calibrate(prepare_by_platform(Recurrent().eval(), example_inputs=(x,)), (x,))
    gm(x)
    assert not gm.state.is_leaf
    assert capture(gm, (x,)).carried == ("state",)


class Selecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        return y.topk(2)[1], torch.argsort(y, 0), y.argmax(1), y.max(1)[0], y.min(dim=0).indices, y.amax(), y.msort()


def test_selected_indices_are_recorded_in_order():
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    gm = calibrate(prepare_by_platform(Selecting().eval(), example_inputs=(x,)), (x,))
    captured = capture(gm, (x,))
    found = captured.selections
    assert [len(found[kind]) for kind in ("TopK", "ArgMax", "ArgMin")] == [3, 2, 1]
    assert np.array_equal(found["TopK"][0], list(captured.outputs.values())[0])
    assert np.array_equal(found["TopK"][1], list(captured.outputs.values())[1])
    assert np.array_equal(found["ArgMax"][0], list(captured.outputs.values())[2])
    assert np.array_equal(found["ArgMin"][0], list(captured.outputs.values())[4])
    assert np.array_equal(found["TopK"][2], found["TopK"][1])  # msort gives values only


def test_a_complex_output_is_refused():
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return {"y": self.linear(x), "spectrum": torch.fft.rfft(self.linear(x))}

    x = torch.randn(4, 6)
    gm = calibrate(prepare_by_platform(Spectrum().eval()), (x,))
    with pytest.raises(ExportError, match=r"output 'spectrum' is torch\.complex64.*view_as_real"):
        capture(gm, (x,))


@pytest.mark.parametrize("noise", [False, True])
def test_a_model_that_draws_is_told_from_one_that_could(noise):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x):
            y = self.dropout(self.linear(x))
            y = torch.nn.functional.scaled_dot_product_attention(y, y, y)
            return y + torch.randn(y.shape) if noise else y

    x = torch.randn(2, 3, 5, 4)
    gm = calibrate(prepare_by_platform(Attention().eval(), example_inputs=(x,)), (x,))
    state = torch.get_rng_state()
    first, second = capture(gm, (x,)), capture(gm, (x,))
    assert first.draws is second.draws is noise
    assert np.array_equal(first.outputs["output"], second.outputs["output"])
    assert torch.equal(state, torch.get_rng_state())


class Overwrites(nn.Module):
    """Three quantized tensors; the zeros have no effect if all of them are overwritten."""

    def __init__(self, share):
        super().__init__()
        self.lin, self.share = nn.Linear(4, 4), share

    def forward(self, x):
        h = torch.zeros_like(x)
        h[:, : int(self.share * x.shape[1])] = self.lin(x)[:, : int(self.share * x.shape[1])]
        return h * 0.5


@pytest.mark.parametrize(("share", "expected"), [(1.0, False), (0.5, True)])
def test_a_tensor_has_an_effect_unless_it_is_overwritten(share, expected):
    x = torch.randn(3, 4)
    gm = prepare_by_platform(Overwrites(share).eval(), "TSQAT", example_inputs=(x,))
    calibrate(gm, (x,))
    captured = capture(gm, (x,))
    zeros = [name for name, q in captured.integers.items() if not q.any()]
    assert len(zeros) == 1
    assert has_effect(zeros, gm, (x,), (), captured) is expected
    assert has_effect([*zeros, "lin"], gm, (x,), (), captured)
