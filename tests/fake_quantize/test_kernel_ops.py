"""Compiled training calls the kernels as operators: the bits and gradients of eager training, at every size."""

import copy

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fxqat
from fxqat.fake_quantize import kernel_ops, kernels
from fxqat.fake_quantize.straight_through import SMALL_FOR_CODES, fake_quantize_ste
from fxqat.nn.bias import BIAS_LIMIT, INT32_LIMIT

pytestmark = pytest.mark.skipif(kernels.LIBRARY is None, reason="the kernels are not built")

LARGE = (4, 8, 16, 17)  # more than SMALL_FOR_CODES elements
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "every second": lambda x: torch.cat([x, x], 1)[:, ::2],
}
RANGES = {"int8": (-127, 127, None), "uint8": (0, 255, 3.0), "int4": (-8, 7, -1.0)}


def value(layout="contiguous", shape=LARGE):
    return LAYOUTS[layout](torch.randn(shape, generator=torch.Generator().manual_seed(0))).detach().requires_grad_()


def rounded(numbers):
    low, high, zero_point = numbers
    scale = torch.tensor(0.02 if high > 7 else 0.3, requires_grad=True)
    offset = None if zero_point is None else torch.tensor(zero_point, requires_grad=True)

    def function(x):
        return fake_quantize_ste(x, scale, offset, None, None, None, low, high, None, 0.01, 16, False, 1)

    return function, [parameter for parameter in (scale, offset) if parameter is not None]


def operators_of(function, x):
    """How often a compiled function and its gradient call each operator."""
    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as record:
        compiled(x).sum().backward()
    return {event.key: event.count for event in record.key_averages()}


def results(function, x, parameters):
    y = function(x)
    weights = torch.linspace(-1.0, 2.0, y.numel()).view_as(y)
    return y, *torch.autograd.grad((weights * y).sum(), [x, *parameters])


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("numbers", list(RANGES))
def test_a_value_and_its_gradients_are_those_without_a_compiler(numbers, layout):
    torch.compiler.reset()
    function, parameters = rounded(RANGES[numbers])
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    x = value(layout)
    assert x.numel() > SMALL_FOR_CODES
    found, expected = results(compiled, x, parameters), results(function, x, parameters)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(gradient.abs().sum() > 0 for gradient in expected[1:])
    assert found[0].stride() == expected[0].stride()


def weight_rounding(transposed):
    """A weight with scales per channel: with a factor, with the scale in use given, and with zero points."""
    generator = torch.Generator().manual_seed(0)
    scale = (torch.rand(24, generator=generator) * 0.1 + 0.01).requires_grad_()
    factor, unit = torch.rand(2, 24, generator=generator) + 0.5
    zero_point = torch.randint(-3, 3, (24,), generator=generator).float().requires_grad_()
    axis = 1 if transposed else 0

    def function(x):
        folded = fake_quantize_ste(x, scale, None, factor, None, None, -8, 7, axis, 0.1, 16, True, 1)
        raised = fake_quantize_ste(x, scale, None, None, scale.detach() * 2, unit, -127, 127, axis, 0.1, 16, True, 1)
        moved = fake_quantize_ste(x, scale, zero_point, None, None, unit, -8, 7, axis, 0.1, 16, True, 1)
        return folded + raised + moved

    shape = (7, 24, 3, 3) if transposed else (24, 7, 3, 3)
    return function, torch.randn(shape, generator=generator).requires_grad_(), [scale, zero_point]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_weight_and_its_gradients_are_those_without_a_compiler(backend, transposed):
    torch.compiler.reset()
    function, x, parameters = weight_rounding(transposed)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    found, expected = results(compiled, x, parameters), results(function, x, parameters)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert all(gradient.abs().sum() > 0 for gradient in expected[1:])


def test_the_compiler_sees_an_operator_for_each_pass():
    function, _ = rounded(RANGES["uint8"])
    found = operators_of(function, value())
    assert found["fxqat::round"] == found["fxqat::round_backward"] == 1
    assert "aten::round" not in found


def test_without_the_kernels_the_compiler_sees_torch_operators(monkeypatch):
    monkeypatch.setattr(kernels, "LIBRARY", None)
    function, _ = rounded(RANGES["uint8"])
    found = operators_of(function, value())
    assert "aten::round" in found
    assert not any(name.startswith("fxqat::round") for name in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_computed_by_torch(dtype):
    function, _ = rounded(RANGES["int8"])
    x = value().detach().to(dtype).requires_grad_()
    assert not any(name.startswith("fxqat::round") for name in operators_of(function, x))
    assert torch.compile(function, backend="aot_eager", fullgraph=True)(x).dtype == dtype


def test_other_batches_and_an_empty_one():
    torch.compiler.reset()
    function, parameters = rounded(RANGES["uint8"])
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch in (4, 6, 9, 0):
        x = value(shape=(batch, *LARGE[1:]))
        found, expected = results(compiled, x, parameters), results(function, x, parameters)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def test_a_bias_is_rounded_as_without_a_compiler():
    torch.manual_seed(0)
    gm = fxqat.prepare_by_platform(nn.Sequential(nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 3)), "TSQAT")
    x = torch.randn(5, 9)
    fxqat.calibrate(gm, [x], progress=False)
    fxqat.enable_quantization(gm)
    assert operators_of(gm, x)["fxqat::round_bias"] == 2
    compiled = torch.compile(gm, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), gm(x))
    gradients = []
    for model in (compiled, gm):
        gm.zero_grad()
        model(x).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in gm.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_a_batch_norm_divides_the_grid_as_without_a_compiler():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4, affine=False)
    gm = fxqat.prepare_by_platform(nn.Sequential(*layers), "TSQAT")
    x = torch.randn(5, 3, 9, 9)
    fxqat.calibrate(gm, [x], progress=False)
    fxqat.enable_quantization(gm)
    gm.train()
    assert operators_of(gm, x)["fxqat::bn_factor"] == 2
    state = copy.deepcopy(gm.state_dict())
    found = []
    for model in (torch.compile(gm, backend="aot_eager", fullgraph=True), gm):
        gm.load_state_dict(state)
        gm.zero_grad()
        output = model(x)
        output.square().sum().backward()
        statistics = [buffer.clone() for name, buffer in gm.named_buffers() if "running" in name]
        found.append([output.detach(), *statistics, *(parameter.grad.clone() for parameter in gm.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_an_exported_program_has_torch_operators():
    function, _ = rounded(RANGES["int8"])
    x = value()

    class Rounding(nn.Module):
        def forward(self, x):
            return function(x)

    program = torch.export.export(Rounding(), (x.detach(),))
    assert not any("fxqat.round" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(x.detach()), function(x))


def test_the_operators_keep_their_promises():
    x, scale, zero_point = value().detach(), torch.tensor(0.02), torch.tensor(3.0)
    wide = torch.full((8,), 0.03)

    def check(operator, *arguments):
        tests = ("test_schema", "test_faketensor")
        found = torch.library.opcheck(operator.default, arguments, test_utils=tests)
        assert list(found.values()) == ["SUCCESS"] * len(tests)
        return operator(*arguments)

    for given, axis in (((scale, zero_point, None, None, scale), None), ((wide, None, wide, wide, None), 1)):
        for with_codes in (False, True):
            _, table, codes = check(kernel_ops.round_tensor, x, *given, 0, 255, axis, 1, 16, with_codes)
            for needed in ((True, True), (True, False), (False, True)):
                numbers = (axis, kernel_ops.per_channel_bits(given), 0, 255, 0.5, *needed)
                check(kernel_ops.round_backward, codes if with_codes else x, torch.ones_like(x), table, *numbers)
    for scales in (torch.tensor(0.01), wide):
        check(kernel_ops.round_bias, torch.randn(8), scale, scales, None, scales, 16, 16, BIAS_LIMIT, INT32_LIMIT)
    for gamma in (torch.randn(8), None):
        check(kernel_ops.bn_factor, torch.rand(8), gamma, 1e-5)
