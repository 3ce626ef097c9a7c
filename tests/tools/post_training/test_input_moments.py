"""The moments of a layer's inputs, and the weight that best reproduces the float model's outputs."""

import copy

import numpy as np
import pytest
import torch

import fxqat
from fxqat.tools.post_training.input_moments import DAMPINGS, Moments, damped, moments_of_halves, weight_towards_float
from fxqat.tools.post_training.layer_matrices import inputs_to_columns
from fxqat.tools.post_training.segments import named_inputs, split
from tests.models import build, calibrate, inputs


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def correlated(columns, samples, seed=0):
    return random(columns, columns, seed=seed) @ random(columns, samples, seed=seed + 1)


def moments(x, changed):
    return Moments.of(changed[None], (x - changed)[None])


@pytest.mark.parametrize("centred", [False, True])
def test_averages_are_over_all_samples(centred):
    x, changed = 2 + correlated(5, 40), 1 + correlated(5, 40, seed=7)
    both = moments(x[:, :15], changed[:, :15]) + moments(x[:, 15:], changed[:, 15:])
    gram, cross = (t[0].numpy() for t in both.averages(centred))
    a, b = (t.numpy() - centred * t.numpy().mean(1, keepdims=True) for t in (x, changed))
    np.testing.assert_allclose(gram, b @ b.T / 40, atol=1e-12)
    np.testing.assert_allclose(cross, (a - b) @ b.T / 40, atol=1e-12)


def test_with_many_samples_it_is_least_squares(monkeypatch):
    monkeypatch.setattr("fxqat.tools.post_training.input_moments.DAMPINGS", (*DAMPINGS, 1e-9))
    x, weight = correlated(6, 4000), random(4, 6, seed=3)
    changed = x + 0.3 * random(6, 6, seed=5) @ x
    found = weight_towards_float(weight[None], *(moments(x[:, k::2], changed[:, k::2]) for k in (0, 1)), centred=False)
    expected = np.linalg.lstsq(changed.T.numpy(), (weight @ x).T.numpy(), rcond=None)[0].T
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-5)
    assert not np.allclose(found[0].numpy(), weight.numpy(), atol=0.05)


def ridge(weight, x, changed, damping):
    gram = changed @ changed.T
    extra = damping * np.trace(gram) / len(gram) * np.eye(len(gram))
    return weight + weight @ (x - changed) @ changed.T @ np.linalg.inv(gram + extra)


@pytest.mark.parametrize("samples", [6, 20, 60, 2000])
def test_the_damping_is_chosen_by_cross_validation(samples):
    """Compare with the errors on the samples."""
    x, weight = correlated(8, samples), random(3, 8, seed=3)
    changed = x + 0.4 * random(8, 8, seed=5) @ x + 0.8 * random(8, samples, seed=9)
    parts = [(x[:, part], changed[:, part]) for part in (slice(samples // 2), slice(samples // 2, None))]
    found = weight_towards_float(weight[None], *(moments(*part) for part in parts), centred=False)
    w, (a, b) = weight.numpy(), [tuple(t.numpy() for t in part) for part in parts]
    ways = [lambda x, y: w, *(lambda x, y, d=d: ridge(w, x, y, d) for d in DAMPINGS)]
    errors = [
        sum(np.square(w @ test[0] - way(*train) @ test[1]).sum() for train, test in ((a, b), (b, a))) for way in ways
    ]
    expected = ways[int(np.argmin(errors))](x.numpy(), changed.numpy())
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-9)
    assert (samples == 6) or not np.allclose(expected, w, atol=1e-3)


def test_one_sample_changes_no_weight():
    weight = random(1, 3, 4)
    alone = moments(random(4, 1), random(4, 1, seed=2))
    nothing = moments(random(4, 0), random(4, 0))
    assert torch.equal(weight_towards_float(weight, nothing, alone, centred=True), weight)


def test_a_damped_gram_has_an_inverse():
    gram = damped(torch.zeros(1, 3, 3, dtype=torch.float64), 0.1)
    assert torch.isfinite(torch.linalg.cholesky(gram)).all()
    torch.testing.assert_close(damped(2 * torch.eye(3), 0.5), 3 * torch.eye(3))


def test_halves_are_of_the_layer_s_inputs():
    gm = fxqat.prepare_by_platform(build("conv_bn_relu"), "TSQAT")
    batches = [inputs("conv_bn_relu", seed=i) for i in range(2)]
    values = [named_inputs(calibrate(gm, *batches).eval(), batch) for batch in batches]
    segment = split(gm)[0]
    path, layer = next(iter(segment.layers.items()))
    first, second = moments_of_halves(segment, path, copy.deepcopy(segment), values, values)
    fxqat.enable_quantization(gm)
    quant = next(iter(segment.quantizers.values()))
    with torch.no_grad():
        read = [inputs_to_columns(layer.op, layer.weight, quant(batch[0])) for batch in batches]
        exact = [inputs_to_columns(layer.op, layer.weight, batch[0]) for batch in batches]
    for found, which in ((first, 0), (second, 1)):
        x, wanted = (torch.cat([t.chunk(2, -1)[which] for t in tensors], -1) for tensors in (read, exact))
        expected = Moments.of(x, wanted - x)
        assert found.count == expected.count == x.shape[-1]
        for name in ("gram", "cross", "mean", "shift"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-2)
        assert float(found.shift.abs().max()) > 0


def test_the_columns_of_a_convolution_are_made_image_by_image(monkeypatch):
    seen = []
    real = inputs_to_columns
    monkeypatch.setattr(
        "fxqat.tools.post_training.layer_weights.inputs_to_columns",
        lambda op, weight, x: seen.append(len(x)) or real(op, weight, x),
    )
    gm = calibrate(fxqat.prepare_by_platform(torch.nn.Conv2d(3, 4, 3).eval(), "TSQAT"), (torch.randn(6, 3, 5, 5),))
    (segment,), (other,) = ([each for each in split(m) if each.layers] for m in (gm, copy.deepcopy(gm)))
    values = [{name: torch.randn(6, 3, 5, 5) for name in segment.reads}]
    path = next(iter(segment.layers))
    first, second = moments_of_halves(segment, path, other, values, values)
    assert set(seen) == {1}
    assert first.count == second.count == 3 * 3 * 3
