"""An assert of tensor values is checked on the example inputs, is reported, and is not in the graph."""

import inspect

import pytest
import torch
from torch import nn

from fxqat import prepare_by_platform
from fxqat.errors import TraceError
from fxqat.tracing.asserts import is_asserted
from tests.tracing.patched_functions import assert_each, assert_finite_below


class Asked:
    """Notes whether its truth value is asked for in an assert."""

    def __init__(self, value):
        self.value, self.found = value, []

    def __bool__(self):
        self.found.append(is_asserted(inspect.currentframe().f_back))
        return self.value


def test_asserts_are_told_from_branches():
    yes, no = Asked(True), Asked(False)
    assert_each(yes, no)
    assert (yes.found, no.found) == ([True] * 3, [True] * 2)
    for asked in (yes, no):
        asked.found.clear()
        if asked:
            pass
        bool(asked)
        _ = (asked and 1) or 2
        if not asked:
            pass
        assert asked.found == [False] * 4


def test_nothing_is_asserted_without_a_frame():
    assert not is_asserted(None)


class Net(nn.Module):
    def __init__(self, limit=1e9):
        super().__init__()
        self.limit = limit
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)
        assert_finite_below(y, self.limit)
        return self.last(y.relu())


def test_asserts_of_values_are_reported_and_not_in_the_graph():
    model, x = Net(), torch.randn(3, 4)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert [(found.expression.split()[0], found.value) for found in gm.quant_report.forced] == [
        ("assert", True),
        ("assert", False),
    ]
    assert not gm.quant_report.leaves
    assert not [node for node in gm.graph.nodes if node.op == "call_function"]
    torch.testing.assert_close(gm(x), model(x))


def test_an_assert_that_fails_on_the_example_inputs_fails():
    with pytest.raises(TraceError, match="AssertionError"):
        prepare_by_platform(Net(limit=-1e9), "TSQAT", example_inputs=(torch.randn(3, 4),), check="off")
