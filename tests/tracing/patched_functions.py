"""Functions that cannot be traced, in a module of their own: they are called through it."""

import torch


class Config:
    """Something that cannot stand in a graph."""

    def __init__(self, threshold=0.0, factor=2.0):
        self.threshold = threshold
        self.factor = factor


def gate(x, config=None, *, factor=1.0):
    """Takes a way that depends on data."""
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
        """Takes a way that depends on data."""
        return x * self.scale if x.max() > 0 else x


@torch.fx.wrap
def shifted(x, by):
    """A user's leaf."""
    return x + by


@torch.fx.wrap
def add_to_tail(x, y):
    """A user's leaf that works in place and gives nothing."""
    x[:, 1:] += y[:, 1:]
