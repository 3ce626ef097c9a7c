"""A module that writes to its arguments is traced several times as if each time were the first."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fxqat import prepare_by_platform
from fxqat.errors import TraceError
from fxqat.tracing.written_arguments import WrittenArguments


class Cache:
    """What blocks keep of what they computed, in the attributes of an object and in its list."""

    def __init__(self):
        self.last = None
        self.kept = []

    def append(self, y):
        self.last = y
        self.kept.append(y)

    def values(self):
        return [*self.kept, self.last]


class Named(dict):
    def append(self, y):
        self[len(self)] = y


class Block(nn.Module):
    """Branches on its mode, after or before it writes to its argument."""

    def __init__(self, differs):
        super().__init__()
        self.layer, self.differs = nn.Linear(4, 4), differs

    def forward(self, x, kept):
        y = self.layer(x)
        if self.training and self.differs:
            y = y + 0.1
        kept.append(y)
        if self.training:
            y = y * 1.5
        return y.relu()


class Net(nn.Module):
    def __init__(self, make, blocks):
        super().__init__()
        self.make, self.blocks, self.head = make, nn.ModuleList(blocks), nn.Linear(4, 4)

    def forward(self, x):
        kept = self.make()
        for block in self.blocks:
            x = block(x, kept)
        values = kept if isinstance(kept, list) else list(kept.values())
        return self.head(x) + sum(values) * len(values)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("make", [list, Named, Cache])
def test_both_modes_find_the_arguments_as_they_were(make):
    model = Net(make, [Block(False), Block(False)])
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(X,))
    assert gm.quant_report.eval_only == ()
    for training in (True, False):
        torch.testing.assert_close(gm.train(training)(X), model.train(training)(X))


@pytest.mark.parametrize("make", [list, Cache])
def test_a_module_that_writes_something_else_in_training_follows_eval_mode(make):
    model = Net(make, [Block(False), Block(True)]).eval()
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(X,)).eval()
    assert gm.quant_report.eval_only == ("blocks.1",)
    torch.testing.assert_close(gm(X), model(X))


class Branches(Block):
    def forward(self, x, kept):
        y = super().forward(x, kept)
        return y * 2 if float(y.sum()) > 1e9 else y


class Calls(Block):
    """Fails in a function, which becomes a leaf."""

    def forward(self, x, kept):
        return super().forward(x, kept) * number(x)


def number(x):
    return torch.tensor(1.0 + (float(x.sum()) > 1e9))


def test_a_module_that_has_written_is_no_leaf_but_the_module_around_it():
    around = nn.Sequential(nn.Linear(4, 4), Net(list, [Block(False), Branches(False)]))
    gm = prepare_by_platform(around, "TSQAT", example_inputs=(X,))
    assert [leaf.path for leaf in gm.quant_report.leaves] == ["1"]
    torch.testing.assert_close(gm(X), around(X))
    with pytest.raises(TraceError, match=r"in module: blocks.1"):
        prepare_by_platform(around[1], "TSQAT", example_inputs=(X,))


def test_a_function_becomes_a_leaf_after_a_write():
    model = Net(list, [Calls(False)])
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(X,))
    assert [leaf.path.rpartition(".")[2] for leaf in gm.quant_report.leaves] == ["number"]
    torch.testing.assert_close(gm(X), model(X))


def test_what_arguments_hold_is_put_back():
    inner = [1, {2}]
    cache = Cache()
    given = (inner, {"a": cache, "b": inner}, defaultdict(list, x=[3]), SimpleNamespace(y=4))
    before = WrittenArguments.of(given)
    assert before.is_as(WrittenArguments.of(given))
    assert not before.restore()
    inner[1].add(5)
    cache.append(X)
    given[2]["z"].append(6)
    given[3].y += 1
    assert not before.is_as(WrittenArguments.of(given))
    assert before.restore()
    assert (inner, cache.last, cache.kept, dict(given[2]), given[3].y) == ([1, {2}], None, [], {"x": [3]}, 4)
    assert before.is_as(WrittenArguments.of(given))


def test_arguments_that_hold_themselves_or_cannot_be_compared():
    class Odd:
        def __eq__(self, other):
            raise RuntimeError

        __hash__ = None

    held = [Odd(), torch.ones(2)]
    held.append(held)
    before = WrittenArguments.of(held)
    assert not before.restore()
    held[1] = torch.ones(2)
    assert before.restore()
    assert held[2] is held
