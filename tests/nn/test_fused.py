"""The fused float layer: it computes layer, BatchNorm and activation, folded or not."""

import pytest
import torch
from torch import nn

from fxqat.nn.fused import FusedLayer
from tests.builders import LAYER_IDS, LAYERS, LayerCase, layer_input, random_norm


@pytest.mark.parametrize("case", LAYERS, ids=LAYER_IDS)
@pytest.mark.parametrize("training", [True, False])
def test_it_computes_layer_norm_and_activation(case: LayerCase, training: bool) -> None:
    layer, x = case.layer().train(training), layer_input(case)
    bn = random_norm(case, layer).train(training)
    exact = torch.relu(bn(layer(x)))
    fused = FusedLayer(layer, random_norm(case, layer).train(training), nn.ReLU(inplace=True))
    assert torch.equal(fused(x), exact)
    assert torch.equal(fused.bn.running_mean, bn.running_mean)
    assert fused.training == training


@pytest.mark.parametrize("case", LAYERS, ids=LAYER_IDS)
def test_folded_it_is_a_plain_layer_and_the_same_function(case: LayerCase) -> None:
    layer, x = case.layer().eval(), layer_input(case)
    fused = FusedLayer(layer, random_norm(case, layer).eval(), nn.ReLU6())
    exact, before = fused(x), {name: tensor.clone() for name, tensor in fused.state_dict().items()}
    folded = fused.folded()
    assert all(torch.equal(tensor, before[name]) for name, tensor in fused.state_dict().items())
    assert folded.layer is not fused.layer
    assert type(folded.layer) is type(layer)
    assert folded.bn is None
    assert folded.layer.bias is not None
    torch.testing.assert_close(folded(x), exact, rtol=1e-4, atol=1e-5)


def test_without_norm_there_is_nothing_to_fold() -> None:
    fused = FusedLayer(nn.Linear(3, 2), None, nn.ReLU())
    weight = fused.layer.weight.clone()
    assert fused.folded() is fused
    assert torch.equal(fused.layer.weight, weight)


def test_a_bare_layer_is_itself() -> None:
    layer = nn.Conv1d(2, 3, 2)
    x = torch.randn(1, 2, 5)
    assert torch.equal(FusedLayer(layer)(x), layer(x))
    assert set(FusedLayer(layer).state_dict()) == {"layer.weight", "layer.bias"}
