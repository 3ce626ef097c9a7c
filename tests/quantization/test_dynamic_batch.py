"""Outputs must follow an open batch size, and what does not is named."""

import numpy as np
import pytest
import torch

from fxqat.errors import ExportError
from fxqat.quantization.dynamic_batch import batch_size, check_batch, has_batch, twice
from fxqat.utils.node_meta import ForcedNumber

ROWS = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
DOUBLE = np.concatenate([ROWS, ROWS])
BATCH = ForcedNumber("size", 2, "model.py:7")
OTHER = ForcedNumber("size", 6, "model.py:9")
CHECK = ForcedNumber("gt", True, "model.py:8")


def test_inputs_without_a_batch_stay_as_they_are() -> None:
    scalar, x, mask = torch.tensor(0.5), torch.randn(2, 3), torch.ones(5, 5)
    assert batch_size((scalar, {"x": x}, mask)) == 2
    doubled = twice((scalar, {"x": x}, mask))
    assert doubled[0] is scalar
    assert torch.equal(doubled[1]["x"], torch.cat([x, x]))
    assert doubled[2] is mask
    assert not has_batch(scalar, 2)
    with pytest.raises(ExportError, match="every input is a scalar"):
        batch_size((scalar,))


@pytest.mark.parametrize("forced", [(), (CHECK,)])
def test_outputs_that_follow_the_batch_pass(forced: tuple[ForcedNumber, ...]) -> None:
    boxes = np.arange(8).reshape(8, 1)  # four boxes for each sample
    single = {"y": ROWS, "loss": np.float32(1.0), "boxes": boxes}
    double = single | {"y": DOUBLE, "boxes": np.concatenate([boxes, boxes])}
    assert check_batch(single, double, 2, forced) == ()


def test_an_output_with_the_rows_of_the_first_batch_names_the_line() -> None:
    with pytest.raises(ExportError, match=r"y with 2 rows for 4 samples.*2 at model\.py:7.*x\.shape\[0\]"):
        check_batch({"y": ROWS}, {"y": ROWS}, 2, (BATCH, CHECK))


def test_the_batch_size_as_a_number_in_the_graph_names_the_line() -> None:
    """``y / int(x.shape[0])``: rows and values look right, for the number is the same at every batch size."""
    with pytest.raises(ExportError, match=r"holds the number 2.*model\.py:7.*another batch size"):
        check_batch({"y": ROWS}, {"y": DOUBLE}, 2, (OTHER, BATCH))


def test_what_cannot_be_decided_is_told() -> None:
    table = np.ones((2, 3), np.float32)  # of as many rows as the batch, by chance
    (stuck,) = check_batch({"y": ROWS, "table": table}, {"y": DOUBLE, "table": table}, 2, ())
    assert "table has 2 rows for 2 and for 4 samples" in stuck
    (other,) = check_batch({"y": ROWS}, {"y": DOUBLE}, 2, (OTHER,))
    assert "6 at model.py:9" in other
    (mixed,) = check_batch({"y": ROWS}, {"y": DOUBLE[::-1]}, 2, ())
    assert "y mixes the samples" in mixed
    (votes,) = check_batch({"votes": np.array([1, 2])}, {"votes": np.array([3, 3, 3, 3])}, 2, ())
    assert "votes mixes the samples" in votes
