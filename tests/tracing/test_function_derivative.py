"""Functions whose backward is the derivative of their forward are traced into; the others keep their backward."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxqat
from fxqat.tracing.function_derivative import apply_forward, has_derivative_as_backward
from tests.builders import Again


class Swish(torch.autograd.Function):
    """Keeps its input only."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return gradient * gate * (1 + x * (1 - gate))


class Scaled(torch.autograd.Function):
    """Its context is set up apart."""

    @staticmethod
    def forward(x, factor, shape):
        return (x * factor).reshape(shape)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, gradient):
        x, factor = ctx.saved_tensors
        gradient = gradient.reshape(x.shape)
        return gradient * factor, (gradient * x).sum((0, 2, 3), keepdim=True), None


class Checkpoint(torch.autograd.Function):
    """Computes a function again in its backward; its parameters are arguments."""

    @staticmethod
    def forward(ctx, function, count, *tensors):
        ctx.function, ctx.inputs, ctx.parameters = function, list(tensors[:count]), list(tensors[count:])
        with torch.no_grad():
            return ctx.function(*ctx.inputs)

    @staticmethod
    def backward(ctx, *gradients):
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.inputs]
        with torch.enable_grad():
            outputs = ctx.function(*[tensor.view_as(tensor) for tensor in inputs])
        return None, None, *torch.autograd.grad(outputs, inputs + ctx.parameters, gradients)


class LowerBound(torch.autograd.Function):
    """A bound that values below it can leave; far above it the gradient is the derivative."""

    @staticmethod
    def forward(ctx, x, bound):
        ctx.save_for_backward(x, bound)
        return torch.max(x, bound)

    @staticmethod
    def backward(ctx, gradient):
        x, bound = ctx.saved_tensors
        return gradient * ((x >= bound) | (gradient < 0)), None


class Clamp(torch.autograd.Function):
    """A straight-through clamp; between the limits the gradient is the derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.clamp(-6, 6)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class FarClamp(torch.autograd.Function):
    """A straight-through clamp with limits that few values reach."""

    @staticmethod
    def forward(ctx, x):
        return x.clamp(-2000, 2000)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class ClippedGradient(torch.autograd.Function):
    """Of small gradients it is the derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-3, 3)


class Writes(torch.autograd.Function):
    """Writes to its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Net(nn.Module):
    """A Function between two convolutions."""

    def __init__(self, call):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.ReLU())
        self.normed = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.counting = Counting()
        self.factor = nn.Parameter(torch.rand(1, 4, 1, 1) + 0.5)
        self.register_buffer("bound", torch.tensor(1e-6))
        self.call = call

    def forward(self, x):
        return self.last(self.call(self, self.first(x)))


class Counting(nn.Module):
    """Counts its calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return 2 * x


FOLLOWED = {
    "swish": lambda net, x: Swish.apply(x),
    "setup_context": lambda net, x: Scaled.apply(x, net.factor, x.shape),
    "checkpoint": lambda net, x: Checkpoint.apply(lambda y: F.relu(net.inner[0](y)), 1, x, *net.inner[0].parameters()),
    "nested": lambda net, x: Checkpoint.apply(Swish.apply, 1, x),
    "adds to gradients": lambda net, x: Again.apply(x, net.inner),
}
OWN_GRADIENT = {
    "bound": lambda net, x: x * LowerBound.apply(net.factor, net.bound),
    "clamp": lambda net, x: Clamp.apply(x),
    "far clamp": lambda net, x: FarClamp.apply(x),
    "clipped": lambda net, x: ClippedGradient.apply(x),
    "writes": lambda net, x: Writes.apply(x + 0),
}


def gradients(model, x):
    """Of a loss with large and small gradients."""
    model.zero_grad()
    y = model(x)
    (y * torch.linspace(-20, 20, y.numel()).reshape(y.shape)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [*FOLLOWED, *OWN_GRADIENT])
def test_gradients_are_those_of_the_model(name):
    model, x = Net((FOLLOWED | OWN_GRADIENT)[name]).train(), torch.randn(2, 3, 8, 8)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert bool(gm.quant_report.leaves) == (name in OWN_GRADIENT)
    assert {line.partition(":")[0] for line in gm.quant_report.checkpointed} == (
        {__file__} if name in FOLLOWED else set()
    )
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert all(p.grad is None for net in (model, gm) for p in net.parameters())
    expected, found = gradients(model, 3 * x), gradients(gm, 3 * x)
    assert expected
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()))


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_followed_is_quantized_and_exported(name, tmp_path):
    model, x = Net(FOLLOWED[name]).eval(), torch.randn(2, 3, 8, 8)
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    convolutions = [row.status for row in gm.quant_report if row.op == "conv2d"]
    assert len(convolutions) == 2 + (name in ("checkpoint", "adds to gradients"))
    assert "float" not in convolutions
    fxqat.calibrate(gm, [x])
    fxqat.enable_quantization(gm)
    assert fxqat.convert_export(gm, (x,), tmp_path / "model.onnx").certificate.passed


def test_asking_changes_neither_the_model_nor_random_numbers():
    net, x = Net(FOLLOWED["adds to gradients"]).eval(), torch.randn(2, 4, 6, 6)
    net.factor.grad = torch.ones_like(net.factor)
    before, random = {key: value.clone() for key, value in net.state_dict().items()}, torch.get_rng_state()
    assert has_derivative_as_backward(net, Again, Again.forward, (x, net.inner), {})
    assert not has_derivative_as_backward(net, Again, Again.forward, (x, net.normed), {})
    assert has_derivative_as_backward(net, Again, Again.forward, (x, net.counting), {})
    assert net.counting.calls == 0
    assert has_derivative_as_backward(net, Scaled, Scaled.forward, (x, net.factor, x.shape), {})
    assert not has_derivative_as_backward(net, LowerBound, LowerBound.forward, (net.factor, net.bound), {})
    assert torch.equal(torch.get_rng_state(), random)
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert net.inner[0].weight.grad is None
    assert not any(module.training for module in net.modules())
    assert torch.equal(net.factor.grad, torch.ones_like(net.factor))


def test_a_forward_as_ordinary_code_has_the_gradient_of_its_operations():
    x = torch.randn(5, requires_grad=True)
    y = apply_forward(Clamp, Clamp.forward, (10 * x,), {})
    y.sum().backward()
    assert torch.equal(x.grad, 10.0 * (10 * x.detach()).abs().le(6))
    with torch.no_grad():
        assert not (2 * x).requires_grad  # no_grad works as before


class AsksAnotherThread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        def without_gradients():
            with torch.no_grad():
                return torch.is_grad_enabled()

        with ThreadPoolExecutor(1) as pool, torch.no_grad():
            return x * 2, torch.tensor([torch.is_grad_enabled(), pool.submit(without_gradients).result()])


def test_no_grad_is_ignored_in_the_thread_that_traces_only():
    with torch.no_grad():
        y, enabled = apply_forward(
            AsksAnotherThread, AsksAnotherThread.forward, (torch.ones(2, requires_grad=True),), {}
        )
        assert not torch.is_grad_enabled()
    assert y.requires_grad
    assert enabled.tolist() == [True, False]
