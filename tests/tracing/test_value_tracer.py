"""Tracing with values: Python code that looks at sizes, types and structure works, and the batch stays dynamic."""

import copy
import inspect
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxqat import convert_export, prepare_by_platform
from fxqat.errors import ConfigError, TraceError
from fxqat.tracing.trace import trace
from fxqat.tracing.value_tracer import bind_arguments
from fxqat.utils.tensors import flatten_tensors
from tests.export_models import calibrate, run_file
from tests.value_models import CASES, Base, NameBySize, build, inputs_of, plain


def image(batch=2, size=8, seed=0):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def without_none(inputs):
    return tuple(value for value in inputs if value is not None)


@pytest.mark.parametrize("name", CASES)
def test_the_graph_computes_what_the_model_computes_at_any_batch(name):
    model, inputs = build(name), inputs_of(name)
    traced = trace(model, example_inputs=inputs, untraceable="error")
    assert [number.value for number in traced.forced] == list(CASES[name].forced)
    assert traced.leaves == ()
    for batch in (2, 5, 1):
        inputs = inputs_of(name, batch)
        with torch.no_grad():
            torch.testing.assert_close(
                plain(traced.gm(*without_none(inputs))), plain(model(*inputs)), rtol=0, atol=0, check_stride=False
            )


def assert_exported_for_any_batch(model, inputs, other, path):
    """Export a model with ``inputs``, and compare the file with the prepared model on ``other``."""
    gm = prepare_by_platform(model, "ONNXRuntime", example_inputs=inputs, untraceable="error")
    calibrate(gm, without_none(inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = convert_export(gm, without_none(inputs), path, dynamic_batch=True)
    assert report.certificate.passed
    other = without_none(other)
    with torch.no_grad():
        expected = [tensor.numpy() for tensor in flatten_tensors(gm(*other))]
    for actual, wanted in zip(run_file(path, flatten_tensors(other)), expected, strict=True):
        assert actual.shape == wanted.shape
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=0.02 * np.abs(wanted).max())


class Together(nn.Module):
    """Several cases in one model, since each export takes a while; an argument holds the inputs of one case."""

    def __init__(self, names):
        super().__init__()
        self.models = nn.ModuleDict({name: build(name) for name in names})

    def forward(self, *inputs):
        return [model(*given) for model, given in zip(self.models.values(), inputs, strict=True)]


SIGNATURES = ("optional_left_out", "optional_none", "keyword_only", "variable_arguments", "dict_of_tensors")
"""Cases about the arguments of the model's own forward, which are exported alone."""
TOGETHER = [name for name in CASES if name not in SIGNATURES]


@pytest.mark.parametrize("name", SIGNATURES)
def test_what_is_exported_takes_any_batch(name, tmp_path):
    assert_exported_for_any_batch(build(name), inputs_of(name), inputs_of(name, 5), tmp_path / "model.onnx")


@pytest.mark.parametrize("first", range(0, len(TOGETHER), 8))
def test_cases_that_are_exported_together_take_any_batch(first, tmp_path):
    names = TOGETHER[first : first + 8]
    small, large = (tuple(inputs_of(name, batch) for name in names) for batch in (2, 5))
    assert_exported_for_any_batch(Together(names).eval(), small, large, tmp_path / "model.onnx")


def test_a_forced_number_is_reported_with_file_and_line():
    gm = prepare_by_platform(build("loop_over_channels"), example_inputs=inputs_of("loop_over_channels"))
    (forced,) = gm.quant_report.forced
    model = CASES["loop_over_channels"].model
    lines, start = inspect.getsourcelines(model)
    number = start + next(i for i, line in enumerate(lines) if "range(" in line)
    assert forced.value == 4
    assert forced.source == f"{inspect.getsourcefile(model)}:{number}"
    assert f"fixed at 4: {forced.expression} ({forced.source})" in str(gm.quant_report)


def test_a_number_that_is_the_same_line_twice_is_reported_once():
    class Twice(Base):
        def forward(self, x):
            y = self.conv(x)
            for _ in range(2):
                y = y * float(x.shape[3])
            return y

    traced = trace(Twice(), example_inputs=(image(),))
    assert [number.value for number in traced.forced] == [8]
    assert torch.equal(traced.gm(image(3)), traced.root(image(3)))


def test_the_graph_has_the_branch_of_the_example():
    model = NameBySize().eval()
    wide = trace(model, example_inputs=(image(size=16),)).gm
    narrow = trace(model, example_inputs=(image(size=8),)).gm
    assert wide(image(size=16)).shape[1] == 3
    assert narrow(image(size=8)).shape[1] == 2


class Counter(Base):
    """Counts its calls, and keeps a moving average of its values."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        y = self.conv(x)
        self.calls += 1
        self.average.mul_(0.9).add_(y.mean((0, 2, 3)).detach(), alpha=0.1)
        return y - self.average[:, None, None] * self.calls


class Reassigned(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.ones(4))

    def forward(self, x):
        y = self.conv(x)
        self.state = self.state * 0.5 + y.mean((0, 2, 3)).detach()
        return y + self.state.view(1, -1, 1, 1)


class CopiedInto(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.ones(4))

    def forward(self, x):
        y = self.conv(x)
        self.state.copy_(y.detach().amax((0, 2, 3)))
        self.state[0] = 3.0
        return y / self.state.view(1, -1, 1, 1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("model_type", [Counter, Reassigned, CopiedInto])
def test_buffers_that_forward_writes_change_at_run_time_as_in_the_model(model_type, training):
    model = model_type().train(training)
    before = copy.deepcopy(model.state_dict())
    gm = prepare_by_platform(model, example_inputs=(image(),), untraceable="error")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for seed in range(3):
        torch.testing.assert_close(gm(image(seed=seed)), model(image(seed=seed)))
    prepared = gm.state_dict()
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(prepared[gm.provenance.tensor_names[name]], buffer)
        assert not torch.equal(buffer, before[name])


def test_attributes_that_forward_assigns_are_as_before_after_tracing():
    model = build("assigned_attribute")
    traced = trace(model, example_inputs=(image(),))
    assert model.last is None
    assert traced.root.last is None
    assert torch.equal(traced.gm(image(4)), model(image(4)))


class DropPath(nn.Module):
    """Drops whole samples, in training only."""

    def forward(self, x):
        if not self.training:
            return x
        keep = (torch.rand(x.shape[0], 1, 1, 1) > 0.5).to(x.dtype)
        return x * keep


class WithDropPath(Base):
    def __init__(self):
        super().__init__()
        self.drop = DropPath()

    def forward(self, x):
        return self.drop(self.conv(x))


def test_drop_path_follows_the_mode():
    gm = prepare_by_platform(WithDropPath(), example_inputs=(image(),))
    x = image(64)
    dropped = (gm.train()(x) == 0).flatten(1).all(1).sum().item()
    assert 10 < dropped < 54
    assert not (gm.eval()(x) == 0).flatten(1).all(1).any()
    assert gm.quant_report.eval_only == ()


def test_a_module_with_parameters_that_branches_on_training_computes_both():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)
            self.auxiliary = nn.Linear(4, 3)

        def forward(self, x):
            return (self.fc(x), self.auxiliary(x)) if self.training else self.fc(x)

    class Net(Base):
        def __init__(self):
            super().__init__()
            self.head = Head()

        def forward(self, x):
            return self.head(F.dropout(self.conv(x).mean((2, 3)), 0.5, self.training))

    model = Net().train()
    gm = prepare_by_platform(model, example_inputs=(image(),))
    assert gm.quant_report.eval_only == ()
    assert gm.quant_report.unread == ()
    assert [tuple(output.shape) for output in gm.train()(image(64))] == [(64, 2), (64, 3)]
    torch.testing.assert_close(gm.eval()(image()), model.eval()(image()))


def test_functional_dropout_follows_the_mode():
    class Dropped(Base):
        def forward(self, x):
            return F.dropout(self.conv(x), 0.5, training=self.training)

    gm = prepare_by_platform(Dropped(), example_inputs=(image(),))
    assert 0.4 < (gm.train()(image(8)) == 0).float().mean() < 0.6
    assert (gm.eval()(image(8)) != 0).all()


def test_random_numbers_are_not_consumed():
    class Noisy(Base):
        def forward(self, x):
            return self.conv(x) + torch.randn(x.shape[0], 1, 1, 1) * 0

    model = Noisy()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    gm = prepare_by_platform(model, example_inputs=(image(),))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(gm(image(4)), model(image(4)))


def test_random_constructors_draw_at_run_time():
    class Noisy(Base):
        def forward(self, x):
            y = self.conv(x)
            return y + torch.rand(y.shape) + torch.randn(y.size(0), 1, 1, 1)

    gm = trace(Noisy(), example_inputs=(image(),)).gm
    x = image()
    assert not torch.equal(gm(x), gm(x))
    torch.manual_seed(0)
    first = gm(x)
    torch.manual_seed(0)
    assert torch.equal(gm(x), first)


def test_the_users_model_and_inputs_stay_as_they_are():
    model = build("in_place")
    x = image()
    kept, state = x.clone(), copy.deepcopy(model.state_dict())
    attributes = dict(vars(model))
    trace(model, example_inputs=(x,))
    assert torch.equal(x, kept)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert vars(model) == attributes


def test_the_result_is_pickled_and_copied():
    gm = prepare_by_platform(build("dict_out"), example_inputs=(image(),))
    for other in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        torch.testing.assert_close(other(image(3)), gm(image(3)), rtol=0, atol=0)
        assert other.quant_report.forced == gm.quant_report.forced


def test_inputs_that_do_not_fit_are_a_configuration_error():
    model = build("optional_given")
    with pytest.raises(ConfigError, match="do not fit the arguments of forward"):
        trace(model, example_inputs=(image(), None, 1.0, 2.0))
    with pytest.raises(ConfigError, match="do not fit the arguments of forward"):
        trace(build("non_empty"), example_inputs=(image(), image()))


def test_an_error_of_the_model_itself_is_reported_with_its_line():
    class Wrong(Base):
        def forward(self, x):
            y = self.conv(x)
            assert y.shape[1] == 7, "seven channels"
            return y

    with pytest.raises(TraceError, match="seven channels") as caught:
        trace(Wrong(), example_inputs=(image(),))
    assert "assert y.shape[1] == 7" in str(caught.value)


def test_arguments_are_bound_by_name_and_the_rest_keeps_its_default():
    given, fixed = bind_arguments(build("optional_given"), (1, None), {})
    assert given == {"x": 1}
    assert fixed == {"mask": None, "scale": 2.0}
    given, fixed = bind_arguments(build("variable_arguments"), (1, 2, 3), {})
    assert given == {"x": 1, "others": (2, 3)}
    assert fixed == {}
    given, fixed = bind_arguments(build("optional_given"), (1, 5.0), {"mask": 4})
    assert given == {"x": 1, "scale": 5.0}
    assert fixed == {}


def test_too_many_arguments_are_a_type_error():
    with pytest.raises(TypeError, match="too many"):
        bind_arguments(build("non_empty"), (1, 2), {})
    with pytest.raises(TypeError, match="x"):
        bind_arguments(build("non_empty"), (), {})


@pytest.mark.parametrize("write", ["neg_", "mul_", "assign", "copy_"])
def test_readers_of_a_written_buffer_see_the_new_value_with_fake_quant_on_too(write):
    class Alternating(Base):
        def __init__(self):
            super().__init__()
            self.register_buffer("sign", torch.ones(()))

        def forward(self, x):
            y = self.conv(x)
            if write == "neg_":
                self.sign.neg_()
            elif write == "mul_":
                self.sign.mul_(-1)
            elif write == "assign":
                self.sign = -self.sign
            else:
                self.sign.copy_(-self.sign)
            return y * self.sign

    model = Alternating().eval()
    gm = prepare_by_platform(model, example_inputs=(image(),))
    calibrate(gm, (image(),), (image(),))
    for _ in range(3):
        with torch.no_grad():
            expected, actual = model(image()), gm(image())
        assert (actual - expected).abs().max() < 0.1 * expected.abs().max()
    assert gm.sign == model.sign == -1


class Cell(Base):
    """Writes through a view, which the graph cannot follow in every case."""

    def __init__(self, write):
        super().__init__()
        self.write = write

    def forward(self, x):
        y = self.conv(x)
        if self.write == "iadd":
            z = y[:, 0]
            z += 1
        elif self.write == "method":
            y[:, 0].mul_(2.0)
        elif self.write == "view":
            y.view(y.size(0), -1).add_(1)
        elif self.write == "module":
            nn.functional.relu(y[:, :2], inplace=True)
        else:
            y[:, 0] += 1
        return y


@pytest.mark.parametrize("write", ["iadd", "method", "view", "module", "setitem"])
def test_a_write_through_a_view_is_right_or_refused(write):
    model = Cell(write).eval()
    refusal = ""
    try:
        gm = prepare_by_platform(model, example_inputs=(image(),))
    except TraceError as error:
        refusal = str(error)
    if refusal:
        assert "through a view" in refusal
        assert write != "setitem"
    else:
        torch.testing.assert_close(gm(image(4)), model(image(4)))


def test_a_trace_without_values_does_not_see_sizes():
    model = build("loop_over_channels")
    with pytest.raises(TraceError, match="pass example_inputs"):
        trace(model)
    assert trace(model, example_inputs=(image(),)).forced


class Tries(nn.Module):
    """Calls layers with what only some of them take, a module that fails in its second layer, and a wrong view."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.LeakyReLU(), nn.Linear(4, 4)])
        self.narrow = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))

    def forward(self, x):
        for layer in self.layers:
            try:
                x = layer(x, lengths=None)
            except TypeError:
                x = layer(x)
        try:
            x = self.narrow(x)
        except RuntimeError:
            x = x + 1
        try:
            return x.view(7, -1)
        except RuntimeError:
            return x.view(-1, 2)


def test_a_call_that_fails_where_forward_expects_it_is_not_in_the_graph():
    model, x = Tries().eval(), torch.randn(3, 4)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    torch.testing.assert_close(gm(x), model(x))
    assert not gm.quant_report.leaves
    called = [str(node.target) for node in gm.graph.nodes if node.op == "call_module" and "fake_quant" not in node.name]
    assert called == ["layers.0", "layers.1", "layers.2"]
