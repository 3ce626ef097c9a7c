"""Weights and biases that a graph computes from parameters and buffers alone become parametrizations of their layers.

``F.conv2d(x, (self.weight - mean) / std)`` has a weight as ``nn.Conv2d`` has: in a file it is a constant. So has
``F.linear(x, self.weight, torch.cat([self.q_bias, zeros, self.v_bias]))`` a bias. The operations that compute them move
into a parametrization (``torch.nn.utils.parametrize``), which is trained as they were, and whose result is quantized as
a weight, or as a bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm

from fxqat.nn.parametrized import BIAS, WEIGHT, parametrized
from fxqat.nn.weighted import WEIGHTED_TYPES, WeightedLayer, weighted_layer, weighted_op
from fxqat.ops.identify import works_in_place
from fxqat.utils.contexts import eval_mode
from fxqat.utils.fx_graph import attribute_of, writes_state
from fxqat.utils.own_forward import type_of
from fxqat.utils.torch_compat import WEIGHT_NORM
from fxqat.utils.train_eval_graph import eval_or_train
from fxqat.utils.unused_names import unused_name
from fxqat.utils.weight_hooks import has_other_hooks, weight_hooks


@dataclass(frozen=True)
class Computed:
    """A tensor of a layer that is computed.

    Args:
        source: the module that computes it, and holds the other tensors that it reads.
        original: what is given to that module, a parameter, or else a buffer.
    """

    source: nn.Module
    original: Tensor

    def value(self) -> Tensor:
        """What is computed."""
        with torch.no_grad(), eval_mode(self.source):  # spectral norm iterates when it is read in training
            value: Tensor = self.source(self.original)
        return value


def parameter_values(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes whose values depend on parameters and buffers alone, which the graph does not write to.

    They are computed by functions, methods and parametrizations, and in the same way in training and in eval mode.

    Args:
        gm: a graph module.
    """
    written = {read.target for node in gm.graph.nodes if writes_state(node) for read in node.all_input_nodes}
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            is_value = node.target not in written and isinstance(attribute_of(gm, node), Tensor)
        else:
            is_value = _is_pure_call(node) and found.issuperset(node.all_input_nodes)
        if is_value:
            found.add(node)
    return found


def original_of(gm: fx.GraphModule, tensor: fx.Node, computed: set[fx.Node]) -> fx.Node | None:
    """The first parameter of floats that a tensor is computed from, else the first buffer; None if it depends on more.

    Args:
        gm: a graph module.
        tensor: the node of a weight or a bias.
        computed: the :func:`parameter_values`.
    """
    if tensor not in computed:
        return None
    tensors: dict[fx.Node, Any] = {n: attribute_of(gm, n) for n in _computation(tensor) if n.op == "get_attr"}
    floats = [node for node, tensor in tensors.items() if tensor.is_floating_point()]
    return min(floats, key=lambda node: not isinstance(tensors[node], nn.Parameter), default=None)


def computed_tensor(gm: fx.GraphModule, tensor: fx.Node, original: fx.Node) -> Computed:
    """What computes a weight or a bias as the graph does, from the same parameters.

    Args:
        gm: a graph module.
        tensor: its node.
        original: its :func:`original_of`.
    """
    return Computed(_source(gm, tensor, original), attribute_of(gm, original))  # type: ignore[arg-type]


def made_layer(
    kind: type[nn.Module],
    options: dict[str, Any],
    weight: nn.Parameter | Computed,
    bias: nn.Parameter | Computed | None,
) -> WeightedLayer:
    """A layer that has its tensors, or computes them.

    Args:
        kind: the type of the layer, one of ``fxqat.nn.weighted.WEIGHTED_TYPES``.
        options: arguments of its constructor, without channels and kernel size.
        weight: in the shape of that type, or what computes it.
        bias: ``(out,)``, what computes it, or None.
    """
    computed = {name: each for name, each in ((WEIGHT, weight), (BIAS, bias)) if isinstance(each, Computed)}
    stored: list[Any] = [nn.Parameter(t.value()) if isinstance(t, Computed) else t for t in (weight, bias)]
    layer = weighted_layer(kind, options, *stored)
    layer.eval()  # spectral norm iterates when it is read in training
    for name, found in computed.items():
        delattr(layer, name)
        if isinstance(found.original, nn.Parameter):
            setattr(layer, name, found.original)
        else:
            layer.register_buffer(name, found.original)
        parametrize.register_parametrization(layer, name, found.source, unsafe=True)
    return parametrized(layer) if computed else layer


def hooked_layer(layer: nn.Module) -> nn.Module:
    """A layer that computes its weight and bias as the hooks of torch on it, pruning or the old weight norm.

    It is the layer itself if hooks compute anything else, or otherwise: ``spectral_norm`` writes buffers in training.
    """
    hooks = weight_hooks(layer)
    if type_of(layer) not in WEIGHTED_TYPES or not hooks or has_other_hooks(layer):
        return layer
    tensors: dict[str, Any] = {WEIGHT: layer.weight, BIAS: layer.bias}
    tensors |= {name: _of_hook(layer, hook, name) for hook, name in hooks}
    if tensors.keys() > {WEIGHT, BIAS} or any(tensors[name] is None for _, name in hooks):
        return layer
    op = weighted_op(layer)  # type: ignore[arg-type]
    return made_layer(op.layer, op.options, tensors[WEIGHT], tensors[BIAS]).train(layer.training)


def _of_hook(layer: nn.Module, hook: Any, name: str) -> Computed | None:
    """What computes a tensor as a hook does; None for a hook that does more."""
    graph = fx.Graph()
    original = graph.placeholder("original")
    if isinstance(hook, WeightNorm):
        parameter, other = f"{name}_v", f"{name}_g"
        graph.output(graph.call_function(WEIGHT_NORM, (original, graph.get_attr(other), hook.dim)))
    elif isinstance(hook, BasePruningMethod):
        parameter, other = f"{name}_orig", f"{name}_mask"
        graph.output(graph.call_function(torch.mul, (original, graph.get_attr(other))))
    else:
        return None
    return Computed(fx.GraphModule({other: getattr(layer, other)}, graph), getattr(layer, parameter))


def _is_pure_call(node: fx.Node) -> bool:
    if node.op == "call_module":
        is_call = ".parametrizations." in f".{node.target}"
    else:
        is_call = node.op in ("call_function", "call_method") and node.target is not eval_or_train
    return is_call and not node.is_impure() and not works_in_place(node)


def _computation(tensor: fx.Node) -> list[fx.Node]:
    """A node and all that it is computed from, in order."""
    found = {tensor}
    for node in reversed(tensor.graph.nodes):
        if node in found:
            found.update(node.all_input_nodes)
    return [node for node in tensor.graph.nodes if node in found]


def _source(gm: fx.GraphModule, tensor: fx.Node, original: fx.Node) -> fx.GraphModule:
    """The module that computes a tensor from a parameter, and holds the other tensors that it reads."""
    graph = fx.Graph()
    held: dict[str, Any] = {}
    copies = {original: graph.placeholder("original")}
    for node in _computation(tensor):
        if node is original:
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {}
        if node.op in ("get_attr", "call_module"):
            name = unused_name(str(node.target).rpartition(".")[2], held)
            held[name], copies[node].target = attribute_of(gm, node), name
    graph.output(copies[tensor])
    return fx.GraphModule(held, graph)
