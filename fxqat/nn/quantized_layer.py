"""What layers with fake-quants of weights have in common: weighted layers, tables of embeddings, recurrent layers."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.kept_weights import KeptWeights


class QuantizedWeight(NamedTuple):
    """A weight of a layer.

    Args:
        name: one of the layer's ``weight_names``; in the file it follows the path of the layer.
        quant: its fake-quant, the layer's attribute ``<name>_fake_quant``.
        values: what is rounded, with gradients: with BatchNorm folded in, of a recurrent layer in the layout of ONNX.
    """

    name: str
    quant: FakeQuantizeBase
    values: Tensor


class QuantizedLayer(nn.Module):
    """A layer with fake-quants of its weights.

    Attributes:
        kept_weights: the weights that are rounded once for several forward passes, None if each pass rounds them.
    """

    weight_names: ClassVar[tuple[str, ...]] = ("weight",)
    kept_weights: KeptWeights | None = None

    @abstractmethod
    def weight_values(self) -> tuple[Tensor, ...]:
        """What is rounded, see :class:`QuantizedWeight`, for each name."""

    @abstractmethod
    def weight_tensors(self) -> list[list[Tensor]]:
        """For each name the tensors that hold the weight: one, of a recurrent layer one for each direction."""

    def weight_fake_quants(self) -> list[FakeQuantizeBase]:
        """The fake-quants of the weights, for each name."""
        return [getattr(self, f"{name}_fake_quant") for name in self.weight_names]

    def quantized_weights(self) -> list[QuantizedWeight]:
        """The weights."""
        parts = zip(self.weight_names, self.weight_fake_quants(), self.weight_values(), strict=True)
        return [QuantizedWeight(*part) for part in parts]
