"""The activation that reads the output of a layer, in the layer or after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from torch import Tensor, fx
from torch.nn import functional as F

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.qat import QATLayer
from fxqat.ops.families import GATED
from fxqat.ops.identify import identify
from fxqat.utils.fx_graph import called_module

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "gelu": F.gelu,
        "hardsigmoid": F.hardsigmoid,
        "hardswish": F.hardswish,
        "mish": F.mish,
        "relu": F.relu,
        "relu6": F.relu6,
        "sigmoid": F.sigmoid,
        "silu": F.silu,
        "tanh": F.tanh,
    }
)
"""By op name: those without parameters. GELU's approximation by tanh differs from GELU by .0005 at most."""


def activation_after(calls: Iterable[fx.Node]) -> Activation | None:
    """What reads the output of a layer in all its calls, also behind fake-quants, if that is one activation.

    Args:
        calls: the nodes that call one layer, in a prepared graph.

    Returns:
        The activation; None if there is none, or if something else reads the output, too.
    """
    found = {_of_call(node) for node in calls}
    return found.pop() if len(found) == 1 else None


def _of_call(node: fx.Node) -> Activation | None:
    layer = called_module(node)
    if isinstance(layer, QATLayer) and layer.activation is not None:
        return layer.activation
    readers = {reader: identify(reader).name for reader in _readers(node)}
    names = set(readers.values())
    if "mul" in names and len(readers) == 2:
        gate, product = sorted(readers, key=lambda reader: readers[reader] == "mul")
        name = GATED.get(readers[gate])
        return None if name is None or _readers(gate) != {product} else ACTIVATIONS[name]
    return ACTIVATIONS.get(names.pop()) if len(names) == 1 else None


def _readers(node: fx.Node) -> set[fx.Node]:
    """What reads a value, quantized or not."""
    users = [_readers(user) if isinstance(called_module(user), FakeQuantizeBase) else {user} for user in node.users]
    return set().union(*users)
