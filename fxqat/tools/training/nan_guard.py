"""Training steps that are not finite: found, left out, and the layer in which they began named."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxqat.utils.fx_graph import module_path
from fxqat.utils.tensors import flatten_tensors
from fxqat.utils.torch_compat import unwrap
from fxqat.utils.train_eval_graph import graph_of_mode


class NaNGuard:
    """Leaves out training steps whose loss or gradients are NaN or infinite.

    A batch of NaN also ruins what a forward pass updates, such as the running statistics of BatchNorm: they are set
    back. Asking whether a step is finite waits for the device, once a step; a copy of all buffers is kept.

    Args:
        model: a prepared model, also wrapped by DDP or ``torch.compile``.

    Attributes:
        skipped: how many steps were left out so far.

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
            loss: what was differentiated, ``()``.
            inputs: what the model was called with; it is called again to find the layer.
            gradients: whether gradients have to be finite, too; False beside a ``GradScaler``, which looks at them
                itself.

        Returns:
            True for a finite step. After any other, on one rank or on all, the buffers are what they were before it, no
            parameter has a gradient, and a ``RuntimeWarning`` names the place where NaN or infinity first appears.
        """
        with torch.no_grad():
            if self._is_finite(loss, gradients):
                self._keep()
                return True
            self._restore()
            place = first_not_finite(self.gm, *inputs) or self._behind_the_model(loss)
            self._restore()
        self.gm.zero_grad(set_to_none=True)
        self.skipped += 1
        warnings.warn(
            f"Training step left out ({self.skipped} so far): NaN or infinity first appears in {place}. Look at this "
            "batch; if it happens again, lower the learning rate or leave that layer float.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False

    def _is_finite(self, loss: Tensor, gradients: bool) -> bool:
        """Whether loss and gradients are, on every rank."""
        found = [parameter.grad for parameter in self.gm.parameters() if parameter.grad is not None]
        total = loss.detach().float().clone()  # it is added up in place
        if gradients and found:
            total = total + torch.nn.utils.get_total_norm(found)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
        return bool(total.isfinite())

    def _keep(self) -> None:
        """Remember the buffers. Batch norm does not count its updates as versions of a tensor, so all are copied."""
        for name, buffer in self.gm.named_buffers():
            self._kept[name].copy_(buffer)

    def _restore(self) -> None:
        for name, buffer in self.gm.named_buffers():
            buffer.copy_(self._kept[name])

    def _behind_the_model(self, loss: Tensor) -> str:
        """Where it can be if what the model gives is finite."""
        for name, parameter in self.gm.named_parameters():
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                return f"the gradient of {name}: what the model gives is finite"
        if not bool(loss.isfinite()):
            return "the loss: what the model gives is finite"
        return "the norm of all gradients, each of which is finite, or on another rank"


@torch.no_grad()
def first_not_finite(model: nn.Module, *inputs: Any) -> str:
    """Where NaN first appears in a forward pass; without any, where infinity in the output comes from.

    The pass is in the mode that the model is in. Infinity that goes away again, as that of a mask does, does not count.

    Args:
        model: a prepared model, also wrapped.
        inputs: what it is called with. Buffers are updated as in any call.

    Returns:
        ``"layer1.0.conv1"`` and the like, or ``""`` if what the model gives is finite.
    """
    gm = unwrap(model)
    search = _Search(gm, graph=graph_of_mode(gm.graph, gm.training))  # type: ignore[arg-type]
    search.run(*inputs)
    return search.place


class _Search(fx.Interpreter):
    """Runs a model and remembers where values that are not finite come from."""

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
            self.place = self._name(n) + (f", computed from the infinity that {source} gives" if source else "")
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
        ruined = next((name for name, tensor in parameters if not bool(tensor.isfinite().all())), "")
        return f"{target}, whose {ruined} is not finite" if ruined else target
