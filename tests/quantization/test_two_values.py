"""Two values of every node, float and of rounded operands, against the formulas."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxqat import enable_calibration, prepare_by_platform
from fxqat.fake_quantize.state import disable_all
from fxqat.quantization.two_values import MeanError, TwoValues
from fxqat.utils.train_eval_graph import graph_of_mode
from tests.quantization.damaged_models import Root


def calibrated(model, *inputs, backend="TSQAT", config=None):
    gm = prepare_by_platform(model.eval(), backend, config, example_inputs=inputs).eval()
    enable_calibration(gm)
    with torch.no_grad():
        gm(*inputs)
    disable_all(gm)
    return gm


def compared(gm, *inputs):
    run = TwoValues(gm, graph_of_mode(gm.graph, training=False))
    with torch.no_grad():
        output = run.on(inputs)
    return run, output, {(node.node, node.kind): node for node in run.nodes()}


def mean_error(x, y):
    return float((x - y).abs().mean() / x.abs().mean())


class Net(nn.Module):
    """A layer, a cosine of its value, and a sum."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = self.fc(x) * 20
        return self.out(torch.cos(y) + x)


def test_errors_are_those_of_rounded_operands():
    x = torch.randn(16, 8)
    gm = calibrated(Net(), x)
    _, output, found = compared(gm, x)
    torch.testing.assert_close(output, Net().eval()(x))
    quant = {name: gm.get_submodule(f"{name}_act_fake_quant").quantize for name in ("x", "fc", "mul", "cos", "add")}
    with torch.no_grad():
        fc = gm.fc(x)
        mul = fc * 20
        assert found["x", "value"].error == pytest.approx(mean_error(x, quant["x"](x)), rel=1e-5)
        assert found["fc", "operation"].error == pytest.approx(mean_error(fc, gm.fc(quant["x"](x))), rel=1e-5)
        assert found["mul", "operation"].error == pytest.approx(mean_error(mul, quant["fc"](fc) * 20), rel=1e-4)
        assert found["cos", "operation"].error == pytest.approx(
            mean_error(mul.cos(), quant["mul"](mul).cos()), rel=1e-4
        )
        noise = (mul - quant["mul"](mul)).double()
        sqnr = 10 * math.log10(float(mul.double().square().sum() / noise.square().sum()))
        assert found["mul", "value"].sqnr == pytest.approx(sqnr, abs=1e-3)


def test_a_layer_with_a_weight_hands_on_no_error():
    x = torch.randn(16, 8)
    gm = calibrated(Net(), x, config={"overrides": [{"match": {"node": "fc"}, "output": None}]})
    run, _, found = compared(gm, x)
    assert found["fc", "operation"].error > 0
    assert ("mul", "operation") not in found  # no fake-quant between the layer and this product
    assert run._error(next(node for node in run.graph.nodes if node.name == "mul")) == 0


def test_nodes_that_read_float():
    x = torch.randn(16, 8)
    gm = calibrated(Net(), x)
    run = TwoValues(gm, graph_of_mode(gm.graph, training=False), {"cos"})
    with torch.no_grad():
        run.on((x,))
        fc = gm.fc(x)
        rounded = gm.get_submodule("fc_act_fake_quant").quantize(fc) * 20
    found = {(node.node, node.kind): node for node in run.nodes()}
    assert found["cos", "operation"].error == pytest.approx(mean_error((fc * 20).cos(), rounded.cos()), rel=1e-4)


def test_an_operation_that_fails_on_rounded_operands_is_a_problem():
    x = Root.inputs()
    model = Root().eval()
    gm = calibrated(model, x)
    run, output, found = compared(gm, x)
    torch.testing.assert_close(output, model(x))
    assert found["linalg_cholesky", "operation"].error == math.inf
    assert found["linalg_cholesky", "operation"].problem
    assert run.failed == {"linalg_cholesky"}


class Odd(nn.Module):
    """Values of all kinds: NaN, infinity, none at all, integers, booleans, a tuple, None, random numbers, a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, mask=None):
        self.calls.add_(1)
        y = F.dropout(self.fc(x), 0.5, training=True)
        if mask is not None:
            y = y + mask
        nan = torch.where(y > 0, y, float("nan"))
        return {"y": (y.relu(), None), "nan": nan, "inf": y / 0, "empty": y[:0], "n": y.argmax(-1), "b": y > 0}


def test_values_of_all_kinds():
    x = torch.randn(16, 8)
    gm = calibrated(Odd(), x)
    state = torch.get_rng_state()
    run, output, found = compared(gm, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(node.error >= 0 for node in found.values())
    assert run.problems() == {}  # the same random numbers on both sides
    assert output["nan"].isnan().any()


class Centered(nn.Module):
    """The mean of values whose mean is 0."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.fc = nn.InstanceNorm2d(3), nn.Linear(3, 4)

    def forward(self, x):
        return self.fc(self.norm(x).mean((2, 3)))


def test_a_result_that_is_rounding_error_in_float_is_no_problem():
    x = torch.randn(4, 3, 8, 8)
    run, _, found = compared(calibrated(Centered(), x), x)
    assert found["mean", "operation"].error > 1000
    assert run.problems() == {}


def test_mean_error():
    error = MeanError()
    error.add(torch.tensor([1.0, 3.0, math.nan, -math.inf]), torch.tensor([1.5, 3.0, 7.0, -math.inf]))
    error.add(torch.zeros(2), torch.zeros(2))
    assert error.share() == 0.5 / 4
    assert not error.is_above(0.2)
    error.add(torch.ones(1), torch.tensor([math.nan]))
    assert error.share() == math.inf
    counted = MeanError()
    counted.add(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 4, 3]))
    assert counted.share() == 0.5
    assert counted.is_above(0.9)  # integers have a limit of their own
    other = MeanError()
    other.add(torch.ones(2), torch.ones(3))
    assert other.share() == math.inf
    assert MeanError().share() == 0
