"""Functions that cannot be traced are called as a whole."""

import copy
import inspect
import pickle
import sys

import pytest
import torch
from torch import nn

from fxqat import enable_calibration, enable_quantization, prepare_by_platform
from fxqat.errors import TraceError
from fxqat.tracing.function_leaf import FunctionLeaf, failing_functions
from fxqat.tracing.trace import trace
from tests.tracing import patched_functions
from tests.tracing.patched_functions import Config, Decoder, gate, keep_positive, outer
from tests.value_models import Base

HERE = "tests.tracing.patched_functions"


def image(batch=2, seed=0):
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def modules(gm):
    return [type(gm.get_submodule(str(n.target))).__name__ for n in gm.graph.nodes if n.op == "call_module"]


class Imported(Base):
    def forward(self, x):
        return gate(self.conv(x)).relu()


class Attribute(Base):
    def forward(self, x):
        return patched_functions.gate(self.conv(x), factor=3.0).relu()


class Nested(Base):
    def forward(self, x):
        return outer(self.conv(x))


class WithConfig(Base):
    def __init__(self):
        super().__init__()
        self.config = Config(threshold=5.0)

    def forward(self, x):
        return gate(self.conv(x), self.config, factor=0.5)


class ByKeyword(Base):
    def __init__(self):
        super().__init__()
        self.config = Config(factor=4.0)

    def forward(self, x):
        return gate(x=self.conv(x), config=self.config)


class Twice(Base):
    def forward(self, x):
        return gate(gate(self.conv(x)) + 1)


class Method(Base):
    def __init__(self):
        super().__init__()
        self.decoder = Decoder(3.0)

    def forward(self, x):
        return self.decoder.decode(self.conv(x))


class Several(Base):
    def forward(self, x):
        y = self.conv(x)
        boxes, scores = keep_positive(y, y.mean((1, 2, 3)))
        return boxes + 1, scores


LEAVES = {
    Imported: ["gate"],
    Attribute: ["gate"],
    Nested: ["gate"],
    WithConfig: ["gate"],
    ByKeyword: ["gate"],
    Twice: ["gate"],
    Method: ["Decoder.decode"],
    Several: ["keep_positive"],
}


@pytest.mark.parametrize("model_type", LEAVES)
def test_the_smallest_function_becomes_the_leaf(model_type):
    torch.manual_seed(0)
    model = model_type()
    traced = trace(model, example_inputs=(image(),))
    assert [leaf.path for leaf in traced.leaves] == [f"{HERE}.{name}" for name in LEAVES[model_type]]
    assert modules(traced.gm).count("FunctionLeaf") == (2 if model_type is Twice else 1)
    for seed in range(4):
        torch.testing.assert_close(traced.gm(image(3, seed)), model(image(3, seed)), rtol=0, atol=0)


def test_a_function_leaf_is_reported_with_reason_and_source():
    gm = prepare_by_platform(Nested(), example_inputs=(image(),))
    (leaf,) = gm.quant_report.leaves
    lines, start = inspect.getsourcelines(gate)
    number = start + next(i for i, line in enumerate(lines) if "the line to name" in line)
    assert leaf.path == f"{HERE}.gate"
    assert leaf.source.startswith(f"{inspect.getsourcefile(gate)}:{number}: if x.sum()")
    assert "depends on tensor values" in leaf.reason
    assert f"left float, not traced: {HERE}.gate" in str(gm.quant_report)


@pytest.mark.parametrize("model_type", LEAVES)
def test_a_model_with_function_leaves_is_copied_and_pickled(model_type):
    gm = prepare_by_platform(model_type(), example_inputs=(image(),))
    for other in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        torch.testing.assert_close(other(image(3)), gm(image(3)), rtol=0, atol=0)
        assert other.quant_report.leaves == gm.quant_report.leaves


def test_a_model_with_function_leaves_is_trained():
    gm = prepare_by_platform(WithConfig(), example_inputs=(image(),)).eval()
    enable_calibration(gm)
    gm(image())
    enable_quantization(gm)
    gm.train()(image(4)).square().mean().backward()
    gradients = [p.grad for name, p in gm.named_parameters() if name.startswith("conv") and name.endswith("weight")]
    assert gradients
    assert all(g is not None and g.isfinite().all() and g.abs().sum() > 0 for g in gradients)


def test_untraceable_error_makes_no_function_leaf():
    with pytest.raises(TraceError, match="depends on tensor values") as caught:
        prepare_by_platform(Imported(), example_inputs=(image(),), untraceable="error")
    assert "if x.sum() > config.threshold" in str(caught.value)
    assert gate is patched_functions.gate


def test_a_function_without_a_name_to_import_is_no_candidate():
    def local(x):
        return x if x.sum() > 0 else -x

    class Net(Base):
        def forward(self, x):
            return local(self.conv(x))

    with pytest.raises(TraceError, match="cannot trace Net"):
        trace(Net(), example_inputs=(image(),))
    assert modules(trace(nn.Sequential(Net()), example_inputs=(image(),)).gm) == ["Net"]


def test_arguments_that_a_graph_cannot_hold_are_kept_in_the_leaf():
    config = Config(threshold=-1e9, factor=5.0)
    x = torch.ones(2)
    assert torch.equal(FunctionLeaf(gate, {1: config})(x, None), x * 5)
    assert torch.equal(FunctionLeaf(gate, {"config": config})(x, factor=2.0), x * 10)
    assert torch.equal(FunctionLeaf(gate, {})(x), x * 2)


def test_what_cannot_be_copied_is_shared_by_copies():
    backend, config = Config(threshold=-1e9), Config(threshold=-1e9)
    backend.framework = torch  # as einops' recipes hold it
    leaf = FunctionLeaf(gate, {1: backend, "config": config}).eval()
    other = copy.deepcopy(leaf)
    assert other.constants[1] is backend
    assert other.constants["config"] is not config
    assert not other.training


def test_failing_functions_are_innermost_first():
    class Raises:
        def relu(self):
            return self

        def sum(self):
            raise ValueError("no")

    try:
        outer(Raises())
    except ValueError:
        found = list(failing_functions(sys.exc_info()[2]))
    assert [function.__name__ for function, _ in found] == ["gate", "outer"]
    assert found[0][1][0] is vars(patched_functions)
    assert list(failing_functions(None)) == []


def test_methods_are_called_through_their_class():
    class Raises:
        def max(self):
            raise ValueError("no")

    try:
        Decoder().decode(Raises())
    except ValueError:
        ((function, owners),) = failing_functions(sys.exc_info()[2])
    assert function is Decoder.decode
    assert owners == [Decoder]


class CallsBlock(nn.Module):
    def __init__(self, as_method):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.as_method = as_method

    def forward(self, x):
        return patched_functions.run_if_positive(self.block.forward if self.as_method else self.block, x)


@pytest.mark.parametrize("as_method", [False, True])
def test_a_function_that_gets_a_module_is_no_leaf_but_the_module_around_it(as_method):
    model, x = nn.Sequential(nn.Linear(4, 4), CallsBlock(as_method)), torch.randn(3, 4)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert gm.quant_report.leaves[-1].path == "1"
    assert "gets a module" in gm.quant_report.leaves[-1].reason
    assert {"1.block.0.weight", "1.block.0.bias"} <= dict(gm.named_parameters()).keys()
    torch.testing.assert_close(gm(x), model(x))
