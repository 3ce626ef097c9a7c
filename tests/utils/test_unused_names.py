from __future__ import annotations

from itertools import islice

from fxqat.utils.unused_names import numbered, unused_name


def test_the_first_name_that_is_not_taken() -> None:
    assert unused_name("conv", set()) == "conv"
    assert unused_name("conv", {"conv_1", "convolution"}) == "conv"
    assert unused_name("conv", {"conv"}) == "conv_1"
    assert unused_name("conv", ["conv", "conv_1", "conv_3"]) == "conv_2"
    assert unused_name("conv_1", {"conv_1"}) == "conv_1_1"
    assert unused_name("", {"", None}) == "_1"


def test_names_count_up_without_end() -> None:
    assert list(islice(numbered("a"), 3)) == ["a", "a_1", "a_2"]
    assert list(islice(numbered("a"), 1000, 1001)) == ["a_1000"]
