"""Modules that work in training only: kept in training, no value of their own in the deployed model."""

import copy
import pickle

import onnx
import pytest
import torch
from torch import nn

from fxqat import calibrate, convert_export, enable_quantization, prepare_by_platform
from fxqat.utils.training_only import is_idle, mark_if_idle


class DropPath(nn.Module):
    """As in timm."""

    def __init__(self, p=0.5):
        super().__init__()
        self.p = p

    def forward(self, x):
        if self.p == 0 or not self.training:
            return x
        return x * x.new_empty((x.shape[0], *(1,) * (x.ndim - 1))).bernoulli_(1 - self.p) / (1 - self.p)


class Doubled(DropPath):
    """Changes its input in eval mode, in place."""

    def forward(self, x):
        return super().forward(x) if self.training else x.mul_(2)


class Pair(DropPath):
    """Wants two inputs."""

    def forward(self, x, y):
        return x + y if self.training else x


class Clipped(DropPath):
    """Returns its input in eval mode, if that is small."""

    def forward(self, x):
        return super().forward(x) if self.training or x.abs().max() < 6 else x.clamp(-6, 6)


class Attended(nn.Module):
    """Computes in eval mode, too, and passes the mode on."""

    def forward(self, x):
        return nn.functional.dropout(nn.functional.relu(x), 0.5, self.training)


class Block(nn.Module):
    def __init__(self, drop):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.drop = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), drop
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        x = self.a(x)
        return self.last((x + self.drop(self.b(x))).mean((2, 3)))


X = torch.randn(16, 3, 4, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("module", "idle"), [(DropPath(), True), (DropPath(0), True), (Doubled(), False)])
def test_modules_that_return_their_input_in_eval_mode_are_marked(module, idle):
    state = torch.get_rng_state()
    mark_if_idle(module)
    assert is_idle(module) is idle
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training


@pytest.mark.parametrize("module", [Pair(), Clipped(), Attended(), nn.ReLU(), Block(DropPath()), nn.BatchNorm2d(2)])
def test_others_are_not(module):
    mark_if_idle(module)
    assert not is_idle(module)


@pytest.mark.parametrize("inputs", [None, (X,)])
@pytest.mark.parametrize("backend", ["TSQAT", "OpenVINO", "ONNXRuntime"])
def test_they_follow_the_mode_and_have_no_quantizer(inputs, backend, tmp_path):
    found = {}
    for name, drop in (("drop", DropPath()), ("identity", nn.Identity())):
        gm = prepare_by_platform(Block(drop), backend, example_inputs=inputs)
        gm = pickle.loads(pickle.dumps(copy.deepcopy(gm)))
        calibrate(gm, [X], progress=False)
        enable_quantization(gm)
        gm.train()
        varies = not torch.equal(gm(X), gm(X))
        assert varies == (name == "drop")
        gm.eval()
        convert_export(gm, X, tmp_path / f"{name}.onnx")
        nodes = [node.op_type for node in onnx.load(tmp_path / f"{name}.onnx").graph.node]
        found[name] = (gm(X), nodes, [str(n.target) for n in gm.graph.nodes if "fake_quant" in str(n.target)])
    assert torch.equal(found["drop"][0], found["identity"][0])
    assert found["drop"][1:] == found["identity"][1:]


def test_what_computes_in_eval_mode_is_traced_into_without_example_inputs():
    gm = prepare_by_platform(Block(Attended()), "TSQAT")
    called = {str(node.target) for node in gm.graph.nodes}
    assert "drop" not in called
    assert isinstance(gm.get_submodule("b").activation, nn.ReLU)
    gm.train()
    assert not torch.equal(gm(X), gm(X))
    gm.eval()
    assert torch.equal(gm(X), gm(X))
