"""Values that leave torch while tracing are followed, kept in a leaf, or refused: never constants."""

import copy
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxqat
from fxqat.errors import TraceError


class Inner(nn.Module):
    """One step, with what steps may need."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.drop = nn.Dropout(0.5)
        self.bn = nn.BatchNorm1d(6)
        self.register_buffer("at", torch.zeros((), dtype=torch.long))
        self.register_buffer("width", torch.tensor(1))
        self.register_buffer("kept", torch.arange(6) % 2 == 0)

    def forward(self, x):
        return self.step(self, x)


class Net(nn.Module):
    def __init__(self, step):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(6, 6), Inner(step), nn.Linear(6, 6)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


def pointer(self, y):
    k = int(self.at)
    self.at += 1
    return y * (k + 1)


def padded_by_pointer(self, y):
    longer = F.pad(y, (0, 0, 0, self.at))
    self.at += 1
    return y * (2 if longer.shape[0] > y.shape[0] else 1)


def padded_by_value(self, y):
    return y * (2 if F.pad(y, (0, 0, 0, (y.sum() > 0).long())).shape[0] > y.shape[0] else 1)


def padded_by_constant(self, y):
    longer = F.pad(y, (0, 0, 0, torch.ceil(y.shape[0] / self.width).long() - self.width))
    return longer * (2 if longer.shape[0] < y.shape[0] + self.width else 1)


def caught(self, y):
    try:
        return y.transpose(0, 1).view(-1, y.shape[0]).transpose(0, 1) + y.view(7, 3)
    except RuntimeError:
        return y * 3


VALUES = {
    "numpy": lambda self, y: y * float(y.detach().numpy().max()),
    "list": lambda self, y: y * y.detach().flatten().tolist()[0],
    "percentile": lambda self, y: y * float(np.percentile(y.detach().numpy(), 90)),
    "from_numpy": lambda self, y: y + torch.from_numpy(np.abs(y.detach().numpy()).copy()),
    "item": lambda self, y: y * y.sum().item(),
    "a number from a parameter": lambda self, y: y * float(self.gain.detach()),
    "a branch on a parameter": lambda self, y: y * 2 if self.gain > 0.4 else y,
    "a number from a buffer that is written": pointer,
    "a size from a buffer that is written": padded_by_pointer,
    "a size from a value": padded_by_value,
    "a size from a mask": lambda self, y: y * (2 if y[y > 0].shape[0] > 9 else 1),
    "requires_grad": lambda self, y: y * 2 if y.requires_grad else y,
    "text": lambda self, y: y * (2 if f"{y.sum().item():.3f}".startswith("-") else 3),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_no_constants(name):
    model, x = Net(VALUES[name]).eval(), torch.randn(3, 6)
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,), check="quick")
    leaves = [leaf.path for leaf in gm.quant_report.leaves]
    assert leaves == [] if name in ("list", "item") else leaves[-1] == "inner"
    with torch.no_grad():
        for net in (model, gm):
            for path, parameter in net.named_parameters():
                if path == "inner.gain":
                    parameter.mul_(0.5)
    for _ in range(2):
        other = torch.randn(4, 6) * 3
        torch.testing.assert_close(gm(other), model(other))


FOLLOWED = {
    "no_grad": lambda self, y: y - _without_gradient(y),
    "copy": lambda self, y: y + copy.copy(y),
    "flag as a number": lambda self, y: y * (1 + self.training),
    "flag passed on": lambda self, y: F.dropout(y, 0.5, self.training),
    "flag of a child": lambda self, y: y * 0.5 if self.drop.training else y * 0.7,
    "numbers that differ": lambda self, y: F.dropout(
        y * (0.5 if self.training else 1.0), 0.1 if self.training else 0.0
    ),
    "frozen statistics": lambda self, y: F.batch_norm(
        y, self.bn.running_mean + 1, self.bn.running_var, self.bn.weight, self.bn.bias, False
    ),
    "rrelu": lambda self, y: F.rrelu(y, 0.1, 0.3, self.training),
    "an error that is caught": caught,
    "a size from a buffer": padded_by_constant,
    "a size from a mask in a buffer": lambda self, y: y[:, self.kept].repeat(1, 2)[:, : 2 * y[:, self.kept].shape[1]],
    "numpy's numbers": lambda self, y: np.float32(0.5) * y * np.float64(2.0),
}


NAMES = ("first.weight", "first.bias")


def _without_gradient(y):
    with torch.no_grad():
        return y.mean(1, keepdim=True) * 2


@pytest.mark.parametrize("name", FOLLOWED)
def test_it_is_followed_with_its_gradients_in_both_modes(name):
    model = Net(FOLLOWED[name])
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(torch.randn(3, 6),))
    assert gm.quant_report.leaves == ()
    assert "equal to the model in training" in gm.quant_report.sameness
    for training in (False, True):
        x = torch.randn(5, 6)
        results = []
        for net in (model, gm):
            torch.manual_seed(1)
            net.train(training).zero_grad()
            y = net(x)
            y.square().sum().backward()
            results.append((y.detach(), [net.get_parameter(n).grad for n in NAMES]))
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_frozen_statistics_stay_frozen_in_training():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.bn = nn.Linear(6, 6), nn.BatchNorm1d(6)

        def forward(self, x):
            bn = self.bn
            return F.batch_norm(self.fc(x), bn.running_mean, bn.running_var, bn.weight, bn.bias, False)

    model, x = Frozen().train(), torch.randn(8, 6)
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    torch.testing.assert_close(gm(x), model(x))
    assert torch.equal(gm.get_buffer("bn.running_mean"), torch.zeros(6))


def test_parameters_used_outside_of_the_graph_are_an_error():
    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x):
            return self.fc(x) * sum(p.abs().mean() for p in self.parameters())

    for inputs in ((torch.randn(2, 6),), None):
        with pytest.raises(TraceError, match="computed from parameters outside of the graph"):
            fxqat.prepare_by_platform(Penalty(), "TSQAT", example_inputs=inputs)


@pytest.mark.parametrize(
    ("function", "inputs", "expression"),
    [
        (lambda self, x: sum(self.first(y) for y in x), lambda n: [torch.randn(2, 6)] * n, "2 items"),
        (lambda self, x: self.first(x[-1]), lambda n: [torch.randn(2, 6)] * n, "2 items"),
        (
            lambda self, x: sum(self.first(y) for y in x.values()),
            lambda n: {k: torch.ones(2, 6) for k in "abc"[:n]},
            "['a', 'b']",
        ),
        (lambda self, x: self.first(x) * (2 if x.is_contiguous() else 3), lambda n: torch.ones(n, 6), "True"),
        (lambda self, x: self.first(x) * x.stride(0), lambda n: torch.ones(n, 6), "6"),
    ],
)
def test_what_is_fixed_by_the_inputs_is_reported(function, inputs, expression, caplog):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 6)

        def forward(self, x):
            return function(self, x)

    gm = fxqat.prepare_by_platform(Model(), "TSQAT", example_inputs=(inputs(2),))
    forced = gm.quant_report.forced
    assert expression in [str(number.value) for number in forced]
    assert all(number.source.startswith(f"{__file__}:") for number in forced)
    assert f"fixed at {expression}" in caplog.text


def test_an_ordered_dict_stays_one(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x):
            y = self.fc(x)
            return OrderedDict(out=y, aux=y * 2)

    x = torch.randn(2, 6)
    gm = fxqat.prepare_by_platform(Model(), "TSQAT", example_inputs=(x,))
    assert type(gm(x)) is OrderedDict
    fxqat.calibrate(gm, [x])
    report = fxqat.convert_export(gm, (x,), tmp_path / "model.onnx")
    assert [output.name for output in report.certificate.outputs] == ["out", "aux"]
