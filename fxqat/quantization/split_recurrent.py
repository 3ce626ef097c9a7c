"""Split recurrent modules: an ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` becomes a chain of single layers.

Each layer is a :class:`~fxqat.nn.recurrent.RecurrentLayer`, which becomes one ONNX operator. Around it, operations that
only move values bring its input, states and outputs into the layout of torch:

1. ``batch_first`` is a ``transpose`` before and behind, an input without a batch gets one;
2. each layer gets its part of the states at the start, if the module is called with states;
3. the two directions of a bidirectional layer are joined; dropout runs between two layers;
4. who reads the state at the end of one layer reads it there; who reads all of them reads a ``cat``.

A module stays whole, and float, if its layers cannot be such operators: see :func:`why_whole`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn

from fxqat.nn.recurrent import CELLS, RECURRENT_TYPES, RecurrentLayer
from fxqat.utils.fx_graph import called_module, set_module
from fxqat.utils.node_meta import KEPT_WHOLE, PART_OF, SHAPE, VALUE, kind_of
from fxqat.utils.torch_compat import has_hooks

PROJECTS = "has projections (proj_size), which ONNX's LSTM has not"
NOT_A_TENSOR = "its input is no tensor (a packed sequence): pad the sequences instead, pack_padded_sequence has no ONNX"
OUTPUTS = ("output", "hidden", "cell")
HOOKED = "has forward hooks, which a quantized layer would not run"


def split_recurrent(gm: fx.GraphModule, names: Collection[str]) -> fx.GraphModule:
    """Split the modules in place and return the graph module (without generating its code again).

    Args:
        gm: a standardized graph module.
        names: names of the ops of the table (``lstm``, ``gru``, ``rnn``) that are quantized.
    """
    made: dict[int, nn.Module] = {}
    for node, module in [(node, called_module(node)) for node in gm.graph.nodes]:
        if isinstance(module, nn.RNNBase) and type(module) in RECURRENT_TYPES and CELLS[module.mode].op in names:
            reason = why_whole(node, module)
            if reason:
                node.meta[KEPT_WHOLE] = reason
                continue
            if id(module) not in made:
                made[id(module)] = _layers(module)
            set_module(gm, str(node.target), made[id(module)])
            _Splitter(gm, node, module).split()
    gm.graph.lint()
    return gm


def why_whole(node: fx.Node, module: nn.RNNBase) -> str:
    """Why a recurrent module is not split; empty if it is."""
    if module.proj_size:
        return PROJECTS
    if has_hooks(module):
        return HOOKED
    x = _argument(node, 0, "input")
    return "" if isinstance(x, fx.Node) and kind_of(x) in (None, "float") else NOT_A_TENSOR


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _layers(module: nn.RNNBase) -> nn.Module:
    """The layers of a module, and the dropout between them; the layer itself if there is one."""
    if module.num_layers == 1:
        return RecurrentLayer(module)
    parts: dict[str, nn.Module] = {}
    for number in range(module.num_layers):
        parts[f"layer_{number}"] = RecurrentLayer(module, number)
        if module.dropout and number + 1 < module.num_layers:
            parts[f"dropout_{number}"] = nn.Dropout(module.dropout).train(module.training)
    return nn.ModuleDict(parts).train(module.training)


class _Splitter:
    """Writes the nodes of one call of a recurrent module, before it.

    Args:
        gm: the graph module.
        node: the call.
        module: what it calls.
    """

    def __init__(self, gm: fx.GraphModule, node: fx.Node, module: nn.RNNBase) -> None:
        self.gm = gm
        self.node = node
        self.module = module
        self.directions = 2 if module.bidirectional else 1
        self.meta = {k: v for k, v in node.meta.items() if k not in (VALUE, SHAPE)}
        self.made: list[fx.Node] = []
        self.meta |= {PART_OF: (str(node.target), type(module)), VALUE: "float"}

    def split(self) -> None:
        """Replace the call."""
        x: fx.Node = _argument(self.node, 0, "input")
        has_batch = len(x.meta.get(SHAPE, (0, 0, 0))) == 3
        time_first = self.module.batch_first is False or not has_batch
        with self.gm.graph.inserting_before(self.node):
            states = self._initial_states()
            if not has_batch:
                x, states = self._call(torch.unsqueeze, x, 1), [self._call(torch.unsqueeze, s, 1) for s in states]
            if not time_first:
                x = self._call(torch.transpose, x, 0, 1)
            finals = []
            for number in range(self.module.num_layers):
                x, final = self._layer(number, x, states)
                finals.append(final)
            if not time_first:
                x = self._call(torch.transpose, x, 0, 1)
            if not has_batch:
                x = self._call(torch.squeeze, x, 1)
                finals = [[self._call(torch.squeeze, state, 1) for state in final] for final in finals]
            self._replace(x, [list(layers) for layers in zip(*finals, strict=True)])

    def _call(self, function: Any, *args: Any) -> fx.Node:
        return self._meant(self.gm.graph.call_function(function, args))

    def _meant(self, made: fx.Node) -> fx.Node:
        made.meta = dict(self.meta)
        self.made.append(made)
        return made

    def _initial_states(self) -> list[fx.Node]:
        given = _argument(self.node, 1, "hx")
        if given is None:
            return []
        if CELLS[self.module.mode].num_states == 1:
            return [given]
        if isinstance(given, (tuple, list)):
            return list(given)
        return [self._call(operator.getitem, given, place) for place in range(2)]

    def _layer(self, number: int, x: fx.Node, states: list[fx.Node]) -> tuple[fx.Node, list[fx.Node]]:
        """Call one layer; returns its output, ``(T, N, D * H)``, and its states at the end."""
        path, is_alone = str(self.node.target), self.module.num_layers == 1
        if not is_alone:
            rows = slice(number * self.directions, (number + 1) * self.directions)
            states = [self._call(operator.getitem, state, rows) for state in states]
        target = path if is_alone else f"{path}.layer_{number}"
        call = self._meant(self.gm.graph.call_module(target, (x, *states)))
        call.meta[VALUE] = "tuple"
        y, *final = (self._item(call, place) for place in range(1 + CELLS[self.module.mode].num_states))
        if self.directions == 1:
            y = self._call(torch.squeeze, y, 1)
        else:
            y = self._call(torch.flatten, self._call(torch.transpose, y, 1, 2), 2)
        if self.module.dropout and number + 1 < self.module.num_layers:
            y = self._meant(self.gm.graph.call_module(f"{path}.dropout_{number}", (y,)))
        return y, final

    def _item(self, call: fx.Node, place: int) -> fx.Node:
        name = f"{call.name}_{OUTPUTS[place]}"
        return self._meant(self.gm.graph.create_node("call_function", operator.getitem, (call, place), name=name))

    def _replace(self, y: fx.Node, states: list[list[fx.Node]]) -> None:
        """Let the readers of the module read its parts.

        Args:
            y: the output.
            states: for each kind of state the one of each layer, at the end.
        """
        for user in list(self.node.users):
            place = _index(user)
            if place in (0, -2):
                self._become(user, y)
            elif place in (1, -1) and len(states) == 1:
                self._read_states(user, states[0])
            elif place in (1, -1):
                for reader in list(user.users):
                    inner = _index(reader)
                    if inner is not None:
                        self._read_states(reader, states[inner])
                if user.users:
                    self._pass_on(user, self._all_states(states))
                self.gm.graph.erase_node(user)
        if self.node.users:
            whole = self._all_states(states)
            self._pass_on(self.node, (y, whole))
        self.gm.graph.erase_node(self.node)
        for made in reversed(self.made):
            if not made.users:
                self.gm.graph.erase_node(made)

    def _all_states(self, states: list[list[fx.Node]]) -> Any:
        """The states as the module returns them."""
        found = tuple(self._joined(layers) for layers in states)
        return found if len(found) > 1 else found[0]

    def _joined(self, layers: list[fx.Node]) -> fx.Node:
        return layers[0] if len(layers) == 1 else self._call(torch.cat, layers, 0)

    def _read_states(self, reader: fx.Node, layers: list[fx.Node]) -> None:
        """Let a node that stands for the states of all layers be read from the layers (case 4)."""
        for user in list(reader.users):
            row = _index(user)
            if row is not None:
                row %= len(layers) * self.directions
                layer, direction = layers[row // self.directions], row % self.directions
                self._become(user, self._call(operator.getitem, layer, direction))
        if reader.users:
            self._become(reader, self._joined(layers))
        else:
            self.gm.graph.erase_node(reader)

    def _become(self, old: fx.Node, new: fx.Node) -> None:
        old.replace_all_uses_with(new)
        self.gm.graph.erase_node(old)

    def _pass_on(self, old: fx.Node, structure: Any) -> None:
        """Give readers a structure of nodes in place of one node."""
        replaced: Any = lambda node: structure if node is old else node  # noqa: E731  torch's types are narrower
        for user in list(old.users):
            args: Any = fx.node.map_arg((user.args, user.kwargs), replaced)
            user.args, user.kwargs = args


def _index(node: fx.Node) -> int | None:
    """The number of the item that a node reads, None if it reads another part."""
    if node.target is not operator.getitem or not isinstance(node.args[1], int):
        return None
    return node.args[1]
