"""BatchNorm re-estimation: after finetuning, the running statistics are measured anew, under quantization.

Source: Nagel et al. 2022 (arXiv:2203.11086), section 4.4: at low bit widths, weights that oscillate make the moving
averages lag behind the statistics that the network has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxqat.nn.fold import bn_factor
from fxqat.nn.qat import BN_TRAIN, QATLayer
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.utils.batches import read_batches
from fxqat.utils.contexts import eval_mode
from fxqat.utils.torch_compat import BatchNorm


@torch.no_grad()
def reestimate_batch_norm(gm: QuantGraphModule, batches: Iterable[Any]) -> int:
    """Set the running statistics to the mean over some batches, in place; the model is quantized as it is.

    While they are measured every BatchNorm normalizes with the statistics of the batch, and the folded weights keep the
    old ones. Per-channel scales of weights follow the new ones, so that the integers stay what they were trained to be
    (to the significant bits of a scale).

    Args:
        gm: a prepared model; its mode and switches stay as they are.
        batches: the model's inputs, of a size as in training.

    Returns:
        How many BatchNorms have new statistics.

    Raises:
        ConfigError: no batches.
    """
    inputs = read_batches(gm, batches, "reestimate_batch_norm")
    layers = [layer for layer in gm.modules() if isinstance(layer, QATLayer) and layer.bn is not None]
    norms = [bn for bn in gm.modules() if isinstance(bn, BatchNorm) and bn.running_mean is not None]
    sums: dict[BatchNorm, tuple[Any, Any, int]] = {}
    with eval_mode(gm), ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_with_live_statistics(layer))
        for bn in norms:
            stack.enter_context(_measuring(bn, sums))
        for batch in inputs:
            gm(*batch)
    old = {layer: bn_factor(layer.bn) for layer in layers if layer.bn is not None}
    for bn, (mean, variance, count) in sums.items():
        assert bn.running_mean is not None
        assert bn.running_var is not None
        bn.running_mean.copy_(mean / count)
        bn.running_var.copy_(variance / count)
    for layer, factor in old.items():
        _let_scale_follow(layer, factor)
    return len(sums)


@contextmanager
def _with_live_statistics(layer: QATLayer) -> Iterator[None]:
    """A layer runs its BatchNorm behind the convolution, as in training."""
    mode, layer.bn_mode = layer.bn_mode, BN_TRAIN
    layer.training = True
    try:
        yield
    finally:
        layer.bn_mode, layer.training = mode, False


@contextmanager
def _measuring(bn: BatchNorm, sums: dict[BatchNorm, tuple[Any, Any, int]]) -> Iterator[None]:
    """Add up the statistics of each batch; the BatchNorm normalizes with them and does not take note of them."""

    def measure(module: nn.Module, args: tuple[Any, ...]) -> None:
        dims = [d for d in range(args[0].dim()) if d != 1]
        variance, mean = torch.var_mean(args[0].double(), dims)
        mean_so_far, variance_so_far, count = sums.get(bn, (0.0, 0.0, 0))
        sums[bn] = mean_so_far + mean, variance_so_far + variance, count + 1

    momentum, counted = bn.momentum, None if bn.num_batches_tracked is None else bn.num_batches_tracked.clone()
    bn.momentum, bn.training = 0.0, True
    handle = bn.register_forward_pre_hook(measure)
    try:
        yield
    finally:
        handle.remove()
        bn.momentum, bn.training = momentum, False
        if counted is not None and bn.num_batches_tracked is not None:
            bn.num_batches_tracked.copy_(counted)


def _let_scale_follow(layer: QATLayer, old: Tensor) -> None:
    """Change the scales of a layer's weight by as much as its folded weight has changed."""
    quant = layer.weight_fake_quant
    if layer.bn is None or quant.scale.dim() == 0 or layer.op.groups > 1:
        return
    change = torch.nan_to_num((bn_factor(layer.bn) / old).abs(), nan=1.0, posinf=1.0)
    quant.set_qparams(quant.scale * change, quant.zero_point)
