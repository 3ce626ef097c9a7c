"""Every torch name that is private or differs between versions, and nothing else."""

from __future__ import annotations

from torch import Tensor, nn

BatchNorm = nn.modules.batchnorm._BatchNorm
"""The common base of BatchNorm1d, 2d and 3d."""


def tensor_version(tensor: Tensor) -> tuple[int, int]:
    """Identity and in-place version of a tensor: equal as long as nothing wrote to it."""
    return id(tensor), tensor._version


def keep_local_under_ddp(model: nn.Module, names: list[str]) -> None:
    """Tell DistributedDataParallel not to overwrite these buffers with rank 0's before each forward."""
    model._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP / DataParallel and ``torch.compile`` wrappers."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model
