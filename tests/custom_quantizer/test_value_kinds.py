"""What kind of value a node produces."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxqat import calibrate, convert_export, enable_calibration, enable_quantization, prepare_by_platform
from fxqat.custom_quantizer.value_kinds import NO_ELEMENTS, untrained, value_kinds
from fxqat.utils.node_meta import Kind
from tests.models import TOYS, build, inputs


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.lstm = nn.LSTM(3, 4)
        self.register_buffer("ids", torch.arange(4))
        self.register_buffer("grid", torch.rand(4))

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda m, x: F.relu(x), Kind.FLOAT),
        (lambda m, x: x + 1, Kind.FLOAT),
        (lambda m, x: x.shape, Kind.OTHER),
        (lambda m, x: x.shape[0], Kind.OTHER),
        (lambda m, x: x.size(0) * 2 + 1, Kind.OTHER),
        (lambda m, x: x.size(0) // 2, Kind.OTHER),
        (lambda m, x: x * x.size(0), Kind.FLOAT),
        (lambda m, x: x > 0, Kind.OTHER),
        (lambda m, x: x.argmax(1), Kind.OTHER),
        (lambda m, x: x.chunk(2), Kind.CONTAINER),
        (lambda m, x: x.chunk(2)[0], Kind.FLOAT),
        (lambda m, x: x[:, 1], Kind.FLOAT),
        (lambda m, x: m.lstm(x), Kind.UNKNOWN),
        (lambda m, x: m.lstm(x)[0], Kind.FLOAT),
        (lambda m, x: torch.renorm(x, 2, 0, 1.0), Kind.UNKNOWN),
        (lambda m, x: torch.renorm(x, 2, 0, 1.0) + 1, Kind.FLOAT),
        (lambda m, x: m.grid + 1, Kind.FLOAT),
        (lambda m, x: m.ids + 1, Kind.OTHER),
        (lambda m, x: torch.cat([x, x]), Kind.FLOAT),
    ],
)
def test_kinds(function, kind):
    gm = fx.symbolic_trace(Apply(function))
    kinds = value_kinds(gm)
    nodes = list(gm.graph.nodes)
    assert kinds[nodes[-2]] is kind
    assert kinds[nodes[0]] is Kind.FLOAT
    assert kinds[nodes[-1]] is Kind.OTHER


def test_buffers_are_what_they_hold():
    gm = fx.symbolic_trace(Apply(lambda m, x: x[m.ids] * m.grid))
    kinds = {str(node.target): kind for node, kind in value_kinds(gm).items() if node.op == "get_attr"}
    assert kinds == {"ids": Kind.OTHER, "grid": Kind.FLOAT}


@pytest.mark.parametrize("name", TOYS)
def test_kinds_agree_with_what_is_computed(name):
    """Run the graph node by node and look."""
    gm = fx.symbolic_trace(build(name))
    kinds = value_kinds(gm)

    class Look(fx.Interpreter):
        def run_node(self, node):
            value = super().run_node(node)
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            if kinds[node] is Kind.FLOAT:
                assert is_float, node
            if kinds[node] is Kind.OTHER and node.op != "output":
                assert not is_float, node
            return value

    with torch.no_grad():
        Look(gm).run(*inputs(name))
    assert len(kinds) == len(gm.graph.nodes)


class Stages(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        centered = x - self.mean
        scaled = centered * self.gain
        return F.relu(centered) + self.conv(centered) + scaled


def test_what_depends_on_no_parameter_is_not_trained():
    names = {node.name for node in untrained(fx.symbolic_trace(Stages()))}
    assert names == {"x", "mean", "sub", "relu"}


class Biased(nn.Module):
    """Something is added to scores, as masks are."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, mask):
        return self.after((self.before(x) + mask).softmax(-1))


@pytest.mark.parametrize(
    ("value", "status"), [(-float("inf"), "float"), (-1e9, "float"), (-100.0, "float"), (-20.0, "quantized")]
)
def test_an_input_with_infinities_is_a_mask(value, status):
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, value)
    report = prepare_by_platform(Biased(), "TSQAT", example_inputs=(torch.randn(4, 4), mask)).quant_report
    assert {row.node: row.status for row in report}["mask"] == status
    assert {row.op: row.status for row in report}["softmax"] == "quantized"


def test_an_input_with_many_values_is_data():
    given = -3e4 * torch.rand(4, 4)
    report = prepare_by_platform(Biased(), "TSQAT", example_inputs=(torch.randn(4, 4), given)).quant_report
    assert {row.node: row.status for row in report}["mask"] == "quantized"


class PaddedPool(nn.Module):
    """Padding that no maximum is in."""

    def __init__(self, pool):
        super().__init__()
        self.before, self.pool, self.after = nn.Conv1d(2, 3, 1), pool, nn.Conv1d(3, 2, 1)

    def forward(self, x):
        return self.after(self.pool(F.pad(self.before(x), (1, 1), value=-float("inf"))))


@pytest.mark.parametrize("pool", [nn.MaxPool1d(3), nn.AdaptiveMaxPool1d(2)])
def test_a_maximum_over_padding_with_infinities_is_quantized(pool):
    report = prepare_by_platform(PaddedPool(pool), "TSQAT", example_inputs=(torch.randn(2, 2, 10),)).quant_report
    found = {row.node: row.status for row in report}
    assert (found["pad"], found["pool"]) == ("float", "quantized")


class Logarithms(nn.Module):
    """Infinities that are computed, and chosen away, as in the position buckets of T5."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        places = torch.arange(x.size(-1)).float()
        small = torch.where(places < 1, places, places.log() * 2)
        return self.after(self.before(x) + small)


def test_computed_infinities_are_not_quantized():
    model, x = Logarithms(), torch.randn(3, 4)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    found = {row.op: row.status for row in gm.quant_report}
    assert (found["log"], found["mul"]) == ("float", "float")
    assert found["linear"] in ("quantized", "shares")
    enable_calibration(gm)
    gm(x)
    enable_quantization(gm)  # which names whatever met an infinity


class Steps(nn.Module):
    """Reads a text step by step, of which nothing is there before the first one."""

    def __init__(self):
        super().__init__()
        self.embed, self.fc = nn.Embedding(5, 4), nn.Linear(4, 4)

    def forward(self, tokens, x):
        y = self.fc(x)
        for step in range(3):
            context = torch.cat([y[:, :1], self.fc(2.0 * self.embed(tokens[:, :step]))], 1)
            y = y + context.mean(1, keepdim=True)
        return y


class NoChannels(nn.Module):
    """A branch of which pruning has left nothing."""

    def __init__(self):
        super().__init__()
        self.body, self.into, self.out = nn.Linear(4, 4), nn.Linear(4, 0), nn.Linear(0, 4)

    def forward(self, x):
        return self.body(x) + self.out(self.into(x))


@pytest.mark.parametrize(
    ("model", "inputs", "without"),
    [
        (Steps, (torch.tensor([[1, 2, 3], [4, 0, 1]]), torch.randn(2, 3, 4)), {"embed", "mul", "fc_1"}),
        (NoChannels, (torch.randn(2, 4),), {"into", "out"}),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_what_has_no_elements_stays_float(model, inputs, without, tmp_path):
    gm = prepare_by_platform(model().eval(), example_inputs=inputs)
    assert without <= {row.node for row in gm.quant_report if row.reason == NO_ELEMENTS}
    calibrate(gm, [inputs], progress=False)
    enable_quantization(gm)
    assert convert_export(gm, inputs, tmp_path / "model.onnx").certificate.passed
