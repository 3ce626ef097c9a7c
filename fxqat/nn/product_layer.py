"""The product of a value and a weight, ``x @ weight + bias``, as a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight + bias``.

    Args:
        x: ``(..., in_features)``.
        weight: ``(in_features, out_features)``.
        bias: ``(out_features,)`` or None.

    Example:
        >>> linear_product(torch.ones(1, 2), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.ones(3))
        tensor([[ 6.,  8., 10.]])
    """
    if bias is None:
        return torch.matmul(x, weight)
    return torch.addmm(bias, x, weight) if x.dim() == 2 else torch.matmul(x, weight) + bias


class ProductLayer(nn.Module):
    """A linear layer whose weight is ``(in_features, out_features)``, such as GPT-2's ``Conv1D``.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: whether it has a bias, ``(out_features,)``.
        device: where its parameters are made; as ``torch.empty`` makes them.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device: str | None = None) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(in_features, out_features, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight + bias``."""
        return linear_product(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """The sizes, for printing."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
