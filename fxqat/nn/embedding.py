"""Tables of embeddings as quantized layers: rows of integers, of which only those that are looked up become reals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.kept_weights import deployed
from fxqat.nn.quantized_layer import QuantizedLayer
from fxqat.utils.tensors import widened
from fxqat.utils.torch_compat import tensor_version

Table = nn.Embedding | nn.EmbeddingBag

TABLES: Mapping[type[nn.Module], tuple[Callable[..., Tensor], tuple[str, ...]]] = MappingProxyType(
    {
        nn.Embedding: (F.embedding, ("padding_idx", "scale_grad_by_freq")),
        nn.EmbeddingBag: (F.embedding_bag, ("padding_idx", "scale_grad_by_freq", "mode", "include_last_offset")),
    }
)
"""For each type of table (not its subclasses), its function and the options that it takes."""

AXIS = 0
"""The axis of a table along which a scale per channel is one per row."""


def why_table_stays_float(table: Table) -> str:
    """Why a table cannot be quantized; empty if it can."""
    if table.max_norm is not None:
        return "max_norm rescales the rows of the table in each run"
    if table.sparse:
        return "sparse=True: its gradient has the rows that were read only, and that of the scales needs the others too"
    return ""


class QATEmbedding(QuantizedLayer):
    """A table of embeddings that simulates its integers.

    Args:
        table: the float layer; the QAT layer uses its parameter, not a copy of it.
        weight_fake_quant: fake-quant of the table, with a scale for each row or one for all.
    """

    weight: nn.Parameter

    def __init__(self, table: Table, weight_fake_quant: FakeQuantizeBase) -> None:
        super().__init__()
        self.layer = type(table)
        self.layer_type = type(table).__name__
        self.function, names = TABLES[type(table)]
        self.options: dict[str, Any] = {name: getattr(table, name) for name in names}
        self.weight = table.weight  # type: ignore[assignment]  # torch declares parameters as tensors
        self.weight_fake_quant = weight_fake_quant
        self.training = table.training

    def forward(self, indices: Tensor, *rest: Tensor | None, **options: Tensor | None) -> Tensor:
        """Look rows up.

        Args:
            indices: integers, of any shape that the table takes.
            rest: for an EmbeddingBag ``offsets`` and ``per_sample_weights``, by position.
            options: the same by name.
        """
        quant, weight = self.weight_fake_quant, self.weight
        quant.observe_changed(weight, (tensor_version(weight),))
        rows: Tensor = weight
        if quant.fake_quant_enabled:
            [rows] = deployed(self, (quant,), self._deployed_tensors)
        return self.function(indices, rows, **self.call_options(rest, options))

    def _deployed_tensors(self) -> tuple[Tensor]:
        self.weight_fake_quant.follow(self.weight)
        return (self.weight_fake_quant.quantize(self.weight),)

    def call_options(self, rest: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of the function in a call of the layer."""
        return self.options | dict(zip(("offsets", "per_sample_weights"), rest, strict=False)) | dict(options)

    def folded(self) -> tuple[Tensor, None]:
        """The table, not quantized, and no bias; a table in half precision is float32."""
        return widened(self.weight), None

    def weight_values(self) -> tuple[Tensor]:
        """The table."""
        return (self.folded()[0],)

    def weight_tensors(self) -> list[list[Tensor]]:
        """The table as it is."""
        return [[self.weight]]

    def float_layer(self) -> Table:
        """The plain layer; it shares its parameter with this layer."""
        rows, features = self.weight.shape
        layer: Any = self.layer(rows, features, device="meta", **self.options)
        layer.weight = self.weight
        return layer.train(self.training)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """The float layer's type and the table's shape, for printing."""
        return f"{self.layer_type}, weight={tuple(self.weight.shape)}"


def embedding_bag(
    indices: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    mode: str = "mean",
    padding_idx: int | None = None,
    include_last_offset: bool = False,
) -> Tensor:
    """``F.embedding_bag`` of bags of one size as a lookup and a reduction; other bags as torch has them.

    Args:
        indices: ``(bags, size)``, or ``(indices,)`` with ``offsets``.
        weight: ``(rows, features)``.
        offsets: ``(bags,)``, where each bag begins.
        per_sample_weights: of the shape of ``indices``.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        padding_idx: the row that does not count.
        include_last_offset: whether ``offsets`` has the end of the last bag.

    Returns:
        ``(bags, features)``.

    Example:
        >>> table = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
        >>> embedding_bag(torch.tensor([[0, 1], [1, 1]]), table)
        tensor([[2.0000, 3.5000],
                [3.0000, 5.0000]])
    """
    if indices.dim() == 1:
        return F.embedding_bag(
            *(indices, weight, offsets),
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
        )
    rows = F.embedding(indices, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return rows.amax(1) if mode == "max" else rows.sum(1) if mode == "sum" else rows.mean(1)
    counts = (indices != padding_idx).unsqueeze(-1)
    number = counts.to(rows.dtype).sum(1)
    if mode == "max":
        largest = rows.masked_fill(~counts, torch.finfo(rows.dtype).min).amax(1)
        return torch.where(number > 0, largest, 0.0)
    total = rows.masked_fill(~counts, 0.0).sum(1)
    return total if mode == "sum" else total / number.clamp(min=1.0)
