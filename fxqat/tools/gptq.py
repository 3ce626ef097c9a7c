"""GPTQ: the error of each rounded weight is made up for by the weights that are rounded behind it.

Source: Frantar et al. 2022 (arXiv:2210.17323), equations 2 and 3 and section 3.3. With ``X`` what a layer reads in the
float model and ``X'`` what it reads in the quantized one, columns being samples::

    H  = X' X'^T + lambda I                    (damped: lambda is a part of the mean of H's diagonal)
    W* = W + W (X - X') X'^T H^-1              (where |W X - W* X'|^2 is least)
    U^T U = H^-1, U upper triangular
    for each column j:  E = (w_j - quant(w_j)) / U_jj;   W_k = W_k - E U_jk  for k > j

Columns go by falling ``H_jj``. The second line makes it a GPTQ towards what the float model gives, from what the
quantized layers before leave; Li et al. 2025 (GPTAQ, arXiv:2504.02692) have the same aim column by column.
Where the biases are corrected afterwards, ``X`` and ``X'`` are taken without their means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fxqat.fake_quantize.functional import per_axis
from fxqat.nn.qat import QATLayer
from fxqat.nn.weighted import TRANSPOSED, WeightedOp
from fxqat.tools.segments import Segment, Values


@torch.no_grad()
def compensated(
    segment: Segment,
    path: str,
    reference: Segment,
    rounded: Sequence[Values],
    exact: Sequence[Values],
    damping: float,
    centred: bool,
) -> Tensor:
    """The folded weight of a layer that, rounded to the nearest, is what GPTQ gives.

    Args:
        segment: a calibrated one, in which the layers before this one are done.
        path: of the layer.
        reference: the same segment in the float model.
        rounded: what the segment reads in the quantized model, batch by batch.
        exact: what it reads in the float model.
        damping: what is added to the diagonal of ``H``, as a part of its mean.
        centred: whether the layer's bias is corrected afterwards.

    Returns:
        The weight of which each element is as it was when it was rounded, of the weight's shape.
    """
    layer = segment.layers[path]
    op, (weight, _) = layer.op, layer.folded()
    samples = _samples(segment, path, rounded, quantized=True)
    references = _samples(reference, path, exact, quantized=False)
    count = 0
    gram = cross = mean = shift = torch.zeros((), dtype=torch.float64)
    for x, wanted in zip(samples, references, strict=True):
        x, missing = columns(op, weight, x), columns(op, weight, wanted - x)
        count += x.shape[-1]
        gram = gram + (x @ x.mT).double()
        cross = cross + (missing @ x.mT).double()
        mean, shift = mean + x.double().sum(-1, keepdim=True), shift + missing.double().sum(-1, keepdim=True)
    if centred:
        gram, cross = gram - mean @ mean.mT / count, cross - shift @ mean.mT / count
    scale, zero_point = layer.weight_fake_quant.qparams()
    axis = layer.weight_fake_quant.axis
    step, zero = (rows(op, per_axis(t, weight.dim(), axis).expand_as(weight)) for t in (scale, zero_point))
    scheme = layer.weight_fake_quant.scheme
    found = gptq(
        *(rows(op, weight).double(), gram / count, cross / count, damping),
        *(step[..., :1].double(), zero[..., :1].double(), scheme.quant_min, scheme.quant_max),
    )
    return from_rows(op, found, weight.shape).to(weight.dtype)


def gptq(
    weight: Tensor,
    gram: Tensor,
    cross: Tensor,
    damping: float,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
) -> Tensor:
    """GPTQ of some matrices.

    Args:
        weight: ``(groups, rows, columns)``.
        gram: ``X' X'^T``, ``(groups, columns, columns)``.
        cross: ``(X - X') X'^T``, of the same shape.
        damping: as a part of the mean of the gram's diagonal.
        scale: ``(groups, rows, 1)``.
        zero_point: of the same shape.
        quant_min: the smallest integer.
        quant_max: the largest one.

    Returns:
        ``(groups, rows, columns)``: each weight as it was when it was rounded.
    """
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    damped = (damping * diagonal.mean(-1, keepdim=True)).clamp_min(torch.finfo(gram.dtype).tiny ** 0.5)
    gram = gram + torch.diag_embed(damped.expand_as(diagonal))
    weight = weight + torch.linalg.solve(gram, (weight @ cross).mT).mT
    order = diagonal.argsort(-1, descending=True)
    weight = weight.gather(-1, order[:, None, :].expand_as(weight))
    gram = gram.gather(-1, order[:, None, :].expand_as(gram)).gather(-2, order[:, :, None].expand_as(gram))
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(gram)), upper=True)
    for j in range(weight.shape[-1]):
        column = weight[..., j : j + 1]
        integers = torch.clamp(torch.round(column / scale) + zero_point, quant_min, quant_max)
        error = (column - (integers - zero_point) * scale) / upper[:, j : j + 1, j : j + 1]
        weight[..., j + 1 :] -= error * upper[:, j : j + 1, j + 1 :]
    return torch.empty_like(weight).scatter_(-1, order[:, None, :].expand_as(weight), weight)


def rows(op: WeightedOp, weight: Tensor) -> Tensor:
    """A weight as matrices, ``(groups, out_channels / groups, inputs of one output)``."""
    groups = int(op.arguments.get("groups", 1))
    if op.layer in TRANSPOSED:
        channels, inputs = weight.shape[1], weight.shape[0] // groups
        return weight.reshape(groups, inputs, channels, -1).transpose(1, 2).flatten(2)
    return weight.reshape(groups, weight.shape[0] // groups, -1)


def from_rows(op: WeightedOp, matrices: Tensor, shape: torch.Size) -> Tensor:
    """The weight of some matrices, of a shape but for its number of output channels."""
    groups, channels, _ = matrices.shape
    if op.layer in TRANSPOSED:
        return matrices.reshape(groups, channels, shape[0] // groups, *shape[2:]).transpose(1, 2).flatten(0, 1)
    return matrices.reshape(groups * channels, *shape[1:])


def columns(op: WeightedOp, weight: Tensor, x: Tensor) -> Tensor:
    """What a layer multiplies its weight by, ``(groups, inputs of one output, samples)``.

    It is what the layer gives with the identity for its matrices.
    """
    groups, _, inputs = rows(op, weight).shape
    identity = torch.eye(inputs, dtype=x.dtype, device=x.device).expand(groups, -1, -1)
    y = op(x, from_rows(op, identity, weight.shape), None)
    y = y.movedim(-1 if weight.dim() == 2 else 1 - weight.dim(), 0)
    found: Tensor = y.reshape(groups, inputs, -1)
    return found


def _samples(segment: Segment, path: str, batches: Sequence[Values], quantized: bool) -> Iterator[Tensor]:
    """What a layer reads, call by call."""
    with _recorded(segment.layers[path]) as inputs:
        for values in batches:
            segment.switch(quantized)
            segment(values)
            yield from inputs
            inputs.clear()


@contextmanager
def _recorded(layer: QATLayer) -> Iterator[list[Tensor]]:
    """The inputs of a layer, as it is called."""
    inputs: list[Tensor] = []

    def record(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.append(args[0])

    handle = layer.register_forward_pre_hook(record)
    try:
        yield inputs
    finally:
        handle.remove()
