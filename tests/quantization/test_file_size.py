"""The tensors of the file are known before the export."""

import torch
from torch import nn

from fxqat import prepare_by_platform
from fxqat.quantization.file_size import float_bytes, stored_tensors


class Tied(nn.Module):
    """An embedding of 1000 floats, a linear layer of its 1000 integers, and 100 integers with 10 floats of bias."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(100, 10)
        self.hidden = nn.Linear(10, 10)
        self.unread = nn.Linear(1000, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.hidden(self.emb(tokens)), self.emb.weight)


def test_of_a_computed_weight_the_file_has_the_integers() -> None:
    model = nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(10, 10, bias=False)) for _ in range(3)))
    tensors = list(stored_tensors(prepare_by_platform(model)))
    assert [tensor.numel() for tensor, bits in tensors if bits == 8] == [100] * 3
    assert not [tensor for tensor, bits in tensors if bits is None]


def test_what_is_in_the_file_is_found() -> None:
    tensors = list(stored_tensors(prepare_by_platform(Tied(), example_inputs=(torch.zeros(2, 3, dtype=torch.long),))))
    assert float_bytes(tensor for tensor, bits in tensors if bits is None) == 40
    assert sorted(tensor.numel() for tensor, bits in tensors if bits == 8) == [100, 1000]
