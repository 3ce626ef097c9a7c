"""Sharing groups as a union of sets."""

import random

import pytest

from fxqat.custom_quantizer.sharing import Groups


def test_a_name_alone_stands_for_itself():
    groups = Groups()
    assert groups.find("a") == "a"
    assert groups.find("b") != groups.find("a")


@pytest.mark.parametrize(
    "pairs", [["ab", "bc", "cd"], ["cd", "ab", "bc"], ["da", "db", "dc"], ["ab", "ab", "ac", "bd"]], ids="-".join
)
def test_joining_is_transitive_in_any_order(pairs):
    groups = Groups()
    for first, second in pairs:
        groups.join(first, second)
    assert len({groups.find(name) for name in "abcd"}) == 1
    assert groups.find("e") == "e"
    assert groups.find("a") in "abcd"


@pytest.mark.parametrize("seed", range(5))
def test_groups_equal_connected_components(seed):
    rng = random.Random(seed)
    names = [str(i) for i in range(30)]
    pairs = [(rng.choice(names), rng.choice(names)) for _ in range(20)]
    groups, neighbours = Groups(), {name: {name} for name in names}
    for first, second in pairs:
        groups.join(first, second)
        union = neighbours[first] | neighbours[second]
        for name in union:
            neighbours[name] = union
    for name in names:
        assert {other for other in names if groups.find(other) == groups.find(name)} == neighbours[name]
    assert len({groups.find(name) for name in names}) == len({frozenset(group) for group in neighbours.values()})
