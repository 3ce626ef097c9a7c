"""The comparison of a prepared model with its float model: what it finds, what it reports, and what it leaves alone."""

import copy
import pickle

import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxqat
from fxqat.errors import ConfigError, TraceError
from fxqat.quantization.report import ANY_BATCH
from fxqat.quantization.sameness import Reference, check_sameness
from fxqat.tools.to_float import to_float
from tests.fresh_process import run_fresh
from tests.models import TOYS, build, inputs, prepared

RUNS = ["on the given inputs", "on a batch of another size", "on inputs with other values", "in training"]


class Net(nn.Module):
    """Two layers with a step between them."""

    def __init__(self, step, **modules):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        for name, module in modules.items():
            setattr(self, name, module)
        self.step = step

    def forward(self, x):
        return self.second(self.step(self, self.first(x)))


def as_traced(step, traced_step, **modules):
    """A prepared model of ``traced_step``, and the reference of a model that does ``step``."""
    gm = fxqat.prepare_by_platform(Net(traced_step, **modules), "TSQAT", example_inputs=(torch.randn(3, 6),))
    return gm, Reference(Net(step, **modules), lambda args, kwargs: (args, kwargs))


def compare(step, traced_step, x=None, **options):
    gm, reference = as_traced(step, traced_step)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)) if x is None else x
    return check_sameness(gm, reference, ((x,), {}), **options)


@pytest.mark.parametrize("name", [name for name in TOYS if name not in ("unused_parameters",)])
def test_equal_models_are_equal_in_all_runs_and_stay_as_they_are(name):
    model = build(name).train()
    state, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    gm = prepared(name, example_inputs=inputs(name))
    lines = gm.quant_report.sameness
    assert len(lines) == 4
    assert not any(line.startswith("computes") for line in lines)
    assert sum(line.startswith("equal to the model ") for line in lines) >= 3
    assert torch.equal(torch.get_rng_state(), generator)
    found = gm.state_dict()
    for key, value in build(name).state_dict().items():
        assert torch.equal(state[key], value)
        if key in found:
            assert torch.equal(found[key], value)
    assert all(parameter.grad is None for parameter in gm.parameters())


def test_each_run_is_named_once():
    lines = compare(lambda self, y: y.relu(), lambda self, y: F.relu(y))
    assert lines == [f"equal to the model {run}" for run in RUNS]
    assert compare(lambda self, y: y.relu(), lambda self, y: F.relu(y), check="quick") == lines[:1]


@pytest.mark.parametrize(
    ("step", "traced", "where"),
    [
        (lambda self, y: y * 1.01, lambda self, y: y, "on the given inputs: output 0 differs"),
        (lambda self, y: y if y.std(0).amax() < 1e-6 else y * 2, lambda self, y: y, "on inputs with other values"),
        (lambda self, y: y.detach(), lambda self, y: y, "in training: the gradient of first"),
        (lambda self, y: y + (0 * y - y.detach() + y), lambda self, y: y, "in training: the gradient of first"),
        (lambda self, y: y * 2 if self.training else y, lambda self, y: y, "in training: output 0"),
        (lambda self, y: y[:1], lambda self, y: y, "output 0 differs"),
    ],
)
def test_a_difference_is_an_error_that_says_where(step, traced, where):
    x = torch.zeros(3, 6) if "other values" in where else None
    with pytest.raises(TraceError, match=where) as caught:
        compare(step, traced, x)
    assert "leaf_module" in str(caught.value)
    assert "concrete_args" in str(caught.value)


def test_a_difference_that_only_training_has_is_a_warning_where_that_is_asked_for(caplog):
    lines = compare(lambda self, y: y * 2 if self.training else y, lambda self, y: y, strict=False)
    assert lines[:3] == [f"equal to the model {run}" for run in RUNS[:3]]
    assert lines[3].startswith("computes something else than the model in training: output 0")
    assert lines[3] in caplog.text


def test_a_batch_size_that_is_fixed_is_reported(caplog):
    lines = compare(lambda self, y: y / y.shape[0], lambda self, y: y / 3)
    assert ANY_BATCH not in lines
    assert "computes something else than the model on a batch of another size: output 0 differs" in caplog.text
    assert lines[3] == "equal to the model in training"


def test_of_a_large_batch_a_few_samples_are_compared(caplog):
    sizes = []

    def noted(self, y):
        sizes.append(len(y))
        return y

    large = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    assert compare(noted, lambda self, y: y, large) == [f"equal to the model {run}" for run in RUNS]
    assert sizes == [40, 9, 8, 8]
    assert not caplog.text


def test_a_model_that_computes_something_else_on_a_few_samples_is_compared_on_all(caplog):
    large = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    constant = Net(None).first.weight[0, 0].item()
    lines = compare(lambda self, y: y * 2 if len(y) < 20 else y, lambda self, y: y, large)
    assert lines[1].startswith(f"computes something else than the model {RUNS[1]}: output 0 differs")
    assert [lines[i] for i in (0, 2, 3)] == [f"equal to the model {RUNS[i]}" for i in (0, 2, 3)]
    lines = compare(lambda self, y: y * 2 if len(y) == 8 else y, lambda self, y: y, large)
    assert lines == [f"equal to the model {run}" for run in RUNS]  # 9 samples are as 40
    with pytest.raises(TraceError, match="on inputs with other values: output 0 differs"):
        compare(lambda self, y: y * self.first.weight[0, 0], lambda self, y: y * constant, large)


@pytest.mark.parametrize("share", [1e-2, 1e-3])
def test_a_branch_that_contributes_little_is_compared_too(share, caplog):
    lines = compare(lambda self, y: y + share * y / y.shape[0], lambda self, y: y + share * y / 3)
    assert ANY_BATCH not in lines
    assert "computes something else than the model on a batch of another size: output 0 differs" in caplog.text
    with pytest.raises(TraceError, match="on the given inputs: output 0 differs"):
        compare(lambda self, y: y + share * y, lambda self, y: y)


def test_a_branch_that_contributes_little_and_rounding_are_told_apart(caplog):
    def summed(self, y):
        return (y.unsqueeze(-1) * torch.linspace(-1, 1, 4096) * 1e3).sum(-1) + y  # cancels: rounding of 1e-4

    def summed_backwards(self, y):
        return (y.unsqueeze(-1) * torch.linspace(-1, 1, 4096).flip(0) * 1e3).cumsum(-1)[..., -1] + y

    assert compare(summed, summed_backwards) == [f"equal to the model {run}" for run in RUNS]
    assert not caplog.text


def test_an_alias_that_only_float32_has_is_not_excused_by_float64():
    def overwritten(self, y):
        z = y.float()
        z /= 2
        return y

    with pytest.raises(TraceError, match="on the given inputs: output 0 differs"):
        compare(overwritten, lambda self, y: y)
    model, x = Net(overwritten), torch.randn(3, 6)
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,))  # the write is followed
    torch.testing.assert_close(gm(x), model(x))


def test_the_first_module_that_differs_is_named():
    class Scaled(nn.Module):
        def forward(self, x):
            return x * 1.5

    gm, reference = as_traced(
        lambda self, y: self.inner(y), lambda self, y: self.inner(y), inner=nn.Sequential(nn.Tanh(), nn.Softsign())
    )
    reference.model.inner[1] = nn.Sequential(nn.Softsign(), Scaled())
    with pytest.raises(TraceError, match=r"they begin to differ in 'inner.1' \(Sequential\)"):
        check_sameness(gm, reference, ((torch.randn(3, 6),), {}))
    reference.model.inner = nn.Identity()
    with pytest.raises(TraceError, match="they begin to differ in 'inner'"):
        check_sameness(gm, reference, ((torch.randn(3, 6),), {}))


def test_a_module_is_not_blamed_for_an_output_that_nobody_reads():
    class Two(nn.Module):
        def forward(self, x):
            return x * 2.0, x.tanh()

    def step(self, y):
        return self.after(self.two(y)[0])

    gm, reference = as_traced(step, step, two=Two(), after=nn.Tanh())
    reference.model.after = nn.Softsign()
    with pytest.raises(TraceError, match=r"they begin to differ in 'after' \(Softsign\)"):
        check_sameness(gm, reference, ((torch.randn(3, 6),), {}))


def test_state_in_python_is_named_as_the_cause():
    class Counting(Net):
        calls = 0

        def forward(self, x):
            Counting.calls += 1
            return super().forward(x) * Counting.calls

    with pytest.raises(TraceError, match="the model itself gives other values when it is called again: it keeps state"):
        fxqat.prepare_by_platform(Counting(lambda self, y: y), "TSQAT", example_inputs=(torch.randn(3, 6),))
    assert Counting.calls > 0


def test_random_numbers_are_equal_in_any_order():
    def noisy(self, y):
        noise, kept = torch.rand_like(y), F.dropout(y, 0.5, self.training)
        return kept + noise

    def reordered(self, y):
        kept = F.dropout(y, 0.5, self.training)
        return kept + torch.rand_like(y)

    assert len(compare(noisy, reordered)) == 4
    with pytest.raises(TraceError, match="in training: output 0"):
        compare(noisy, lambda self, y: F.dropout(y, 0.2, self.training) + torch.rand_like(y))


def test_a_branch_on_a_value_by_torch_cond_is_compared_and_exported(tmp_path):
    """In a process of its own: after ``torch.cond``, torch 2.14 compiles other models in pieces."""
    script = "import sys; from tests.quantization.test_sameness import export_branch as run; run(sys.argv[1])"
    done = run_fresh(["-c", script, tmp_path / "model.onnx"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "model.onnx").exists()


def export_branch(path):
    """Take a model with a branch from the comparison to ONNX Runtime, both ways."""

    class Branch(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda y: y.clone(), lambda y: y * 2, (x,))

    gm = fxqat.prepare_by_platform(nn.Sequential(nn.Linear(6, 6), Branch()), "TSQAT", example_inputs=torch.randn(3, 6))
    assert len(gm.quant_report.sameness) == 4
    fxqat.calibrate(gm, [torch.randn(8, 6)])
    report = fxqat.convert_export(gm, torch.ones(3, 6), path)
    fxqat.enable_quantization(gm.eval())
    session = onnxruntime.InferenceSession(path)
    results = [(gm(x), session.run(None, {"input": x.numpy()})[0]) for x in (torch.ones(3, 6), -torch.ones(3, 6))]
    assert report.certificate.passed
    for expected, found in results:
        torch.testing.assert_close(torch.as_tensor(found), expected)


def test_without_example_inputs_the_first_call_compares(caplog):
    def aliased(self, y):
        z = y
        z += 1
        return y

    gm = fxqat.prepare_by_platform(Net(aliased), "TSQAT")
    assert "not compared with the model yet" in str(gm.quant_report)
    with pytest.raises(TraceError, match="on the given inputs: output 0 differs"):
        fxqat.calibrate(gm, [torch.randn(3, 6)])

    gm = fxqat.prepare_by_platform(Net(lambda self, y: y.relu()), "TSQAT")
    copied, pickled = copy.deepcopy(gm), pickle.loads(pickle.dumps(fxqat.prepare_by_platform(nn.Linear(6, 6))))
    fxqat.enable_calibration(gm)
    with torch.inference_mode():
        gm(torch.randn(3, 6))
    assert gm.quant_report.sameness == tuple(f"equal to the model {run}" for run in RUNS)
    assert not gm._forward_pre_hooks
    assert all(quant.observer_enabled for quant in gm.modules() if hasattr(quant, "observer_enabled"))
    for other in (copied, pickled):
        other(torch.randn(3, 6))
        assert other.quant_report.sameness == ()
    assert caplog.text == ""


def test_the_first_call_compares_with_the_weights_of_that_moment():
    model = Net(lambda self, y: y.relu())
    gm = fxqat.prepare_by_platform(model, "TSQAT")
    with torch.no_grad():
        gm.get_parameter("first.weight").mul_(3)
    gm.double()
    gm(x=torch.randn(2, 6).double())
    assert ANY_BATCH in gm.quant_report.sameness
    assert len(gm.quant_report.sameness) == 4


def test_the_first_call_warns_of_a_branch_on_training(caplog):
    gm = fxqat.prepare_by_platform(Net(lambda self, y: y * 2 if self.training else y), "TSQAT")
    fxqat.calibrate(gm, [torch.randn(3, 6)])
    assert "computes something else than the model in training" in caplog.text
    assert gm.quant_report.sameness[:3] == tuple(f"equal to the model {run}" for run in RUNS[:3])


@pytest.mark.parametrize("check", ["quick", "off"])
def test_less_is_compared_on_request(check):
    model, x = Net(lambda self, y: y.relu()), torch.randn(3, 6)
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,), check=check)
    assert gm.quant_report.sameness == (("equal to the model on the given inputs",) if check == "quick" else ())
    gm = fxqat.prepare_by_platform(model, "TSQAT", check=check)
    gm(x)
    assert len(gm.quant_report.sameness) == (check == "quick")
    with pytest.raises(ConfigError, match="check must be 'full', 'quick' or 'off', got 'some'"):
        fxqat.prepare_by_platform(model, "TSQAT", check="some")


def test_frozen_batch_norms_and_calibration_only_are_not_compared_in_training():
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(2, 3, 6, 6)
    frozen = fxqat.prepare_by_platform(model, "TSQAT", {"bn_mode": "freeze"}, example_inputs=(x,))
    assert frozen.quant_report.sameness[3] == "not compared with the model in training"
    only = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,), is_qat=False)
    assert only.quant_report.sameness == frozen.quant_report.sameness


def test_batch_norm_in_training_may_need_a_larger_batch():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(torch.randn(1, 4),))
    assert "equal to the model in training" in gm.quant_report.sameness
    assert gm.get_submodule("0").bn.num_batches_tracked.item() == 0


def test_a_module_under_two_names_is_compared_as_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = nn.Linear(4, 4)
            self.c = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            y = self.c(self.a(x)) + self.b(x)
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            return y + self.mean

    gm = fxqat.prepare_by_platform(Tied(), "TSQAT", example_inputs=(torch.randn(2, 4),))
    assert gm.quant_report.sameness == tuple(f"equal to the model {run}" for run in RUNS)
    assert torch.equal(gm.get_buffer("mean"), torch.zeros(4))


def test_a_batch_norm_under_two_names_is_compared_trained_and_exported(tmp_path):
    class SharedProjection(nn.Module):
        """Query and key of the attention of mmsegmentation's ANNHead."""

        def __init__(self):
            super().__init__()
            self.key = self.query = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4))
            self.last = nn.Conv2d(4, 2, 1)

        def forward(self, x):
            return self.last(self.query(x) * self.key(x + 1))

    torch.manual_seed(0)
    model, x = SharedProjection(), torch.randn(4, 3, 5, 5)
    own = [*model.parameters(), *model.buffers()]
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert gm.quant_report.sameness == tuple(f"equal to the model {run}" for run in RUNS)
    assert all(a is b for a, b in zip(own, [*model.parameters(), *model.buffers()], strict=True))
    for each in (model, gm):
        each.train()(x)
    torch.testing.assert_close(to_float(gm).state_dict(), model.state_dict())
    fxqat.calibrate(gm.eval(), [(x,)], progress=False)
    fxqat.enable_quantization(gm)
    assert fxqat.convert_export(gm, (x,), tmp_path / "shared.onnx").certificate.passed


def test_inputs_that_the_model_cannot_run_are_an_error():
    def fails(self, y):
        assert y.shape[0] != 3, "three"
        return y

    with pytest.raises(ConfigError, match="does not run on example_inputs, in eval mode: AssertionError: three"):
        compare(fails, lambda self, y: y)
    verdicts = ["not compared with the model", "equal to the model", *["not compared with the model"] * 2]
    lines = compare(fails, lambda self, y: y, strict=False)
    assert lines == [f"{verdict} {run}" for verdict, run in zip(verdicts, RUNS, strict=True)]


def test_a_model_on_the_meta_device_with_inputs_there_is_prepared():
    model, x = nn.Sequential(nn.Linear(6, 6, device="meta")), torch.empty(2, 6, device="meta")
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert len(gm.quant_report.sameness) == 4
    assert all(parameter.is_meta for parameter in gm.parameters())


def test_a_constant_that_was_computed_from_a_weight_is_found():
    def from_weight(self, y):
        return F.linear(y, self.first.state_dict()["weight"] * 0.5)

    with pytest.raises(TraceError, match="on inputs with other values: output 0 differs.*read weights outside"):
        fxqat.prepare_by_platform(Net(from_weight), "TSQAT", example_inputs=(torch.randn(3, 6),))
    gm = fxqat.prepare_by_platform(Net(from_weight), "TSQAT")
    before = {name: tensor.clone() for name, tensor in gm.state_dict().items()}
    with pytest.raises(TraceError, match="on inputs with other values: output 0 differs"):
        gm(torch.randn(3, 6))
    assert all(torch.equal(tensor, before[name]) for name, tensor in gm.state_dict().items())


def test_inputs_that_only_the_model_overwrites_are_told_at_the_first_call(caplog):
    class Overwrites(Net):
        def forward(self, x):
            x += 0.5
            return super().forward(x)

    gm, x = fxqat.prepare_by_platform(Overwrites(lambda self, y: y), "TSQAT"), torch.ones(2, 6)
    gm(x)
    line = "forward overwrites its inputs: the prepared model leaves the caller's tensors as they are"
    assert gm.quant_report.sameness == (*(f"equal to the model {run}" for run in RUNS), line)
    assert line in caplog.text
    assert torch.equal(x, torch.ones(2, 6))


def test_the_comparison_leaves_the_state_of_a_leaf_alone():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.seen, self.gain = 0, [], nn.Parameter(torch.tensor(0.5))

        def forward(self, y):
            if self.training:
                self.calls += 1
                self.seen.append(y.shape)
                self.gain.data.mul_(1.5)
            return y * (1 + self.calls) * self.gain

    for given in ((torch.randn(3, 6),), None):
        model = Net(lambda self, y: self.inner(y), inner=Counting())
        gm = fxqat.prepare_by_platform(model, "TSQAT", {"leaf_module": ["inner"]}, example_inputs=given)
        if given is None:
            gm.eval()(torch.randn(3, 6))
        assert "equal to the model in training" in gm.quant_report.sameness
        assert (gm.inner.calls, gm.inner.seen, gm.inner.gain.item()) == (0, [], 0.5)


def test_the_module_that_differs_in_training_is_named():
    class Louder(nn.Module):
        def forward(self, y):
            return y * 2 if self.training else y

    gm, reference = as_traced(lambda self, y: self.inner(y), lambda self, y: self.inner(y), inner=nn.Tanh())
    reference.model.inner = nn.Sequential(nn.Tanh(), Louder())
    with pytest.raises(TraceError, match=r"in training: output 0.*they begin to differ in 'inner' \(Sequential\)"):
        check_sameness(gm, reference, ((torch.randn(3, 6),), {}))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_table_with_sparse_gradients_is_compared_and_keeps_them(kind):
    class Recommender(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.fc = kind(9, 4, sparse=True), nn.Linear(4, 2)

        def forward(self, i):
            found = self.table(i)
            return self.fc(found if found.dim() == 2 else found.mean(1))

    model, i = Recommender(), torch.randint(0, 9, (3, 5))
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(i,))
    assert gm.quant_report.sameness[-1] == "equal to the model in training"
    for holder in (gm, model):
        holder(i).sum().backward()
    gradient = gm.get_parameter("table.weight").grad
    assert gradient.is_sparse
    torch.testing.assert_close(gradient.to_dense(), model.table.weight.grad.to_dense())
