"""Standardize: one spelling per op, before anything is matched.

Cases:

1. A functional convolution or linear with a parameter as weight becomes the module, so that its weight is quantized as
   a weight. Calls that share parameters and arguments share the module. So does a functional lookup in a parameter.
   A weight or a bias that is computed from parameters alone is computed in the module
   (``fxqat.quantization.computed_weights``); any other bias is added after the module.
   Products with a parameter are linear, too (``fxqat.quantization.products``).
2. Functional dropout that gets ``self.training`` becomes a module of the module that calls it, so that it follows
   ``train()`` and ``eval()`` of both.
3. A module call that passes its input by keyword passes it by position.
4. Writes in place become new values (``fxqat.quantization.in_place``).
5. Arguments that tracing fixed to a value are removed from the signature.
6. Ops that give values and indices are described as tuples of values; the indices are not quantizable values.
7. ``nn.Identity``, which libraries use as a placeholder, is removed. Of a list of tensors that passes through it, the
   items are read directly: each is a value of its own.
8. An item of a list of tensors that is read several times is read once, so that one value has one quantizer and name.
9. ``x + 0``, as ``sum`` begins, and ``x * 1`` are ``x``, if the example inputs show that ``x`` is a tensor of floats.
10. ``torch.cat([torch.tensor([]), x])`` is ``x``: the caches of language models begin with an empty tensor.
11. ``torch.empty`` and its kin become ``torch.zeros``: what the memory happens to hold has no range.
12. Numbers that torch's exporter cannot write: of the bounds in ``clamp(x, 0, 0.5)`` both become floats, and a pool's
    ``[3]``, which torch takes for all axes, becomes ``3``.
13. Layers with parametrized weights become such layers of classes that can be pickled, and so do layers whose weights
    hooks of torch compute (``torch.nn.utils.prune``, the old ``weight_norm``).
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection
from itertools import chain
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.nn import functional as F

from fxqat.nn.parametrized import computed_tensors, parametrized
from fxqat.nn.product_layer import ProductLayer, linear_product
from fxqat.ops.families import IDENTITY, LOOKUP, WEIGHTED
from fxqat.ops.identify import gives_indices, identify
from fxqat.quantization.computed_weights import (
    Computed,
    computed_tensor,
    hooked_layer,
    made_layer,
    original_of,
    parameter_values,
)
from fxqat.quantization.in_place import no_writes_to_values
from fxqat.quantization.products import products_to_linear
from fxqat.utils.fx_graph import attribute_of, called_module, module_path, set_module, unique_name
from fxqat.utils.node_meta import MODE, SHAPE, SPELLING, VALUE, kind_of
from fxqat.utils.own_forward import type_of
from fxqat.utils.torch_compat import has_hooks
from fxqat.utils.train_eval_graph import follows_mode

LOOKUP_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    torch.embedding: ("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse"),
    **{f: tuple(inspect.signature(f).parameters) for f in (F.embedding, F.embedding_bag)},
}
"""The names of the arguments of the functions that look up rows."""


def standardize(gm: fx.GraphModule, fixed_arguments: Collection[str] = ()) -> fx.GraphModule:
    """Rewrite the graph in place and return the graph module (without generating its code again).

    Args:
        gm: a traced graph module.
        fixed_arguments: names of the arguments of forward that tracing fixed to a value.
    """
    _drop_fixed_arguments(gm.graph, fixed_arguments)  # case 5
    _remove_identities(gm)  # case 7
    _read_items_once(gm.graph)  # case 8
    no_writes_to_values(gm)  # case 4
    computed = parameter_values(gm)
    products_to_linear(gm, computed)  # case 1
    made: dict[tuple[Any, ...], str] = {}  # paths of the modules of case 1
    for node in list(gm.graph.nodes):
        _fill_with_zeros(node)  # case 11
        op = identify(node)
        if op.name == "clamp":
            _bounds_of_one_type(node)  # case 12
        elif op.name.endswith(("pool2d", "pool3d")):
            _number_for_all_axes(node)  # case 12
        if node.op == "call_function" and op.family == WEIGHTED and node not in computed:
            kind = ProductLayer if node.target is linear_product else op.modules[0]
            _weighted_to_module(gm, node, kind, made, computed)  # case 1
        elif node.op == "call_function" and op.family == LOOKUP:
            _lookup_to_module(gm, node, op.modules[0], made)  # case 1
        elif node.op == "call_function" and op.family == IDENTITY and op.modules:
            node = _dropout_to_module(gm, node, op.modules[0])  # case 2
        if node.op == "call_module" and not node.args:
            _input_by_position(node)  # case 3
        module: Any = called_module(node)
        if module is not None:
            layer = parametrized(module) if computed_tensors(module) else hooked_layer(module)
            if layer is not module:
                set_module(gm, str(node.target), layer)  # case 13
        if gives_indices(op):
            node.meta[VALUE] = "tuple"  # case 6
        elif op.name == "indices":
            node.meta[VALUE] = "tensor"  # case 6
    _remove_neutral_numbers(gm.graph)  # case 9
    _remove_empty_constants(gm.graph)  # case 10
    for node in reversed(list(gm.graph.nodes)):
        if node in computed and node.op != "get_attr" and not node.users:
            gm.graph.erase_node(node)  # a layer computes its weight itself
    _drop_unread_attributes(gm)
    gm.graph.lint()
    return gm


def _drop_fixed_arguments(graph: fx.Graph, names: Collection[str]) -> None:
    """Remove the placeholders of fixed arguments, and the nodes with which fx checks their values."""
    for node in list(graph.nodes):
        if node.op == "placeholder" and str(node.target).rpartition("_")[0] in names:
            unneeded = [node]
            for reader in unneeded:
                unneeded += [user for user in reader.users if user not in unneeded]
            for reader in reversed(unneeded):
                graph.erase_node(reader)


def _read_items_once(graph: fx.Graph) -> None:
    first: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.nodes):
        op = identify(node)
        if op.name == "getitem" and isinstance(node.args[1], int) and identify(node.all_input_nodes[0]).gives_tuple:
            read = first.setdefault((*node.args, node.meta.get(MODE)), node)
            if read is not node:
                node.replace_all_uses_with(read)
                graph.erase_node(node)


def _bound(node: fx.Node, names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of a call by name, both positional and keyword arguments."""
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _weighted_to_module(
    gm: fx.GraphModule, node: fx.Node, kind: type[nn.Module], made: dict[Any, str], computed: set[fx.Node]
) -> None:
    transposed = "Transpose" in kind.__name__
    if kind in (nn.Linear, ProductLayer):
        names: tuple[str, ...] = ()
    elif transposed:
        names = ("stride", "padding", "output_padding", "groups", "dilation")
    else:
        names = ("stride", "padding", "dilation", "groups")
    bound = _bound(node, ("input", "weight", "bias", *names))
    weight = _parameter(gm, bound["weight"])
    original = bound["weight"] if weight is not None else original_of(gm, bound["weight"], computed)
    if original is None:
        return  # a weight that depends on inputs is an activation; the backend's rules decide about it
    given = weight if weight is not None else computed_tensor(gm, bound["weight"], original)
    options = {name: bound[name] for name in names if name in bound}
    if any(isinstance(value, fx.Node) for value in options.values()):
        return
    values = given.value() if isinstance(given, Computed) else given
    channels = values.shape[1] * int(bound.get("groups", 1)) if transposed else values.shape[kind is ProductLayer]
    bias = _bias(gm, bound.get("bias"), computed, channels)
    added = bound.get("bias") if bias is None else None

    def make() -> nn.Module:
        return made_layer(kind, options, given, bias)

    computed_by = "" if weight is not None else bound["weight"].name
    added_by = bound["bias"].name if isinstance(bias, Computed) else "" if bias is None else str(bound["bias"].target)
    key = (computed_by, added_by, repr(sorted(options.items())))
    path = _module_of(gm, original, kind, key, made, make)
    with gm.graph.inserting_before(node):
        new = gm.graph.call_module(path, (bound["input"],))
    _replace(node, new)
    if added is not None:
        _add_bias(gm, new, added, int(kind.__name__[-2]) if names else 0)


def _bias(gm: fx.GraphModule, node: object, computed: set[fx.Node], channels: int) -> nn.Parameter | Computed | None:
    """The bias of a layer, ``(channels,)``; None if it has none, or if that must be added."""
    if not isinstance(node, fx.Node):
        return None
    bias: nn.Parameter | Computed | None = _parameter(gm, node)
    original = original_of(gm, node, computed) if bias is None else None
    if original is not None:
        bias = computed_tensor(gm, node, original)
    values = bias.value() if isinstance(bias, Computed) else bias
    return bias if values is not None and values.shape == (channels,) else None


def _lookup_to_module(gm: fx.GraphModule, node: fx.Node, kind: type[nn.Module], made: dict[Any, str]) -> None:
    bound = _bound(node, LOOKUP_ARGUMENTS[node.target])
    table, indices = _parameter(gm, bound["weight"]), bound.pop("input" if "input" in bound else "indices")
    if table is None:
        return
    weight = bound.pop("weight")
    if node.target is torch.embedding and bound.get("padding_idx", -1) < 0:
        bound["padding_idx"] = None
    called: dict[str, Any] = {name: bound.pop(name) for name in ("offsets", "per_sample_weights") if name in bound}
    if any(isinstance(value, fx.Node) for value in bound.values()):
        return
    key = (repr(sorted(bound.items())),)
    path = _module_of(gm, weight, kind, key, made, lambda: kind(*table.shape, _weight=table, **bound))
    gm.get_submodule(path).weight = table
    with gm.graph.inserting_before(node):
        new = gm.graph.call_module(path, (indices,), called)
    _replace(node, new)


def _module_of(
    gm: fx.GraphModule,
    weight: fx.Node,
    kind: type[nn.Module],
    key: tuple[str, ...],
    made: dict[Any, str],
    make: Callable[[], nn.Module],
) -> str:
    """The path of the module for all calls that share parameters and arguments, made at the first of them."""
    key = (str(weight.target), kind.__name__, *key)
    if key not in made:
        owner = str(weight.target).rpartition(".")[0]
        name = "linear" if kind is ProductLayer else kind.__name__.lower()
        made[key] = unique_name(gm, f"{owner}.{name}" if owner else name)
        gm.add_submodule(made[key], make().train(gm.get_submodule(owner).training))
    return made[key]


def _add_bias(gm: fx.GraphModule, node: fx.Node, bias: fx.Node, space: int) -> None:
    """Add a computed bias to the result of a layer whose result has ``space`` dimensions after the channels."""
    with gm.graph.inserting_after(node):
        shaped = gm.graph.call_method("reshape", (bias, (-1, *[1] * space))) if space else bias
        added = gm.graph.call_function(torch.add, (node, shaped))
        if space:
            added.prepend(shaped)
    added.meta = dict(node.meta)
    node.replace_all_uses_with(added, delete_user_cb=lambda user: user is not added)


def _dropout_to_module(gm: fx.GraphModule, node: fx.Node, kind: type[nn.Module]) -> fx.Node:
    bound = _bound(node, ("input", "p", "training", "inplace"))
    training, p = bound.get("training", True), bound.get("p", 0.5)
    known = VALUE in node.meta  # else it was traced without values, where self.training is False
    if isinstance(p, fx.Node) or not (follows_mode(training) or (training is False and not known)):
        return node  # the user chose dropout that is always on, or off
    owner = _holder_of(gm, node)
    path = unique_name(gm, f"{owner}.{kind.__name__.lower()}" if owner else kind.__name__.lower())
    gm.add_submodule(path, kind(p, bound.get("inplace", False)).train(gm.get_submodule(owner).training))
    with gm.graph.inserting_before(node):
        new = gm.graph.call_module(path, (bound["input"],))
    _replace(node, new)
    if isinstance(training, fx.Node) and not training.users:
        gm.graph.erase_node(training)
    return new


def _holder_of(gm: fx.GraphModule, node: fx.Node) -> str:
    """The path of the innermost module around a node that the graph module has; empty for itself."""
    paths = {path for path, _ in gm.named_modules(remove_duplicate=False)}
    path = module_path(node)
    while path not in paths:
        path = path.rpartition(".")[0]
    return path


def _input_by_position(node: fx.Node) -> None:
    names = list(inspect.signature(called_module(node).forward).parameters)  # type: ignore[union-attr]
    if names and names[0] in node.kwargs:
        rest = dict(node.kwargs)
        node.args = (rest.pop(names[0]),)
        node.kwargs = rest


def _remove_identities(gm: fx.GraphModule) -> None:
    for node in list(gm.graph.nodes):
        module = called_module(node)
        if type_of(module) is nn.Identity and module is not None and not has_hooks(module):
            _replace_by_argument(node, next(chain(node.args, node.kwargs.values())))


NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}
"""By the name of an op, the number as its second operand that changes no value."""


def _remove_neutral_numbers(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        op = identify(node)
        if op.name not in NEUTRAL or node.kwargs or len(node.args) != 2 or node.meta.get(VALUE) != "float":
            continue
        first, second = node.args
        if op.name in ("add", "mul") and not isinstance(first, fx.Node):
            first, second = second, first
        is_number = type(second) in (int, float) and second == NEUTRAL[op.name]
        if is_number and isinstance(first, fx.Node) and first.meta.get(VALUE) == "float":
            _replace_by_argument(node, first)


FILLED: dict[Any, Any] = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like, "new_empty": "new_zeros"}
"""For each function and method that gives memory as it is, the one that fills it."""


def _fill_with_zeros(node: fx.Node) -> None:
    if node.target not in FILLED or node.op not in ("call_function", "call_method"):
        return
    node.target = FILLED[node.target]
    if node.target is torch.zeros and (layout := node.kwargs.get("memory_format")) is not None:
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "memory_format"}
        with node.graph.inserting_after(node):
            arranged = node.graph.call_method("contiguous", (node,), {"memory_format": layout})
        arranged.meta = dict(node.meta)
        node.replace_all_uses_with(arranged, delete_user_cb=lambda user: user is not arranged)


def _bounds_of_one_type(node: fx.Node) -> None:
    first, *bounds = node.args or (None,)
    if any(isinstance(bound, float) for bound in (*bounds, *node.kwargs.values())):
        node.args = (first, *(float(bound) if isinstance(bound, int) else bound for bound in bounds))
        node.kwargs = {name: float(b) if isinstance(b, int) else b for name, b in node.kwargs.items()}


def _number_for_all_axes(node: fx.Node) -> None:
    if node.op == "call_function":
        alone = (list, tuple)
        node.args = tuple(a[0] if isinstance(a, alone) and len(a) == 1 else a for a in node.args)
        node.kwargs = {name: a[0] if isinstance(a, alone) and len(a) == 1 else a for name, a in node.kwargs.items()}
    elif (pool := called_module(node)) is not None:
        for name in ("kernel_size", "stride", "padding", "dilation"):
            if isinstance(given := getattr(pool, name, None), (list, tuple)) and len(given) == 1:
                setattr(pool, name, given[0])


EMPTY_CONSTANTS = (torch.tensor, torch.zeros, "new_tensor", "new_zeros")
"""What makes a tensor of a size that is written in the code."""


def _remove_empty_constants(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        given = node.args[0] if node.args else node.kwargs.get("tensors")
        if node.target not in (torch.cat, torch.concat, torch.concatenate) or not isinstance(given, (list, tuple)):
            continue
        kept = [operand for operand in given if not _is_empty_constant(operand)]
        if not kept or len(kept) == len(given) or any(kind_of(operand) != kind_of(node) for operand in kept):
            continue
        if len(kept) == 1:
            _replace_by_argument(node, kept[0])
        else:
            named = {name: value for name, value in node.kwargs.items() if name != "tensors"}
            node.args, node.kwargs = (kept, *node.args[1:]), named
        for operand in dict.fromkeys(given):
            if operand not in kept and not operand.users:
                graph.erase_node(operand)


def _is_empty_constant(operand: Any) -> bool:
    """Whether an operand is a tensor of the shape (0,), whatever the inputs of the model are."""
    if not isinstance(operand, fx.Node) or operand.target not in EMPTY_CONSTANTS or operand.meta.get(SHAPE) != (0,):
        return False
    sizes = operand.args[1:] if operand.op == "call_method" else operand.args
    return bool(sizes) and not any(isinstance(size, fx.Node) for size in sizes)


def _replace_by_argument(node: fx.Node, value: Any) -> None:
    """Let the readers of a node read a value instead. It may be a list of nodes: its items are then read directly."""

    def instead(argument: Any) -> Any:
        return value if argument is node else argument

    for reader in list(node.users):
        reads_item = reader.target is operator.getitem and reader.all_input_nodes == [node]
        if reads_item and not isinstance(value, fx.Node):
            _replace_by_argument(reader, value[reader.args[1]])
        else:
            args, kwargs = map_aggregate((reader.args, reader.kwargs), instead)
            reader.args, reader.kwargs = args, kwargs
    node.graph.erase_node(node)


def _replace(old: fx.Node, new: fx.Node) -> None:
    new.meta = {SPELLING: old.target} | dict(old.meta)
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def _parameter(gm: fx.GraphModule, value: Any) -> nn.Parameter | None:
    if not (isinstance(value, fx.Node) and value.op == "get_attr"):
        return None
    tensor = attribute_of(gm, value)
    return tensor if isinstance(tensor, nn.Parameter) else None


def _drop_unread_attributes(gm: fx.GraphModule) -> None:
    """Erase unread ``get_attr`` nodes, and parameters that only they read, so that no tensor has two names."""
    attributes = [node for node in gm.graph.nodes if node.op == "get_attr"]
    read = {str(node.target) for node in attributes if node.users}
    for node in attributes:
        if node.users:
            continue
        gm.graph.erase_node(node)
        owner, _, name = str(node.target).rpartition(".")
        module = gm.get_submodule(owner)
        ours = module is gm or type(module) is nn.Module  # a container made by fx
        if str(node.target) not in read and ours and hasattr(module, name):
            delattr(module, name)
