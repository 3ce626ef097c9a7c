"""What kind of value each node produces: a float tensor, several tensors, something else, or unknown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import fx, nn

from fxqat.ops.families import BINARY, CONSTRUCTOR, IDENTITY, MATH, NOT_FLOAT, OPAQUE, PASS_THROUGH, RECURRENT
from fxqat.ops.identify import identify, is_stateless_layer
from fxqat.ops.unbounded import unbounded_values
from fxqat.utils.fx_graph import attribute_of, called_module, node_inputs, writes_state
from fxqat.utils.node_meta import SHAPE, Kind, kind_of
from fxqat.utils.train_eval_graph import eval_or_train, nodes_only_in

SEEN = {
    "float": Kind.FLOAT,
    "tuple": Kind.CONTAINER,
    "float64": Kind.WIDE,
    "complex": Kind.WIDE,
    "tensor": Kind.OTHER,
    "plain": Kind.OTHER,
    "object": Kind.OTHER,
}
"""The kind of a value that tracing saw (see ``fxqat.utils.node_meta.describe``)."""

REDUCTIONS = ("mean", "sum", "norm", "var", "std", "max", "min")
"""Ops that reduce all dimensions to one number if they get none."""

NO_RANGE = "holds values that stand for infinity, as masks do: one range cannot hold them and the others"
UPDATES_BUFFER = "updates a buffer of the model: not part of the result"
TRAINING_ONLY = "runs in training only: not deployed"
NO_ELEMENTS = "has no elements on the example inputs, or its weight has none: there is no range"


def always_float(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """The nodes whose values stay float on every backend, and why."""
    found = dict.fromkeys(unbounded_values(gm), NO_RANGE) | dict.fromkeys(_buffer_updates(gm), UPDATES_BUFFER)
    found |= dict.fromkeys(filter(_is_empty, gm.graph.nodes), NO_ELEMENTS)
    return found | dict.fromkeys(nodes_only_in(gm.graph, training=True), TRAINING_ONLY)


def value_kinds(gm: fx.GraphModule) -> dict[fx.Node, Kind]:
    """The kind of every node's value: as tracing saw it, otherwise from the ops (inputs count as float tensors)."""
    kinds: dict[fx.Node, Kind] = {}
    for node in gm.graph.nodes:
        kinds[node] = _kind(gm, node, kinds)
    return kinds | dict.fromkeys(_buffer_updates(gm), Kind.OTHER)


def exact_values(gm: fx.GraphModule, kinds: Mapping[fx.Node, Kind]) -> set[fx.Node]:
    """The float tensors that are computed from constants, sizes, integers and booleans only.

    No float input and no trained parameter reaches them: they are positions, grids, masks, and what is computed from
    them. Rounding on the way would destroy them (the cosine of a position that was rounded by one).
    """
    return _computed_without_inputs(gm, kinds, of_parameters=False)


def constant_values(gm: fx.GraphModule, kinds: Mapping[fx.Node, Kind]) -> set[fx.Node]:
    """The float tensors that are computed from parameters as well, and from nothing that changes between two inputs.

    Where they are read, they are constants of the file. What only moves values that are read elsewhere is none of them:
    the parameter is rounded, and stored as integers.
    """
    found = _computed_without_inputs(gm, kinds, of_parameters=True)
    for node in reversed(gm.graph.nodes):
        if identify(node).family == PASS_THROUGH and not found.issuperset(node.users):
            found.discard(node)
    return found - exact_values(gm, kinds)


def _computed_without_inputs(gm: fx.GraphModule, kinds: Mapping[fx.Node, Kind], of_parameters: bool) -> set[fx.Node]:
    """The float tensors that no float input, no changing buffer and no layer with parameters reaches.

    Args:
        gm: the graph.
        kinds: of all nodes.
        of_parameters: if True, parameters may reach them, also those of layers that are called once (an MLP of position
            biases), but no input of any type.
    """
    reached: set[fx.Node] = set()
    writes = _buffer_updates(gm)
    calls = Counter(node.target for node in gm.graph.nodes if node.op == "call_module")
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            changes = of_parameters or kinds[node] is not Kind.OTHER
        elif node.op == "get_attr":
            is_trained = isinstance(attribute_of(gm, node), nn.Parameter)
            changes = (is_trained and not of_parameters) or node in writes
        else:
            module = called_module(node)
            trains = module is not None and (next(module.parameters(), None) is not None or node in writes)
            if of_parameters and is_stateless_layer(node):
                trains = calls[node.target] > 1
            changes = trains or (not reads_sizes_only(node, kinds) and not reached.isdisjoint(node.all_input_nodes))
        if changes:
            reached.add(node)
    computed = [node for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    return {node for node in computed if node not in reached and kinds[node] is not Kind.OTHER}


def returns_structure(node: fx.Node) -> bool:
    """Whether a recurrent layer or an unknown op returns tensors in a structure, as LSTM does."""
    return kind_of(node) == "object" and identify(node).family in (OPAQUE, RECURRENT)


def reads_sizes_only(node: fx.Node, kinds: Mapping[fx.Node, Kind]) -> bool:
    """Whether an op takes sizes and types of its operands, and no value."""
    op = identify(node)
    if op.family == CONSTRUCTOR:
        return getattr(node.target, "__name__", node.target) not in ("tensor", "as_tensor", "asarray", "new_tensor")
    return op.name == "size" and node.target != "item" and kinds[node] is Kind.OTHER


def single_numbers(nodes: Iterable[fx.Node], kinds: Mapping[fx.Node, Kind]) -> set[fx.Node]:
    """The computed values that have no dimension, as losses; without example inputs, those that the ops show to be.

    Args:
        nodes: in execution order.
        kinds: of all nodes.
    """
    found: set[fx.Node] = set()
    for node in nodes:
        if kinds[node] is not Kind.FLOAT or node.op in ("placeholder", "get_attr"):
            continue
        if SHAPE in node.meta:
            is_single = node.meta[SHAPE] == ()
        elif (op := identify(node)).name in REDUCTIONS:
            is_single = len(node.args) == 1 and not {"dim", "axis"} & node.kwargs.keys()
        else:
            operands = [operand for operand in node.all_input_nodes if kinds[operand] is Kind.FLOAT]
            is_single = op.family in (BINARY, MATH, IDENTITY) and bool(operands) and found.issuperset(operands)
        if is_single:
            found.add(node)
    return found


def untrained(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes whose range training does not move.

    Their values depend only on the model's inputs and constants, or are computed in eval mode only.
    """
    found: set[fx.Node] = set()
    in_eval = nodes_only_in(gm.graph, training=False)
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            trains = isinstance(attribute_of(gm, node), nn.Parameter)
        else:
            module = called_module(node)
            trains = module is not None and next(module.parameters(), None) is not None
        stands_for_training = any(user.target is eval_or_train for user in node.users)
        if (not trains and found.issuperset(node.all_input_nodes)) or (node in in_eval and not stands_for_training):
            found.add(node)
    return found


def _is_empty(node: fx.Node) -> bool:
    """Whether a value has no elements, as the text before the first step, or a layer has no weights."""
    module = called_module(node)
    weights = () if module is None else module.parameters(recurse=False)
    return 0 in node.meta.get(SHAPE, ()) or any(not weight.numel() for weight in weights)


def _buffer_updates(gm: fx.GraphModule) -> set[fx.Node]:
    """Buffers that the graph writes, the writes, and the nodes that are computed for them alone."""
    writes = {node for node in gm.graph.nodes if writes_state(node)}
    found = writes | {node for node in gm.graph.nodes if node.op == "get_attr" and writes & set(node.users)}
    for node in reversed(gm.graph.nodes):
        if node.users and node.op != "placeholder" and all(user in found for user in node.users):
            found.add(node)
    return found


def _kind(gm: fx.GraphModule, node: fx.Node, kinds: dict[fx.Node, Kind]) -> Kind:
    if node.op == "output":
        return Kind.OTHER
    seen = kind_of(node)
    if seen is not None:
        return SEEN[seen]
    if node.op == "placeholder":
        return Kind.OTHER if node.args else Kind.FLOAT  # with a default it is an option, not a tensor
    if node.op == "get_attr":
        tensor = attribute_of(gm, node)
        return Kind.FLOAT if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() else Kind.OTHER
    op = identify(node)
    if op.family == NOT_FLOAT:
        return Kind.OTHER
    if op.family in (OPAQUE, RECURRENT):
        return Kind.UNKNOWN
    if op.name == "split" or (op.name == "getitem" and op.gives_tuple):
        return Kind.CONTAINER
    first = next(node_inputs(node.args), None)
    source = kinds.get(first, Kind.OTHER) if first is not None else Kind.OTHER
    if op.name == "getitem":
        return Kind.FLOAT if source in (Kind.CONTAINER, Kind.UNKNOWN) else source
    if op.family == PASS_THROUGH and source is Kind.OTHER:
        return Kind.OTHER
    if op.family == BINARY:
        inputs = {kinds[n] for n in node_inputs((node.args, node.kwargs))}
        return Kind.FLOAT if inputs & {Kind.FLOAT, Kind.UNKNOWN} else Kind.OTHER
    return Kind.FLOAT
