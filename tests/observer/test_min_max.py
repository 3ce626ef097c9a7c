"""MinMax: the smallest and the largest value seen."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxqat.observer.min_max import MinMaxObserver
from fxqat.scheme import QuantizeScheme

BATCHES = st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5), min_size=1, max_size=6)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(BATCHES)
def test_range_is_that_of_all_batches_together_in_any_order(batches: list[list[float]]) -> None:
    forward, backward = MinMaxObserver(QuantizeScheme()), MinMaxObserver(QuantizeScheme())
    for batch, other in zip(batches, reversed(batches), strict=True):
        forward(torch.tensor(batch))
        backward(torch.tensor(other))
    everything = [value for batch in batches for value in batch]
    assert (forward.min_val.item(), forward.max_val.item()) == (min(everything), max(everything))
    assert torch.equal(forward.min_val, backward.min_val)
    assert torch.equal(forward.max_val, backward.max_val)


def test_channels_grow_one_by_one() -> None:
    observer = MinMaxObserver(QuantizeScheme(per_channel=True), 0, 2)
    observer(torch.tensor([[1.0, 2.0], [-1.0, 0.0]]))
    observer(torch.tensor([[0.0, 1.5], [-3.0, 4.0]]))
    assert observer.min_val.tolist() == [0.0, -3.0]
    assert observer.max_val.tolist() == [2.0, 4.0]
