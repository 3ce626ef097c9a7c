"""The QAT layer in its three modes, against float layers and against integer arithmetic in float64."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from fxqat.fake_quantize.base import WEIGHT, FakeQuantizeBase
from fxqat.fake_quantize.fixed import FixedFakeQuantize
from fxqat.fake_quantize.state import enable_calibration, enable_quantization
from fxqat.nn.bias import INT32_LIMIT
from fxqat.nn.qat import QATLayer
from fxqat.nn.weighted import weighted_op
from fxqat.numerics import fake_quantize, per_axis, quantize
from fxqat.scheme import QuantizeScheme
from tests.builders import (
    INT8_WEIGHT,
    LAYER_IDS,
    LAYERS,
    UINT8,
    LayerCase,
    calibrate,
    layer_input,
    make_fake_quant,
    make_qat_layer,
    random_norm,
    switch_on,
)

EVERY_LAYER = pytest.mark.parametrize("case", LAYERS, ids=LAYER_IDS)
CONV = next(case for case in LAYERS if case.name == "conv2d_groups")
GROUPED = next(case for case in LAYERS if case.name == "conv_transpose2d_groups")
LINEAR = next(case for case in LAYERS if case.name == "linear")
FEW = pytest.mark.parametrize("case", [CONV, GROUPED, LINEAR], ids=lambda case: case.name)
PER_TENSOR_WEIGHT = QuantizeScheme(narrow_range=True)


def float_chain(case: LayerCase, seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """The layer and the BatchNorm that ``make_qat_layer`` builds with the same seed, in training mode."""
    torch.manual_seed(seed)
    layer = case.layer()
    return layer.train(), random_norm(case, layer, seed).train()


def channels_last_shape(values: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Values per channel, shaped for axis 1 of ``y``."""
    return values.reshape(1, -1, *[1] * (y.dim() - 2))


def weight_integers(layer: QATLayer, weight: torch.Tensor) -> torch.Tensor:
    """Integers of a (folded) weight in the layer's own grid."""
    quant = layer.weight_fake_quant
    scale, zero_point = quant.qparams()
    axis = quant.axis if scale.dim() else None
    return quantize(weight, scale, zero_point, quant.scheme.quant_min, quant.scheme.quant_max, axis)


def record_weights(layer: QATLayer) -> list[torch.Tensor]:
    """A list that every later call of the layer appends the weight it uses to."""
    used: list[torch.Tensor] = []
    function = layer.op.function

    def recording(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **arguments: object
    ) -> torch.Tensor:
        used.append(weight)
        return function(x, weight, bias, **arguments)

    layer.op = replace(layer.op, function=recording)
    return used


def input_quantizer(x: torch.Tensor) -> FakeQuantizeBase:
    """A calibrated activation quantizer."""
    return calibrate(make_fake_quant(UINT8), x)


# mode 2, live statistics


@EVERY_LAYER
@pytest.mark.parametrize("observe", [False, True])
def test_live_and_unquantized_it_is_the_float_layer_bit_for_bit(case: LayerCase, observe: bool) -> None:
    layer, bn = float_chain(case)
    qat = make_qat_layer(case, activation=nn.ReLU())
    qat.weight_fake_quant.observer_enabled = observe
    for seed in range(2):
        x = layer_input(case, seed)
        exact, found = torch.relu(bn(layer(x))), qat(x)
        assert torch.equal(found, exact)
    exact.square().sum().backward()
    found.square().sum().backward()
    assert torch.equal(qat.weight.grad, layer.weight.grad)
    assert torch.equal(qat.bn.running_var, bn.running_var)
    assert torch.equal(qat.bn.running_mean, bn.running_mean)
    assert qat.bn.num_batches_tracked == bn.num_batches_tracked == 2


@EVERY_LAYER
@pytest.mark.parametrize("scheme", [INT8_WEIGHT, PER_TENSOR_WEIGHT], ids=str)
def test_live_and_quantized_it_normalises_the_rounded_folded_weight(case: LayerCase, scheme: QuantizeScheme) -> None:
    qat = switch_on(make_qat_layer(case, scheme=scheme))
    layer, bn = float_chain(case)
    op, x = weighted_op(layer), layer_input(case)
    with torch.no_grad():
        factor = bn.weight / torch.sqrt(bn.running_var + bn.eps)
        wide = op.per_output_channel(factor, layer.weight)
        scale, _ = qat.weight_fake_quant.qparams()
        shaped = scale if scale.dim() == 0 else scale.reshape([-1 if d == op.axis else 1 for d in range(wide.dim())])
        rounded = weight_integers(qat, layer.weight * wide) * shaped / wide
    moved = (layer.weight + (rounded - layer.weight).detach()).requires_grad_()
    exact, found = bn(op(x, moved, layer.bias)), qat(x)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
    assert (found - make_qat_layer(case)(x)).abs().max() > 1e-4
    direction = torch.randn_like(exact)
    exact.backward(direction)
    found.backward(direction)
    inside = (weight_integers(qat, layer.weight * wide).abs() < scheme.quant_max).float()
    torch.testing.assert_close(qat.weight.grad * inside, layer.weight.grad * inside, rtol=1e-3, atol=1e-3)
    assert torch.count_nonzero(inside) > 0.6 * inside.numel()


@EVERY_LAYER
def test_the_integers_are_the_same_in_training_and_in_eval(case: LayerCase) -> None:
    qat = switch_on(make_qat_layer(case))
    used = record_weights(qat)
    folded, _ = qat.folded()
    wide = qat.op.per_output_channel(qat.bn.weight / torch.sqrt(qat.bn.running_var + qat.bn.eps), qat.weight)
    qat(layer_input(case))
    live = weight_integers(qat, used[0] * wide)
    deployed = weight_integers(qat, folded)
    assert torch.all((live - deployed).abs() <= 1)
    assert (live != deployed).float().mean() <= 0.002
    assert deployed.abs().max() == 127


def test_a_gamma_of_zero_is_harmless() -> None:
    qat = make_qat_layer(CONV)
    with torch.no_grad():
        qat.bn.weight[1] = 0.0
    switch_on(qat)
    y = qat(layer_input(CONV))
    y.sum().backward()
    assert torch.all(y[:, 1] == qat.bn.bias[1])
    assert torch.isfinite(qat.weight.grad).all()
    assert torch.isfinite(qat.weight_fake_quant.relative_scale.grad).all()


@FEW
@pytest.mark.parametrize("dead", [slice(None), slice(1, None), slice(0, 1)], ids=["all", "some", "one"])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("observed_in_training", [True, False])
def test_a_gamma_of_zero_learns_as_in_the_float_layer(
    case: LayerCase, dead: slice, per_channel: bool, observed_in_training: bool
) -> None:
    scheme = replace(INT8_WEIGHT if per_channel else PER_TENSOR_WEIGHT, bit_width=16)
    qat, (layer, bn) = make_qat_layer(case, scheme=scheme), float_chain(case)
    x = layer_input(case)
    exact, found = (bn.weight, layer.weight), (qat.bn.weight, qat.weight)
    for gamma, _ in (exact, found):
        gamma.data[dead] = 0.0
    if observed_in_training:
        enable_calibration(qat)
        qat(x)
        qat.bn.load_state_dict(bn.state_dict())
        enable_quantization(qat)
    else:
        switch_on(qat)
    # in the second step, a small gamma is coarsely rounded beside large ones of the same scale
    for step in range(3 if per_channel and case is not GROUPED else 1):
        y = bn(layer(x))
        direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(step))
        expected = torch.autograd.grad(y, exact, direction)
        for one, other in zip(torch.autograd.grad(qat(x), found, direction), expected, strict=True):
            assert torch.dist(one, other) <= 2e-3 * other.norm()
        for tensors in (exact, found):
            torch._foreach_add_([tensor.data for tensor in tensors], expected, alpha=1e-3)


# mode 1, deployed arithmetic


@EVERY_LAYER
@pytest.mark.parametrize("scheme", [INT8_WEIGHT, PER_TENSOR_WEIGHT], ids=str)
@pytest.mark.parametrize("with_bn", [True, False])
def test_eval_is_integer_arithmetic(case: LayerCase, scheme: QuantizeScheme, with_bn: bool) -> None:
    qat = make_qat_layer(case, scheme=scheme, with_bn=with_bn).eval()
    switch_on(qat)
    x = layer_input(case)
    source = input_quantizer(x)
    weight, bias = (None if t is None else t.detach() for t in qat.folded())
    weight_scale, _ = qat.weight_fake_quant.qparams()
    input_scale, input_zero = source.qparams()
    q_x = quantize(x, input_scale, input_zero, 0, 255).double() - input_zero.double()
    products = qat.op(q_x, weight_integers(qat, weight).double(), None)
    assert torch.equal(products, products.round())
    scale = (input_scale * weight_scale).expand(-1 if weight_scale.dim() else products.shape[1])
    scale = scale.repeat(products.shape[1] // scale.numel())
    if bias is not None:
        products = products + channels_last_shape(torch.round(bias / scale).double(), products)
    expected = products * channels_last_shape(scale.double(), products)
    found = qat(source(x), source)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@EVERY_LAYER
def test_eval_without_quantization_is_the_float_chain(case: LayerCase) -> None:
    layer, bn = float_chain(case)
    layer.eval()
    bn.eval()
    x = layer_input(case)
    qat = make_qat_layer(case, activation=nn.ReLU6()).eval()
    exact = torch.clamp(bn(layer(x)), 0, 6)
    torch.testing.assert_close(qat(x), exact, rtol=1e-4, atol=1e-5)
    source = make_fake_quant(UINT8)
    torch.testing.assert_close(qat(x, source), exact, rtol=1e-4, atol=1e-5)


@FEW
def test_bias_is_rounded_only_when_both_sides_are_quantized(case: LayerCase) -> None:
    qat = switch_on(make_qat_layer(case, with_bn=False).eval())
    x = layer_input(case)
    source = make_fake_quant(UINT8)
    source.set_qparams(torch.tensor(0.5), torch.tensor(100.0))  # coarse, so that a rounded bias shows
    weight = qat.weight_fake_quant.quantize(qat.weight)
    assert torch.equal(qat(x), qat.op(x, weight, qat.bias))
    assert torch.equal(qat(x, source), qat.op(x, weight, qat.bias))
    source.fake_quant_enabled = True
    _, scale = qat.deployed_scales(qat.bias, source)
    rounded = torch.round(qat.bias / scale) * scale
    assert torch.equal(qat(x, source), qat.op(x, weight, rounded))
    assert not torch.equal(rounded, qat.bias)


@FEW
def test_freeze_trains_as_it_evaluates(case: LayerCase) -> None:
    qat = switch_on(make_qat_layer(case, bn_mode="freeze"))
    x = layer_input(case)
    source = input_quantizer(x)
    mean = qat.bn.running_mean.clone()
    trained = qat(source(x), source)
    assert torch.equal(qat.bn.running_mean, mean)
    assert qat.bn.num_batches_tracked == 0
    assert torch.equal(qat.eval()(source(x), source), trained)


@EVERY_LAYER
def test_freeze_gradients_are_those_of_layer_and_frozen_norm(case: LayerCase) -> None:
    layer, bn = float_chain(case)
    bn.eval()
    qat, x = make_qat_layer(case, bn_mode="freeze"), layer_input(case)
    exact = bn(layer(x))
    direction = torch.randn_like(exact)
    exact.backward(direction)
    qat(x).backward(direction)
    for found, wanted in ((qat.weight, layer.weight), (qat.bn.weight, bn.weight), (qat.bn.bias, bn.bias)):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-3, atol=1e-3)
    assert qat.bn.weight.grad.abs().max() > 0


# mode 3, statistics frozen after some steps


@EVERY_LAYER
def test_before_n_steps_it_is_the_live_mode(case: LayerCase) -> None:
    live, counted = switch_on(make_qat_layer(case)), switch_on(make_qat_layer(case, bn_mode=3))
    for seed in range(3):
        x = layer_input(case, seed)
        exact, found = live(x), counted(x)
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(counted.bn.running_mean, live.bn.running_mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(counted.bn.running_var, live.bn.running_var, rtol=1e-6, atol=1e-6)
    direction = torch.randn_like(exact)
    exact.backward(direction)
    found.backward(direction)
    for name, parameter in counted.named_parameters():
        torch.testing.assert_close(parameter.grad, live.get_parameter(name).grad, rtol=1e-3, atol=2e-3)


@EVERY_LAYER
def test_after_n_steps_the_statistics_stand_still_and_are_used(case: LayerCase) -> None:
    counted, live = switch_on(make_qat_layer(case, bn_mode=2)), switch_on(make_qat_layer(case))
    for seed in range(2):
        counted(layer_input(case, seed))
    live.bn.load_state_dict(counted.bn.state_dict())
    live.weight_fake_quant.load_state_dict(counted.weight_fake_quant.state_dict())
    live.bn.eval()  # nn.BatchNorm with running statistics
    before = counted.bn.running_var.clone()
    x = layer_input(case, 7) * 3 + 1
    exact, found = live(x), counted(x)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
    assert torch.equal(counted.bn.running_var, before)
    direction = torch.randn_like(exact)
    exact.backward(direction)
    found.backward(direction)
    torch.testing.assert_close(counted.weight.grad, live.weight.grad, rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(counted.bn.weight.grad, live.bn.weight.grad, rtol=1e-3, atol=2e-3)


@EVERY_LAYER
@pytest.mark.parametrize("bn_mode", ["train", "freeze", 1])
def test_ranges_follow_the_folded_weight(case: LayerCase, bn_mode: str | int) -> None:
    qat, x = switch_on(make_qat_layer(case, bn_mode=bn_mode)), layer_input(case)
    with torch.no_grad():
        before = [value.clone() for value in (qat.folded()[0], qat.weight_fake_quant.qparams()[0])]
        qat(x)
        qat.bn.running_var.mul_(1e-4)
        qat.bn.weight.mul_(-2.0)
        qat.weight.mul_(3.0)
        now = qat.folded()[0]
        qat(x)
    scale, axis = qat.weight_fake_quant.qparams()[0], qat.op.axis
    size, old = (w.movedim(axis, 0).flatten(1).abs().amax(1) for w in (now, before[0]))
    torch.testing.assert_close(scale / before[1], size / old, rtol=1e-5, atol=0.0)
    assert (size > 10 * old).all()
    rounded = qat.weight_fake_quant.eval().quantize(now)
    assert ((rounded - now).abs() <= per_axis(scale, now.dim(), axis) * 0.501).all()


@EVERY_LAYER
def test_ranges_follow_the_statistics_of_a_calibration_in_training_mode(case: LayerCase) -> None:
    """The weight is watched before the batch changes the statistics."""
    qat, x = make_qat_layer(case), layer_input(case)
    quant = qat.weight_fake_quant
    quant.observer_enabled, qat.bn.momentum = True, 1.0
    qat(x / 100)
    watched = quant.observer.max_val.clone()
    quant.observer_enabled, quant.fake_quant_enabled = False, True
    qat.bn.momentum = 0.0
    now = qat.folded()[0]
    qat(x)
    assert (now.abs().amax() > 10 * watched).any()
    scale, zero_point = quant.qparams()
    assert not zero_point.any()
    size = now.movedim(qat.op.axis, 0).flatten(1).abs().amax(1)
    assert (scale * quant.scheme.quant_max >= 0.96 * size).all()


def test_a_channel_that_batch_norm_had_switched_off_gets_a_range() -> None:
    qat, x = make_qat_layer(CONV), layer_input(CONV)
    with torch.no_grad():
        qat.bn.weight[1] = 0.0
        switch_on(qat)(x)
        qat.bn.weight[1] = 0.5
        expected = qat.folded()[0][1].abs().amax()
        qat(x)
    assert qat.weight_fake_quant.qparams()[0][1] * 127 == pytest.approx(expected.item(), rel=0.02)
    assert (qat.weight_fake_quant.magnitude > 0).all()


def test_gradients_are_those_of_the_range_in_the_forward_pass() -> None:
    """A layer that is called twice in a step, while its statistics change."""
    qat, alone = (switch_on(make_qat_layer(CONV)) for _ in range(2))
    x, other = layer_input(CONV), 100 * layer_input(CONV, 3)
    qat(x)
    alone(x)
    first = qat(x)
    qat(other)
    first.square().sum().backward()
    alone(x).square().sum().backward()
    quants = qat.weight_fake_quant, alone.weight_fake_quant
    torch.testing.assert_close(quants[0].relative_scale.grad, quants[1].relative_scale.grad, rtol=1e-3, atol=0.0)
    assert quants[1].relative_scale.grad.abs().sum() > 0


@FEW
def test_after_n_steps_training_differs_from_eval_only_by_the_bias(case: LayerCase) -> None:
    qat = switch_on(make_qat_layer(case, bn_mode=1))
    x = layer_input(case)
    qat(x)
    switch_on(qat)
    torch.testing.assert_close(qat(x), qat.eval()(x), rtol=1e-3, atol=1e-3)
    assert qat.bn_steps == 2


def test_steps_count_training_only_and_travel_with_the_state_dict() -> None:
    qat = make_qat_layer(CONV, bn_mode=5)
    x = layer_input(CONV)
    qat(x)
    qat.eval()(x)
    qat.train()(x)
    twin = make_qat_layer(CONV, bn_mode=5)
    twin.load_state_dict(qat.state_dict(), strict=True)
    assert twin.bn_steps == 2
    assert "bn_steps" not in dict(make_qat_layer(CONV).named_buffers())


@FEW
def test_counted_statistics_count_their_batches_as_batch_norm_does(case: LayerCase) -> None:
    counted, live = make_qat_layer(case, bn_mode=2), make_qat_layer(case)
    for seed in range(2):
        counted(layer_input(case, seed))
        live(layer_input(case, seed))
    assert live.bn.num_batches_tracked == 2
    assert counted.bn.num_batches_tracked == 2


def test_a_norm_in_eval_mode_stays_frozen_before_n_steps_too() -> None:
    qat = make_qat_layer(CONV, bn_mode=10)
    layer, bn = float_chain(CONV)
    x = layer_input(CONV)
    qat.bn.eval()
    mean = qat.bn.running_mean.clone()
    torch.testing.assert_close(qat(x), bn.eval()(layer(x)), rtol=1e-4, atol=1e-4)
    assert torch.equal(qat.bn.running_mean, mean)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_frozen_statistics_survive_a_bad_batch(bad: float) -> None:
    qat = make_qat_layer(CONV, bn_mode=0)
    mean, variance = qat.bn.running_mean.clone(), qat.bn.running_var.clone()
    x = layer_input(CONV)
    x[0, 0, 0, 0] = bad
    qat(x)
    assert torch.equal(qat.bn.running_mean, mean)
    assert torch.equal(qat.bn.running_var, variance)


@pytest.mark.parametrize("bn_mode", ["train", "freeze", 0, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_trains_close_to_float32(bn_mode: str | int, dtype: torch.dtype) -> None:
    exact, half = (switch_on(make_qat_layer(CONV, bn_mode=bn_mode)) for _ in range(2))
    x = layer_input(CONV)
    source = input_quantizer(x)
    wanted = exact(source(x), source)
    with torch.autocast("cpu", dtype=dtype):
        found = half(source(x), source)
        found.float().square().mean().backward()
    wanted.square().mean().backward()
    torch.testing.assert_close(found.float(), wanted, rtol=0.05, atol=0.05)
    assert half.bn.running_var.dtype == torch.float32
    assert half.weight_fake_quant.relative_scale.grad.dtype == torch.float32
    torch.testing.assert_close(half.weight.grad, exact.weight.grad, rtol=0.1, atol=0.05)


# overflow repair


@EVERY_LAYER
def test_a_dead_channel_keeps_its_bias(case: LayerCase) -> None:
    qat = make_qat_layer(case).eval()
    with torch.no_grad():
        channel = (slice(None),) * qat.op.axis + (0,)
        qat.weight[channel] *= 1e-9
    switch_on(qat)
    x = layer_input(case)
    source = input_quantizer(x)
    weight, bias = qat.folded()
    lifted, scale = qat.deployed_scales(bias, source)
    own = qat.weight_fake_quant.used_scale()
    assert own[0] < lifted[0]
    assert torch.equal(own[1:], lifted[1:])
    assert torch.all((bias.double() / scale.double()).abs() < INT32_LIMIT)
    exact = qat.op(source(x), weight, bias)
    used = record_weights(qat)
    assert (qat(source(x), source) - exact).abs().max() < 0.05 * exact.abs().max()
    limit = INT8_WEIGHT.quant_max
    assert torch.equal(used[0], fake_quantize(weight, lifted, None, -limit, limit, qat.op.axis))


@FEW
def test_the_repair_leaves_other_channels_alone(case: LayerCase) -> None:
    sick, well = (make_qat_layer(case, with_bn=False).eval() for _ in range(2))
    with torch.no_grad():
        sick.weight[(slice(None),) * sick.op.axis + (0,)] *= 1e-9
    x = layer_input(case)
    source = input_quantizer(x)
    outputs = [switch_on(layer)(source(x), source) for layer in (sick, well)]
    per_group = sick.weight.shape[sick.op.axis]
    healthy = [c for c in range(outputs[0].shape[1]) if c % per_group]
    assert torch.equal(outputs[0][:, healthy], outputs[1][:, healthy])
    assert not torch.equal(outputs[0][:, 0], outputs[1][:, 0])


def test_a_per_tensor_weight_is_repaired_as_a_whole() -> None:
    qat = make_qat_layer(LINEAR, with_bn=False, scheme=PER_TENSOR_WEIGHT).eval()
    with torch.no_grad():
        qat.weight.mul_(1e-14)
        qat.bias.copy_(torch.tensor([1.0, -2.0, 3.0, -4.0, 0.0]))
    switch_on(qat)
    x = layer_input(LINEAR)
    source = input_quantizer(x)
    weight_scale, scale = qat.deployed_scales(qat.bias, source)
    assert weight_scale.dim() == 0
    assert weight_scale > qat.weight_fake_quant.used_scale()
    assert scale.shape == ()  # a vector for a weight of one scale computes garbage on QNN's HTP
    torch.testing.assert_close(qat(source(x), source), qat.bias.detach().expand(16, 5), rtol=1e-5, atol=1e-5)


def test_without_bias_or_quantized_input_there_is_no_bias_scale() -> None:
    qat = make_qat_layer(LINEAR, with_bn=False)
    for bias, source in ((None, input_quantizer(torch.randn(4))), (qat.bias, None)):
        weight_scale, scale = qat.deployed_scales(bias, source)
        assert scale is None
        assert torch.equal(weight_scale, qat.weight_fake_quant.used_scale())


# observing the weight


@FEW
@pytest.mark.parametrize("training", [True, False])
def test_the_folded_weight_is_what_is_observed(case: LayerCase, training: bool) -> None:
    qat = make_qat_layer(case).train(training)
    qat.weight_fake_quant.observer_enabled = True
    weight, _ = qat.folded()
    others = [d for d in range(weight.dim()) if d != qat.op.axis]
    expected = weight.detach().amax(others)
    qat(layer_input(case))
    torch.testing.assert_close(qat.weight_fake_quant.observer.max_val, expected, rtol=1e-5, atol=1e-7)
    assert qat.weight_fake_quant.observer.has_seen_data()


@pytest.mark.parametrize(
    "change",
    [
        lambda qat: torch.nn.init.constant_(qat.weight, 3.0),
        lambda qat: qat.load_state_dict(
            {name: value * 2 if name == "weight" else value for name, value in qat.state_dict().items()}
        ),
        lambda qat: qat.bn.running_var.mul_(0.01),
    ],
    ids=["in_place", "load_state_dict", "statistics"],
)
def test_a_changed_weight_is_observed_again(change: object) -> None:
    qat = make_qat_layer(CONV).eval()
    qat.weight_fake_quant.observer_enabled = True
    x = layer_input(CONV)
    qat(x)
    before = qat.weight_fake_quant.observer.max_val.clone()
    qat(x)
    assert torch.equal(qat.weight_fake_quant.observer.max_val, before)
    change(qat)
    qat(x)
    assert torch.any(qat.weight_fake_quant.observer.max_val > before * 1.5)


@pytest.mark.parametrize("case", [CONV, GROUPED], ids=lambda case: case.name)
@pytest.mark.parametrize("again", [True, False], ids=["train", "eval"])
def test_statistics_that_training_changes_are_observed(case: LayerCase, again: bool) -> None:
    """torch's BatchNorm does not count its updates of the statistics in the version of the tensor."""
    qat, x = make_qat_layer(case).train(), layer_input(case)
    qat.bn.momentum = 0.5
    qat.weight_fake_quant.observer_enabled = True
    qat(x)
    before = qat.weight_fake_quant.observer.max_val.clone()
    qat(x * 0.01)  # lowers the variances, after the weight is observed
    qat.train(again)(x)
    weight, _ = qat.folded() if not again else (None, None)
    assert torch.any(qat.weight_fake_quant.observer.max_val > before * 1.2)
    if weight is not None:
        shown = weight.detach().amax([d for d in range(weight.dim()) if d != qat.op.axis])
        assert torch.all(qat.weight_fake_quant.observer.max_val >= shown * (1 - 1e-6))


def test_a_second_calibration_sees_a_weight_that_was_changed_through_data() -> None:
    qat, x = make_qat_layer(CONV).eval(), layer_input(CONV)
    enable_calibration(qat)
    qat(x)
    enable_quantization(qat)
    before = qat.weight_fake_quant.scale.clone()
    qat.weight.data.mul_(4.0)  # not counted by autograd's version of the tensor
    qat(x)
    enable_calibration(qat)
    qat(x)
    enable_quantization(qat)
    assert qat.weight_fake_quant.observer.has_seen_data()
    torch.testing.assert_close(qat.weight_fake_quant.scale, before * 4)


def test_an_unchanged_weight_is_observed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    qat = make_qat_layer(CONV).eval()
    qat.weight_fake_quant.observer_enabled = True
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(qat.weight_fake_quant, "observe", seen.append)
    qat.weight_fake_quant.observer(qat.folded()[0].detach())
    for _ in range(3):
        qat(layer_input(CONV))
    assert len(seen) == 1
    assert torch.equal(seen[0], qat.folded()[0])


# the module


@EVERY_LAYER
def test_parameters_are_taken_over_and_keep_their_names(case: LayerCase) -> None:
    layer, bn = case.layer(), None
    quant = make_fake_quant(INT8_WEIGHT, WEIGHT, weighted_op(layer).axis, layer.weight.shape[weighted_op(layer).axis])
    qat = QATLayer(layer, bn, None, quant)
    assert qat.weight is layer.weight
    assert qat.bias is layer.bias
    assert set(layer.state_dict()) <= set(qat.state_dict())
    assert type(layer).__name__ in repr(qat)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("bn_mode", ["train", 3])
def test_copies_compute_the_same_and_are_apart(again: object, bn_mode: str | int) -> None:
    qat = switch_on(make_qat_layer(CONV, bn_mode=bn_mode, activation=nn.ReLU(inplace=True)))
    twin = again(qat)
    x = layer_input(CONV)
    assert torch.equal(twin(x), qat(x))
    with torch.no_grad():
        twin.weight.zero_()
    assert qat.weight.abs().max() > 0


def test_with_fixed_parameters_only_the_weight_learns() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3)
    quant = make_fake_quant(INT8_WEIGHT, WEIGHT, 0, 4, FixedFakeQuantize)
    qat = switch_on(QATLayer(layer, None, None, quant))
    assert {name for name, _ in qat.named_parameters()} == {"weight", "bias"}
    qat(torch.randn(2, 3, 5, 5)).sum().backward()
    assert qat.weight.grad.all()  # the largest of a channel, on the end of the range, too


@FEW
def test_a_training_step_moves_weight_scale_and_norm(case: LayerCase) -> None:
    qat = switch_on(make_qat_layer(case, activation=nn.ReLU()))
    optimizer = torch.optim.SGD(qat.parameters(), lr=0.1)
    before = {name: value.detach().clone() for name, value in qat.named_parameters()}
    qat(layer_input(case)).square().sum().backward()
    optimizer.step()
    moved = {name for name, value in qat.named_parameters() if not torch.equal(value, before[name])}
    assert {"weight", "bn.weight", "bn.bias", "weight_fake_quant.relative_scale"} <= moved
    assert all(torch.isfinite(value).all() for value in qat.parameters())


@pytest.mark.parametrize("bn_mode", ["train", "freeze", 2, None])
@EVERY_LAYER
def test_half_precision_folds_and_quantizes_in_float32(case: LayerCase, bn_mode: str | int | None) -> None:
    layer = make_qat_layer(case, with_bn=bn_mode is not None, bn_mode=bn_mode or "train", scheme=INT8_WEIGHT)
    half = copy.deepcopy(layer).bfloat16()
    same = copy.deepcopy(half).float()  # the weights of the half-precision layer in float32
    for twin in (half, same):
        switch_on(twin)
    x = layer_input(case).bfloat16()
    input_quant = calibrate(make_fake_quant(UINT8), x.float())
    for training in (True, False):
        actual, expected = half.train(training)(x, input_quant), same.train(training)(x.float(), input_quant)
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.float(), expected, rtol=0.05, atol=0.05 * expected.abs().max().item())
    actual.float().square().mean().backward()
    assert half.weight.grad.dtype == torch.bfloat16
    assert half.weight.grad.isfinite().all()
    if bn_mode in (None, "freeze"):  # no statistics have moved
        twins = [(twin.folded(), twin.deployed_scales(twin.folded()[1], input_quant)) for twin in (half, same)]
        torch.testing.assert_close(*twins, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_layer_that_was_converted_counts_and_freezes_its_statistics(dtype):
    layer, x = make_qat_layer(CONV, bn_mode=1), layer_input(CONV)
    wide = make_qat_layer(CONV, bn_mode=1).to(dtype)
    for _ in range(2):
        expected, found = layer(x), wide(x.to(dtype))
    assert found.dtype == wide.bn.running_mean.dtype == dtype
    limits = {"atol": 0.1, "rtol": 0.05} if dtype is torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(found.float(), expected, **limits)
    torch.testing.assert_close(wide.bn.running_var.float(), layer.bn.running_var, **limits)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bn_mode", ["train", "freeze", 0, 1, 1000])
def test_update_bn_measures_the_statistics_of_every_mode(bn_mode, bits):
    scheme = QuantizeScheme(bits, per_channel=True, narrow_range=True)
    layer = make_qat_layer(CONV, bn_mode=bn_mode, scheme=scheme)
    batches = [layer_input(CONV, seed) for seed in range(3)]
    with torch.no_grad():
        layer.weight.mul_(0.01)  # so that the statistics are far from those that update_bn resets to
        update_bn(batches, layer)
        switch_on(layer.eval())
        found = [layer(x) for x in batches]
        statistics = layer.bn.running_mean.clone(), layer.bn.running_var.clone()
        update_bn(batches, layer.train())
        again = [layer.eval()(x) for x in batches]
    rough = 0.3 if bits == 4 else 0.02
    for before, after in zip((*statistics, *found), (layer.bn.running_mean, layer.bn.running_var, *again), strict=True):
        assert (after - before).norm() < rough * before.norm()
    assert layer.bn.num_batches_tracked == 3
    assert layer.bn.momentum is not None
