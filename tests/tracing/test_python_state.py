"""State that forward keeps in Python: it is restored after tracing, and reported."""

import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import fx, nn

import fxqat
from fxqat.errors import TraceError
from fxqat.tracing.python_state import python_state_kept


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.calls, self.seen = nn.Linear(4, 4), 0, ()

    def forward(self, x):
        self.calls += 1
        self.seen = (*self.seen, x.dim())
        random.random()
        np.random.uniform()
        return self.fc(x)


@pytest.mark.parametrize("with_inputs", [True, False])
def test_changes_are_undone_and_reported(with_inputs, caplog):
    model, x = nn.Sequential(Stateful()), torch.randn(2, 4)
    state = random.getstate()
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,) if with_inputs else None, check="off")
    changes = gm.quant_report.state_changes
    assert [change.partition(":")[0] for change in changes] == [
        "forward changes 0.calls",
        "forward changes 0.seen",
        "forward draws random numbers of Python or numpy",
    ]
    assert "forward changes 0.calls: it stays as it was while tracing" in caplog.text
    assert random.getstate() == state
    assert model[0].calls == 0
    torch.testing.assert_close(gm(x), model(x))


def test_a_model_that_keeps_nothing_changes_nothing():
    model = nn.Sequential(nn.Linear(2, 2))
    with python_state_kept(model) as changes:
        model(torch.ones(1, 2))
    assert changes == []
    model.kept = "before"
    with python_state_kept(model) as changes:
        model.kept = "after"
    assert changes == ["forward changes kept: it stays as it was while tracing"]
    assert model.kept == "before"


def test_a_tensor_of_the_trace_that_a_module_keeps_is_an_error():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.kept = nn.Linear(4, 4), []

        def forward(self, x):
            y = self.fc(x)
            self.kept.append(y)
            self.last = y
            return y

    with pytest.raises(TraceError, match="forward assigns a tensor to .*kept|last.*Give example_inputs"):
        fxqat.prepare_by_platform(Keeps(), "TSQAT")
    model = Keeps()
    fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(torch.ones(1, 4),))
    assert model.kept == []
    assert not any(isinstance(value, fx.Proxy) for value in vars(model).values())


def test_an_input_that_forward_overwrites_is_reported(caplog):
    class Overwrites(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            x += 0.5
            x[:, 0] = 0
            return self.fc(x)

    x = torch.ones(2, 4)
    gm = fxqat.prepare_by_platform(Overwrites(), "TSQAT", example_inputs=(x.clone(),))
    assert gm.quant_report.state_changes[0].startswith("forward overwrites its input x")
    assert "forward overwrites its input x" in caplog.text
    gm(x)
    assert torch.equal(x, torch.ones(2, 4))


LAST = {}


class Global(nn.Module):
    """Keeps a tensor for its next call in a global name."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)
        y = y + LAST.get("value", 0.0)
        LAST["value"] = y.detach().mean()
        return self.last(y)


@pytest.mark.parametrize("with_inputs", [True, False])
def test_a_global_name_that_keeps_a_value_of_the_trace_is_restored(with_inputs, caplog):
    LAST.clear()
    model, x = Global(), torch.randn(2, 4)
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,) if with_inputs else None, check="off")
    assert LAST == {}
    assert gm.quant_report.state_changes == ("forward keeps a tensor in LAST: it is as before",)
    assert "forward keeps a tensor in LAST" in caplog.text
    assert torch.isfinite(model(x)).all()


class Saved:
    """Keeps the output of a module, as an object whose method is a hook."""

    feature = None

    def __init__(self, module):
        module.register_forward_hook(self.save)

    def save(self, module, args, output):
        self.feature = output


class Hooked(nn.Module):
    """Reads what a hook kept."""

    def __init__(self):
        super().__init__()
        self.block, self.last = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)
        self.saved = [Saved(self.block)]

    def forward(self, x):
        return self.last(self.block(x)) + self.saved[0].feature


def test_an_object_whose_method_is_a_hook_keeps_no_value_of_the_trace():
    model, x = Hooked(), torch.randn(3, 4)
    model(x)  # which it keeps, with its gradient
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert [line for line in gm.quant_report.state_changes if "feature" in line]
    assert type(model.saved[0].feature) is torch.Tensor
    torch.testing.assert_close(gm(2 * x), model(2 * x))


class Lengths(nn.Module):
    """Keeps the length of its last input in training as a fraction, whose class has slots."""

    def __init__(self):
        super().__init__()
        self.fc, self.part = nn.Linear(4, 4), Fraction(1, 2)

    def forward(self, x):
        if self.training:
            self.part = Fraction(x.shape[-1], 8)
        return float(self.part) * self.fc(x)


def test_an_object_with_slots_that_was_made_of_values_of_the_trace_is_undone():
    model, x = Lengths(), torch.randn(2, 4)
    gm = fxqat.prepare_by_platform(model.eval(), example_inputs=(x,))
    assert gm.quant_report.state_changes == ("forward changes part: it stays as it was while tracing",)
    assert model.part == Fraction(1, 2)
    torch.testing.assert_close(gm(x), model(x))


class Result:
    """What an object of a policy keeps of a call, as in the distributions of stable-baselines3."""

    def __init__(self, *values):
        self.values = list(values)


class Holder:
    def __init__(self):
        self.recent = None


class Keeping(nn.Module):
    """Keeps objects that hold a tensor: in itself, in an object that it holds, and under a new name."""

    def __init__(self):
        super().__init__()
        self.fc, self.holder, self.last = nn.Linear(4, 4), Holder(), None

    def forward(self, x):
        y = self.fc(x)
        self.holder.recent, self.last, self.new = Result(Result(y)), Result(y), Result(y)
        return self.holder.recent.values[0].values[0] + self.last.values[0] * self.new.values[0]


@pytest.mark.parametrize("called", [False, True], ids=["never called", "called before"])
def test_objects_that_forward_makes_and_keeps_are_as_before(called):
    outer, x = nn.Sequential(Keeping()), torch.randn(2, 4)
    (model,) = outer
    if called:
        with torch.no_grad():
            model(x)
    kept = (model.holder.recent, model.last, vars(model).get("new"))
    gm = fxqat.prepare_by_platform(outer, "TSQAT", example_inputs=(x,))
    assert sorted(gm.quant_report.state_changes) == [
        f"forward keeps a tensor in {name}: it is as before" for name in ("0.last", "0.new", "recent")
    ]
    assert (model.holder.recent, model.last, vars(model).get("new")) == kept
    torch.testing.assert_close(gm(x), model(x))
    assert isinstance(model.new.values[0], torch.Tensor)
