"""SmoothQuant: the function is unchanged, the factors are those of the paper, and large channels cost less."""

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import fxqat
from fxqat.errors import CalibrationError, ConfigError
from fxqat.tools import ptq, smooth


class Block(nn.Module):
    """A normalization, read in several ways."""

    def __init__(self, norm, read):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.read = norm, read
        self.first, self.second = nn.Linear(8, 6), nn.Linear(8, 6, bias=False)
        self.weight, self.bias = nn.Parameter(4 * torch.rand(8) + 0.1), nn.Parameter(torch.randn(8))
        for parameter in norm.parameters():
            nn.init.uniform_(parameter, 0.1, 4.0)

    def forward(self, x):
        return self.read(self, x)


def windows(m, x):
    """As Swin does: pad, roll, split into windows, move them to the batch."""
    y = torch.roll(F.pad(m.norm(x), (0, 0, 0, 0, 0, 1)), shifts=(-1,), dims=(1,))
    return m.first(y.view(x.shape[0], -1, 2, x.shape[2], 8).permute(0, 2, 1, 3, 4).reshape(-1, x.shape[2], 8))


def llama(m, x):
    """RMSNorm as Llama writes it out."""
    y = x.to(torch.float32)
    return m.first(m.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype))


def written_out(m, x):
    """LayerNorm, written out."""
    y = x - x.mean(-1, keepdim=True)
    return m.first(y / torch.sqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * m.weight + m.bias)


def transposed(m, x):
    y = m.norm(x)
    return m.first(y.transpose(0, 1)) / y.shape[1]


LAYER_NORM, RMS_NORM = (lambda: nn.LayerNorm(8)), (lambda: nn.RMSNorm(8))
TAKE_PART = {
    "one reader": (LAYER_NORM, lambda m, x: m.first(m.norm(x)), ["first"]),
    "two readers": (LAYER_NORM, lambda m, x: (lambda y: m.first(y) + m.second(y))(m.norm(x)), ["first", "second"]),
    "RMSNorm": (RMS_NORM, lambda m, x: m.first(m.norm(x)), ["first"]),
    "function": (LAYER_NORM, lambda m, x: m.first(F.layer_norm(x, (8,), m.weight, m.bias)), ["first"]),
    "function by keyword": (LAYER_NORM, lambda m, x: m.first(F.rms_norm(x, (8,), weight=m.weight)), ["first"]),
    "windows": (LAYER_NORM, windows, ["first"]),
    "Llama": (LAYER_NORM, llama, ["first"]),
    "written out": (LAYER_NORM, written_out, ["first"]),
    "a product in place": (LAYER_NORM, lambda m, x: m.first(F.layer_norm(x, (8,)).mul_(m.weight)), ["first"]),
    "its size is read": (LAYER_NORM, transposed, ["first"]),
}
STAY = {
    "something else reads it": lambda m, x: (lambda y: m.first(y) + y.sum())(m.norm(x)),
    "an output": lambda m, x: (lambda y: (m.first(y), y))(m.norm(x)),
    "a transposed reader": lambda m, x: m.first(m.norm(x).transpose(2, 3)),
    "a roll of channels": lambda m, x: m.first(m.norm(x).roll(1, -1)),
    "padding of another value": lambda m, x: m.first(F.pad(m.norm(x), (0, 0, 1, 0), value=1.0)),
    "called twice": lambda m, x: m.first(m.norm(m.norm(x))),
    "reader called twice": lambda m, x: m.first(m.norm(x)) + m.first(x),
    "weight used twice": lambda m, x: m.first(F.layer_norm(x, (8,), m.weight)) + m.weight.sum(),
    "a product that something else reads": lambda m, x: (lambda y: m.first(y + m.bias) + y.sum())(x * m.weight),
    "a product in place that something else reads": lambda m, x: (lambda y: m.first(y.mul_(m.weight)) + y.sum())(x * 2),
    "a sum alone": lambda m, x: m.first(x + m.bias),
    "a product with itself": lambda m, x: m.first(m.weight * m.weight + x * 0),
    "a product along another dimension": lambda m, x: m.first(x * m.weight[:, None]),
    "computed weight": lambda m, x: m.first(F.layer_norm(x, (8,), m.weight * 2)),
    "no weight": lambda m, x: m.first(F.layer_norm(x, (8,))),
    "two dimensions": lambda m, x: m.first(F.layer_norm(x, x.shape[-2:], m.second.weight[:1].expand(8, 8))),
}


def prepared(model, x, backend="TSQAT"):
    return fxqat.prepare_by_platform(model, backend, example_inputs=(x,)).eval()


@pytest.mark.parametrize("name", TAKE_PART)
def test_the_function_is_unchanged_and_the_output_more_even(name):
    norm, read, layers = TAKE_PART[name]
    model, x = Block(norm(), read).eval(), torch.randn(2, 3, 8, 8)
    gm = prepared(model, x)
    before = {path: gm.get_submodule(path).weight.clone() for path in layers}
    (found,) = smooth(gm, [(x,)])
    assert list(found.layers) == layers
    assert found.after < found.before
    assert all((gm.get_submodule(path).weight != before[path]).any() for path in layers)
    torch.testing.assert_close(gm(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", STAY)
def test_what_others_read_stays(name):
    model, x = Block(nn.LayerNorm(8), STAY[name]).eval(), torch.randn(2, 3, 8, 8)
    gm = prepared(model, x)
    state = {key: value.clone() for key, value in gm.state_dict().items() if isinstance(value, torch.Tensor)}
    with pytest.raises(ConfigError, match="no LayerNorm or RMSNorm"):
        smooth(gm, [(x,)])
    assert all(torch.equal(value, gm.state_dict()[key]) for key, value in state.items())


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_factor_is_that_of_the_paper(alpha):
    model, x = Block(nn.LayerNorm(8), TAKE_PART["two readers"][1]).eval(), torch.randn(9, 8)
    batches = [(x[:5],), (x[5:],)]
    peak = model.norm(x).abs().amax(0)
    read = torch.maximum(model.first.weight.abs().amax(0), model.second.weight.abs().amax(0))
    gm = prepared(model, x)
    smooth(gm, batches, alpha=alpha)
    factor = peak**alpha / read ** (1 - alpha)
    torch.testing.assert_close(gm.get_submodule("norm").weight, model.norm.weight / factor)
    torch.testing.assert_close(gm.get_submodule("norm").bias, model.norm.bias / factor)
    torch.testing.assert_close(gm.get_submodule("second").weight, model.second.weight * factor)


def test_an_input_of_one_dimension_is_measured():
    model, x = Block(nn.LayerNorm(8), TAKE_PART["one reader"][1]).eval(), torch.randn(8)
    gm = prepared(model, x)
    (found,) = smooth(gm, [(x,)])
    assert found.after < found.before
    torch.testing.assert_close(gm(x), model(x), rtol=1e-4, atol=1e-5)


def test_channels_that_are_zero_keep_their_values():
    model, x = Block(nn.LayerNorm(8), lambda m, x: m.first(m.norm(x))).eval(), torch.randn(4, 8)
    with torch.no_grad():
        model.norm.weight[2], model.norm.bias[2] = 0.0, 0.0
        model.first.weight[:, 5] = 0.0
    gm = prepared(model, x)
    smooth(gm, [(x,)])
    for place in (2, 5):
        assert gm.get_submodule("norm").weight[place] == model.norm.weight[place]
        assert torch.equal(gm.get_submodule("first").weight[:, place], model.first.weight[:, place])
    torch.testing.assert_close(gm(x), model(x), rtol=1e-4, atol=1e-5)


VITS = {
    "timm": lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=7),
    "torchvision": lambda: torchvision.models.VisionTransformer(32, 16, 2, 4, 32, 64, num_classes=7),
}
READERS = {"norm1": "attn.qkv", "norm2": "mlp.fc1", "ln_1": "self_attention", "ln_2": "mlp.0"}


def with_large_channels(model):
    """As in trained transformers, a few channels behind each LayerNorm are large and read with small weights."""
    modules = dict(model.named_modules())
    for path, norm in modules.items():
        parent, _, name = path.rpartition(".")
        if name in READERS and isinstance(norm, nn.LayerNorm):
            reader = modules[f"{parent}.{READERS[name]}"]
            weight = reader.in_proj_weight if isinstance(reader, nn.MultiheadAttention) else reader.weight
            for tensor, factor in ((norm.weight.data, 60), (norm.bias.data, 60), (weight.data.T, 1 / 60)):
                tensor[:2] *= factor
    nn.init.normal_((model.heads.head if hasattr(model, "heads") else model.head).weight)
    return model.eval()


@pytest.mark.parametrize("name", VITS)
def test_large_channels_cost_less_in_transformers(name, tmp_path):
    torch.manual_seed(0)
    model, x = with_large_channels(VITS[name]()), torch.rand(4, 3, 32, 32)
    expected, batches = model(x).detach(), [(x,)]
    found = smooth(prepared(model, x), batches)
    assert len(found) == 4  # the last LayerNorm is not read by a linear layer alone
    assert all(each.before > 3 * each.after for each in found)
    plain, smoothed = (ptq(model, batches, "TSQAT", smooth=flag, compare=False) for flag in (False, True))
    errors = [float((each(x).detach() - expected).norm() / expected.norm()) for each in (plain, smoothed)]
    assert errors[1] < 0.5 * errors[0]
    assert fxqat.convert_export(smoothed, (x,), tmp_path / "smooth.onnx").certificate.passed


def test_attention_of_torch_is_followed_and_a_parametrized_weight_stays():
    torch.manual_seed(0)
    encoder, x = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, batch_first=True).eval(), torch.randn(2, 5, 16)
    nn.init.uniform_(encoder.norm1.weight, 0.1, 5.0)
    gm = prepared(encoder, x)
    assert [found.layers for found in smooth(gm, [(x,)])] == [("self_attn.linear",), ("linear1",)]
    torch.testing.assert_close(gm(x), encoder(x), rtol=1e-4, atol=1e-5)
    normed = nn.Sequential(nn.LayerNorm(16), nn.utils.parametrizations.weight_norm(nn.Linear(16, 8))).eval()
    with pytest.raises(ConfigError, match="no LayerNorm or RMSNorm"):
        smooth(prepared(normed, x), [(x,)])


def test_windows_of_swin_are_followed():
    torch.manual_seed(0)
    model = torchvision.models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=7).eval()
    x = torch.rand(4, 3, 32, 32)
    gm = prepared(model, x)
    blocks = [f"features_{stage}_{block}_norm{number}" for stage in (1, 3) for block in (0, 1) for number in (1, 2)]
    assert sorted(found.norm for found in smooth(gm, [(x,)])) == sorted([*blocks, "features_2_norm"])
    torch.testing.assert_close(gm(x), model(x), rtol=1e-3, atol=1e-5)


class InEval(nn.Module):
    """Normalizes in eval mode only."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return x if self.training else self.norm(x)


def test_a_float_layer_takes_the_factor_as_well():
    model, x = Block(nn.LayerNorm(8), TAKE_PART["two readers"][1]).eval(), torch.randn(9, 8)
    config = {"overrides": [{"match": {"node": "second"}, "weight": None, "activation": None}]}
    gm = fxqat.prepare_by_platform(model, "TSQAT", config, example_inputs=(x,)).eval()
    (found,) = smooth(gm, [(x,)])
    assert type(gm.get_submodule("second")) is nn.Linear
    assert list(found.layers) == ["second", "first"]
    factor = (model.norm(x).abs().amax(0) / model.first.weight.abs().amax(0)).sqrt()
    torch.testing.assert_close(gm.get_submodule("second").weight, model.second.weight * factor)
    torch.testing.assert_close(gm(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_layer_that_reads_another_value_in_training_stays():
    model, x = nn.Sequential(InEval(), nn.Linear(8, 6)).eval(), torch.randn(4, 8)
    gm = prepared(model, x)
    with pytest.raises(ConfigError, match="no LayerNorm or RMSNorm"):
        smooth(gm, [(x,)])
    torch.testing.assert_close(gm.train()(x), model.train()(x), rtol=1e-4, atol=1e-5)


def test_a_normalization_of_training_only_stays():
    def read(m, x):
        y = m.first(m.norm(x))
        return y + m.second(F.layer_norm(x, (8,), m.weight, m.bias)) if m.training else y

    model, x = Block(nn.LayerNorm(8), read).eval(), torch.randn(4, 8)
    gm = prepared(model, x)
    (found,) = smooth(gm, [(x,)])
    assert found.layers == ("first",)
    torch.testing.assert_close(gm(x), model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gm.train()(x), model.train()(x), rtol=1e-4, atol=1e-5)


def test_wrong_calls_are_refused():
    model, x = Block(nn.LayerNorm(8), lambda m, x: m.first(m.norm(x))).eval(), torch.randn(4, 8)
    gm = prepared(model, x)
    for alpha in (-0.1, 1.1, True, "half"):
        with pytest.raises(ConfigError, match="alpha from 0 to 1"):
            smooth(gm, [(x,)], alpha=alpha)
    with pytest.raises(ConfigError, match="at least one batch"):
        smooth(gm, [])
    with pytest.raises(CalibrationError, match="not finite"):
        smooth(gm, [(x * float("nan"),)])
    fxqat.calibrate(gm, [(x,)], progress=False)
    with pytest.raises(CalibrationError, match="before calibration"):
        smooth(gm, [(x,)])
