"""Kinds of values, as nodes describe them."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import fx, nn

from fxqat.tracing.trace import trace
from fxqat.utils.node_meta import (
    INFINITE_INPUT,
    VALUE,
    FloatLeaf,
    ForcedNumber,
    describe,
    holds_infinity,
    kind_of,
)

FLOAT = torch.zeros(2)
INTEGER = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (FLOAT, "float"),
        (FLOAT.half(), "float"),
        (INTEGER, "tensor"),
        (FLOAT > 0, "tensor"),
        (FLOAT.double(), "float64"),
        (FLOAT.to(torch.complex64), "complex"),
        (FLOAT.to(torch.complex128), "complex"),
        ((FLOAT, FLOAT), "tuple"),
        ([FLOAT], "tuple"),
        ((FLOAT, INTEGER), "object"),
        ((FLOAT, 1), "object"),
        ((1, (2, "a")), "plain"),
        ((), "plain"),
        (torch.Size([1, 2]), "plain"),
        (3, "plain"),
        (None, "plain"),
        (torch.float32, "plain"),
        (torch.device("cpu"), "plain"),
        (slice(1, 2), "plain"),
        ({"a": FLOAT}, "object"),
        (object(), "object"),
    ],
)
def test_kinds(value, kind):
    assert describe(value) == kind
    same = ("float64", "complex", "plain")
    assert describe([value]) == (kind if kind in same else "tuple" if kind == "float" else "object")


def test_nodes_know_the_kind_of_their_value():
    class Net(nn.Module):
        def forward(self, x):
            a, _ = x.chunk(2)
            return a.view(x.size(0) // 2, -1), a.argmax(), a > 0

    gm = trace(Net(), example_inputs=(torch.randn(4, 3),)).gm
    kinds = {node.name: kind_of(node) for node in gm.graph.nodes}
    assert kinds["x"] == "float"
    assert kinds["chunk"] == "tuple"
    assert kinds["size"] == kinds["floordiv"] == "plain"
    assert kinds["view"] == "float"
    assert kinds["argmax"] == kinds["gt"] == "tensor"


def test_without_values_nothing_is_known():
    graph = fx.Graph()
    node = graph.placeholder("x")
    assert kind_of(node) is None
    node.meta[VALUE] = "float"
    assert kind_of(node) == "float"
    node.meta[VALUE] = 3
    assert kind_of(node) is None


@pytest.mark.parametrize("record", [ForcedNumber("size", 4, "a.py:1"), FloatLeaf("body", "why", "a.py:1")])
def test_records_are_frozen(record):
    name = next(iter(vars(record)))
    with pytest.raises(FrozenInstanceError):
        setattr(record, name, None)
    assert record == type(record)(**vars(record))


@pytest.mark.parametrize(
    ("value", "constant", "given"),
    [
        (torch.tensor([0.0, -float("inf")]), True, True),
        (torch.tensor([0.0, float("inf")]), True, True),
        (torch.tensor([0.0, torch.finfo(torch.float32).min]), True, True),
        (torch.tensor([0.0, -1e9]), True, True),
        (torch.tensor([0.0, -1e4]), True, False),
        (torch.tensor([0.0, 1e9]), False, False),
        (torch.tensor([0.0, float("nan")]), False, False),
        (torch.tensor([0, -(2**40)]), False, False),
        (torch.zeros(2, device="meta"), False, False),
        (torch.tensor([0.0, -float("inf")], dtype=torch.float64), True, True),
        (torch.zeros(2).to(torch.float8_e4m3fn), False, False),
        (torch.zeros(2, 2).to_sparse(), False, False),
        (torch.zeros(0), False, False),
        (-1e9, False, False),
    ],
)
def test_what_stands_for_infinity(value, constant, given):
    assert holds_infinity(value) is constant
    assert holds_infinity(value, INFINITE_INPUT) is given
