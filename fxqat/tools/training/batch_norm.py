"""BatchNorm re-estimation: measure the running statistics again after finetuning, on the quantized model.

Source: Nagel et al. 2022 (arXiv:2203.11086), section 4.4: at low bit widths, oscillating weights make the moving
averages differ from the statistics of the final network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxqat.errors import CalibrationError, ConfigError
from fxqat.nn.fold import bn_factor
from fxqat.nn.qat import BN_TRAIN, QATLayer
from fxqat.quantization.graph_module import prepared_model
from fxqat.utils.batches import read_batches
from fxqat.utils.contexts import eval_mode, hooked
from fxqat.utils.torch_compat import BatchNorm


@torch.no_grad()
def reestimate_batch_norm(gm: nn.Module, batches: Iterable[Any]) -> int:
    """Set the running statistics of every BatchNorm to their mean over some batches, in place.

    During the measurement every BatchNorm normalizes with the statistics of the batch, and the folded weights keep the
    old ones. Per-channel weight scales are changed with the statistics, so that the trained integers stay the same (up
    to the precision of a scale).

    Args:
        gm: a prepared model; its mode and switches are unchanged.
        batches: batches of inputs, see :func:`fxqat.calibrate`, of the batch size of the training.

    Returns:
        The number of BatchNorms with new statistics.

    Raises:
        CalibrationError: NaN or infinity reaches a BatchNorm.
        ConfigError: there are no batches, or one does not fit the model.
    """
    gm = prepared_model(gm, ConfigError)
    inputs = read_batches(gm, batches, "reestimate_batch_norm")
    layers = [layer for layer in gm.modules() if isinstance(layer, QATLayer) and layer.bn is not None]
    norms = [bn for bn in gm.modules() if isinstance(bn, BatchNorm) and bn.running_mean is not None]
    sums: dict[nn.Module, tuple[Any, Any, int]] = {}

    def measure(bn: nn.Module, args: tuple[Tensor, ...]) -> None:
        dims = [d for d in range(args[0].dim()) if d != 1]
        variance, mean = torch.var_mean(args[0].double(), dims)
        mean_so_far, variance_so_far, count = sums.get(bn, (0.0, 0.0, 0))
        sums[bn] = mean_so_far + mean, variance_so_far + variance, count + 1

    with eval_mode(gm), ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_unfolded(layer))
        for bn in norms:
            stack.enter_context(_batch_statistics(bn))
        stack.enter_context(hooked(norms, measure, pre=True))
        for batch in inputs:
            gm(*batch)
    failed = [path for path, bn in gm.named_modules() if bn in sums and not sum(sums[bn][:2]).isfinite().all()]
    if failed:
        raise CalibrationError(
            f"reestimate_batch_norm: NaN or infinity reaches {len(failed)} BatchNorms, first {failed[0]}; nothing is "
            "changed. Look for NaN in the batches, and for overflow in the model"
        )
    old = {layer: bn_factor(layer.bn) for layer in layers if layer.bn is not None}
    for bn in norms:
        if bn in sums:  # it was called
            mean, variance, count = sums[bn]
            assert bn.running_mean is not None
            assert bn.running_var is not None
            bn.running_mean.copy_(mean / count)
            bn.running_var.copy_(variance / count)
    for layer, factor in old.items():
        _rescale_(layer, factor)
    return len(sums)


@contextmanager
def _unfolded(layer: QATLayer) -> Iterator[None]:
    """A layer runs its BatchNorm after the convolution, as in training."""
    mode, layer.bn_mode = layer.bn_mode, BN_TRAIN
    layer.training = True
    try:
        yield
    finally:
        layer.bn_mode, layer.training = mode, False


@contextmanager
def _batch_statistics(bn: BatchNorm) -> Iterator[None]:
    """A BatchNorm normalizes with the statistics of the batch, and its running statistics do not change."""
    momentum, kept = bn.momentum, [(buffer, buffer.clone()) for buffer in bn.buffers()]  # 0 times NaN is NaN
    bn.momentum, bn.training = 0.0, True
    try:
        yield
    finally:
        bn.momentum, bn.training = momentum, False
        for buffer, before in kept:
            buffer.copy_(before)


def _rescale_(layer: QATLayer, old: Tensor) -> None:
    """Multiply the scales of a layer's weight by the change of its folding factor."""
    quant = layer.weight_fake_quant
    if layer.bn is None or quant.scale.dim() == 0 or layer.op.groups > 1:
        return
    change = torch.nan_to_num((bn_factor(layer.bn) / old).abs(), nan=1.0, posinf=1.0)
    quant.set_qparams(quant.scale * quant.per_scale(change), quant.zero_point)
