"""The record of living copies holds no copy alive and does not travel."""

import copy
import pickle

from fxqat.utils.living_copies import LivingCopies, own_copy
from tests.models import prepared


class Thing:
    """Something that a weak reference may refer to."""


def test_it_forgets_what_nobody_uses() -> None:
    copies, kept = LivingCopies(), Thing()
    copies.found.add(kept)
    copies.found.add(Thing())
    assert list(copies.found) == [kept]
    assert not copies.switched


def test_it_is_new_in_a_copy() -> None:
    copies, kept = LivingCopies(), Thing()
    copies.found.add(kept)
    copies.switched = True
    for new in (copy.deepcopy(copies), pickle.loads(pickle.dumps(copies))):
        assert list(new.found) == []
        assert not new.switched


def test_a_copy_of_our_own_counts_as_switched() -> None:
    gm = prepared("conv_bn_relu")
    ours, users = own_copy(gm), copy.deepcopy(gm)
    assert set(gm.living_copies.found) == {ours, users}
    assert [ours.living_copies.switched, users.living_copies.switched, gm.living_copies.switched] == [
        True,
        False,
        False,
    ]
    assert own_copy([1, 2]) == [1, 2]
