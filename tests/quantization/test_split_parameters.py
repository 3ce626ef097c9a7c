"""Split parameters: their parts are weights of layers, and the float model's state dict has them whole."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxqat
from fxqat import convert_export, prepare_by_platform
from fxqat.checkpoint import float_state_dict


class Packed(nn.Module):
    """Two layers whose weights are one parameter."""

    def __init__(self, split):
        super().__init__()
        self.split = split
        self.before = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(8, 6))
        self.bias = nn.Parameter(torch.randn(8))
        self.after = nn.Linear(8, 2)

    def forward(self, x):
        first, second = self.split(self.weight)
        x = self.before(x)
        y = torch.cat([F.linear(x, first, self.split(self.bias)[0]), F.linear(x, second, self.split(self.bias)[-1])], 1)
        return self.after(y)


SPLITS = {
    "chunk": lambda weight: weight.chunk(2),
    "torch.chunk": lambda weight: torch.chunk(input=weight, chunks=2),
    "split": lambda weight: weight.split([3, 5]),
    "torch.tensor_split": lambda weight: torch.tensor_split(weight, 2, dim=0),
}


class Summed(Packed):
    """The sum reads the whole parameter."""

    def forward(self, x):
        return super().forward(x) + self.weight.sum()


class Half(Packed):
    """Only one part is read."""

    def forward(self, x):
        return F.linear(self.before(x), self.weight.chunk(2)[0], self.bias.chunk(2)[0])


class Twice(Packed):
    """The same parts for two inputs."""

    def forward(self, x):
        return super().forward(x) - super().forward(x * 2)


class Differently(Packed):
    """Parts of two kinds, which overlap."""

    def forward(self, x):
        return super().forward(x) + F.linear(x, self.weight.split([2, 6])[0]).sum(-1, keepdim=True)


class Tied(Packed):
    """A module has the same parameter as its weight."""

    def __init__(self, split):
        super().__init__(split)
        self.tied = nn.Linear(6, 8)
        self.tied.weight = self.weight

    def forward(self, x):
        return super().forward(x) + self.after(self.tied(x))


class Unbound(Packed):
    """The items have no dimension along which to concatenate them."""

    def forward(self, x):
        rows = self.weight.unbind(0)
        return self.before(x) + sum(rows[i] for i in range(8))


def parts_of(gm):
    return {name: found.names for name, found in gm.provenance.split_tensors.items()}


@pytest.mark.parametrize("kind", [Packed, Twice])
@pytest.mark.parametrize("split", list(SPLITS))
def test_each_part_is_the_weight_of_a_layer(kind, split, tmp_path):
    torch.manual_seed(0)
    model, x = kind(SPLITS[split]), torch.randn(4, 6)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert set(parts_of(gm)) == {"weight", "bias"}
    layers = [row for row in gm.quant_report if row.op == "linear"]
    assert all("per-channel" in row.weight for row in layers)
    assert not {"chunk", "split", "tensor_split"} & {str(node.target) for node in gm.graph.nodes}
    torch.testing.assert_close(gm(x), model(x))
    if split == "split":  # the other ways to split give the same graph
        fxqat.enable_calibration(gm)
        gm(x)
        fxqat.enable_quantization(gm)
        assert convert_export(gm, (x,), tmp_path / "model.onnx").certificate.passed


def test_the_float_models_state_has_the_whole_parameter_as_trained():
    model, x = Packed(SPLITS["split"]), torch.randn(4, 6)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert gm.quant_report.unread == ()
    optimizer = torch.optim.SGD(gm.parameters(), lr=0.1)
    gm(x).square().sum().backward()
    optimizer.step()
    twin = Packed(SPLITS["split"])
    for result in (gm, copy.deepcopy(gm)):
        state = float_state_dict(result)
        assert {name: tensor.shape for name, tensor in state.items()} == {
            name: tensor.shape for name, tensor in model.state_dict().items()
        }
        twin.load_state_dict(state)
        torch.testing.assert_close(twin(x), gm(x))
    assert not torch.equal(twin.weight, model.weight)


@pytest.mark.parametrize("kind", [Summed, Half, Differently, Tied, Unbound])
def test_what_is_read_in_another_way_stays_whole(kind):
    model, x = kind(SPLITS["chunk"]), torch.randn(4, 6)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert "weight" not in parts_of(gm)
    assert float_state_dict(gm)["weight"].shape == (8, 6)
    torch.testing.assert_close(gm(x), model(x))


def test_a_frozen_parameter_has_frozen_parts():
    model, x = Packed(SPLITS["chunk"]), torch.randn(4, 6)
    model.weight.requires_grad_(False)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    named = dict(gm.named_parameters())
    assert [named[name].requires_grad for name in parts_of(gm)["weight"]] == [False, False]
    assert [named[name].requires_grad for name in parts_of(gm)["bias"]] == [True, True]
