"""Models that 8 bits damage, each at a node that is known, with their inputs."""

import torch
from torch import nn


class Phases(nn.Module):
    """The cosine and sine of large phases, as in a rotary position embedding."""

    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x, position):
        phase = position[..., None] * torch.linspace(1, 0.01, 16)
        cos, sin = torch.cos(phase), torch.sin(phase)
        a, b = self.q(x).chunk(2, -1)
        return self.o(torch.cat([a * cos - b * sin, a * sin + b * cos], -1))


class BestScores(nn.Module):
    """The rows with the best of many scores."""

    def __init__(self):
        super().__init__()
        self.row, self.score, self.head = nn.Linear(16, 16), nn.Linear(16, 1), nn.Linear(16, 4)

    def forward(self, x):
        rows = self.row(x).relu()
        _, best = torch.topk(self.score(rows).squeeze(-1).sigmoid(), 30, 1)
        return self.head(torch.gather(rows, 1, best[..., None].expand(-1, -1, 16))), best


class Tangent(nn.Module):
    """A hyperbolic tangent written by hand."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        y = self.first(x).exp()
        return self.last((y - 1) / (y + 1))


class TwoConvs(nn.Module):
    """Two convolutions."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return self.last(self.first(x))


class Root(nn.Module):
    """The root of a matrix that has none once it is rounded."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)
        nn.init.eye_(self.fc.weight)

    def forward(self, x):
        return torch.linalg.cholesky(self.fc(x))

    @staticmethod
    def inputs():
        """A matrix that has a root."""
        return torch.tensor([[1.0, 0.97], [0.97, 0.941]])


def outlier():
    """Images in which one value is a thousand times the deviation of the others."""
    x = torch.randn(4, 3, 16, 16)
    x[0, 0, 3, 3] = 1000.0
    return x


def damaged(name):
    """The model in eval mode, its inputs, and the nodes that are damaged."""
    torch.manual_seed(0)
    if name == "phases":
        return Phases().eval(), (torch.randn(2, 256, 32), torch.arange(256.0).expand(2, 256)), {"cos", "sin"}
    if name == "best scores":
        return BestScores().eval(), (torch.randn(4, 400, 16),), {"topk"}
    if name == "tangent":
        return Tangent().eval(), (torch.randn(64, 16) * 4,), {"truediv"}
    if name == "outlier":
        return TwoConvs().eval(), (outlier(),), {"x"}
    return TwoConvs().eval(), (torch.zeros(4, 3, 16, 16),), {"x"}


FORCED = {"best scores": [{"match": {"node": "topk"}, "activation": {"bit": 8}}]}
"""Overrides that quantize the node that is damaged, where a backend might not."""

DAMAGED = ("phases", "best scores", "tangent", "outlier", "zeros")
