"""Custom autograd.Functions are one call with their own backward; activation checkpointing is reported."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxqat
from fxqat.tracing.autograd_functions import ONE_CALL
from tests.export_models import run_session, session


class Reverse(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


class Sign(torch.autograd.Function):
    """A straight-through sign of each of two tensors."""

    @staticmethod
    def forward(ctx, x, y):
        return x.sign(), y.sign()

    @staticmethod
    def backward(ctx, first, second):
        return first, 2 * second


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = Reverse.apply(self.first(x), 0.5)
        signs = Sign.apply(self.second(y), y)
        return self.last(signs[0] + 0.5 * signs[1]) + y


class Reversing(nn.Module):
    def forward(self, x):
        return Reverse.apply(x, 0.5)


def gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("with_inputs", [True, False])
def test_a_sequence_of_modules_does_not_get_another_one(with_inputs):
    model, x = nn.Sequential(nn.Linear(4, 4), Reversing(), Reversing(), nn.Linear(4, 4)), torch.randn(3, 4)
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,) if with_inputs else None)
    torch.testing.assert_close(gm(x), model(x))
    assert [leaf.path.rpartition(".")[2] for leaf in gm.quant_report.leaves] == ["Reverse"]
    assert len(model) == 4


@pytest.mark.parametrize("with_inputs", [True, False])
def test_a_function_keeps_its_backward(with_inputs):
    model, x = Model(), torch.randn(3, 4)
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(torch.randn(2, 4),) if with_inputs else None)
    expected, found = gradients(model, x), gradients(gm, x)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)
    assert float(expected["second.weight"].abs().max()) > 0
    leaves = {leaf.path: leaf for leaf in gm.quant_report.leaves}
    assert list(leaves) == [f"{__name__}.Reverse", f"{__name__}.Sign"]
    assert all(leaf.reason == ONE_CALL and leaf.source.startswith(f"{__file__}:") for leaf in leaves.values())


@pytest.mark.parametrize("with_inputs", [True, False])
def test_a_function_is_copied_compiled_and_exported(with_inputs, tmp_path):
    x = torch.randn(3, 4)
    gm = fxqat.prepare_by_platform(Model(), "TSQAT", example_inputs=(x,) if with_inputs else None)
    fxqat.calibrate(gm, [x])
    fxqat.enable_quantization(gm)
    expected = gm(x)
    for other in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        assert torch.equal(other(x), expected)
    compiled = torch.compile(gm, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected)
    assert fxqat.convert_export(gm, (x,), tmp_path / "model.onnx").certificate.passed
    torch.testing.assert_close(
        torch.from_numpy(run_session(session(tmp_path / "model.onnx"), [x])[0]), expected.detach()
    )


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 4), reentrant

    def forward(self, x):
        return checkpoint(lambda y: self.second(self.first(y).relu()), x + 0, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("with_inputs", [True, False])
def test_activation_checkpointing_is_traced_into_and_reported(reentrant, with_inputs, caplog):
    model, x = Checkpointed(reentrant), torch.randn(3, 4)
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,) if with_inputs else None, check="quick")
    (line,) = gm.quant_report.checkpointed
    assert line.startswith(f"{__file__}:")
    assert f"activations kept in memory, not computed again: {line}" in caplog.text
    assert [row.status for row in gm.quant_report if row.op == "linear"] == ["quantized", "quantized"]
    torch.testing.assert_close(gm(x), model(x))


def test_functions_compute_as_always_outside_of_a_trace():
    before = vars(torch.autograd.Function)["apply"]
    fxqat.prepare_by_platform(Model(), "TSQAT", example_inputs=(torch.randn(2, 4),))
    assert vars(torch.autograd.Function)["apply"] is before
    x = torch.ones(2, requires_grad=True)
    Reverse.apply(x, 3.0).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), -3.0))


class Double(torch.autograd.Function):
    """Twice the input; its context is set up apart."""

    @staticmethod
    def forward(x, factor=2.0):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.factor * gradient, None


double = Double.apply


class Stored(nn.Module):
    """Calls functions whose ``apply`` was looked up before the model was prepared."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reverse = Reverse.apply

    def forward(self, x):
        return self.last(double(self.reverse(self.first(x), 0.5)))


@pytest.mark.parametrize("with_inputs", [True, False])
def test_an_apply_that_was_stored_keeps_its_backward(with_inputs):
    model, x = Stored(), torch.randn(3, 4)
    before = Reverse.forward, Double.forward, Double.setup_context
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,) if with_inputs else None)
    assert (Reverse.forward, Double.forward, Double.setup_context) == before
    assert [leaf.reason for leaf in gm.quant_report.leaves] == [ONE_CALL] * 2
    expected, found = gradients(model, x), gradients(gm, x)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)
