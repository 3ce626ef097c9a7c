"""Functions that cannot be traced, in a separate module, since they are replaced in their module.

Asserts are here, too, since pytest rewrites those of the tests.
"""

import torch


class Config:
    """A configuration object, which a graph cannot hold."""

    def __init__(self, threshold=0.0, factor=2.0):
        self.threshold = threshold
        self.factor = factor


def gate(x, config=None, *, factor=1.0):
    """Branches on tensor values."""
    config = config or Config()
    if x.sum() > config.threshold:  # the line to name
        return x * config.factor * factor
    return -x


def outer(x):
    """A function around it that can be traced."""
    return gate(x.relu()) + 1


def keep_positive(boxes, scores):
    """Several results, of which the second depends on data."""
    keep = torch.nonzero(scores > 0).flatten()
    if len(keep) == 0:
        return boxes, scores
    return boxes * scores.sum(), scores


class Decoder:
    """An object that is no module."""

    def __init__(self, scale=2.0):
        self.scale = scale

    def decode(self, x):
        """Branches on tensor values."""
        return x * self.scale if x.max() > 0 else x


@torch.fx.wrap
def shifted(x, by):
    """A leaf."""
    return x + by


@torch.fx.wrap
def add_to_tail(x, y):
    """A leaf that works in place and returns None."""
    x[:, 1:] += y[:, 1:]


@torch.fx.wrap
def scores(x, weight):
    """Computes a layer, as torchvision's attention over windows; torch.fx alone could not follow the branch."""
    return torch.nn.functional.linear(x, weight) if x.shape[0] > 1 else x


@torch.fx.wrap
def scores_if_positive(x, weight):
    """The same, branching on tensor values."""
    return torch.nn.functional.linear(x, weight) if x.sum() > 0 else x


def run_if_positive(block, x):
    """Branches on tensor values and calls a module."""
    return block(x) if x.sum() > 0 else 2 * block(x)


def assert_each(yes, no):
    """Three asserts that ask ``yes`` and two that ask ``no``."""
    assert yes
    assert yes, "with a message"
    assert not no
    assert yes and not no  # noqa: PT018


def assert_finite_below(y, limit):
    """Two asserts of tensor values."""
    assert torch.isfinite(y).all(), f"values {y}"
    assert not (y > limit).any()
