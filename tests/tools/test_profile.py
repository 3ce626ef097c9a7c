"""Profiles: measurements, order and files."""

import ast
import csv
import math
import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import fxqat
from fxqat import enable_calibration, enable_quantization, prepare_by_platform
from fxqat.errors import CalibrationError, ConfigError
from fxqat.fake_quantize.state import disable_all, named_fake_quants
from fxqat.tools import Profile, profile
from fxqat.tools.profiling.charts import Axis, curves, histogram, ranges
from fxqat.tools.profiling.profiled_tensor import Histogram, ProfiledTensor
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


def prepared(model, backend="TSQAT", images=4, config=None):
    torch.manual_seed(1)
    batches = [torch.randn(images, 3, 8, 8) for _ in range(2)]
    gm = prepare_by_platform(model, backend, config, example_inputs=(batches[0],), check="off").eval()
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


def test_a_vector_is_one_channel(tmp_path):
    class Score(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x):
            return self.layer(x).squeeze(-1).sigmoid()

    x = torch.randn(6, 4)
    gm = prepare_by_platform(Score(), "TSQAT", example_inputs=(x,), check="off").eval()
    enable_calibration(gm)
    gm(x)
    found = {tensor.name: tensor for tensor in profile(gm, [x])}
    assert [found[name].channels.count for name in ("x", "layer.weight", "sigmoid")] == [4, 1, 1]
    profile(gm, [x]).write_html(tmp_path / "page.html")
    assert "6 in 1 batch" in (tmp_path / "page.html").read_text()


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
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)
        self.places.add(attrs.get("id"))
        if tag == "a":
            self.links.append(attrs["href"])
        if tag in ("link", "img", "iframe") or "src" in attrs:
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
    assert found.verdict in page.text
    assert f"of its {found.tensors[0].channels.count} channels" in page.text
    assert all(text in page.text for text in ("Chain", "8 in 2 batches", f"fxqat {fxqat.__version__}"))
    dead = {tensor.name: tensor.channels.dead for tensor in found if tensor.channels.dead}
    assert dead == {"third.weight": (2,)}  # its output is the bias, which is not 0
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


def measured(output, channels=None, name="conv", kind="weight", order=0, per_channel=False):
    """A tensor with this ratio at the outputs."""
    exact = Difference(1.0, 120.0, 0.0)
    channels = channels or Channels(2, (), (), (1.0, 1.0))
    return ProfiledTensor(
        name, kind, order, "int8", exact, Difference(1.0, output, 0.1), exact, channels, per_channel=per_channel
    )


@pytest.mark.parametrize(
    ("output", "lost", "verdict", "why"),
    [
        (41.9, 0, "healthy", ""),
        (30.0, 0, "healthy", ""),
        (29.9, 0, "check", "outputs by 3.2% of their size"),
        (19.9, 0, "damaged", "outputs by 10.1% of their size"),
        (41.9, 2, "check", "erases 2 of its 20 channels"),
        (41.9, 11, "damaged", "erases 11 of its 20 channels"),
    ],
)
def test_the_verdict_on_a_tensor_follows_the_thresholds(output, lost, verdict, why):
    tensor = measured(output, Channels(20, (), tuple(range(lost)), (*[1.0] * 19, 36.0)))
    assert tensor.verdict == verdict
    assert why in tensor.why
    assert ("channel 19 is 36 times" in tensor.why) == (verdict != "healthy")
    assert "channel 19" not in measured(output, tensor.channels, per_channel=True).why


def test_the_verdict_on_a_model_and_the_shares():
    tensors = (
        measured(20.0, name="a"),
        measured(23.0103, name="b"),
        measured(50.0, name="c"),
        measured(120.0, name="d"),
    )
    found = Profile("TSQAT", tensors, Difference(1.0, 18.0, 0.1), {})
    noise = [0.01, 0.005, 0.00001, 0.0]
    assert [found.share(tensor) for tensor in tensors] == pytest.approx([n / sum(noise) for n in noise], abs=1e-6)
    assert [finding.tensor.name for finding in found.findings] == ["a", "b"]
    expected = [18 - 10 * math.log10(1 - share) for share in (noise[0] / sum(noise), noise[1] / sum(noise))]
    assert [finding.expected for finding in found.findings] == pytest.approx(expected, abs=1e-4)
    assert "Usable, as a rule" in found.verdict
    assert "Of 4 tensors, 0 are damaged, 2 need a look" in found.verdict
    assert "expect 120.0 dB" in Profile("TSQAT", tensors[:2], Difference(1.0, 18.0, 0.1), {}).verdict  # all are float
    healthy = Profile("TSQAT", tensors[2:], Difference(1.0, 49.0, 0.1), {})
    assert healthy.verdict.startswith("Close to the float model")
    assert "All 2 tensors are healthy" in healthy.verdict


@pytest.mark.parametrize("backend", ["TSQAT", "ONNXRuntime", "TensorRT"])
def test_the_overrides_of_the_findings_load_and_improve_the_outputs(backend, tmp_path):
    model = Chain().eval()
    with torch.no_grad():
        model.first.weight[3] *= 300
        model.second.weight[:, 3] /= 300
    gm, batches = prepared(model, backend)
    found = profile(gm, batches, worst=0)
    worst = found.findings[0]
    assert worst.tensor.verdict == "damaged"
    found.write_html(tmp_path / "page.html")
    shown = re.findall(r'"overrides": \[.*?\n\]', Page((tmp_path / "page.html").read_text()).text, re.DOTALL)
    first, *_, every = (ast.literal_eval(f"{{{text}}}") for text in shown)
    assert first["overrides"] == list(worst.tensor.overrides)
    assert every["overrides"] == found.overrides()
    for pasted in (first, every):
        other, _ = prepared(model, backend, config=pasted)
        better = profile(other, batches, worst=0)
        assert better.output.sqnr > found.output.sqnr + 1
        assert worst.tensor.name not in {tensor.name for tensor in better}


def test_the_chart_of_ranges_shows_every_channel_once():
    chart = str(ranges(measured(50.0, Channels(5, (1,), (3,), (0.5, 0.0, 2.0, 0.1, 4.0)))))
    drawn = dict(re.findall(r'<path class="dots (\w+)" d="([^"]+)"', chart))
    places = {css: re.findall(r"M([\d.]+) ([\d.]+)h0", path) for css, path in drawn.items()}
    assert {css: len(points) for css, points in places.items()} == {"plain": 3, "lost": 1, "dead": 1}
    heights = [float(y) for _, y in places["plain"]]  # from the top
    assert heights[0] - heights[1] == pytest.approx(2 * (heights[1] - heights[2]), abs=0.3)  # 0.5, 2, 4 on a log axis
    assert float(places["dead"][0][1]) > float(places["lost"][0][1])


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis("x", 0.0, 10.0), [0, 2, 4, 6, 8, 10]),
        (Axis("x", -0.07, 0.05), [-0.06, -0.04, -0.02, 0, 0.02, 0.04]),
        (Axis("x", 0.5, 2e6, log=True), [1, 100, 1e4, 1e6]),
        (Axis("x", 2.0, 7.0, log=True), [2, 3, 4, 5, 6, 7]),
    ],
)
def test_axes_have_round_ticks_within_their_range(axis, ticks):
    assert axis.ticks() == pytest.approx(ticks)
    assert all(-1e-9 <= axis.place(tick) <= 1 + 1e-9 for tick in axis.ticks())


def test_the_chart_of_curves_names_every_tensor_and_that_of_values_counts_them():
    tensors = [measured(20.0 + i, name=f"layer<{i}>", kind=("weight", "activation")[i % 2], order=i) for i in range(4)]
    chart = str(curves(tensors))
    names = re.findall("<title>([^<]+): (\\w+) ([\\d.]+) dB</title>", chart)
    assert [(name, ratio) for name, kind, ratio in names if kind == "output"] == [
        (f"layer&lt;{i}&gt;", f"{20.0 + i:.1f}") for i in range(4)
    ]
    assert len(names) == 4 + 4 + 2
    values = str(histogram(Histogram(-1.0, 1.0, (0, 3, 0, 1), (-0.5, 0.5))))
    assert values.count('class="area') == 2
    assert values.count('class="line end"') == 2


class Tagger(nn.Module):
    """A table, an LSTM and a linear layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.lstm, self.head = nn.Embedding(20, 8), nn.LSTM(8, 16), nn.Linear(16, 5)

    def forward(self, tokens):
        return self.head(self.lstm(self.table(tokens))[0])


def test_weights_of_recurrent_layers_are_measured():
    tokens = torch.randint(0, 20, (7, 4), generator=torch.Generator().manual_seed(0))
    model = Tagger().eval()
    gm = prepare_by_platform(model, "Experimental", {"extra_qconfig_dict": {"w_qscheme": {"bit": 4}}},
                             example_inputs=(tokens,))  # fmt: skip
    fxqat.calibrate(gm, [(tokens,)], progress=False, compare=False)
    enable_quantization(gm)
    result = profile(gm, [(tokens,)])
    found = {tensor.name: tensor for tensor in result}
    for name, _, values in gm.lstm.quantized_weights():
        quant = getattr(gm.lstm, f"{name}_fake_quant")
        alone = found[f"lstm.{name}"]
        assert alone.kind == "weight"
        assert alone.own.sqnr == pytest.approx(sqnr(values, quant.quantize(values)), abs=0.01)
        disable_all(gm)
        quant.fake_quant_enabled = True
        with torch.no_grad():
            assert alone.output.sqnr == pytest.approx(sqnr(model(tokens), gm(tokens)), abs=0.01)
        (rule,) = alone.overrides
        left = prepare_by_platform(model, "Experimental", {"overrides": [rule]}, example_inputs=(tokens,))
        assert [row.op for row in left.quant_report if row.weight] == ["embedding", "linear"]
    assert [name for name in found if name.startswith("lstm.weight")]
