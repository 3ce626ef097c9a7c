"""Profiles: measurements, order and files."""

import csv
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from fxqat import enable_calibration, enable_quantization, prepare_by_platform
from fxqat.errors import CalibrationError, ConfigError
from fxqat.fake_quantize.state import disable_all, named_fake_quants
from fxqat.tools import profile
from fxqat.tools.profiling.page import _ranges
from fxqat.tools.profiling.profiled_tensor import ProfiledTensor
from fxqat.utils.compare import Channels, Difference
from fxqat.utils.contexts import equal_random_numbers
from tests.models import TOYS, calibrated, inputs


class Chain(nn.Module):
    """Three convolutions without an activation between them, and a linear layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.third(self.second(self.first(x))).mean((2, 3)))


def prepared(model, backend="TSQAT", images=4):
    torch.manual_seed(1)
    batches = [torch.randn(images, 3, 8, 8) for _ in range(2)]
    gm = prepare_by_platform(model, backend, example_inputs=(batches[0],)).eval()
    enable_calibration(gm)
    with torch.no_grad():
        for batch in batches:
            gm(batch)
    enable_quantization(gm)
    return gm, batches


def sqnr(x, y):
    x, y = x.double(), y.double()
    return float(10 * torch.log10(x.square().sum() / (x - y).square().sum()))


def test_differences_equal_those_of_models_quantized_by_hand():
    gm, batches = prepared(Chain().eval())
    found = {tensor.name: tensor for tensor in profile(gm, batches)}
    assert list(sorted(found.values(), key=lambda t: t.order))[1].name == "first.weight"
    with torch.no_grad():
        layer, quant = gm.second, gm.get_submodule("second_act_fake_quant")
        weight = layer.weight
        rounded = layer.weight_fake_quant.quantize(weight)
        assert found["second.weight"].own.sqnr == pytest.approx(sqnr(weight, rounded), abs=1e-6)
        assert found["second.weight"].cumulative == found["second.weight"].own

        model = Chain().eval()
        float_value = torch.cat([model.second(model.first(batch)) for batch in batches])
        assert found["second"].own.sqnr == pytest.approx(sqnr(float_value, quant.quantize(float_value)), abs=1e-4)
        output = torch.cat([model(batch) for batch in batches])
        alone = model.head(model.third(quant.quantize(float_value)).mean((2, 3)))
        assert found["second"].output.sqnr == pytest.approx(sqnr(output, alone), abs=1e-3)
        model.second.weight.copy_(rounded)
        alone = torch.cat([model(batch) for batch in batches])
        assert found["second.weight"].output.sqnr == pytest.approx(sqnr(output, alone), abs=1e-3)

        values = []
        handle = quant.register_forward_hook(lambda module, args, result: values.append(result))
        outputs = torch.cat([gm(batch) for batch in batches])
        handle.remove()
        assert found["second"].cumulative.sqnr == pytest.approx(sqnr(float_value, torch.cat(values)), abs=1e-4)
        assert profile(gm, batches).output.sqnr == pytest.approx(sqnr(output, outputs), abs=1e-3)


class Branches(nn.Module):
    """A convolution that is called twice, beside another one, and noise that is drawn in eval mode, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.beside = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)

    def forward(self, x):
        y = self.twice(x).relu()
        return self.twice(y) + self.beside(x), self.beside(y + 0.1 * torch.randn_like(y))


def test_each_tensor_alone_equals_a_whole_run_in_which_only_it_is_quantized():
    gm, batches = prepared(Branches().eval(), images=2)
    found = {tensor.name: tensor for tensor in profile(gm, batches)}
    quants = dict(named_fake_quants(gm))
    with torch.no_grad(), equal_random_numbers(gm):
        for name in ("twice.weight", "beside.weight", "x"):
            pairs = []
            for batch in batches:
                disable_all(gm)
                expected = gm(batch)
                quant = next(quant for path, quant in quants.items() if path.startswith((f"{name}_", f"{name}.")))
                quant.fake_quant_enabled = True
                pairs.append([torch.cat([y.flatten() for y in outputs]) for outputs in (expected, gm(batch))])
            assert found[name].output.sqnr == pytest.approx(sqnr(*map(torch.cat, zip(*pairs, strict=True))), abs=1e-4)
    disable_all(gm)
    before = torch.get_rng_state()
    profile(gm, batches[:1])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("layer", ["first", "second", "third"])
@pytest.mark.parametrize("backend", ["TSQAT", "Vitis"])
def test_a_damaged_layer_comes_first(layer, backend):
    model = Chain().eval()
    with torch.no_grad():
        model.get_submodule(layer).weight[3] *= 1000
    gm, batches = prepared(model, backend)
    worst = profile(gm, batches).tensors[0]
    assert worst.name.removesuffix(".weight") == layer
    assert worst.channels.widest == 3
    assert worst.channels.lost_share > 0.5
    assert worst.channels.outlier > 100


def test_a_healthy_model_is_sorted_by_the_effect_on_the_output():
    gm, batches = prepared(Chain().eval())
    effects = [tensor.output.sqnr for tensor in profile(gm, batches)]
    assert effects == sorted(effects)
    assert len(set(effects)) > 5


@pytest.mark.parametrize("name", TOYS)
def test_every_quantized_tensor_is_measured_and_the_model_is_unchanged(name):
    gm = calibrated(name, "ONNXRuntime").train()
    before = {key: value.clone() for key, value in gm.state_dict().items() if isinstance(value, torch.Tensor)}
    found = profile(gm, [inputs(name)])
    assert gm.training
    assert all(quant.fake_quant_enabled and not quant.observer_enabled for _, quant in named_fake_quants(gm))
    after = gm.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    names = [tensor.name for tensor in found]
    assert len(set(names)) == len(names) >= len(list(named_fake_quants(gm)))
    assert all(-120 <= d.sqnr <= 120 and -1 <= d.cosine <= 1 for t in found for d in (t.own, t.output, t.cumulative))


def test_switches_that_were_off_stay_off():
    gm, batches = prepared(Chain().eval())
    disable_all(gm)
    quant = gm.get_submodule("first_act_fake_quant")
    quant.fake_quant_enabled = True
    profile(gm, batches[:1])
    assert [name for name, found in named_fake_quants(gm) if found.fake_quant_enabled] == ["first_act_fake_quant"]
    assert not quant._forward_hooks


class Page(HTMLParser):
    """The tags and the text of a page; every open tag must be closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.places, self.loaded, self.text = [], [], set(), [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.places.add(attrs.get("id"))
        if tag == "a":
            self.links.append(attrs["href"])
        if tag in ("script", "link", "img", "iframe"):
            self.loaded.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_and_the_csv_file(tmp_path):
    model = Chain().eval()
    with torch.no_grad():
        model.second.weight[3] *= 1000
        model.third.weight[2] = 0
    gm, batches = prepared(model)
    found = profile(gm, batches, worst=3)
    found.write_html(tmp_path / "page.html", title="A <chain>")
    page = Page((tmp_path / "page.html").read_text())
    assert page.open == []
    assert page.loaded == []  # self-contained
    assert {link.removeprefix("#") for link in page.links} <= page.places
    assert "A <chain>" in page.text
    assert "second (8 of 8)" in page.text or "second (7 of 8)" in page.text
    assert "third.weight (1 of 8)" in page.text  # dead
    assert len(found.histograms) == 3
    count = sum(found.histograms["second"].counts)
    assert count == 2 * 4 * 8 * 8 * 8

    found.write_csv(tmp_path / "table.csv")
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [row["name"] for row in rows] == [tensor.name for tensor in found]
    assert [float(row["output_sqnr"]) for row in rows] == [tensor.output.sqnr for tensor in found]
    assert rows[0]["widest_channel"] == "3"
    assert all(tensor.name in str(found) for tensor in found)
    assert found.table(rows=1).count("\n") == 4


def test_errors(tmp_path):
    gm = prepare_by_platform(Chain(), "TSQAT")
    with pytest.raises(ConfigError, match="at least one batch"):
        profile(gm, [])
    with pytest.raises(CalibrationError, match="saw no data"):
        profile(gm, [torch.randn(1, 3, 8, 8)])
    gm, batches = prepared(Chain().eval())
    found = profile(gm, batches[:1], worst=1)
    for write in (found.write_csv, found.write_html):
        with pytest.raises(ConfigError, match="cannot write"):
            write(tmp_path / "nowhere" / "file")


def test_the_drawing_of_ranges_shows_every_channel_once():
    nothing = Difference(1.0, 120.0, 0.0)
    channels = Channels(5, (1,), (3,), (0.5, 0.0, 2.0, 0.1, 4.0))
    tensor = ProfiledTensor(
        "conv", "weight", 0, "int8", own=nothing, output=nothing, cumulative=nothing, channels=channels
    )
    (axes,) = _ranges(tensor).axes
    drawn = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}
    assert {label: [int(channel) for channel, _ in points] for label, points in drawn.items()} == {
        "kept: 3": [0, 2, 4],
        "lost: 1": [3],
        "dead: 1": [1],
    }
    assert drawn["kept: 3"][1][1] == 2.0
    assert drawn["dead: 1"][0][1] > 0
