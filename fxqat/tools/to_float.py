"""Back to float: the model that a prepared one was made of, with the weights that were trained.

The graph is written anew, call by call:

1. calls of fake-quants are left out;
2. a QAT layer, or a fused one that stayed float, becomes its layer, BatchNorm and activation. Layer and BatchNorm stand
   where the user's model has their tensors; an activation that was fused stands beside its layer, as
   ``<layer>_activation``;
3. a layer whose tensors are no module's in the user's model (``F.conv2d(x, self.kernel)``) becomes a call of its
   function;
4. a parameter that was taken apart (``fxqat.quantization.split_parameters``) is put together, and split where it is
   read;
5. tensors that the graph does not read come along under their names.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.fused import FusedLayer
from fxqat.nn.qat import QATLayer
from fxqat.nn.weighted import WEIGHTED_TYPES, weighted_op
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.utils.fx_graph import Call, attribute_of, called_module, calls_in, graph_of
from fxqat.utils.node_meta import MODE
from fxqat.utils.torch_compat import unwrap
from fxqat.utils.train_eval_graph import TrainEvalGraphModule
from fxqat.utils.unused_names import unused_name


class FloatGraphModule(TrainEvalGraphModule):
    """A float model as a graph; copies and pickles keep both modes, and tensors that the graph does not read."""

    def __reduce__(self) -> tuple[Any, ...]:
        """The graph is pickled as its list of calls, as that of a prepared model is."""
        state = {name: value for name, value in self.__dict__.items() if name != "_graph"}
        return _restore, (state, calls_in(self.graph), type(self).__name__)

    def __deepcopy__(self, memo: dict[int, Any]) -> FloatGraphModule:
        restore, (state, calls, name) = self.__reduce__()
        result: FloatGraphModule = restore(copy.deepcopy(state, memo), calls, name)
        memo[id(self)] = result
        return result


def to_float(model: nn.Module) -> FloatGraphModule:
    """The float model of a prepared one, with the weights as they are now.

    It computes what the prepared model computes after ``disable_all``, in eval mode and in training (where BatchNorm
    uses the statistics of the batch, whatever ``bn_mode`` was). Types of layers, and names of their tensors, are the
    user's: ``model.load_state_dict(to_float(gm).state_dict())`` is how the trained weights come back into the user's
    own model. Modules and parameters that are shared stay shared. What was learned about rounding and clipping is not
    in it; where the weights were learned together with their quantizer, as at low bit widths, float accuracy may have
    suffered.

    Args:
        model: a model of ``prepare_by_platform``, also wrapped by DDP or ``torch.compile``; it is not changed.

    Returns:
        A graph module that shares no tensor with the given model, on its device and in its mode. It can be traced and
        prepared again, exported, copied and pickled.

    Raises:
        ConfigError: the model is not a prepared one.

    Example:
        >>> from fxqat import prepare_by_platform
        >>> gm = prepare_by_platform(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), "TSQAT")
        >>> [type(module).__name__ for module in to_float(gm).children()]
        ['Conv2d', 'BatchNorm2d']
    """
    gm = unwrap(model)
    if not isinstance(gm, QuantGraphModule):
        raise ConfigError(f"expected a model that prepare_by_platform returned, got {type(model).__name__}")
    work = copy.deepcopy(gm)
    writer = _Writer(work, _float_tensors(work))
    for node in work.graph.nodes:
        writer.write(node)
    root = _tree(work, writer.modules, writer.names.tensors, writer.constants)
    result = _restore(root.__dict__, calls_in(writer.graph), type(gm).__name__)
    for name in work.provenance.preserved:
        setattr(result, name, getattr(work, name))
    return result


def _restore(state: dict[str, Any], calls: list[Call], name: str) -> FloatGraphModule:
    holder = nn.Module()
    holder.__dict__.update(state)
    result = FloatGraphModule(holder, graph_of(calls), name)
    result.__dict__.update(state)  # fx takes over only what the graph reads
    return result


@dataclass
class _FloatTensors:
    """The tensors of the float model.

    Args:
        tensors: by their names; tied ones have several.
        names: of each, by its ``id``.
        parts: for the ``id`` of a part, the name of the whole, the sizes of the parts, the place, and the dimension.
    """

    tensors: dict[str, Tensor]
    names: dict[int, list[str]] = field(default_factory=dict)
    parts: dict[int, tuple[str, list[int], int, int]] = field(default_factory=dict)


def _float_tensors(gm: QuantGraphModule) -> _FloatTensors:
    inside: dict[str, Tensor] = dict(gm.named_buffers(remove_duplicate=False))
    inside |= dict(gm.named_parameters(remove_duplicate=False))
    provenance = gm.provenance
    found = _FloatTensors(provenance.unread | {name: inside[path] for name, path in provenance.tensor_names.items()})
    for name, joined in provenance.split_tensors.items():
        parts = [inside[part] for part in joined.names]
        whole = torch.cat([part.detach() for part in parts], joined.dim)
        found.tensors[name] = nn.Parameter(whole, parts[0].requires_grad)
        sizes = [part.shape[joined.dim] for part in parts]
        found.parts |= {id(part): (name, sizes, place, joined.dim) for place, part in enumerate(parts)}
    for name, tensor in found.tensors.items():
        found.names.setdefault(id(tensor), []).append(name)
    return found


class _Writer:
    """The graph being written, and the modules and constants that it reads, by their paths."""

    def __init__(self, gm: fx.GraphModule, names: _FloatTensors) -> None:
        self.gm = gm
        self.names = names
        self.graph = fx.Graph()
        self.modules: dict[str, nn.Module] = {}
        self.constants: dict[str, Any] = {}
        self._values: dict[fx.Node, fx.Node] = {}
        self._layers: dict[int, nn.Module] = {}
        self._taken = {path for path, _ in gm.named_modules(remove_duplicate=False)}
        self._taken |= {name.rpartition(".")[0] for name in names.tensors}

    def write(self, node: fx.Node) -> None:
        """Write what a node of the prepared model's graph is in the float one."""
        module = called_module(node)
        if isinstance(module, FakeQuantizeBase):
            self._values[node] = self._values[node.all_input_nodes[0]]  # case 1
        elif isinstance(module, (QATLayer, FusedLayer)):
            self._values[node] = self._write_layer(node, module)
        elif type(module) in WEIGHTED_TYPES and self._home(module, str(node.target)) is None:
            self._values[node] = self._call_layer(node, module, str(node.target), self._values[node.all_input_nodes[0]])
        elif module is not None:
            self._values[node] = self.graph.node_copy(node, self._values.__getitem__)
            self._values[node].target = self._home(module, str(node.target)) or str(node.target)
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
            value = self._call(node, fused.bn, self._home(fused.bn, path) or self._free(f"{path}_bn"), value)
        if fused.activation is not None:
            value = self._call(node, fused.activation, self._free(f"{path}_activation"), value)
        return value

    def _call_layer(self, node: fx.Node, layer: Any, path: str, value: fx.Node) -> fx.Node:
        home = self._home(layer, path)
        if home is not None:
            return self._call(node, layer, home, value)
        assert type(layer) in WEIGHTED_TYPES
        op = weighted_op(layer)
        if op.padding is not None:
            value = self._create(node, "call_function", F.pad, (value, *op.padding))
        read = [None if tensor is None else self._read(node, tensor) for tensor in (layer.weight, layer.bias)]
        return self._create(node, "call_function", op.function, (value, *read), op.arguments)

    def _home(self, module: Any, path: str) -> str | None:
        """Where a module stands so that its tensors have the names of the user's; None if there is no such place.

        Args:
            module: the module.
            path: its path in the prepared model, which is preferred.
        """
        own = {name: t for name, t in module.state_dict(keep_vars=True).items() if id(t) in self.names.names}
        if not own:
            return None if self.names.parts.keys() & {id(t) for t in module.parameters()} else path
        name, tensor = next(iter(own.items()))
        ends = [known.removesuffix(f".{name}") for known in self.names.names[id(tensor)] if known.endswith(f".{name}")]
        for home in sorted(ends, key=lambda end: end != path):
            fits = all(f"{home}.{name}" in self.names.names[id(tensor)] for name, tensor in own.items())
            if fits and self.modules.get(home, module) is module:
                return home
        return None

    def _read(self, node: fx.Node, value: Any) -> fx.Node:
        """A value that the graph reads from the model (case 4)."""
        if id(value) in self.names.parts:
            name, sizes, place, dim = self.names.parts[id(value)]
            whole = self._create(node, "get_attr", name)
            split = self._create(node, "call_function", torch.split, (whole, sizes, dim))
            return self._create(node, "call_method", "__getitem__", (split, place))
        known = self.names.names.get(id(value), [str(node.target)])
        name = str(node.target) if node.target in known else known[0]
        if id(value) not in self.names.names:
            self.constants[name] = value
        return self._create(node, "get_attr", name)

    def _free(self, path: str) -> str:
        """A path at which nothing of the user's stands."""
        free = unused_name(path, self._taken)
        self._taken.add(free)
        return free

    def _call(self, node: fx.Node, module: nn.Module, path: str, value: fx.Node) -> fx.Node:
        self.modules[path] = module
        return self._create(node, "call_module", path, (value,))

    def _create(self, source: fx.Node, op: str, target: Any, args: Any = (), kwargs: Any = None) -> fx.Node:
        """A node that runs in the mode in which another one does."""
        node = self.graph.create_node(op, target, args, kwargs or {})
        if MODE in source.meta:
            node.meta[MODE] = source.meta[MODE]
        return node


def _tree(
    gm: nn.Module, modules: dict[str, nn.Module], tensors: dict[str, Tensor], constants: dict[str, Any]
) -> nn.Module:
    """A module that has all of these at their paths, its containers in the modes that they have in a model."""
    root = nn.Module().train(gm.training)
    for path in sorted(modules, key=lambda path: path.count(".")):
        owner = _owner(root, gm, path)
        setattr(owner, path.rpartition(".")[2], modules[path])
    for path, value in [*tensors.items(), *constants.items()]:
        owner, name = _owner(root, gm, path), path.rpartition(".")[2]
        if hasattr(owner, name):
            continue
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            owner.register_buffer(name, value, persistent=path in tensors)  # case 5
        else:
            setattr(owner, name, value)
    return root


def _owner(root: nn.Module, gm: nn.Module, path: str) -> nn.Module:
    """The module at the parent of a path; containers on the way are made."""
    owner, inside = root, gm
    for part in path.split(".")[:-1]:
        inside = getattr(inside, part, inside)
        if not hasattr(owner, part):
            setattr(owner, part, nn.Module().train(inside.training))
        owner = getattr(owner, part)
    return owner
