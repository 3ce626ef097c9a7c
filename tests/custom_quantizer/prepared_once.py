"""The prepared toy models that several tests only read."""

from functools import cache

from torch import nn

from tests.models import prepared


@cache
def prepared_once(name: str, backend: str) -> nn.Module:
    """A toy model prepared for a backend, the same object each time: do not change it."""
    return prepared(name, backend)
