"""Skip training steps with NaN or infinity, and name the layer where they first appear."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxqat.errors import ConfigError
from fxqat.utils.flags import check_flags
from fxqat.utils.fx_graph import module_path
from fxqat.utils.tensors import flatten_tensors
from fxqat.utils.torch_compat import unwrap
from fxqat.utils.train_eval_graph import graph_of_mode


class NaNGuard:
    """Skips training steps whose loss or gradients are NaN or infinite.

    A batch with NaN also corrupts the buffers that a forward pass updates, such as the running statistics of BatchNorm:
    they are restored. The check synchronizes with the device once per step, and a copy of all buffers is kept.

    Args:
        model: a prepared model, also wrapped by DDP or ``torch.compile``.

    Attributes:
        skipped: number of steps skipped so far.

    Example:
        >>> from fxqat import prepare_by_platform
        >>> gm = prepare_by_platform(nn.Linear(4, 2), "TSQAT").train()
        >>> guard, x = NaNGuard(gm), torch.ones(3, 4)
        >>> loss = gm(x).square().sum()
        >>> loss.backward()
        >>> guard.accepts(loss, x)  # then optimizer.step()
        True
    """

    def __init__(self, model: nn.Module) -> None:
        self.gm = unwrap(model)
        self.skipped = 0
        self._kept = {name: buffer.detach().clone() for name, buffer in self.gm.named_buffers()}

    def accepts(self, loss: Tensor, *inputs: Any, gradients: bool = True) -> bool:
        """Whether the optimizer may take this step; call it after ``backward``.

        Args:
            loss: the loss, ``()``.
            inputs: the model's inputs; after a step that is not finite the model is called again to find the layer.
            gradients: whether to check the gradients as well; False with a ``GradScaler``, which checks them itself.

        Returns:
            True if the step is finite. If it is not, on one rank or on all, the buffers are restored, all gradients are
            None, and a ``RuntimeWarning`` names the place where NaN or infinity first appears.

        Raises:
            ConfigError: ``gradients`` is no bool.
        """
        check_flags(ConfigError, "NaNGuard.accepts", gradients=gradients)
        with torch.no_grad():
            if self._is_finite(loss, gradients):
                self._keep()
                return True
            self._restore()
            place = first_not_finite(self.gm, *inputs) or self._place_after_model(loss)
            self._restore()
        self.gm.zero_grad(set_to_none=True)
        self.skipped += 1
        warnings.warn(
            f"Training step skipped ({self.skipped} so far): NaN or infinity first appears in {place}. Check this "
            "batch; if it happens again, lower the learning rate or leave that layer float.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False

    def _is_finite(self, loss: Tensor, gradients: bool) -> bool:
        """Whether loss and gradients are finite on every rank."""
        found = [parameter.grad for parameter in self.gm.parameters() if parameter.grad is not None]
        total = loss.detach().float().clone()  # it is added up in place
        if gradients and found:
            total = total + torch.nn.utils.get_total_norm(found)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
        return bool(total.isfinite())

    def _keep(self) -> None:
        """Copy all buffers: BatchNorm's updates do not change a tensor's version, so no copy can be saved."""
        for name, buffer in self.gm.named_buffers():
            self._kept[name].copy_(buffer)

    def _restore(self) -> None:
        for name, buffer in self.gm.named_buffers():
            buffer.copy_(self._kept[name])

    def _place_after_model(self, loss: Tensor) -> str:
        """Where NaN or infinity appears if the model's output is finite."""
        for name, parameter in self.gm.named_parameters():
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                return f"the gradient of {name}: the model's output is finite"
        if not bool(loss.isfinite()):
            return "the loss: the model's output is finite"
        return "the norm of all gradients (each is finite), or on another rank"


@torch.no_grad()
def first_not_finite(model: nn.Module, *inputs: Any) -> str:
    """Where NaN first appears in a forward pass; if it does not, where infinity in the output first appears.

    The model runs in its current mode. Infinity that does not reach the output, as that of a mask, does not count.

    Args:
        model: a prepared model, also wrapped.
        inputs: the model's inputs. Buffers are updated as in any call.

    Returns:
        For example ``"layer1.0.conv1"``; ``""`` if the output is finite.
    """
    gm = unwrap(model)
    search = _Search(gm, graph=graph_of_mode(gm.graph, gm.training))  # type: ignore[arg-type]
    search.run(*inputs)
    return search.place


class _Search(fx.Interpreter):
    """Runs a graph and records where NaN and infinity first appear."""

    place = ""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.infinite: dict[fx.Node, str] = {}
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if self.place:
            return result
        tensors = [tensor for tensor in flatten_tensors(result) if tensor.is_floating_point()]
        source = next((self.infinite[node] for node in n.all_input_nodes if node in self.infinite), "")
        if any(bool(tensor.isnan().any()) for tensor in tensors):
            self.place = self._name(n) + (f", computed from infinity in {source}" if source else "")
        elif any(bool(tensor.isinf().any()) for tensor in tensors):
            self.infinite[n] = source or self._name(n)
            if n.op == "output":
                self.place = source
        return result

    def _name(self, node: fx.Node) -> str:
        target = str(node.target)
        if node.op in ("placeholder", "get_attr"):
            return f"the model's input {target}" if node.op == "placeholder" else target
        if node.op != "call_module":
            path = module_path(node)
            return f"{node.name} of {path}" if path else node.name
        parameters = self.fetch_attr(target).named_parameters()
        broken = next((name for name, tensor in parameters if not bool(tensor.isfinite().all())), "")
        return f"{target}, whose {broken} is not finite" if broken else target
