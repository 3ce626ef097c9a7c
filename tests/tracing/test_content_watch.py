"""What a function's result, or its size, depends on: values of tensors, of constants only, or sizes."""

import pytest
import torch
from torch.nn import functional as F

from fxqat.tracing.content_watch import ContentWatch

CALLS = {
    "sum": (lambda x, n, m: x.sum(), (False, False)),
    "number": (lambda x, n, m: x.sum().item(), (True, False)),
    "padding by a constant": (lambda x, n, m: F.pad(x, (n, n)), (False, True)),
    "padding by a value": (lambda x, n, m: F.pad(x, (x[0].int(), n)), (True, True)),
    "nonzero": (lambda x, n, m: x.nonzero(), (True, False)),
    "nonzero of a constant": (lambda x, n, m: m.nonzero(), (False, True)),
    "index": (lambda x, n, m: x[torch.tensor([0, 2])], (False, False)),
    "mask": (lambda x, n, m: x[x > 0], (True, False)),
    "mask of a constant": (lambda x, n, m: x[m], (False, True)),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_sees_what_is_read(name):
    call, (content, constants) = CALLS[name]
    x, n, mask = torch.arange(4.0), torch.tensor(1), torch.tensor([True, False, True, True])
    with ContentWatch([id(n), id(mask)]) as watch:
        found = call(x, n, mask)
    assert (watch.read_content, watch.read_constants) == (content, constants)
    expected = call(x, n, mask)
    assert found == expected if isinstance(found, float) else torch.equal(found, expected)
