"""Turn a prepared model back into the float model that it was made from, with the trained weights.

The graph is written again, call by call:

1. calls of fake-quants are left out;
2. a QAT layer, or a fused layer that stayed float, becomes its layer, BatchNorm and activation. Layer and BatchNorm get
   the paths that their tensors have in the user's model; a fused activation becomes ``<layer>_activation``, next to its
   layer;
3. a layer or table whose tensors belong to no module of the user's model (``F.conv2d(x, self.kernel)``) becomes a call
   of its function, with the operations that compute its weight, if it is computed;
4. a layer of a recurrent module becomes a call of :func:`fxqat.nn.recurrent.run_layer` on the parameters of the user's
   module;
5. a parameter that was split (``fxqat.quantization.split_parameters``) is concatenated again, and split where it is
   read;
6. tensors that the graph does not read are copied under their names.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.embedding import TABLES, QATEmbedding
from fxqat.nn.fused import FusedLayer
from fxqat.nn.parametrized import BIAS, WEIGHT, computed_tensors
from fxqat.nn.qat import QATLayer
from fxqat.nn.recurrent import RecurrentLayer, run_layer
from fxqat.nn.weighted import WEIGHTED_TYPES, weighted_op
from fxqat.quantization.graph_module import QuantGraphModule, prepared_model
from fxqat.utils.fx_graph import attribute_of, called_module, calls_in, set_attribute
from fxqat.utils.living_copies import own_copy
from fxqat.utils.node_meta import MODE
from fxqat.utils.own_forward import type_of
from fxqat.utils.train_eval_graph import TrainEvalGraphModule, from_calls
from fxqat.utils.unused_names import unused_name


class FloatGraphModule(TrainEvalGraphModule):
    """A float model as a graph. Copies and pickles keep both modes, and the tensors that the graph does not read."""

    def __deepcopy__(self, memo: dict[int, Any]) -> FloatGraphModule:
        restore, (cls, state, calls, name) = self.__reduce__()
        result: FloatGraphModule = restore(cls, copy.deepcopy(state, memo), calls, name)
        memo[id(self)] = result
        return result


def to_float(model: nn.Module) -> FloatGraphModule:
    """Return the float model of a prepared model, with the current weights.

    It computes what the prepared model computes after ``disable_all``, in eval mode and in training (where BatchNorm
    uses the statistics of the batch, for every ``bn_mode``). Layer types and tensor names are those of the user's
    model, so ``model.load_state_dict(to_float(gm).state_dict())`` loads the trained weights into it. Shared modules
    and parameters stay shared. Learned scales and clipping ranges are lost; weights that were trained at low bit widths
    may be less accurate in float. Those that ``reconstruct`` or ``correct_bias`` fitted to quantization errors may give
    far worse results in float, which is logged as a warning.

    Args:
        model: a model of ``prepare_by_platform``, also wrapped by DDP or ``torch.compile``; not changed.

    Returns:
        A graph module on the device and in the mode of the given model, which shares no tensor with it. It can be
        traced and prepared again, exported, copied and pickled. Only a recurrent layer, which is a call of its
        function there, stays float if it is prepared again: load the weights into your model for that.

    Raises:
        ConfigError: the model is not a prepared one.

    Example:
        >>> from fxqat import prepare_by_platform
        >>> gm = prepare_by_platform(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), "TSQAT")
        >>> [type(module).__name__ for module in to_float(gm).children()]
        ['Conv2d', 'BatchNorm2d']
    """
    gm = prepared_model(model, ConfigError)
    if gm.provenance.fitted_by:
        logging.getLogger("fxqat").warning(
            "to_float: %s fitted weights or biases of the model to quantization errors. In float they may give far "
            "worse results than those of the model that you prepared",
            gm.provenance.fitted_by,
        )
    work = own_copy(gm)
    writer = _Writer(work, _float_tensors(work))
    for node in work.graph.nodes:
        writer.write(node)
    for path in writer.replaced:
        work.delete_submodule(path)  # it may lie inside a module that is called, such as an embedding
    root = _tree(work, writer.modules, writer.float_tensors.tensors, writer.constants)
    result: FloatGraphModule = from_calls(FloatGraphModule, root.__dict__, calls_in(writer.graph), type(gm).__name__)
    for name in work.provenance.preserved:
        set_attribute(result, name, attrgetter(name)(work))
    return result


@dataclass
class _FloatTensors:
    """The tensors of the float model.

    Args:
        tensors: the tensors by name; a tied tensor has several names.
        names: the names of each tensor, by its ``id``.
        parts: for the ``id`` of a part of a split parameter: name of the parameter, sizes of its parts, index of this
            part, and dimension.
    """

    tensors: dict[str, Tensor]
    names: dict[int, list[str]] = field(default_factory=dict)
    parts: dict[int, tuple[str, list[int], int, int]] = field(default_factory=dict)


def _float_tensors(gm: QuantGraphModule) -> _FloatTensors:
    inside: dict[str, Tensor] = dict(gm.named_buffers(remove_duplicate=False))
    inside |= dict(gm.named_parameters(remove_duplicate=False))
    provenance = gm.provenance
    found = _FloatTensors(provenance.unread | {name: inside[path] for name, path in provenance.tensor_names.items()})
    for name, split in provenance.split_tensors.items():
        parts = [inside[part] for part in split.names]
        whole = torch.cat([part.detach() for part in parts], split.dim)
        found.tensors[name] = nn.Parameter(whole, parts[0].requires_grad)
        sizes = [part.shape[split.dim] for part in parts]
        found.parts |= {id(part): (name, sizes, index, split.dim) for index, part in enumerate(parts)}
    for name, tensor in found.tensors.items():
        found.names.setdefault(id(tensor), []).append(name)
    return found


class _Writer:
    """Writes the float graph.

    Attributes:
        graph: the graph that is written.
        modules: the modules that it calls, by path.
        constants: the values other than tensors of the float model that it reads, by path.
        replaced: the paths of layers that became calls of their functions (case 3).
    """

    def __init__(self, gm: fx.GraphModule, float_tensors: _FloatTensors) -> None:
        self.gm = gm
        self.float_tensors = float_tensors
        self.graph = fx.Graph()
        self.modules: dict[str, nn.Module] = {}
        self.constants: dict[str, Any] = {}
        self.replaced: set[str] = set()
        self._values: dict[fx.Node, fx.Node] = {}
        self._layers: dict[int, nn.Module] = {}
        self._taken = {path for path, _ in gm.named_modules(remove_duplicate=False)}
        self._taken |= {name.rpartition(".")[0] for name in float_tensors.tensors}

    def write(self, node: fx.Node) -> None:
        """Write the float form of one node of the prepared model's graph."""
        module = called_module(node)
        if isinstance(module, FakeQuantizeBase):
            self._values[node] = self._values[node.all_input_nodes[0]]  # case 1
        elif isinstance(module, RecurrentLayer):
            self._values[node] = self._write_recurrent(node, module)  # case 4
        elif isinstance(module, (QATLayer, FusedLayer)):
            self._values[node] = self._write_layer(node, module)
        elif isinstance(module, (QATEmbedding, *TABLES)):
            self._values[node] = self._write_table(node, module)
        elif type_of(module) in WEIGHTED_TYPES and self._user_path(module, str(node.target)) is None:
            self._values[node] = self._call_layer(node, module, str(node.target), self._values[node.all_input_nodes[0]])
        elif module is not None:
            self._values[node] = self.graph.node_copy(node, self._values.__getitem__)
            self._values[node].target = self._user_path(module, str(node.target)) or str(node.target)
            self.modules[str(self._values[node].target)] = module
        elif node.op == "get_attr":
            value = attribute_of(self.gm, node)
            if not isinstance(value, FakeQuantizeBase):
                self._values[node] = self._read(node, value)
        else:
            self._values[node] = self.graph.node_copy(node, self._values.__getitem__)

    def _write_layer(self, node: fx.Node, fused: QATLayer | FusedLayer) -> fx.Node:
        """Cases 2 and 3."""
        path = str(node.target)
        if id(fused) not in self._layers:
            self._layers[id(fused)] = fused.float_layer() if isinstance(fused, QATLayer) else fused.layer
        value = self._call_layer(node, self._layers[id(fused)], path, self._values[node.all_input_nodes[0]])
        if fused.bn is not None:
            value = self._call(
                node, fused.bn, self._user_path(fused.bn, path) or self._unused_path(f"{path}_bn"), value
            )
        if fused.activation is not None:
            value = self._call(node, fused.activation, self._unused_path(f"{path}_activation"), value)
        return value

    def _write_table(self, node: fx.Node, module: Any) -> fx.Node:
        """Cases 2 and 3 of a table, which keeps the arguments of its call."""
        path = str(node.target)
        if isinstance(module, QATEmbedding):
            module = self._layers.setdefault(id(module), module.float_layer())
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__)
        user_path = self._user_path(module, path)
        if user_path is not None:
            self.modules[user_path] = module
            return self._create(node, "call_module", user_path, args, kwargs)
        self.replaced.add(path)
        function, names = TABLES[type(module)]
        options = {name: getattr(module, name) for name in (*names, "max_norm", "norm_type", "sparse")}
        read = self._read(node, module.weight)
        return self._create(node, "call_function", function, (args[0], read), options | kwargs)

    def _write_recurrent(self, node: fx.Node, layer: RecurrentLayer) -> fx.Node:
        """Case 4: the module's layers are separate calls, but their parameters have the names of the module."""
        self.replaced.add(str(node.target))
        x, *states = (self._values[value] for value in node.args if isinstance(value, fx.Node))
        given = [[self._read(node, getattr(layer, name)) for name in names] for names in layer.names]
        lengths = node.kwargs.get("lengths")
        steps = self._values[lengths] if isinstance(lengths, fx.Node) else None
        arguments = (layer.mode, x, states, given, layer.training, steps)
        return self._create(node, "call_function", run_layer, arguments)

    def _call_layer(self, node: fx.Node, layer: Any, path: str, value: fx.Node) -> fx.Node:
        user_path = self._user_path(layer, path)
        if user_path is not None:
            return self._call(node, layer, user_path, value)
        assert type_of(layer) in WEIGHTED_TYPES
        self.replaced.add(path)
        op = weighted_op(layer)
        if op.padding is not None:
            value = self._create(node, "call_function", F.pad, (value, *op.padding))
        weight, bias = (self._read_tensor(node, layer, name) for name in (WEIGHT, BIAS))
        return self._create(node, "call_function", op.function, (value, weight, bias), op.arguments)

    def _read_tensor(self, node: fx.Node, layer: Any, name: str) -> fx.Node | None:
        """Read a tensor of a layer, if it has that; what computes it is written into the graph (case 3)."""
        if name not in computed_tensors(layer):
            tensor = getattr(layer, name)
            return None if tensor is None else self._read(node, tensor)
        computed = layer.parametrizations[name]
        source = computed[0]
        assert isinstance(source, fx.GraphModule)  # other parametrizations are of a module of the user's model
        values: dict[fx.Node, fx.Node] = {}
        for inner in source.graph.nodes:
            if inner.op == "placeholder":
                values[inner] = self._read(node, computed.original)
            elif inner.op == "get_attr":
                values[inner] = self._read(node, attribute_of(source, inner))
            elif inner.op == "output":
                break
            else:
                values[inner] = self.graph.node_copy(inner, values.__getitem__)
                if inner.op == "call_module":
                    path = f"{node.target}.{inner.target}"
                    path = self._user_path(called_module(inner), path) or self._unused_path(path)
                    self.modules[path], values[inner].target = source.get_submodule(str(inner.target)), path
        return values[inner.args[0]]

    def _user_path(self, module: Any, path: str) -> str | None:
        """The path at which a module's tensors have the names of the user's model; None if there is none.

        Args:
            module: the module.
            path: its path in the prepared model, which is taken if it fits.
        """
        own = {name: t for name, t in module.state_dict(keep_vars=True).items() if id(t) in self.float_tensors.names}
        if not own:
            return None if self.float_tensors.parts.keys() & {id(t) for t in module.parameters()} else path
        names = self.float_tensors.names
        name, tensor = next(iter(own.items()))
        ends = [known.removesuffix(f".{name}") for known in names[id(tensor)] if known.endswith(f".{name}")]
        for candidate in sorted(ends, key=lambda end: end != path):
            fits = all(f"{candidate}.{name}" in names[id(tensor)] for name, tensor in own.items())
            if fits and self.modules.get(candidate, module) is module:
                return candidate
        return None

    def _read(self, node: fx.Node, value: Any) -> fx.Node:
        """Read a tensor or another value of the model (case 5)."""
        if id(value) in self.float_tensors.parts:
            name, sizes, index, dim = self.float_tensors.parts[id(value)]
            whole = self._create(node, "get_attr", name)
            split = self._create(node, "call_function", torch.split, (whole, sizes, dim))
            return self._create(node, "call_method", "__getitem__", (split, index))
        known = self.float_tensors.names.get(id(value), [str(node.target)])
        name = str(node.target) if node.target in known else known[0]
        if id(value) not in self.float_tensors.names:
            self.constants[name] = value
        return self._create(node, "get_attr", name)

    def _unused_path(self, path: str) -> str:
        """A path that the user's model does not have."""
        free = unused_name(path, self._taken)
        self._taken.add(free)
        return free

    def _call(self, node: fx.Node, module: nn.Module, path: str, value: fx.Node) -> fx.Node:
        self.modules[path] = module
        return self._create(node, "call_module", path, (value,))

    def _create(self, source: fx.Node, op: str, target: Any, args: Any = (), kwargs: Any = None) -> fx.Node:
        """Create a node that runs in the same mode as ``source``."""
        node = self.graph.create_node(op, target, args, kwargs or {})
        if MODE in source.meta:
            node.meta[MODE] = source.meta[MODE]
        return node


def _tree(
    gm: nn.Module, modules: dict[str, nn.Module], tensors: dict[str, Tensor], constants: dict[str, Any]
) -> nn.Module:
    """A module with these modules, tensors and constants at their paths; containers get their modes from ``gm``."""
    root = nn.Module().train(gm.training)
    for path in sorted(modules, key=lambda path: path.count(".")):
        owner = _owner(root, gm, path)
        setattr(owner, path.rpartition(".")[2], modules[path])
    for path, value in [*tensors.items(), *constants.items()]:
        owner, name = _owner(root, gm, path), path.rpartition(".")[2]
        if hasattr(owner, name):
            continue
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            owner.register_buffer(name, value, persistent=path in tensors)  # case 6
        else:
            setattr(owner, name, value)
    return root


def _owner(root: nn.Module, gm: nn.Module, path: str) -> nn.Module:
    """The module at the parent of a path; missing containers are made."""
    owner, inside = root, gm
    for part in path.split(".")[:-1]:
        inside = getattr(inside, part, inside)
        if not hasattr(owner, part):
            setattr(owner, part, nn.Module().train(inside.training))
        owner = getattr(owner, part)
    return owner
