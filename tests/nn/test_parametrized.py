"""Layers with computed weights: the same function and gradients as the layer with the weight that is computed."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from fxqat.fake_quantize.base import WEIGHT
from fxqat.nn.parametrized import computed_tensors, parametrized, qat_layer_type
from fxqat.nn.qat import QATLayer
from fxqat.nn.weighted import weighted_op
from fxqat.utils.own_forward import type_of
from tests.builders import (
    INT8_WEIGHT,
    LAYERS,
    LayerCase,
    layer_input,
    make_fake_quant,
    random_norm,
    switch_on,
)


class Squashed(nn.Module):
    """A weight that a function of a parameter computes."""

    def forward(self, original):
        return 2 * torch.tanh(original)


def squashed(case: LayerCase, *names: str) -> nn.Module:
    torch.manual_seed(0)
    layer = case.layer()
    for name in names or ("weight",):
        parametrize.register_parametrization(layer, name, Squashed())
    return layer


def qat_layer(kind: type[QATLayer], case: LayerCase, layer: nn.Module, bn: nn.Module | None) -> QATLayer:
    axis = weighted_op(layer).axis
    quant = make_fake_quant(INT8_WEIGHT, WEIGHT, axis, layer.weight.shape[axis])
    return switch_on(kind(layer, bn, nn.ReLU(), quant))


WITH_BIAS = [case for case in LAYERS if case.layer().bias is not None]
COMPUTED = [
    *(pytest.param(case, ("weight",), id=case.name) for case in LAYERS),
    *(pytest.param(case, ("bias",), id=f"{case.name}, bias") for case in WITH_BIAS),
    *(pytest.param(case, ("weight", "bias"), id=f"{case.name}, both") for case in WITH_BIAS),
]


@pytest.mark.parametrize(("case", "names"), COMPUTED)
def test_a_parametrized_layer_can_be_pickled(case: LayerCase, names: tuple[str, ...]) -> None:
    layer, x = squashed(case, *names).eval(), layer_input(case)
    found = parametrized(layer)
    assert type_of(found) is type_of(layer) is type(case.layer())
    assert found.state_dict().keys() == layer.state_dict().keys()
    assert not found.training
    assert computed_tensors(found) == names
    for same in (found, pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        assert torch.equal(same(x), layer(x))


def test_what_torch_does_to_one_layer_does_not_change_the_class() -> None:
    first, second = (parametrized(squashed(LAYERS[0])) for _ in range(2))
    with pytest.raises(AttributeError):
        parametrize.remove_parametrizations(first, "weight")
    assert second.weight.shape == (6, 4, 3)


@pytest.mark.parametrize(("case", "names"), COMPUTED)
@pytest.mark.parametrize("with_bn", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_it_computes_what_a_layer_with_these_tensors_computes(
    case: LayerCase, names: tuple[str, ...], with_bn: bool, training: bool
) -> None:
    layer, x = squashed(case, *names), layer_input(case)
    plain = case.layer()
    plain.load_state_dict({"weight": layer.weight} | ({} if layer.bias is None else {"bias": layer.bias}))
    norms = [random_norm(case, plain) if with_bn else None for _ in range(2)]
    computed = qat_layer(qat_layer_type(layer), case, layer, norms[0]).train(training)
    stored = qat_layer(QATLayer, case, plain, norms[1]).train(training)
    expected, found = stored(x), computed(x)
    assert torch.equal(found, expected)
    for y in (found, expected):
        y.square().sum().backward()
    for name, expected in stored.named_parameters(recurse=False):
        if name in names:
            original = layer.parametrizations[name].original
            (gradient,) = torch.autograd.grad(getattr(layer, name), original, expected.grad)
            torch.testing.assert_close(original.grad, gradient)
        else:
            torch.testing.assert_close(getattr(computed, name).grad, expected.grad)


def test_the_power_iteration_of_spectral_norm_runs_once_in_a_training_step() -> None:
    torch.manual_seed(0)
    layer = parametrizations.spectral_norm(nn.Conv2d(3, 5, 3))
    bn = nn.BatchNorm2d(5)
    expected, x = copy.deepcopy(layer), torch.randn(2, 3, 6, 6)
    quant = make_fake_quant(INT8_WEIGHT, WEIGHT, 0, 5)
    qat = qat_layer_type(layer)(layer, bn, None, quant)
    quant.observer_enabled = quant.fake_quant_enabled = True
    layer.load_state_dict(expected.state_dict())  # building reads the shape
    for _ in range(3):
        qat(x)
        expected(x)
    found = dict(qat.named_buffers())["parametrizations.weight.0._u"]
    assert torch.equal(found, expected.parametrizations.weight[0]._u)


def test_the_observer_sees_each_new_weight() -> None:
    layer = squashed(LAYERS[-2])
    quant = make_fake_quant(INT8_WEIGHT, WEIGHT, 0, 5)
    qat = qat_layer_type(layer)(layer, None, None, quant)
    quant.observer_enabled = True
    seen = []
    for value in (0.1, 0.5, 3.0):
        nn.init.constant_(layer.parametrizations.weight.original, value)
        qat(layer_input(LAYERS[-2]))
        seen.append(quant.observer.max_val.max().item())
    assert seen == pytest.approx([2 * torch.tanh(torch.tensor(v)).item() for v in (0.1, 0.5, 3.0)], rel=1e-3)


def test_the_float_layer_is_one_of_torch() -> None:
    case = LAYERS[2]
    layer, x = squashed(case), layer_input(case)
    expected, found = layer(x), qat_layer(qat_layer_type(layer), case, layer, None).float_layer()
    assert torch.equal(found(x), expected)
    parametrize.remove_parametrizations(found, "weight")
    assert torch.equal(found(x), expected)
