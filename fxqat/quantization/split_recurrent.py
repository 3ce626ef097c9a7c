"""Split recurrent modules: an ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` becomes a chain of single layers.

Each layer is a :class:`~fxqat.nn.recurrent.RecurrentLayer`, which becomes one ONNX operator. Around it, operations that
only move values bring its input, states and outputs into the layout of torch:

1. ``batch_first`` is a ``transpose`` before and behind, an input without a batch gets one;
2. each layer gets its part of the states at the start, if the module is called with states;
3. the two directions of a bidirectional layer are joined; dropout runs between two layers;
4. who reads the state at the end of one layer reads it there; who reads all of them reads a ``cat``;
5. a packed input is read padded, with the number of steps of each sample (``fxqat.quantization.packed_sequences``).

On request a layer is unrolled instead over the steps of the example inputs (``fxqat.nn.unrolled``): then its
operations are quantized one by one, and the graph is right for this number of steps only.

A module stays whole, and float, if its layers cannot be such operators: see :func:`why_whole`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.rnn import pack_padded_sequence

from fxqat.errors import ConfigError
from fxqat.nn.recurrent import CELLS, LAYER, RECURRENT_TYPES, UNROLLED, WHOLE, RecurrentLayer, StepDropout
from fxqat.nn.unrolled import linear_of, unroll
from fxqat.quantization.packed_sequences import gather_packing, packed_by, pad_directly, traced_mask
from fxqat.utils.fx_graph import NodeTracer, argument, called_module, set_module
from fxqat.utils.node_meta import KEPT_WHOLE, PART_OF, SHAPE, VALUE, ForcedNumber, kind_of
from fxqat.utils.source import line_of_node
from fxqat.utils.torch_compat import has_hooks
from fxqat.utils.weight_hooks import why_hooks_forbid

PROJECTS = "has projections (proj_size), which ONNX's LSTM has not: unroll it"
NOT_A_TENSOR = "its input is no tensor, and was not packed by pack_padded_sequence"
LINEAR_LAYERS = {"ih": "of_input", "hh": "of_state", "hr": "projection"}
"""The names of the linear layers of an unrolled module, by the names of their weights."""

OUTPUTS = ("output", "hidden", "cell")


def split_recurrent(gm: fx.GraphModule, form_of: Callable[[fx.Node], str]) -> tuple[ForcedNumber, ...]:
    """Split the modules in place (without generating the code of the graph module again).

    Args:
        gm: a standardized graph module.
        form_of: for a call of a recurrent module, ``LAYER``, ``UNROLLED``, or ``WHOLE`` to leave it alone. One whose
            input is packed becomes layers all the same, which read it padded.

    Returns:
        The numbers of steps over which layers were unrolled.

    Raises:
        ConfigError: a module is to be unrolled, and its number of steps is not known.
    """
    gather_packing(gm.graph)
    made: dict[tuple[int, str], nn.Module] = {}
    forced: list[ForcedNumber] = []
    calls = [(node, module) for node in gm.graph.nodes if type(module := called_module(node)) in RECURRENT_TYPES]
    for node, module, form in [(node, module, form_of(node)) for node, module in calls]:
        assert isinstance(module, nn.RNNBase)
        if form == WHOLE:
            if packed_by(argument(node, 0, "input")) is None:
                continue
            form = LAYER  # case 5
        reason = why_whole(node, module, form)
        if reason:
            node.meta[KEPT_WHOLE] = reason
            continue
        parts = made.setdefault((id(module), form), _unrolled_layers(module) if form == UNROLLED else _layers(module))
        set_module(gm, str(node.target), parts)
        splitter = _Splitter(gm, node, module, form)
        if form == UNROLLED:
            forced.append(ForcedNumber(f"steps of {node.target}", splitter.steps, line_of_node(node)))
        splitter.split()
    pad_directly(gm.graph)
    gm.graph.lint()
    return tuple(forced)


def why_whole(node: fx.Node, module: nn.RNNBase, form: str) -> str:
    """Why a recurrent module is not split; empty if it is."""
    if module.proj_size and form == LAYER:
        return PROJECTS
    if has_hooks(module):
        return why_hooks_forbid(module)
    x = argument(node, 0, "input")
    is_tensor = isinstance(x, fx.Node) and kind_of(x) in (None, "float")
    return "" if is_tensor or packed_by(x) is not None else NOT_A_TENSOR


def _layers(module: nn.RNNBase) -> nn.Module:
    """The layers of a module, and the dropout between them; the layer itself if there is one."""
    if module.num_layers == 1:
        return RecurrentLayer(module)
    parts: dict[str, nn.Module] = {f"layer_{n}": RecurrentLayer(module, n) for n in range(module.num_layers)}
    return nn.ModuleDict(parts | _dropouts(module)).train(module.training)


def _dropouts(module: nn.RNNBase) -> dict[str, nn.Module]:
    """The dropout between the layers of a module."""
    between = range(module.num_layers - 1 if module.dropout else 0)
    return {f"dropout_{number}": StepDropout(module.dropout).train(module.training) for number in between}


def _unrolled_layers(module: nn.RNNBase) -> nn.Module:
    """The linear layers of a module, and the dropout between its layers."""
    parts: dict[str, nn.Module] = {}
    for number in range(module.num_layers):
        for end in ("", "_reverse")[: 1 + module.bidirectional]:
            for kind, name in LINEAR_LAYERS.items():
                layer = linear_of(module, kind, f"_l{number}{end}")
                if layer is not None:
                    parts[f"{name}_{number}{end}"] = layer
    return nn.ModuleDict(parts | _dropouts(module)).train(module.training)


class _Splitter:
    """Writes the nodes of one call of a recurrent module, before it.

    Args:
        gm: the graph module.
        node: the call.
        module: what it calls.
        form: ``LAYER`` or ``UNROLLED``.
    """

    def __init__(self, gm: fx.GraphModule, node: fx.Node, module: nn.RNNBase, form: str) -> None:
        self.gm = gm
        self.node = node
        self.module = module
        self.form = form
        given = argument(node, 0, "input")
        self.packed = packed_by(given)
        self.x: fx.Node = given if self.packed is None else self.packed.values
        self.batch_first = module.batch_first if self.packed is None else self.packed.batch_first
        self.lengths: dict[str, Any] = {} if self.packed is None else {"lengths": self.packed.lengths}
        self.directions = 2 if module.bidirectional else 1
        self.meta = {k: v for k, v in node.meta.items() if k not in (VALUE, SHAPE)}
        self.made: list[fx.Node] = []
        self.meta |= {PART_OF: (str(node.target), type(module)), VALUE: "float"}

    def split(self) -> None:
        """Replace the call."""
        x = self.x
        has_batch = len(x.meta.get(SHAPE, (0, 0, 0))) == 3
        time_first = not self.batch_first or not has_batch
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
            if self.packed is not None:
                x = self._call(pack_padded_sequence, x, self.packed.lengths, False, self.packed.enforce_sorted)
                x.meta[VALUE] = "object"
            elif not time_first:
                x = self._call(torch.transpose, x, 0, 1)
            if not has_batch:
                x = self._call(torch.squeeze, x, 1)
                finals = [[self._call(torch.squeeze, state, 1) for state in final] for final in finals]
            self._replace(x, [list(layers) for layers in zip(*finals, strict=True)])

    def _call(self, function: Any, *args: Any) -> fx.Node:
        return self._meant(self.gm.graph.call_function(function, args))

    def _meant(self, made: fx.Node) -> fx.Node:
        made.meta = dict(self.meta)
        if self.form == UNROLLED:
            del made.meta[VALUE]  # some are tuples or sizes: the ops tell
        self.made.append(made)
        return made

    def _initial_states(self) -> list[fx.Node]:
        given = argument(self.node, 1, "hx")
        if given is None:
            return []
        if CELLS[self.module.mode].num_states == 1:
            return [given]
        if isinstance(given, (tuple, list)):
            return list(given)
        return [self._call(operator.getitem, given, place) for place in range(2)]

    def _layer(self, number: int, x: fx.Node, states: list[fx.Node]) -> tuple[fx.Node, list[fx.Node]]:
        """Compute one layer; returns its output, ``(T, N, D * H)``, and its states at the end."""
        path = str(self.node.target)
        y, final = (self._unrolled if self.form == UNROLLED else self._operator)(number, x, states)
        if self.module.dropout and number + 1 < self.module.num_layers:
            y = self._meant(self.gm.graph.call_module(f"{path}.dropout_{number}", (y,), self.lengths))
        return y, final

    def _operator(self, number: int, x: fx.Node, states: list[fx.Node]) -> tuple[fx.Node, list[fx.Node]]:
        path, is_alone = str(self.node.target), self.module.num_layers == 1
        if not is_alone:
            rows = slice(number * self.directions, (number + 1) * self.directions)
            states = [self._call(operator.getitem, state, rows) for state in states]
        target = path if is_alone else f"{path}.layer_{number}"
        call = self._meant(self.gm.graph.call_module(target, (x, *states), self.lengths))
        call.meta[VALUE] = "tuple"
        y, *final = (self._item(call, place) for place in range(1 + CELLS[self.module.mode].num_states))
        if self.directions == 1:
            y = self._call(torch.squeeze, y, 1)
        else:
            y = self._call(torch.flatten, self._call(torch.transpose, y, 1, 2), 2)
        return y, final

    @property
    def steps(self) -> int:
        """The number of steps on the example inputs."""
        shape = self.x.meta.get(SHAPE)
        if shape is None:
            raise ConfigError(f"{self.node.target} is to be unrolled: prepare with example_inputs, which fix its steps")
        return int(shape[1 if len(shape) == 3 and self.batch_first else 0])

    def _unrolled(self, number: int, x: fx.Node, states: list[fx.Node]) -> tuple[fx.Node, list[fx.Node]]:
        graph, module, path = self.gm.graph, self.module, str(self.node.target)
        tracer = NodeTracer(graph, self._meant)

        def layer(name: str) -> Callable[[fx.Proxy], fx.Proxy]:
            return lambda value: fx.Proxy(self._meant(graph.call_module(f"{path}.{name}", (value.node,))), tracer)

        def named(value: fx.Proxy, name: str) -> fx.Proxy:
            old = value.node
            new = graph.create_node(old.op, old.target, old.args, old.kwargs, name=f"{self.node.name}_{name}")
            self.made.remove(old)
            graph.erase_node(old)
            return fx.Proxy(self._meant(new), tracer)

        source = fx.Proxy(x, tracer)
        mask = None
        if self.packed is not None:
            mask = traced_mask(source, fx.Proxy(self.packed.lengths, tracer))
        widths = (module.proj_size or module.hidden_size, module.hidden_size)[: CELLS[module.mode].num_states]
        outputs: list[Any] = []
        finals: list[list[Any]] = []
        for direction, end in enumerate(("", "_reverse")[: self.directions]):
            first = number * self.directions + direction
            given: list[Any] = [fx.Proxy(state, tracer) for state in states]
            start = [state[first] for state in given] or [source.new_zeros((source.size(1), width)) for width in widths]
            names = {kind: f"{name}_{number}{end}" for kind, name in LINEAR_LAYERS.items()}
            projection = {"projection": layer(names["hr"])} if module.proj_size else {}
            steps = list(range(self.steps))[:: -1 if end else 1]
            functions = (layer(names["ih"]), layer(names["hh"]))
            output, *final = unroll(module.mode, source, start, steps, *functions, **projection, named=named, mask=mask)
            outputs.append(output)
            finals.append(final)
        y: Any = outputs[0] if self.directions == 1 else torch.cat(outputs, -1)
        last: list[Any] = [torch.stack(states) for states in zip(*finals, strict=True)]
        return y.node, [state.node for state in last]

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
