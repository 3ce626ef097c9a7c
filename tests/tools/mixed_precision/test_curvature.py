"""Traces against the exact Hessian, and scores against the real loss."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxqat.tools.mixed_precision.curvature import orthogonal_signs, own_cross_entropy, squared_gradients, traces


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


@pytest.fixture
def mlp():
    return Perceptron().double(), torch.randn(16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layer", ["first", "second"])
def test_the_trace_is_the_exact_one(mlp, layer):
    model, x = mlp
    labels = torch.arange(16) % 4
    weight = getattr(model, layer).weight
    torch.manual_seed(2)
    (found,) = traces(200)(F.cross_entropy(model(x), labels), [weight], 16)

    def loss(flat):
        weights = {f"{layer}.weight": flat.view_as(weight)}
        return F.cross_entropy(torch.func.functional_call(model, weights, (x,)), labels)

    hessian = torch.autograd.functional.hessian(loss, weight.detach().flatten())
    assert float(found) * weight.numel() == pytest.approx(float(hessian.trace()), rel=0.02)
    assert abs(float(hessian.trace())) > 1e-3


def test_squared_gradients_are_those_of_one_sample(mlp):
    model, x = mlp
    delta = torch.zeros(16, 10, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(16) % 4
    outputs = model.second(torch.tanh(model.first(x)) + delta)
    (found,) = squared_gradients(F.cross_entropy(outputs, labels), [delta], 16)
    for i in range(16):
        value = torch.tanh(model.first(x[i])).detach().requires_grad_()
        F.cross_entropy(model.second(value)[None], labels[i : i + 1]).backward()
        torch.testing.assert_close(found[i] * 16, value.grad.square())


def test_own_cross_entropy_is_least_at_the_model_s_outputs(mlp):
    model, x = mlp
    outputs = model(x).detach().requires_grad_()
    own_cross_entropy(outputs, None).backward()
    assert float(outputs.grad.abs().max()) < 1e-7
    assert outputs.grad.shape == (16, 4)


def test_signs_are_orthogonal_and_endless():
    draw = orthogonal_signs(torch.zeros(4, 8))
    rows = torch.stack([next(draw).flatten() for _ in range(64)])
    assert torch.equal(rows.abs(), torch.ones(64, 32))
    for block in rows.split(32):
        assert torch.equal(block @ block.T, 32 * torch.eye(32))
    assert not torch.equal(rows[:32], rows[32:])
