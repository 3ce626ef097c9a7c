"""A model must follow open sizes, and what does not is named."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.export import Dim

from fxqat.errors import ExportError
from fxqat.quantization.dynamic_sizes import OpenSizes, check_sizes, open_sizes
from fxqat.utils.node_meta import ForcedNumber

ROWS = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
DOUBLE = np.concatenate([ROWS, ROWS])
BATCH = ForcedNumber("size", 2, "model.py:7")
OTHER = ForcedNumber("size", 6, "model.py:9")
CHECK = ForcedNumber("gt", True, "model.py:8")


def batch_of_2(*forced: ForcedNumber) -> OpenSizes:
    sizes = open_sizes((torch.ones(2, 6),), ["x"], dynamic_batch=True, forced=forced)
    assert sizes is not None
    return sizes


def test_inputs_without_a_batch_stay_as_they_are() -> None:
    inputs = scalar, x, mask = torch.tensor(0.5), torch.randn(2, 3), torch.ones(5, 5)
    sizes = open_sizes(inputs, ["s", "x", "mask"], dynamic_batch=True)
    assert sizes is not None
    assert (sizes.batch, sizes.only_batch) == (2, True)
    doubled = sizes.second_inputs(inputs)
    assert doubled[0] is scalar
    assert torch.equal(doubled[1], torch.cat([x, x]))
    assert doubled[2] is mask
    assert open_sizes(inputs, ["s", "x", "mask"]) is None
    with pytest.raises(ExportError, match="every input is a scalar"):
        open_sizes((scalar,), ["s"], dynamic_batch=True)


@pytest.mark.parametrize(
    ("dim", "second"),
    [
        ("h", 24),
        (Dim("h"), 24),
        (Dim("h", max=16), 6),
        (Dim("h", min=8, max=16), 16),
        (Dim("h", min=7, max=12), 7),
        (4 * Dim("h"), 24),
        (4 * Dim("h", max=5), 20),
        (Dim("h", max=5) + 8, 10),
        (Dim.DYNAMIC, 24),
        (Dim.DYNAMIC(max=16), 6),
    ],
    ids=str,
)
def test_the_second_size_keeps_to_the_bounds(dim: Any, second: int) -> None:
    x = torch.arange(2 * 12).reshape(2, 12)
    sizes = open_sizes(({"a": x},), ["x"], {"x": {"a": {-1: dim}}})
    assert sizes is not None
    found = sizes.second_inputs(({"a": x},))[0]["a"]
    assert torch.equal(found, torch.cat([x, x], 1)[:, :second])
    assert sizes.shapes == ({"a": {1: dim}},)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"z": {0: "b"}}, "no input 'z'; did you mean '.'. Known: x, y"),
        ({"x": {4: "b"}}, r"entry of x, of shape \(2, 6\)"),
        ({"x": ["b"]}, "a sequence of 2 entries"),
        ({"x": {0: 3.5}}, r"x\[0\], of size 2, must be a name"),
        ({"x": {0: 3}}, r"x\[0\], of size 2, must be a name"),
        ({"x": {0: "n", 1: "n"}}, r"'n' is 2 in x\[0\] and 6 in x\[1\]"),
        ({"x": {0: 4 * Dim("b")}}, r"x\[0\] must be .*4\*b.*, and is 2"),
        ({"x": {0: Dim("b", min=1, max=2)}}, "has no other size than 2: leave it fixed"),
        ([None, None, None], "an entry for each of the 2 inputs"),
        ({"y": {0: "b"}}, "y has 1 items"),
    ],
)
def test_dynamic_shapes_that_do_not_fit_are_refused(shapes: Any, message: str) -> None:
    inputs = (torch.ones(2, 6), (torch.ones(2, 6),))
    with pytest.raises(ExportError, match=message):
        open_sizes(inputs, ["x", "y"], shapes)


@pytest.mark.parametrize("forced", [(), (CHECK,)])
def test_outputs_that_follow_the_batch_pass(forced: tuple[ForcedNumber, ...]) -> None:
    boxes = np.arange(8).reshape(8, 1)  # four boxes for each sample
    single = {"y": ROWS, "loss": np.float32(1.0), "boxes": boxes}
    double = single | {"y": DOUBLE, "boxes": np.concatenate([boxes, boxes])}
    assert check_sizes(batch_of_2(*forced), single, double) == ()


def test_an_output_with_the_rows_of_the_first_batch_names_the_line() -> None:
    with pytest.raises(ExportError, match=r"y with 2 rows for 4 samples.*2 at model\.py:7.*x\.shape\[0\]"):
        check_sizes(batch_of_2(BATCH, CHECK), {"y": ROWS}, {"y": ROWS})


def test_an_open_size_as_a_number_in_the_graph_names_the_line() -> None:
    """``y / int(x.shape[0])``: rows and values look right, for the number is the same at every size."""
    with pytest.raises(ExportError, match=r"holds the number 2.*model\.py:7.*another size"):
        check_sizes(batch_of_2(OTHER, BATCH), {"y": ROWS}, {"y": DOUBLE})
    prepared_with = replace(batch_of_2(OTHER), before=frozenset({6}))
    with pytest.raises(ExportError, match=r"holds the number 6.*model\.py:9"):
        check_sizes(prepared_with, {"y": ROWS}, {"y": DOUBLE})


def test_what_cannot_be_decided_is_told() -> None:
    table = np.ones((2, 3), np.float32)  # of as many rows as the batch, by chance
    (stuck,) = check_sizes(batch_of_2(), {"y": ROWS, "table": table}, {"y": DOUBLE, "table": table})
    assert "table has 2 rows for 2 and for 4 samples" in stuck
    (other,) = check_sizes(batch_of_2(OTHER), {"y": ROWS}, {"y": DOUBLE})
    assert "6 at model.py:9" in other
    (mixed,) = check_sizes(batch_of_2(), {"y": ROWS}, {"y": DOUBLE[::-1]})
    assert "y mixes the samples" in mixed
    (votes,) = check_sizes(batch_of_2(), {"votes": np.array([1, 2])}, {"votes": np.array([3, 3, 3, 3])})
    assert "votes mixes the samples" in votes
