"""Fold constants: what the graph computes from parameters, buffers and constants alone.

Torch's exporter does not know the values of tensors. A model that keeps sizes, factors or indices in buffers
(``self.factors.tolist()``) needs them as numbers:

1. a number, or a list of numbers, is written into the arguments of its readers,
2. so is an integer tensor without dimensions that is part of an index or a shape (``x[:, self.start : self.end]``).

If such a tensor is computed from sizes, too (the padding of EnCodec, from sizes, buffers and ``torch.ceil``), and no
size is open in the file, the sizes are those of the example inputs.

3. A tensor that parameters or buffers determine (the position biases that an MLP computes from a grid) is computed
   here, if it is not larger than what the exporter folds itself: that decides for each operation by the sizes of its
   operands, and the device would compute the others for each input. What only repeats values, as a table that is read
   at an index, is left to the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from fxqat.ops.families import IDENTITY, PASS_THROUGH
from fxqat.ops.identify import identify, is_stateless_layer, works_in_place
from fxqat.utils.fx_graph import attribute_of, called_module, node_inputs, unique_name, writes_state
from fxqat.utils.node_meta import SHAPE, kind_of

TAKE_NUMBERS = ("getitem", "reshape", "expand", "repeat", "select", "split", "permute", "transpose", "pad", "roll")
"""The ops whose arguments after the first are indices or sizes."""

LARGEST = 512 * 512
"""Elements of the largest tensor that is stored, as in onnxscript's folding of constants."""

CONSTANTS = (torch.tensor, torch.as_tensor, torch.asarray, torch.arange, torch.zeros, torch.ones, torch.full)
"""The functions without operands whose results are the same in each call."""


def fold_constants(gm: fx.GraphModule, inputs: tuple[Any, ...] | None = None) -> None:
    """Fold such numbers, in place.

    Args:
        gm: a graph module whose parameters and buffers no longer change, except by the graph itself.
        inputs: inputs whose sizes the file takes; None if a size is open.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        values = _constants(gm, {})
        if inputs is not None and any(_reads_unknown_number(node, values) for node in gm.graph.nodes):
            sizes = _Sizes(gm)
            sizes.run(*inputs)
            values = _constants(gm, sizes.found)
    for node in list(gm.graph.nodes):
        if node not in values:
            _write_numbers(node, values)
    _store_tensors(gm, values)
    for node in reversed(values):
        if not node.users:
            gm.graph.erase_node(node)


def _store_tensors(gm: fx.GraphModule, values: dict[fx.Node, Any]) -> None:
    """Read tensors that are computed from parameters and buffers from new buffers."""
    foldable = _foldable(values)
    computed: set[fx.Node] = set()  # constants that the file computes
    for node in reversed(values):
        readers = [user for user in node.users if user not in values or user in computed]
        if node.op == "get_attr" or not readers:
            continue
        if node not in foldable:
            computed.add(node)
            continue
        name = unique_name(gm, node.name)
        gm.register_buffer(name, values[node].clone(memory_format=torch.contiguous_format), persistent=False)
        with gm.graph.inserting_before(node):
            stored = gm.graph.get_attr(name)
        stored.meta = dict(node.meta)
        for reader in readers:
            reader.replace_input_with(node, stored)


def _foldable(values: Mapping[fx.Node, Any]) -> set[fx.Node]:
    """The tensors that a parameter or a buffer reaches, and that are not too large."""
    reached: set[fx.Node] = set()
    limits: dict[fx.Node, int] = {}
    for node, value in values.items():
        read = node.all_input_nodes
        if node.op in ("get_attr", "call_module") or not reached.isdisjoint(read):
            reached.add(node)
        moves = identify(node).family in (PASS_THROUGH, IDENTITY)
        size = value.numel() if isinstance(value, Tensor) else LARGEST
        limits[node] = limits[read[0]] if moves and read else min(size, LARGEST)
    return {node for node in reached if type(values[node]) is Tensor and values[node].numel() <= limits[node]}


class _Sizes(fx.Interpreter):
    """Runs a graph and keeps the sizes that it reads, in ``found``."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.found: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        result = super().run_node(n)
        if identify(n).name == "size" and _is_number(result):
            self.found[n] = result
        return result


def _reads_unknown_number(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    """Whether an index or a shape has a part that is an integer tensor without dimensions and not among ``values``."""
    if identify(node).name not in TAKE_NUMBERS:
        return False
    read = node_inputs((node.args[1:], node.kwargs))
    return any(each not in values and each.meta.get(SHAPE) == () and kind_of(each) == "tensor" for each in read)


def _constants(gm: fx.GraphModule, sizes: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
    """The values that are computed from parameters, buffers and these sizes alone, in the order of the graph."""
    written = {read.target for node in gm.graph.nodes if writes_state(node) for read in node.all_input_nodes}
    values: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node in sizes:
            values[node] = sizes[node]
        elif node.op == "get_attr":
            value = attribute_of(gm, node)
            if isinstance(value, Tensor) and node.target not in written:
                values[node] = value
        elif _is_pure_call(node) and all(read in values for read in node.all_input_nodes):
            values[node] = _computed(node, values)
    return values


def _is_pure_call(node: fx.Node) -> bool:
    makes_constant = (
        node.op == "call_function" and node.target in CONSTANTS and not any(map(works_in_place, node.users))
    )
    if node.op == "call_module":
        return is_stateless_layer(node)
    computes = node.op in ("call_function", "call_method") and (bool(node.all_input_nodes) or makes_constant)
    return computes and not node.is_impure()


def _computed(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """The value of a call of constants, which are not changed."""
    given = {
        read: values[read].clone() if isinstance(values[read], Tensor) else values[read]
        for read in node.all_input_nodes
    }
    args: Any = fx.node.map_arg(node.args, given.__getitem__)
    kwargs: Any = fx.node.map_arg(node.kwargs, given.__getitem__)
    module = called_module(node)
    if module is not None:
        return module(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _write_numbers(node: fx.Node, values: Mapping[fx.Node, Any]) -> None:
    def number(argument: Any) -> Any:
        value = values.get(argument) if isinstance(argument, fx.Node) else None
        return _plain(value) if _is_number(value) else argument

    def number_of_tensor(argument: Any) -> Any:
        value = values.get(argument) if isinstance(argument, fx.Node) else None
        return value.item() if _is_integer(value) else number(argument)

    first = 1 if identify(node).name in TAKE_NUMBERS else len(node.args)
    args = (*map_aggregate(node.args[:first], number), *map_aggregate(node.args[first:], number_of_tensor))
    kwargs = map_aggregate(node.kwargs, number)
    if args != node.args or kwargs != node.kwargs:
        node.args, node.kwargs = args, kwargs


def _is_number(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_number, value))
    return isinstance(value, (bool, int, float, np.generic))


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


def _is_integer(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() == 0 and not (value.is_floating_point() or value.is_complex())
