"""Functions with a cache are called without it while a model is traced, and only then."""

import functools
import sys
import threading

import torch
from torch import nn

from fxqat import prepare_by_platform
from fxqat.tracing.cached_functions import LRU_CACHE, CachedFunctions
from fxqat.tracing.trace import trace
from tests.value_models import Base


def image():
    return torch.randn(2, 3, 8, 8)


@functools.lru_cache
def ramp(count):
    """A function of a size that is cached."""
    return torch.arange(count).float()


@functools.lru_cache
def untouched(count):
    """A function with a cache that no trace calls."""
    return torch.zeros(count)


class Cached(Base):
    def forward(self, x):
        return self.conv(x) + ramp(x.shape[-1])


def test_caches_of_functions_keep_no_proxies():
    ramp.cache_clear()
    model = Cached()
    expected = model(x := image())
    for _ in range(2):
        traced = trace(model, example_inputs=(x,))
        assert torch.equal(traced.gm(x), expected)
        assert type(ramp(8)) is torch.Tensor
        assert torch.equal(model(x), expected)


def test_caches_that_saw_no_proxy_keep_what_they_hold():
    untouched.cache_clear()
    held = untouched(8)
    trace(Cached(), example_inputs=(image(),))
    assert untouched(8) is held


@functools.lru_cache
def flat_sizes(sizes):
    """Sizes computed from sizes, as einops caches them."""
    return sizes[0] * sizes[1], sizes[2]


class Sizes(nn.Module):
    """Reshapes to cached sizes."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    @functools.lru_cache  # noqa: B019
    def length(self, sizes):
        return sizes[1]

    def forward(self, x):
        y = self.lin(x.reshape(flat_sizes(tuple(x.shape))))
        return y.reshape(-1, self.length(tuple(x.shape)), 4)


def test_sizes_stay_open_although_an_earlier_run_filled_a_cache():
    model, x, other = Sizes(), torch.randn(2, 3, 4), torch.randn(5, 7, 4)
    model(x)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert not gm.quant_report.forced
    torch.testing.assert_close(gm(other), model(other))
    assert flat_sizes.cache_info().currsize == 3
    assert type(flat_sizes) is type(vars(Sizes)["length"]) is LRU_CACHE


def test_those_that_are_defined_later_are_found(monkeypatch):
    functions, here = CachedFunctions(), sys.modules[__name__]
    before = {(owner, key) for owner, key, *_ in functions.find()}
    monkeypatch.setattr(here, "added", functools.lru_cache(len), raising=False)
    found = {(owner, key) for owner, key, *_ in functions.find()}
    assert found - before == {(here, "added")}
    assert {(here, "ramp"), (Sizes, "length")} <= found


def test_of_two_threads_the_last_one_puts_them_back():
    functions, cached = CachedFunctions(), ramp
    entered, leave = threading.Event(), threading.Event()

    def other():
        with functions.replaced(lambda: False):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with functions.replaced(lambda: False):
        thread.start()
        assert entered.wait(10)
    assert ramp is not cached
    assert ramp.__wrapped__ is cached
    assert torch.equal(ramp(3), cached(3))  # in a thread without a trace, the function as it is
    leave.set()
    thread.join()
    assert ramp is cached


def test_what_is_no_cached_function_any_more_stays(monkeypatch):
    functions, here = CachedFunctions(), sys.modules[__name__]
    functions.find()
    monkeypatch.setattr(here, "untouched", now := lambda count: count)
    with functions.replaced(lambda: False):
        assert untouched is now
    assert untouched is now
