"""Equalization: the function is unchanged, the ranges become equal, high biases are absorbed."""

import numpy as np
import pytest
import torch
from torch import nn

import fxqat
from fxqat.errors import CalibrationError
from fxqat.fake_quantize.state import disable_all
from fxqat.tools import equalize
from tests.models import build, calibrated, inputs


def uneven(model):
    """Channels whose ranges differ by a factor of a thousand."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.copy_(10 ** torch.empty_like(module.weight).uniform_(-2, 1))
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.normal_(module.bias)
    return model.eval()


def mobile():
    """Pointwise, depthwise, grouped, pointwise; the last one reads two."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 12, 3, padding=1, groups=4), nn.LeakyReLU(0.1), nn.MaxPool2d(2)),
        nn.ConvTranspose2d(12, 6, 2, stride=2, groups=3),
        nn.ConvTranspose2d(6, 4, 1),
        nn.Conv2d(4, 2, 1),
    )


def outputs(gm, x):
    disable_all(gm)
    with torch.no_grad():
        return gm(x)


def ranges(gm, pair):
    """The weight range of each channel between two layers: of the first's outputs and of the second's inputs."""
    first, second = (gm.get_submodule(path) for path in pair[:2])
    result = []
    for layer, gives in ((first, True), (second, False)):
        weight, groups = layer.folded()[0].detach().numpy(), layer.op.arguments.get("groups", 1)
        parts = np.split(weight, groups, axis=0)
        axis = (1 if gives else 0) if layer.op.axis == 1 else (0 if gives else 1)
        result.append(
            np.concatenate([np.abs(np.moveaxis(part, axis, 0)).reshape(part.shape[axis], -1).max(1) for part in parts])
        )
    return result


def test_the_function_is_unchanged_and_the_ranges_of_every_pair_become_equal():
    model, x = uneven(mobile()), torch.randn(2, 3, 8, 8)
    gm = fxqat.prepare_by_platform(model, example_inputs=x).eval()
    pairs = equalize(gm, iterations=200, absorb_bias=False)
    assert [pair[:2] for pair in pairs] == [("0", "3"), ("3", "6"), ("6", "9"), ("9", "10"), ("10", "11")]
    torch.testing.assert_close(outputs(gm, x), model(x), rtol=1e-4, atol=1e-4)
    for pair in pairs:
        given, read = ranges(gm, pair)
        np.testing.assert_allclose(given, read, rtol=1e-2)


def test_the_factor_is_that_of_the_paper():
    model = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.ReLU(), nn.Conv2d(2, 1, 1, bias=False))
    model[0].weight.data.copy_(torch.tensor([8.0, 1.0]).reshape(2, 1, 1, 1))
    model[2].weight.data.copy_(torch.tensor([2.0, 4.0]).reshape(1, 2, 1, 1))
    gm = fxqat.prepare_by_platform(model)
    equalize(gm, iterations=1)
    np.testing.assert_allclose(gm.get_submodule("0").weight.detach().flatten(), [4, 2])  # s = 2, 1/2
    np.testing.assert_allclose(gm.get_submodule("2").weight.detach().flatten(), [4, 2])


def test_channels_that_are_zero_on_one_side_do_not_stand_out():
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 1, 1))
    model[0].weight.data.copy_(torch.tensor([0.0, 60.0, 1.0, 0.0]).reshape(4, 1, 1, 1))
    model[2].weight.data.copy_(torch.tensor([50.0, 0.0, 4.0, 0.0]).reshape(1, 4, 1, 1))
    gm, x = fxqat.prepare_by_platform(model), torch.randn(1, 1, 2, 2)
    equalize(gm)
    torch.testing.assert_close(outputs(gm, x), model(x), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gm.get_submodule("0").weight.detach().flatten(), [0, 2, 2, 0], rtol=1e-5)
    np.testing.assert_allclose(gm.get_submodule("2").weight.detach().flatten(), [2, 0, 2, 0], rtol=1e-5)


def test_a_layer_whose_channels_are_not_used_is_unchanged():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 1, 1))
    model[2].weight.data.zero_()
    gm = fxqat.prepare_by_platform(model)
    equalize(gm)
    assert torch.equal(gm.get_submodule("0").weight, model[0].weight)
    assert not gm.get_submodule("2").weight.any()


@pytest.mark.parametrize("bias", [True, False])
def test_high_biases_are_absorbed(bias):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Conv2d(4, 2, 3, bias=bias),
        nn.BatchNorm2d(2),
    ).eval()
    model[1].bias.data.copy_(torch.tensor([10.0, 4.0, 1.0, -3.0]))
    gm, x = fxqat.prepare_by_platform(model), 0.1 * torch.randn(2, 3, 6, 6)
    pairs = equalize(gm, iterations=0)
    assert [tuple(pair) for pair in pairs] == [("0", "3", True)]
    np.testing.assert_allclose(gm.get_submodule("0").bn.bias.detach(), [3, 3, 1, -3])  # beta - (beta - 3 gamma)
    torch.testing.assert_close(outputs(gm, x), model(x), rtol=1e-4, atol=1e-4)


def test_relu6_separates_layers_unless_it_is_replaced():
    model = uneven(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU6(), nn.Conv2d(4, 2, 1)))
    assert equalize(fxqat.prepare_by_platform(model)) == []
    gm = fxqat.prepare_by_platform(model)
    assert [pair[:2] for pair in equalize(gm, replace_relu6=True)] == [("0", "3")]
    assert type(gm.get_submodule("0").activation) is nn.ReLU
    assert type(model[2]) is nn.ReLU6


@pytest.mark.parametrize(("activation", "passes"), [(nn.ReLU, 0), (nn.ReLU6, 2)])
def test_the_model_runs_only_where_there_is_a_relu6(activation, passes):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), activation(), nn.Conv2d(4, 2, 1)).eval()
    gm = fxqat.prepare_by_platform(model, check="off")
    calls = []
    gm.get_submodule("2").register_forward_hook(lambda *_: calls.append(1))
    assert len(equalize(gm, [torch.randn(1, 3, 4, 4)] * 2)) == 1
    assert len(calls) == passes


def test_relu6_is_kept_and_clips_no_more_values():
    torch.manual_seed(0)
    model = uneven(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU6(), nn.Conv2d(4, 2, 1)))
    x = torch.randn(4, 3, 8, 8)
    model[1].weight.data.copy_(torch.tensor([0.01, 1.0, 0.5, 30.0]))  # the last is clipped often
    model[3].weight.data.copy_(torch.tensor([[5.0, 1.0, 0.1, 1.0], [5.0, 1.0, 0.1, 2.0]]).reshape(2, 4, 1, 1))
    before = model[:3](x).amax((0, 2, 3))
    gm = fxqat.prepare_by_platform(model.eval())
    expected = model(x)
    weight = gm.get_submodule("0").folded()[0].detach()
    assert [pair[:2] for pair in equalize(gm, [x[:2], (x[2:],)])] == [("0", "3")]
    torch.testing.assert_close(outputs(gm, x), expected, rtol=1e-4, atol=1e-4)
    factors = (weight / gm.get_submodule("0").folded()[0].detach()).amax((1, 2, 3))
    assert float(factors[3]) == pytest.approx(1)
    assert bool((factors[:3] - 1).abs().min() > 0.01)
    assert bool((before[:3] / factors[:3] <= 6 + 1e-5).all())
    assert type(gm.get_submodule("0").activation) is nn.ReLU6


@pytest.mark.parametrize(
    "name", ["residual", "concat", "shared_module", "two_readers", "conv1d", "conv3d", "linear_bn"]
)
def test_the_function_is_unchanged_for_all_pairs(name):
    model = build(name)
    gm = fxqat.prepare_by_platform(model).eval()
    pairs = equalize(gm, absorb_bias=False)
    assert len(set(pairs)) == len(pairs)
    torch.testing.assert_close(outputs(gm, *inputs(name)), model(*inputs(name)), rtol=1e-4, atol=1e-5)


def test_a_calibrated_model_is_an_error():
    with pytest.raises(CalibrationError, match="call it before calibration"):
        equalize(calibrated("residual"))


def test_a_computed_weight_takes_no_factor():
    model, x = uneven(mobile()), torch.randn(2, 3, 8, 8)
    nn.utils.parametrizations.weight_norm(model[3])
    gm = fxqat.prepare_by_platform(model, example_inputs=x).eval()
    pairs = equalize(gm, iterations=5, absorb_bias=False)
    assert [pair[:2] for pair in pairs] == [("6", "9"), ("9", "10"), ("10", "11")]
    torch.testing.assert_close(outputs(gm, x), model(x), rtol=1e-4, atol=1e-4)


def test_layers_of_other_ranks_or_called_twice_are_no_pairs():
    class Flattened(nn.Module):
        """A convolution whose channels are no channels of the linear layer behind it."""

        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 4, 1), nn.Linear(16, 2)

        def forward(self, x):
            return self.fc(self.conv(x).flatten(1))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            return self.second(self.second(self.first(x)))

    for model, x in ((Flattened(), torch.randn(2, 3, 2, 2)), (Twice(), torch.randn(2, 4, 2, 2))):
        gm = fxqat.prepare_by_platform(model.eval(), example_inputs=(x,))
        expected = gm(x)
        assert equalize(gm, [x]) == []
        torch.testing.assert_close(gm(x), expected)
