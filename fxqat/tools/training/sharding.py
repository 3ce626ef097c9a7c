"""Shard a prepared model over processes with torch's FSDP2 (``torch.distributed.fsdp.fully_shard``)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.qat import QATLayer
from fxqat.quantization.graph_module import QuantGraphModule, prepared_model


def shard(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> QuantGraphModule:
    """Shard the weights of a prepared model with FSDP2, in place; scales and zero points stay whole on every rank.

    FSDP2 shards no tensor without dimensions, as the scale of a whole tensor is. The parameters of the fake-quants
    (a few numbers for each tensor) are therefore replicated, and their gradients averaged over the ranks, as DDP
    does it. Each quantized layer is a unit of its own, whose weight is gathered when the layer runs.

    Calibrate before or afterwards; create the optimizer afterwards, with the replicated parameters in a group of their
    own, as torch's optimizers and ``clip_grad_norm_`` do not take sharded and other tensors in one group::

        sharded = [parameter for parameter in gm.parameters() if isinstance(parameter, DTensor)]
        scales = [parameter for parameter in gm.parameters() if not isinstance(parameter, DTensor)]
        optimizer = torch.optim.SGD([{"params": sharded}, {"params": scales}], lr=0.01)

    :func:`fxqat.save_checkpoint` and
    :func:`fxqat.load_checkpoint` work on the sharded model when every rank calls them. To export, load the checkpoint
    into a model that is not sharded.

    Args:
        model: a prepared model, the same on all ranks, not wrapped and not sharded.
        mesh: one dimension, as for ``fully_shard``; None for all ranks.
        options: further arguments of ``fully_shard``: ``mp_policy``, ``reshard_after_forward``, ``offload_policy``.

    Returns:
        The model.

    Raises:
        ConfigError: the model is not a prepared one, there is no process group, the mesh has several dimensions, or
            ``options`` has ``ignored_params``.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    gm = prepared_model(model, ConfigError)
    if gm is not model:
        raise ConfigError(f"shard: expected the prepared model itself, got it inside a {type(model).__name__}")
    if not dist.is_initialized():
        raise ConfigError("shard: there is no process group. Call torch.distributed.init_process_group first.")
    if mesh is not None and mesh.ndim != 1:
        raise ConfigError(f"shard: expected a mesh of one dimension, got {mesh.ndim}: {mesh}")
    if "ignored_params" in options:
        raise ConfigError("shard: ignored_params is set by shard itself, to the parameters of the fake-quants")
    quants = [module for module in gm.modules() if isinstance(module, FakeQuantizeBase)]
    whole = [parameter for quant in quants for parameter in quant.parameters(recurse=False)]
    group = dist.group.WORLD if mesh is None else mesh.get_group()
    for parameter in whole:
        dist.broadcast(parameter.data, group=group, group_src=0)
        parameter.register_post_accumulate_grad_hook(partial(_average_gradient, group))
    for layer in gm.modules():
        if isinstance(layer, QATLayer):
            fully_shard(layer, mesh=mesh, ignored_params=set(whole), **options)
    return fully_shard(gm, mesh=mesh, ignored_params=set(whole), **options)  # type: ignore[return-value]


def _average_gradient(group: dist.ProcessGroup | None, parameter: Tensor) -> None:
    """Replace a gradient by its mean over the ranks; what earlier steps accumulated is the mean already."""
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad, group=group)
    parameter.grad.div_(dist.get_world_size(group))
