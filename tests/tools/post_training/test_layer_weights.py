"""The weights of each layer with what they multiply; GPTQ and AdaRound on recurrent layers."""

import copy
import importlib
from functools import partial

import pytest
import torch
from torch import nn

import fxqat
from fxqat.nn.qat import QATLayer
from fxqat.nn.recurrent import QATRecurrentLayer, step_mask
from fxqat.tools import Reconstruction, correct_bias, reconstruct
from fxqat.tools.post_training.gptq import gptq_weight
from fxqat.tools.post_training.layer_matrices import weight_to_matrices
from fxqat.tools.post_training.layer_weights import weights_of
from fxqat.tools.post_training.segments import split
from fxqat.utils.contexts import hooked
from tests.models import build, calibrate, inputs

# the package has a function of this name, too
reconstruct_module = importlib.import_module("fxqat.tools.post_training.reconstruct")

STEPS, BATCH, FEATURES, HIDDEN = 6, 4, 5, 7
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
LOW_BITS = {"extra_qconfig_dict": {"w_qscheme": {"bit": 3}, "w_observer": "MSE"}}


class Sequences(nn.Module):
    """Two recurrent layers between linear ones, with states as inputs."""

    def __init__(self, kind, bidirectional):
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.rnn = kind(FEATURES, HIDDEN, 2, bidirectional=bidirectional)
        self.head = nn.Linear(HIDDEN * (1 + bidirectional), 3)

    def forward(self, x, h):
        y, _ = self.rnn(torch.relu(self.first(x)), (h, h.tanh()) if isinstance(self.rnn, nn.LSTM) else h)
        return self.head(y)


def prepared(kind, bidirectional=False, backend="TSQAT"):
    torch.manual_seed(0)
    model = Sequences(KINDS[kind], bidirectional).eval()
    with torch.no_grad():
        for parameter in model.rnn.parameters():
            parameter.mul_(2)
    states = 2 * (1 + bidirectional)
    batches = [(torch.randn(STEPS, BATCH, FEATURES), torch.randn(states, BATCH, HIDDEN).tanh()) for _ in range(6)]
    gm = fxqat.prepare_by_platform(model, backend, LOW_BITS, example_inputs=batches[0])
    return model, calibrate(gm, *batches).eval(), batches


@torch.no_grad()
def error(gm, model, batches):
    return sum(float((gm(*batch) - model(*batch)).square().sum()) for batch in batches)


def one_call(gm, layer, batch):
    """The arguments and the result of one call of a layer in the float model."""
    seen = []
    fxqat.disable_all(gm)
    with torch.no_grad(), hooked([layer], lambda _, args, output: seen.append((args, output))):
        gm(*batch)
    return seen[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_columns_of_recurrent_layers_give_the_next_state(kind, bidirectional):
    _, gm, batches = prepared(kind, bidirectional)
    layer = next(module for module in gm.modules() if isinstance(module, QATRecurrentLayer))
    args, output = one_call(gm, layer, batches[0])
    w, r = weights_of(layer)
    # (D, G * H, T * N)
    products = [weight_to_matrices(x.op, x.value()) @ x.columns(x.read(args, {}, output)) for x in (w, r)]
    bias = layer.stacked()[2].reshape(len(layer.names), 2, -1, 1)
    products = [(p + bias[:, i]).mT.unflatten(1, (STEPS, BATCH)) for i, p in enumerate(products)]  # (D, T, N, G * H)
    before = r.columns(r.read(args, {}, output)).mT.unflatten(1, (STEPS, BATCH))
    if kind == "rnn":
        y = (products[0] + products[1]).tanh()
    elif kind == "gru":
        (z, reset, new), (z_h, reset_h, new_h) = (p.chunk(3, -1) for p in products)
        z = (z + z_h).sigmoid()
        y = (1 - z) * (new + (reset + reset_h).sigmoid() * new_h).tanh() + z * before
    else:
        i, o, f, c = (products[0] + products[1]).chunk(4, -1)
        states = args[2]
        y = torch.empty_like(before)
        for d in range(len(layer.names)):
            cell = states[d]
            for t in range(STEPS)[:: -1 if d else 1]:
                cell = f[d, t].sigmoid() * cell + i[d, t].sigmoid() * c[d, t].tanh()
                y[d, t] = o[d, t].sigmoid() * cell.tanh()
    torch.testing.assert_close(y.transpose(0, 1), output[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_columns_of_samples_of_several_lengths_are_those_of_each_sample(bidirectional):
    _, gm, _ = prepared("lstm", bidirectional)
    fxqat.disable_all(gm)
    layer = next(module for module in gm.modules() if isinstance(module, QATRecurrentLayer))
    assert not layer.weight_hh_fake_quant.fake_quant_enabled
    x, lengths = torch.randn(STEPS, BATCH, FEATURES), torch.tensor([STEPS, 1, 3, 4])
    states = [torch.randn(1 + bidirectional, BATCH, HIDDEN) for _ in range(2)]
    samples = [sample for steps in step_mask(x, lengths) for sample in range(BATCH) if steps[sample]]
    for weight in weights_of(layer):
        found = weight.read((x, *states), {"lengths": lengths}, layer(x, *states, lengths=lengths))
        assert found.shape[-1] == len(samples) == lengths.sum()
        for sample, steps in enumerate(lengths.tolist()):
            alone = (x[:steps, [sample]], *(state[:, [sample]] for state in states))
            expected = weight.read(alone, {}, layer(*alone))
            places = [place for place, number in enumerate(samples) if number == sample]
            torch.testing.assert_close(found[..., places], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_the_value(kind):
    _, gm, _ = prepared(kind, bidirectional=True)
    for layer in (module for module in gm.modules() if isinstance(module, (QATLayer, QATRecurrentLayer))):
        before = [weight.value().clone() for weight in weights_of(layer)]
        for place, weight in enumerate(weights_of(layer)):
            assert weight.quant is layer.weight_fake_quants()[place]
            wanted = torch.randn_like(weight.value())
            weight.write_(wanted)
            before[place] = wanted
            assert all(torch.equal(a.value(), b) for a, b in zip(weights_of(layer), before, strict=True))


def test_a_folded_weight_is_written_through_its_batch_norm():
    gm = fxqat.prepare_by_platform(build("conv_bn_relu"), "TSQAT", example_inputs=inputs("conv_bn_relu"))
    layer = next(module for module in gm.modules() if isinstance(module, QATLayer) and module.bn is not None)
    with torch.no_grad():
        layer.bn.weight.uniform_(0.5, 2.0)
    (weight,) = weights_of(layer)
    wanted = torch.randn_like(weight.value())
    weight.write_(wanted)
    torch.testing.assert_close(weight.value(), wanted)
    assert not torch.allclose(layer.weight, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("method", ["GPTQ", Reconstruction(max_layers=1, scale_lr=0.0, iterations=150)])
def test_the_error_of_recurrent_layers_falls(kind, bidirectional, method):
    model, gm, batches = prepared(kind, bidirectional)
    before, weights = error(gm, model, batches), copy.deepcopy(dict(gm.named_parameters()))
    found = reconstruct(gm, batches, method)
    assert {"rnn.layer_0", "rnn.layer_1"} <= set(found)
    assert error(gm, model, batches) < 0.8 * before
    changed = {name for name, value in gm.named_parameters() if not torch.equal(value, weights[name])}
    assert {name for name in weights if "rnn" in name and ".weight_" in name and "fake_quant" not in name} <= changed
    assert not any("bias" in name for name in changed)


def test_the_result_is_exported(tmp_path):
    _, gm, batches = prepared("lstm", bidirectional=True)
    reconstruct(gm, batches, "GPTQ")
    layers = [module for module in gm.modules() if isinstance(module, QATRecurrentLayer)]
    assert len(layers) == 2
    assert fxqat.convert_export(gm, batches[0], tmp_path / "model.onnx").certificate.passed


class LastState(nn.Module):
    """A recurrent module of two layers, and its last hidden state."""

    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(FEATURES, 16, 2)

    def forward(self, x):
        return self.rnn(x)[0][-1]


def loud_sequences(seed, count=6):
    """Correlated inputs of very different loudness, the loudest of which an observer cuts off."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(FEATURES, FEATURES, generator=torch.Generator().manual_seed(99))
    sizes = (1.5 * torch.randn(count, 30, 16, 1, generator=generator)).exp()
    return [(x,) for x in torch.randn(count, 30, 16, FEATURES, generator=generator) @ mixed * sizes]


@pytest.mark.parametrize("kind", KINDS)
def test_gptq_of_recurrent_layers_does_not_make_up_for_clipped_inputs(kind):
    torch.manual_seed(0)
    model = LastState(KINDS[kind]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    clipped = {"match": {"node": "x"}, "output": {"bit": 16, "observer": "Percentile"}}
    shares = {}
    for method in (None, "GPTQ"):
        gm = fxqat.prepare_by_platform(
            model, "Experimental", {"overrides": [clipped]}, example_inputs=(torch.randn(30, 16, FEATURES),)
        )
        batches = loud_sequences(1)
        calibrate(gm, *batches).eval()
        if method:
            reconstruct(gm, batches, method)
        shares[method] = [error(gm, model, given) for given in (batches, loud_sequences(2))]
    assert all(a < 1.1 * b for a, b in zip(shares["GPTQ"], shares[None], strict=True)), shares


@pytest.mark.parametrize(("name", "is_clipped"), [("lstm", False), ("rnn", False), ("gru", True), ("rnn", True)])
def test_of_both_starts_of_gptq_the_one_with_the_better_outputs_is_kept(name, is_clipped, monkeypatch):
    torch.manual_seed(0)
    model = LastState(KINDS[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    given = {"bit": 16, "observer": "Percentile"} if is_clipped else {"bit": 5, "observer": "MinMax"}
    rules, errors = {"overrides": [{"match": {"node": "x"}, "output": given}]}, {}
    for start in (None, False, True):
        gm = fxqat.prepare_by_platform(model, "Experimental", rules, example_inputs=loud_sequences(1)[0])
        calibrate(gm, *loud_sequences(1)).eval()
        with monkeypatch.context() as patch:
            if start is not None:
                patch.setattr(reconstruct_module, "gptq_weight", partial(from_start, gptq_weight, start))
            errors[start] = reconstruct(gm, loud_sequences(1), "GPTQ")["rnn.layer_0"]
    nearest = errors[None][0]
    assert errors[None][1] == min(nearest, errors[False][1], errors[True][1]) < nearest
    assert (errors[False][1] < errors[True][1]) == is_clipped


def from_start(function, start, *args, towards_float, **kwargs):
    """GPTQ that always starts at the weight, or always at the one that best reproduces the float products."""
    return function(*args, **kwargs, towards_float=start)


def test_a_layer_stays_rounded_to_the_nearest_where_gptq_is_worse(monkeypatch):
    torch.manual_seed(0)
    gm = fxqat.prepare_by_platform(LastState(nn.LSTM).eval(), "TSQAT", LOW_BITS, example_inputs=loud_sequences(1)[0])
    calibrate(gm, *loud_sequences(1)).eval()
    before = copy.deepcopy(gm.state_dict())
    monkeypatch.setattr(reconstruct_module, "gptq_weight", worse_weight)
    found = reconstruct(gm, loud_sequences(1), "GPTQ")
    assert set(found) == {"rnn.layer_0", "rnn.layer_1"}
    assert all(first == least > 0 for first, least in found.values())
    assert all(torch.equal(value, before[name]) for name, value in gm.state_dict().items())


def worse_weight(segment, path, *args, place, **kwargs):
    """Zeros, which are worse than any rounding."""
    weight = weights_of(segment.layers[path])[place]
    return torch.zeros_like(weight.value()), weight.quant.qparams()[0]


def test_the_biases_of_other_layers_are_corrected():
    model, gm, batches = prepared("gru")
    before = error(gm, model, batches)
    assert set(correct_bias(gm, batches)) == {"first", "head"}
    assert error(gm, model, batches) < before


def test_each_recurrent_layer_is_in_a_segment():
    _, gm, _ = prepared("lstm")
    assert [list(segment.layers) for segment in split(gm, 1)] == [["first"], ["rnn.layer_0"], ["rnn.layer_1"], ["head"]]
