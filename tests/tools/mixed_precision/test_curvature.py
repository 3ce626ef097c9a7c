"""Traces against the exact Hessian, and scores against the real loss."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxqat.errors import ConfigError
from fxqat.tools.mixed_precision.bank import WidthBank
from fxqat.tools.mixed_precision.curvature import orthogonal_signs, own_cross_entropy, squared_gradients, traces
from fxqat.tools.mixed_precision.sensitivity import sensitivity


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


class Frozen(nn.Module):
    """A frozen table and a frozen linear layer, and kernels of a convolution in a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding.from_pretrained(torch.randn(20, 8))
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.first.weight.requires_grad_(False)
        self.register_buffer("blur", torch.rand(8, 1, 3))

    def forward(self, tokens):
        x = self.first(self.table(tokens)).relu()
        return self.head(F.conv1d(x.mT, self.blur, padding=1, groups=8).mean(2))


@pytest.mark.parametrize("method", ["fisher", "hessian"])
def test_frozen_weights_are_rounded_like_others(method):
    batches = [(torch.randint(0, 20, (16, 6), generator=torch.Generator().manual_seed(2)),)]
    bank = WidthBank(Frozen().eval(), batches, (4, 8), (8,), "Experimental")
    weights = {name for name, unit in bank.units.items() if unit.is_weight}
    assert len(weights) == 4
    alone, found = (sensitivity(bank, batches, way).scores for way in ("alone", method))
    for name in weights:
        assert 0.1 < found[name][4] / alone[name][4] < 10
    frozen = [name for name, tensor in bank.model.named_parameters() if not tensor.requires_grad and "weight" in name]
    assert set(frozen) >= {"table.weight", "first.weight"}


def test_an_operation_without_a_second_derivative_is_an_error():
    model = nn.Sequential(nn.EmbeddingBag(20, 8), nn.Linear(8, 4)).eval()
    batches = [(torch.randint(0, 20, (16, 6)),)]
    bank = WidthBank(model, batches, (4, 8), (8,), "Experimental")
    with pytest.raises(ConfigError, match="no second derivative of an operation .*embedding_bag.* Use 'fisher'"):
        sensitivity(bank, batches, "hessian")
    assert sensitivity(bank, batches, "fisher").scores["0.weight"][4] > 0
