"""Tensors on the meta device: they have a shape and no values."""

from __future__ import annotations

from torch import nn

from fxqat.errors import FxqatError

SHOWN = 4
"""How many names of tensors an error lists."""


def require_values(model: nn.Module, error: type[FxqatError]) -> None:
    """Check that the parameters and buffers of a prepared model have values.

    A model on the meta device can be prepared, which gives the report; nothing else can be done with it.

    Raises:
        error: some are on the meta device.
    """
    names = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise error(
            f"the tensors {', '.join(names[:SHOWN])}{more} of the model are on the meta device, without values: load "
            "the weights into the float model (model.to_empty(device='cpu') makes room for them), and prepare that one"
        )
