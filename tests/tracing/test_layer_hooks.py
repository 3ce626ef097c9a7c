"""Forward hooks on layers of torch: part of the graph where the outputs depend on them, else they stay."""

from collections import defaultdict
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fxqat import calibrate, convert_export, enable_quantization, prepare_by_platform
from fxqat.tracing.trace import trace
from tests.export_models import deployed_outputs, run_file

X = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
FOUND = {}


class Network(nn.Module):
    """Convolutions whose features hooks collect, in one of several places."""

    def __init__(self, place="dict", kinds=(nn.Conv2d,)):
        super().__init__()
        layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True)]
        self.net, self.found, self.place = nn.Sequential(*layers), {}, place
        self.hooked = [i for i, layer in enumerate(self.net) if isinstance(layer, kinds)]
        for i in self.hooked:
            self.net[i].register_forward_hook(self.keep(i))

    def keep(self, i):
        def hook(module, inputs, output):
            if self.place == "attribute":
                module.output = output
            else:
                (self.found if self.place == "dict" else FOUND)[i] = output

        return hook

    def forward(self, x):
        y = self.net(x)
        if self.place == "attribute":
            return (y, *(self.net[i].output for i in self.hooked))
        return (y, *(self.found if self.place == "dict" else FOUND).values())


class Hooked(nn.Module):
    """A convolution with one hook, between two others."""

    def __init__(self, hook, *, pre=False, **options):
        super().__init__()
        self.first, self.hooked, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 3, 1)
        register = self.hooked.register_forward_pre_hook if pre else self.hooked.register_forward_hook
        register(hook, **options)

    def forward(self, x):
        return self.last(self.hooked(self.first(x)))


def exported(model, tmp_path, inputs=(X,)):
    """The prepared model, calibrated, trained for a step, and equal to its file."""
    gm = prepare_by_platform(model.eval(), example_inputs=inputs)
    calibrate(gm, [inputs], progress=False)
    enable_quantization(gm)
    gm.train()
    sum(value.square().mean() for value in _listed(gm(*inputs))).backward()
    assert all(p.grad is not None for p in gm.parameters() if p.requires_grad)
    gm.eval()
    path = tmp_path / "model.onnx"
    convert_export(gm, inputs, path)
    for mine, theirs in zip(deployed_outputs(gm, inputs), run_file(path, inputs), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    return gm


def _listed(result):
    return result if isinstance(result, tuple) else (result,)


def reason_of(gm, name):
    """What the report says of a layer."""
    return next(str(row.reason) for row in gm.quant_report if row.target == name)


@pytest.mark.parametrize("place", ["dict", "attribute", "global"])
@pytest.mark.parametrize("kinds", [(nn.Conv2d,), (nn.BatchNorm2d,), (nn.ReLU, nn.Conv2d)])
def test_features_that_hooks_of_layers_collect_are_in_the_file(place, kinds, tmp_path):
    FOUND.clear()
    model = Network(place, kinds)
    gm = exported(model, tmp_path)
    assert len(gm(X)) == 1 + len(model.hooked)
    assert all(model.net[i]._forward_hooks for i in model.hooked)


def halve(module, args, result):
    result.mul_(0.5)


def mask(module, args, result):
    result[:, 0] = 0.0


@pytest.mark.parametrize(
    ("hook", "options"),
    [
        (halve, {}),
        (mask, {}),
        (lambda module, args, result: 2 * result, {}),
        (lambda module, args, result: result + args[0][..., 1:-1, 1:-1], {}),
        (lambda module, args, kwargs, result: result.relu(), {"with_kwargs": True}),
        (lambda module, args: nn.functional.pad(args[0], (1, 1, 1, 1)), {"pre": True}),
        (lambda module, args, kwargs: ((args[0] * 2,), kwargs), {"pre": True, "with_kwargs": True}),
    ],
)
def test_a_hook_that_modifies_is_traced_and_its_layer_is_quantized(hook, options, tmp_path):
    model = Hooked(hook, **options)
    gm = exported(model, tmp_path)
    assert any("hooked" in change for change in gm.quant_report.state_changes)
    assert not gm.hooked._forward_hooks
    assert not gm.hooked._forward_pre_hooks
    assert gm.hooked.weight_fake_quant is not None


def test_a_hook_that_only_observes_stays_on_its_layer():
    seen = []
    model = Hooked(lambda module, args, result: seen.append(result.mean()))
    gm = prepare_by_platform(model, example_inputs=(X,))
    assert "has forward hooks" in reason_of(gm, "hooked")
    assert not any(node.target == "mean" for node in gm.graph.nodes)
    seen.clear()
    gm(X)
    assert [type(value) for value in seen] == [torch.Tensor]


def test_a_hook_that_needs_values_stays_on_its_layer():
    model = Hooked(lambda module, args, result: result * float(result.detach().numpy().max()))
    gm = prepare_by_platform(model, example_inputs=(X,))
    torch.testing.assert_close(gm(X), model(X))
    assert gm.hooked._forward_hooks


def test_a_hook_that_computes_a_weight_stays_on_its_layer():
    def scaled(module, args):
        module.weight = 3 * module.weight_orig

    model = Hooked(scaled, pre=True)
    model.hooked.weight_orig = model.hooked.weight
    del model.hooked.weight
    model.hooked.weight = model.hooked.weight_orig.detach()
    gm = prepare_by_platform(model, example_inputs=(X,))
    torch.testing.assert_close(gm(X), model(X))
    assert gm.hooked._forward_pre_hooks


def test_a_layer_that_is_called_twice_has_its_hook_in_both_calls(tmp_path):
    class Twice(Hooked):
        def forward(self, x):
            return self.last(self.hooked(self.hooked(self.first(x))))

    gm = exported(Twice(lambda module, args, result: result.tanh()), tmp_path)
    assert [node.target for node in gm.graph.nodes].count("tanh") == 2


def test_the_states_of_a_recurrent_layer_reach_forward_through_a_hook(tmp_path):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head, self.states = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2), []
            self.rnn.register_forward_hook(lambda module, args, result: self.states.append(result[1][0]))

        def forward(self, x):
            self.states.clear()
            y, _ = self.rnn(x)
            return self.head(y), self.states[0]

    gm = exported(Recurrent(), tmp_path, (X[:, 0, :, :3],))
    assert len(gm(X[:, 0, :, :3])) == 2


def test_without_example_inputs_hooks_are_traced_as_well():
    model = Hooked(lambda module, args, result: 2 * result).eval()
    traced = trace(model)
    torch.testing.assert_close(traced.gm(X), model(X))
    assert not traced.gm.hooked._forward_hooks
    assert traced.root.hooked._forward_hooks


class ByDevice(nn.Module):
    """Collects features by the device of the tensor, as the hooks of timm do."""

    def __init__(self):
        super().__init__()
        self.net, self.found = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), Features()
        for i in (0, 1):
            self.net[i].register_forward_hook(partial(self.found.keep, i))

    def forward(self, x):
        y = self.net(x)
        return y, *self.found.taken(x.device)


class Features:
    def __init__(self):
        self.by_device = defaultdict(dict)

    def keep(self, i, module, args, output):
        self.by_device[output.device][i] = output

    def taken(self, device):
        found, self.by_device[device] = self.by_device[device], {}
        return found.values()


def test_features_are_collected_by_device(tmp_path):
    model = ByDevice()
    gm = exported(model, tmp_path)
    assert len(gm(X)) == 3
    assert not model.found.by_device
