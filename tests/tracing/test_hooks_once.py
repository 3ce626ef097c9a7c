"""Hooks of modules whose forward branches on ``self.training``: as often as in the model, in both modes."""

from contextvars import ContextVar

import numpy as np
import pytest
import torch
from torch import nn

import fxqat
from fxqat.quantization.sameness import SamenessError
from tests.export_models import deployed_outputs, run_file

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    """Computes something else in training."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        x = self.inner(x)
        return 2 * x if self.training else x


COLLECTED = ContextVar("collected")


def collect(module, inputs, output):
    COLLECTED.get().append(output)


class Collecting(nn.Module):
    """Returns what hooks of its modules collect, as models of transformers do."""

    def __init__(self, hooked):
        super().__init__()
        self.body = nn.Sequential(Scaled(), Scaled())
        for path in hooked:
            self.body.get_submodule(path).register_forward_hook(collect)

    def forward(self, x):
        token = COLLECTED.set([])
        x = self.body(x)
        result = (x, *COLLECTED.get())
        COLLECTED.reset(token)
        return result


class Other(nn.Module):
    """Gives a module inside other values in training."""

    def __init__(self):
        super().__init__()
        self.fc, self.inner = nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Tanh())

    def forward(self, x):
        x = self.fc(x)
        return self.inner(2 * x if self.training else x)


class Doubling(nn.Module):
    """Its module has a hook that returns another value in training."""

    def __init__(self):
        super().__init__()
        self.scaled = Scaled()
        self.scaled.register_forward_hook(lambda module, _, output: output + 1 if module.training else output)

    def forward(self, x):
        return self.scaled(x)


class ChangingInside(nn.Module):
    """A module inside of the one that branches has a hook that returns a value."""

    def __init__(self):
        super().__init__()
        self.scaled = Scaled()
        self.scaled.inner.register_forward_hook(lambda _, __, output: output + 1)

    def forward(self, x):
        return self.scaled(x)


MODELS = {
    "of the module that branches": lambda: Collecting(["0", "1"]),
    "inside of it": lambda: Collecting(["0.inner", "1.inner"]),
    "both": lambda: Collecting(["0", "0.inner", "1", "1.inner"]),
    "a hook that branches": Doubling,
    "a hook that computes": ChangingInside,
}


@pytest.mark.parametrize("kind", MODELS)
def test_hooks_give_what_they_give_in_the_model(kind, tmp_path):
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    gm = fxqat.prepare_by_platform(model, example_inputs=(X,))
    for is_training in (False, True):
        ours, wanted = gm.train(is_training)(X), model.train(is_training)(X)
        torch.testing.assert_close(ours, wanted)
    gm.eval()
    fxqat.calibrate(gm, [X])
    fxqat.enable_quantization(gm)
    fxqat.convert_export(gm, (X,), tmp_path / "model.onnx")
    for ours, wanted in zip(run_file(tmp_path / "model.onnx", [X]), deployed_outputs(gm, [X]), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-5)


def test_a_hook_that_notes_other_values_in_training_is_refused():
    model = Collecting([])
    model.body = nn.Sequential(nn.Linear(4, 4), Other())
    model.body[1].inner.register_forward_hook(collect)
    with pytest.raises(SamenessError, match="the traced Collecting computes something else than the model in training"):
        fxqat.prepare_by_platform(model.eval(), example_inputs=(X,))
    assert [len(outputs) for outputs in (model.eval()(X), model.train()(X))] == [2, 2]


def test_hooks_are_the_users_own_after_tracing():
    model = Collecting(["0", "0.inner"]).eval()
    before = [dict(module._forward_hooks) for module in model.modules()]
    fxqat.prepare_by_platform(model, example_inputs=(X,))
    assert [dict(module._forward_hooks) for module in model.modules()] == before
    assert "forward" not in vars(model.body[0])
