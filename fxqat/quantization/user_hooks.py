"""Forward hooks that a user registered on a prepared model: which of them the exported file does not have.

The file has what the graph computes. A hook of a module that the graph calls as it is, is exported with this module; a
hook of the prepared model itself, of a layer that becomes operators, or of a container is not.

A hook object with the attribute ``fxqat_internal = True`` is fxqat's own: it changes no output and is not reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.embedding import QATEmbedding
from fxqat.nn.fused import FusedLayer
from fxqat.nn.qat import QATLayer
from fxqat.nn.recurrent import RecurrentLayer
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.utils.fx_graph import called_module
from fxqat.utils.torch_compat import forward_hooks


def lost_hooks(gm: QuantGraphModule) -> list[str]:
    """The user's forward hooks and forward pre-hooks that an export loses, ``"path: name of the hook"``."""
    return [f"{path or 'the model'}: {_name(hook)}" for path, _, _, hook in _lost(gm)]


def drop_hooks(gm: QuantGraphModule) -> None:
    """Remove, in place, the hooks that an export loses."""
    for _, hooks, key, _ in list(_lost(gm)):
        del hooks[key]


def _lost(gm: QuantGraphModule) -> Iterator[tuple[str, dict[int, Any], int, Any]]:
    """``(path of the module, its hooks, key, hook)`` of each hook."""
    becomes_operators = (QATLayer, QATEmbedding, RecurrentLayer, FakeQuantizeBase, FusedLayer)
    called = [(str(node.target), called_module(node)) for node in gm.graph.nodes if node.op == "call_module"]
    kept = {path for path, module in called if not isinstance(module, becomes_operators)}
    for path, module in gm.named_modules():
        if any(path == whole or path.startswith(f"{whole}.") for whole in kept):
            continue
        for hooks in forward_hooks(module):
            for key, hook in hooks.items():
                if not getattr(hook, "fxqat_internal", False):
                    yield path, hooks, key, hook


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
