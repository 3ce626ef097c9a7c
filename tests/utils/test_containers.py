"""Saving and restoring what containers hold."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import pytest

from fxqat.utils.containers import content_of, restore_content


class FrozenDict(OrderedDict):
    """A configuration that nobody may change, as diffusers has it; it cannot be copied either."""

    def __init__(self, name: str, **values: Any) -> None:
        super().__init__()
        for key, value in values.items():
            OrderedDict.__setitem__(self, key, value)

    def __setitem__(self, key, value):
        raise RuntimeError("frozen")

    update = setdefault = pop = clear = copy = __setitem__


class LoudList(list):
    def append(self, item):
        raise RuntimeError("watched")

    clear = extend = append


@pytest.mark.parametrize(
    ("container", "change"),
    [
        ({"a": 1, "b": [2]}, lambda c: c.update(c=3)),
        (OrderedDict(a=1, b=2), lambda c: c.move_to_end("a")),
        (defaultdict(list, a=[1]), lambda c: c["b"]),
        ([1, 2, 3], lambda c: c.pop()),
        ({1, 2}, lambda c: c.add(3)),
        (FrozenDict("x", a=1, b=2), lambda c: OrderedDict.pop(c, "a")),
        (LoudList([1, 2]), lambda c: list.append(c, 3)),
    ],
)
def test_content_is_put_back_in_its_order(container, change):
    before = content_of(container)
    change(container)
    assert content_of(container) != before
    restore_content(container, before)
    assert content_of(container) == before
    assert list(container) == [item[0] if isinstance(container, dict) else item for item in before]


def test_what_did_not_change_is_not_touched():
    held = [1, 2]
    container = {"a": held}
    before = content_of(container)
    restore_content(container, before)
    assert container["a"] is held

    equal = {"a": [1, 2]}
    restore_content(equal, before)  # equal, but another object: a cache was filled again
    assert equal["a"] is held
