"""Functions that a model holds and that hold the model: a copy, and a prepared model, have their own."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxqat import calibrate, convert_export, disable_all, enable_quantization, prepare_by_platform
from fxqat.utils.closures import copy_with_closures
from tests.export_models import run_file


class Net(nn.Module):
    """Its last step is a function made in ``__init__``."""

    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.gain = nn.Parameter(torch.rand(6))
        self.register_buffer("offset", torch.randn(6))
        self.step = make(self)

    def forward(self, x):
        return self.step(self.embed(x))


def defaults(self):
    return lambda y, *, owner=self: y * owner.gain


def nested(self):
    def scaled(y):
        return y * self.gain

    def step(y):
        return scaled(y) + 1

    return step


def recursive(self):
    def step(y, depth=2):
        return step(y * self.gain, depth - 1) if depth else y

    return step


def wrapped(self):
    @functools.wraps(self.last.forward)
    def step(y, inner=self.last.forward):
        return inner(y)

    return step


def bound(self):
    def step(factor, y, *, shift):
        return y * self.gain * factor + shift

    return functools.partial(step, 2.0, shift=self.offset)


def bound_to_itself(self):
    def step(y, again=True):
        return repeat(y * self.gain) if again else y

    repeat = functools.partial(step, again=False)
    return step


MAKERS = {
    "partial": bound,
    "a partial of itself": bound_to_itself,
    "a tied weight": lambda self: lambda y: y @ self.embed.weight.t(),
    "a parameter": lambda self: lambda y: y * self.gain,
    "a buffer": lambda self: lambda y: y + self.offset,
    "a module": lambda self: lambda y: self.last(y),
    "a branch on the mode": lambda self: lambda y: y * self.gain if self.training else y,
    "a default": defaults,
    "a function in it": nested,
    "itself": recursive,
    "a bound method": wrapped,
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_prepared_model_has_the_functions_and_tensors_of_its_own(name, tmp_path):
    model, x = Net(MAKERS[name]).eval(), torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    gm = prepare_by_platform(model, "TSQAT", example_inputs=x)
    assert gm.quant_report.leaves == ()
    expected = model(x), model.train()(x)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7.0)  # the prepared model does not follow
    torch.testing.assert_close((gm.eval()(x), gm.train()(x)), expected)
    calibrate(gm.eval(), [x], progress=False)
    enable_quantization(gm)
    convert_export(gm, x, tmp_path / "model.onnx", dynamic_batch=True)
    for batch in (x, x[:3].flip(0)):
        (found,) = run_file(tmp_path / "model.onnx", (batch,))
        torch.testing.assert_close(torch.from_numpy(found), gm(batch).detach(), atol=0.05, rtol=0)


def test_what_a_function_reads_is_in_the_state_dict_and_trained():
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    gm = prepare_by_platform(Net(MAKERS["a buffer"]), "TSQAT", example_inputs=x)
    before = gm.eval()(x)
    gm.load_state_dict({**gm.state_dict(), "offset": gm.state_dict()["offset"] + 1})
    torch.testing.assert_close(gm(x), before + 1)
    gm = prepare_by_platform(Net(MAKERS["a tied weight"]), "TSQAT", example_inputs=x)
    disable_all(gm)
    model = Net(MAKERS["a tied weight"])
    for net in (gm, model):
        net.train()(x).square().sum().backward()
    torch.testing.assert_close(gm.get_parameter("embed.weight").grad, model.embed.weight.grad)


def test_dropout_in_a_function_follows_the_mode():
    x = torch.ones(64, 6)
    gm = prepare_by_platform(Net(lambda self: lambda y: F.dropout(y, 0.5, self.training)), example_inputs=x)
    assert 0.3 < (gm.train()(x) == 0).float().mean() < 0.7
    assert not (gm.eval()(x) == 0).any()


def test_without_example_inputs():
    model, x = Net(MAKERS["a tied weight"]), torch.randn(4, 6)
    torch.testing.assert_close(prepare_by_platform(model, "TSQAT")(x), model(x))


def test_functions_share_what_they_shared_and_others_stay():
    def plain(y):
        return y

    def make(self):
        count, unset = 0, None

        def step(y):
            nonlocal count, unset
            count += 1
            return y * self.gain

        def counted():
            return self, count

        del unset  # an empty cell
        self.counted, self.plain, self.listed, self.named = counted, plain, [step, plain], {"step": step}
        step.mark = "kept"
        self.last.register_forward_hook(lambda module, args, output: output * 0 + self.gain)
        return step

    model = Net(make)
    copied = copy_with_closures(model)
    assert copied.counted() == (copied, 0)
    copied(torch.ones(2, 6))
    assert copied.counted() == (copied, 1)
    assert model.counted() == (model, 0)
    assert copied.plain is copied.listed[1] is plain
    assert copied.step is copied.listed[0] is copied.named["step"] is not model.step
    assert (copied.step.mark, copied.step.__qualname__) == ("kept", model.step.__qualname__)
    with torch.no_grad():
        model.gain.fill_(9.0)
    torch.testing.assert_close(copied.last(torch.ones(2, 6))[0], copied.gain)
