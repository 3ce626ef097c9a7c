"""The patches that are active while tracing: what they do, and that they are always removed."""

import builtins
import collections
import copy
import threading
import time

import numpy as np
import pytest
import torch
from torch import distributions, nn
from torch.nn import functional as F

from fxqat import calibrate, convert_export, enable_calibration, enable_quantization, prepare_by_platform
from fxqat.errors import TraceError
from fxqat.tracing.patches import CONSTRUCTORS, Patches
from fxqat.tracing.trace import trace
from fxqat.tracing.value_proxy import TrainingFlag
from fxqat.utils.torch_compat import CAUSAL_CHECK, DISTRIBUTION_SIZE, WRAPPER
from tests.tracing import patched_functions
from tests.value_models import CASES, Base, build, inputs_of


def now():
    return {
        "isinstance": builtins.isinstance,
        "callable": builtins.callable,
        "len": builtins.len,
        "to": nn.Module.to,
        "variable": torch.autograd.Variable.__new__,
        "wrapper": getattr(*WRAPPER),
        "causal_check": getattr(*CAUSAL_CHECK),
        "distribution": torch.distributions.Distribution.__init__,
        "distribution_size": getattr(*DISTRIBUTION_SIZE),
        **{name: getattr(torch, name) for name in CONSTRUCTORS},
        "setattr": nn.Module.__setattr__,
        "getattr": nn.Module.__getattr__,
        "call": nn.Module.__call__,
        "gate": patched_functions.gate,
        "method": vars(patched_functions.Decoder)["decode"],
    }


BEFORE = now()


def assert_restored():
    assert now() == BEFORE
    assert "training" not in vars(nn.Module)
    assert nn.Linear(1, 1).training is True


class Fails(Base):
    """Uses every patch, then raises the given exception."""

    def __init__(self, error):
        super().__init__()
        self.error = error
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x):
        y = patched_functions.gate(self.conv(x))
        y = patched_functions.Decoder().decode(y)
        self.state = self.state + y.mean((0, 2, 3))
        self.kept = y
        torch.zeros(y.shape)
        raise self.error


def image():
    return torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("name", CASES)
def test_everything_is_put_back_after_a_trace(name):
    traced = trace(build(name), example_inputs=inputs_of(name))
    assert_restored()
    assert all(type(module.training) is bool for module in traced.root.modules())


@pytest.mark.parametrize("untraceable", ["leaf", "error"])
@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("no"), KeyError("no"), AssertionError("no")])
def test_everything_is_put_back_after_a_failure(error, untraceable):
    model = Fails(error)
    with pytest.raises(TraceError):
        prepare_by_platform(model, example_inputs=(image(),), untraceable=untraceable)
    assert_restored()
    assert torch.equal(model.state, torch.zeros(4))
    assert not hasattr(model, "kept")


def test_everything_is_put_back_after_an_interrupt():
    with pytest.raises(KeyboardInterrupt):
        prepare_by_platform(Fails(KeyboardInterrupt()), example_inputs=(image(),))
    assert_restored()


def test_everything_is_put_back_after_leaf_functions():
    class Net(Base):
        def forward(self, x):
            return patched_functions.Decoder().decode(patched_functions.gate(self.conv(x)))

    model = Net()
    traced = trace(model, example_inputs=(image(),))
    assert len(traced.leaves) == 2
    assert_restored()
    assert torch.equal(traced.gm(image()), traced.gm(image())) is False


class Maker:
    """A tracer that records the calls of the patches."""

    def __init__(self):
        self.hashed = False
        self.calls = []
        self.modules = []

    def create_proxy(self, kind, target, args, kwargs):
        self.calls.append((kind, target, args, kwargs))
        return "a node"

    def call_function_leaf(self, function, args, kwargs):
        raise AssertionError("not asked for")

    def branch_on_training(self, module):
        self.modules.append(module)
        return isinstance(module, nn.Hardtanh)

    def write_buffer(self, module, name, value):
        raise AssertionError("not asked for")


def test_constructors_become_nodes_unless_suspended():
    maker = Maker()
    patches = Patches(maker)
    zeros = torch.zeros
    with patches:
        assert torch.zeros(2, dtype=torch.int64) == "a node"
        with patches.suspend():
            assert torch.equal(torch.zeros(2), torch.ones(2) * 0)
        assert torch.ones(3) == "a node"
    assert [(kind, args, kwargs) for kind, _, args, kwargs in maker.calls] == [
        ("call_function", (2,), {"dtype": torch.int64}),
        ("call_function", (3,), {}),
    ]
    assert maker.calls[0][1] is zeros
    assert_restored()


def test_a_branch_on_training_is_reported():
    maker = Maker()
    patches = Patches(maker)
    module, other = nn.ReLU(), nn.Tanh().eval()
    with patches:
        assert type(module.training) is TrainingFlag
        assert maker.modules == []
        assert not module.training
        assert not other.training
        assert nn.Hardtanh().eval().training
        del maker.modules[-1]
        with patches.suspend():
            assert module.training is True
            assert other.training is False
        module.training = False
    assert maker.modules == [module, other]
    assert module.training is False
    assert_restored()


def test_isinstance_is_unchanged_for_other_objects():
    with Patches(Maker()):
        assert isinstance(1, int)
        assert isinstance(True, (str, int))
        assert not isinstance("a", int)
        assert isinstance([], collections.abc.Sequence)
        with pytest.raises(TypeError):
            isinstance(1, 2)
    assert_restored()


def test_assignments_of_ordinary_values_are_kept():
    module = nn.Linear(2, 2)
    with Patches(Maker()):
        module.note = 3
        module.extra = nn.ReLU()
    assert module.note == 3
    assert isinstance(module.extra, nn.ReLU)
    assert "extra" in dict(module.named_children())


def test_buffers_are_read_as_copies_and_parameters_as_they_are():
    module = nn.BatchNorm2d(3)
    patches = Patches(Maker())
    copy = patches.attribute(module, "running_mean")
    copy += 1
    assert torch.equal(module.running_mean, torch.zeros(3))
    assert patches.attribute(module, "running_mean") is copy
    assert patches.attribute(module, "weight") is module.weight
    assert patches.attribute(nn.Sequential(module), "0.bias") is module.bias


def test_a_failing_trace_does_not_disturb_the_next():
    with pytest.raises(TraceError):
        trace(Fails(ValueError("no")), example_inputs=(image(),))
    model = build("windows")
    traced = trace(model, example_inputs=inputs_of("windows"))
    assert torch.equal(traced.gm(*inputs_of("windows", 3)), model(*inputs_of("windows", 3)))
    assert_restored()


class OldSpellings(nn.Module):
    """Code that asks tensors what only old or unusual code asks."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        default = x() if callable(x) else x
        y = self.lin(torch.autograd.Variable(default)) + torch.tensor(np.array([0.5, 1.0, 1.5, 2.0]))
        index = torch.as_tensor(np.arange(4)[::-1].copy())
        return nn.Softplus().to(y)(y)[:, index]


def test_old_spellings_are_traced():
    model, x = OldSpellings(), torch.randn(3, 4)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert not gm.quant_report.leaves
    assert gm(x).dtype == torch.float64
    torch.testing.assert_close(gm(x), model(x))
    assert_restored()


class LegacyTensors(nn.Module):
    """The old constructor ``torch.Tensor``, as in SpeechBrain's dual-path network."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x):
        batch, channels, length = x.shape
        pad = torch.Tensor(torch.zeros(batch, channels, (7 - length % 7) % 7)).type(x.dtype)
        y = self.conv(torch.cat([x, pad], 2))
        whole = torch.Tensor(batch, channels, y.shape[2]).to(x.device)
        whole[:] = y
        return whole * torch.Tensor([length, 2]).sum() + torch.Tensor([1.0, 2.0]).sum()


def test_the_old_constructor_is_traced_with_open_sizes_and_stays_as_it_was(tmp_path):
    model, x = LegacyTensors(), torch.randn(2, 4, 12)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    for batch in (2, 3):
        x = torch.randn(batch, 4, 12)
        torch.testing.assert_close(gm(x), model(x))
    assert_restored()
    assert "__new__" not in vars(torch.Tensor)
    assert torch.Tensor(2, 3).shape == (2, 3)
    assert torch.Tensor([1, 2]).tolist() == [1.0, 2.0]
    part = torch.ones(2)
    assert torch.Tensor(part).data_ptr() == part.data_ptr()
    assert type(type("Own", (torch.Tensor,), {})([1.0])).__name__ == "Own"
    calibrate(gm, [(x,)], progress=False)
    enable_quantization(gm)
    assert convert_export(gm, (x,), tmp_path / "model.onnx", dynamic_batch=True).certificate.passed


def test_the_old_constructor_with_a_tuple_is_refused_since_it_may_hold_sizes_or_values():
    class Net(LegacyTensors):
        def forward(self, x):
            return self.conv(x) + torch.Tensor(x.shape).fill_(2.0)

    with pytest.raises(TraceError, match="torch.Tensor"):
        prepare_by_platform(Net(), "TSQAT", example_inputs=(torch.randn(2, 4, 12),))
    assert "__new__" not in vars(torch.Tensor)


class Wrapped(nn.Module):
    """Calls functions registered with torch.fx.wrap."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)
        z = patched_functions.shifted(y, by=2.0)
        patched_functions.add_to_tail(z, y)
        return self.last(z)


def test_a_wrapped_function_is_a_node_unless_it_works_in_place():
    model, x = Wrapped(), torch.randn(3, 4)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    called = [getattr(node.target, "__name__", "") for node in gm.graph.nodes if node.op == "call_function"]
    assert called.count("shifted") == 1
    assert "add_to_tail" not in called
    assert {"add", "assign_item"} <= set(called)
    enable_calibration(gm)
    gm(x)
    enable_quantization(gm)
    gm.train()(x).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in gm.parameters() if parameter.grad is not None)
    torch.testing.assert_close(copy.deepcopy(gm)(x), gm(x))
    first = torch.fx.symbolic_trace(Wrapped())  # the registry of torch.fx is as it was
    assert [node.op for node in first.graph.nodes].count("call_function") == 2


class WrappedLayer(nn.Module):
    """Gives a parameter to a function registered with torch.fx.wrap."""

    def __init__(self, name):
        super().__init__()
        self.first, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
        self.name = name

    def forward(self, x):
        return getattr(patched_functions, self.name)(self.first(x).square(), self.weight)


def test_a_wrapped_function_that_gets_a_parameter_is_traced_into():
    gm = prepare_by_platform(WrappedLayer("scores"), "TSQAT", example_inputs=(torch.randn(3, 4),))
    (row,) = [row for row in gm.quant_report.rows if row.op == "linear" and row.node != "first"]
    assert row.weight.startswith("int8")
    assert_restored()


def test_if_it_cannot_be_traced_it_stays_whole():
    model, x = WrappedLayer("scores_if_positive"), torch.randn(3, 4)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    (leaf,) = gm.quant_report.leaves
    assert leaf.path.endswith("scores_if_positive")
    torch.testing.assert_close(gm(x), model(x))
    assert_restored()


class Busy(Base):
    """Makes tensors, branches on their type, and calls modules, slowly enough that threads meet."""

    def forward(self, x):
        for _ in range(20):
            time.sleep(0.001)
            x = self.conv(x)[:, :3] + torch.zeros(x.shape[0], 3, 1, 1)
        return x if isinstance(x, torch.Tensor) else None


def test_other_threads_compute_as_always_while_two_models_are_traced():
    found, stop = [], threading.Event()

    def compute():
        layer = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
        while not stop.is_set():
            y = layer(torch.ones(3, 2)) + torch.zeros(3, 2)
            found.append((type(y) is torch.Tensor, layer.training is False, isinstance(y, torch.Tensor)))

    def prepare(results):
        torch.manual_seed(0)
        model, x = Busy().eval(), torch.randn(2, 3, 4, 4)
        gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
        results.append(float((gm(x) - model(x)).abs().max()))

    errors = []
    preparing = [threading.Thread(target=prepare, args=(errors,)) for _ in range(2)]
    computing = threading.Thread(target=compute)
    for thread in (computing, *preparing):
        thread.start()
    for thread in preparing:
        thread.join()
    stop.set()
    computing.join()
    assert errors == [pytest.approx(0, abs=1e-5)] * 2
    assert len(found) > 20
    assert set(found) == {(True, True, True)}
    assert torch.backends.mha.get_fastpath_enabled()
    assert_restored()


@pytest.mark.parametrize("failing", ["zeros", "is_grad_enabled", "__setattr__"])
def test_patches_that_cannot_be_applied_leave_nothing_behind(failing, monkeypatch):
    original = Patches._patch

    def patch(self, owner, name, build):
        if name == failing:
            raise RuntimeError("no")
        original(self, owner, name, build)

    monkeypatch.setattr(Patches, "_patch", patch)
    with pytest.raises(TraceError, match="RuntimeError: no"):
        trace(Base(), example_inputs=(torch.randn(1, 3, 4, 4),), untraceable="error")
    monkeypatch.undo()
    assert_restored()


def test_a_question_for_the_gradient_mode_is_answered_and_recorded():
    class Asks(Base):
        def forward(self, x):
            return self.conv(x) * (2 if torch.is_grad_enabled() else 3)

    model, x = Asks(), torch.randn(1, 3, 4, 4)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,), check="off")
    assert [(forced.expression, forced.value) for forced in gm.quant_report.forced] == [
        ("torch.is_grad_enabled()", True)
    ]
    torch.testing.assert_close(gm(x), model(x))


def test_gradients_that_follow_the_mode_are_those_of_training():
    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.first(x)
            with torch.set_grad_enabled(self.training):
                z = y * 0.5
            return self.last(y + z)

    model, x = Step().train(), torch.randn(2, 4)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert [found.expression for found in gm.quant_report.forced] == ["torch.set_grad_enabled(self.training)"]
    assert gm.quant_report.leaves == ()
    assert gm.quant_report.eval_only == ()
    for holder in (model, gm):
        holder(x).sum().backward()
    torch.testing.assert_close(gm.get_parameter("first.weight").grad, model.first.weight.grad)


class FrozenDict(collections.OrderedDict):
    """As in diffusers."""

    def update(self, *args, **kwargs):
        raise RuntimeError("You cannot use update on a FrozenDict instance.")


class Configured(Base):
    def __init__(self):
        super().__init__()
        self.config = FrozenDict(scale=2.0)

    def forward(self, x):
        return self.conv(x) * self.config["scale"]


def test_a_dict_that_forbids_changes_is_left_alone():
    prepared = prepare_by_platform(Configured(), example_inputs=(image(),))
    assert_restored()
    assert "equal to the model in training" in prepared.quant_report.sameness


def test_patches_are_removed_although_an_assignment_cannot_be_undone():
    maker = Maker()
    patches = Patches(maker)

    def fails():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), patches:
        patches.assigned.append(fails)
    assert_restored()


class Lengths(Base):
    """Reads the batch by ``len``, as rtdl and speechbrain do."""

    def forward(self, x):
        y = self.conv(x)
        batch = len(y)
        mask = torch.ones(1, device=y.device).expand(len(x), 1, 1, 1)
        if len(y) == 0 or len(y.shape) != 4 or len([x, y]) != 2:
            raise ValueError("no images")
        return (y * mask).reshape(batch * 4, -1).reshape(batch, -1)


def test_the_length_of_a_tensor_stays_open():
    x = image()
    prepared = prepare_by_platform(Lengths(), example_inputs=(x,))
    assert_restored()
    assert "equal to the model on a batch of another size" in prepared.quant_report.sameness
    assert prepared(torch.randn(5, 3, 8, 8)).shape[0] == 5
    assert [(forced.expression, forced.value) for forced in prepared.quant_report.forced] == [("eq", False)]


def test_a_tensor_without_dimensions_has_no_length():
    class Scalar(Base):
        def forward(self, x):
            return self.conv(x) * len(x.mean())

    with pytest.raises(TraceError, match="len"):
        prepare_by_platform(Scalar(), example_inputs=(image(),))


class Policy(nn.Module):
    """A layer, and what a distribution gives of its output."""

    def __init__(self, ask):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.ask = nn.Linear(6, 4), ask

    def forward(self, x):
        return self.ask(self.layer(x))


def normal(y):
    return distributions.Normal(y, F.softplus(y) + 1)


ASKED = {
    "Normal": lambda y: (normal(y).mean, normal(y).log_prob(y + 1), normal(y).entropy()),
    "Independent": lambda y: (distributions.Independent(normal(y), 1).log_prob(y + 1), y),
    "Categorical": lambda y: (distributions.Categorical(logits=y).probs, distributions.Categorical(logits=y).entropy()),
    "Bernoulli": lambda y: (
        distributions.Bernoulli(logits=y).mode,
        distributions.Bernoulli(logits=y).log_prob((y > 0).float()),
    ),
    "divergence": lambda y: distributions.kl_divergence(normal(y), distributions.Normal(torch.zeros(4), torch.ones(4))),
    "transformed": lambda y: distributions.TransformedDistribution(normal(y), [distributions.TanhTransform()]).log_prob(
        y.sigmoid() * 0.5
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_distributions_are_traced_and_exported(name, tmp_path):
    """Their checks of values would be branches on values."""
    x = torch.randn(4, 6)
    gm = prepare_by_platform(Policy(ASKED[name]), "TSQAT", example_inputs=(x,))
    assert gm.quant_report.sameness[1] == "equal to the model on a batch of another size"
    assert not [node for node in gm.graph.nodes if node.name.endswith("_leaf")]
    calibrate(gm, [(x,)], progress=False)
    enable_quantization(gm)
    assert convert_export(gm, (x,), tmp_path / "policy.onnx").certificate.passed
    with pytest.raises(ValueError, match="Expected parameter scale"):
        distributions.Normal(torch.zeros(2), -torch.ones(2), validate_args=True)


@pytest.mark.parametrize("draw", ["sample", "rsample"])
def test_distributions_draw_as_many_numbers_as_there_are_samples(draw):
    policy = Policy(lambda y: getattr(normal(y), draw)())
    gm = prepare_by_platform(policy, "TSQAT", example_inputs=(torch.randn(4, 6),))
    assert gm.quant_report.sameness[3] == "equal to the model in training"
    x = torch.randn(7, 6)
    drawn = [gm(x) for _ in range(2)]
    assert drawn[0].shape == (7, 4)
    assert not torch.equal(*drawn)
