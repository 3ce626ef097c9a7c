"""Inserts fake-quant into an annotated graph.

1. Every sharing group gets one activation fake-quant, which is called after each value of the group. Where a node of
   training stands for a quantized one of eval mode, its value passes through the same fake-quant. Calls after the
   first one of a pass say so, for observers that average over passes.
2. Every annotated weighted layer becomes a :class:`~fxqat.nn.qat.QATLayer` at the same path, every recurrent layer a
   :class:`~fxqat.nn.recurrent.QATRecurrentLayer`, and every table of embeddings a
   :class:`~fxqat.nn.embedding.QATEmbedding`. The first two are called with the fake-quant of their input, from which
   the bias gets its scale, unless they compute in float; a layer that quantizes its input at run time is called with a
   name for that input. A layer that is tied to a table of embeddings has its fake-quant.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import Argument

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import ACTIVATION, WEIGHT, FakeQuantizeBase
from fxqat.fake_quantize.fake_quantizes import FAKE_QUANTIZES
from fxqat.nn.embedding import AXIS, QATEmbedding, Table
from fxqat.nn.fused import FusedLayer
from fxqat.nn.parametrized import qat_layer_type
from fxqat.nn.quantized_layer import QuantizedLayer
from fxqat.nn.recurrent import QATRecurrentLayer, RecurrentLayer
from fxqat.nn.weighted import WEIGHTED_TYPES, weighted_op
from fxqat.observer.base import ObserverBase
from fxqat.observer.observers import OBSERVERS
from fxqat.ops.families import IDENTITY
from fxqat.ops.identify import identify, keeps_output
from fxqat.quantization.annotation import Annotation, annotation_of
from fxqat.quantization.zero_values import zero_values
from fxqat.scheme import QuantizeScheme, TensorQConfig
from fxqat.utils.contexts import eval_mode
from fxqat.utils.fx_graph import attribute_of, called_module, module_path, nodes_where, set_module, unique_name
from fxqat.utils.nearest_name import nearest
from fxqat.utils.own_forward import type_of
from fxqat.utils.train_eval_graph import eval_or_train, nodes_only_in
from fxqat.utils.unused_names import unused_name

_Tied = dict[int, list[tuple[int, TensorQConfig, FakeQuantizeBase]]]
"""By the ``id`` of the weight of each table of embeddings: axis, configuration and fake-quant of what is tied to it."""

ALWAYS_GIVEN = frozenset({"scheme", "axis", "num_channels", "observer", "kind"})
"""The arguments that fxqat itself gives to every observer or fake-quant."""


def insert(gm: fx.GraphModule, bn_mode: str | int) -> fx.GraphModule:
    """Insert fake-quant as annotated, in place; the code of the graph module is not generated again.

    Args:
        gm: an annotated graph module.
        bn_mode: see :class:`~fxqat.nn.qat.QATLayer`.

    Raises:
        ConfigError: a configured observer or fake-quant does not fit its tensor.
    """
    nodes = list(gm.graph.nodes)
    names: set[str] = set()
    _insert_activations(gm, nodes, names)
    _insert_in_training(gm)
    _mark_later_calls(gm)
    _insert_weights(gm, nodes, bn_mode, names)
    gm.graph.lint()
    return gm


def build_fake_quant(
    config: TensorQConfig, kind: str, axis: int | None = None, num_channels: int | None = None
) -> FakeQuantizeBase:
    """The fake-quant of one tensor, with its observer.

    A value with a fixed range is not learned: its scale is known.

    Args:
        config: what to build.
        kind: ``"weight_fake_quant"`` or ``"act_fake_quant"``.
        axis: the channel axis of the tensor, if it has one.
        num_channels: the size of that axis; with blocks their number.

    Raises:
        ConfigError: an observer or fake-quant is unknown, or does not take the arguments it is given.
    """
    scheme, letter = config.scheme, "w" if kind == WEIGHT else "a"
    observer_type = _resolve(config.observer, OBSERVERS, "observer")
    quant_type = _resolve(config.fake_quantize, FAKE_QUANTIZES, "fake-quant")
    _check_arguments(observer_type, config.observer_args, f"observer_args ({letter}_observer_extra_args)")
    _check_arguments(quant_type, config.fake_quantize_args, f"fake_quantize_args ({letter}_fakeq_params)")
    arguments = dict(config.fake_quantize_args)
    if scheme.fixed_range is not None:
        quant_type, arguments = FAKE_QUANTIZES["Fixed"], {}
    try:
        rows = axis if scheme.block_size is None else 0  # of a weight in blocks
        watched = rows if scheme.per_channel else None
        observer: ObserverBase = observer_type(scheme, watched, num_channels, **dict(config.observer_args))
        quant: FakeQuantizeBase = quant_type(scheme, observer, kind, axis, **arguments)
    except TypeError as cause:
        raise ConfigError(
            f"{_name(observer_type)} / {_name(quant_type)}: {cause}. Check the extra arguments "
            f"observer_args={dict(config.observer_args)}, fake_quantize_args={arguments}."
        ) from cause
    if scheme.block_size is not None and type(quant).quantize is not FakeQuantizeBase.quantize:
        raise ConfigError(
            f"{_name(quant_type)} has a method 'quantize' of its own, which knows no blocks (block_size="
            f"{scheme.block_size}): write it as 'rounded', or leave block_size out"
        )
    return quant


def _resolve(name: Any, table: Mapping[str, Callable[..., Any]], what: str) -> Callable[..., Any]:
    """The class of a name, or the class that is given."""
    if isinstance(name, str):
        if name not in table:
            raise ConfigError(f"unknown {what} {name!r}; known: {', '.join(table)}")
        return table[name]
    if not callable(name):
        raise ConfigError(f"{what} must be a name or a class, got {name!r}; known names: {', '.join(table)}")
    resolved: Callable[..., Any] = name
    return resolved


def _check_arguments(kind: Callable[..., Any], arguments: Mapping[str, Any], where: str) -> None:
    """Check that an observer or fake-quant takes these arguments besides those that every one gets."""
    parameters = inspect.signature(kind).parameters if arguments else {}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = [name for name in parameters if name not in ALWAYS_GIVEN]
    for name, value in arguments.items():
        if name not in known:
            raise ConfigError(
                f"{where}: {_name(kind)} has no argument {name!r} (given: {value!r}); {nearest(name, known)}"
            )


@contextmanager
def _errors_name(config: TensorQConfig, tensor: str) -> Iterator[None]:
    """Add to an error the tensor, the observer and the fake-quant it is about."""
    try:
        yield
    except ConfigError as cause:
        kinds = f"observer {_name(config.observer)!r}, fake_quantize {_name(config.fake_quantize)!r}"
        raise ConfigError(f"{tensor}, {kinds}: {cause}") from cause


def _name(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))


def _insert_activations(gm: fx.GraphModule, nodes: list[fx.Node], names: set[str]) -> None:
    paths: dict[int, str] = {}
    groups: dict[int, list[fx.Node]] = {}
    for node in nodes:
        found = annotation_of(node)
        if found is not None and found.value is not None and not found.value.transparent:
            groups.setdefault(found.value.group, []).append(node)
    zeros, fixed = zero_values(gm.graph), nodes_where(gm.graph, _is_same_in_every_pass)
    followed = nodes_where(gm.graph, _is_same_in_training) & nodes_where(gm.graph, partial(_is_trained, gm))
    device = _device_of(gm)
    last_placeholder = [node for node in nodes if node.op == "placeholder"][-1:]
    for node in nodes:
        found = annotation_of(node)
        if found is None or found.value is None or found.value.transparent:
            continue
        value = found.value
        if value.group not in paths:
            path = unique_name(gm, f"{node.name}_act_fake_quant")
            with _errors_name(value.config, f"value of {node.name!r} ({found.reason})"):
                quant_module = build_fake_quant(value.config, ACTIVATION)
            group = groups[value.group]
            quant_module.always_zero = zeros.issuperset(group)
            quant_module.ends_occur = fixed.issuperset(group)
            if followed.issuperset(group):
                quant_module.let_follow()
            gm.add_submodule(path, _placed(quant_module, device, gm.training))
            paths[value.group] = path
        arguments: dict[str, Argument] = {"tensor_name": _tensor_name(node, names)}
        if value.on_grid:
            arguments["on_grid"] = True
        if keeps_output(node):
            arguments["input_kept"] = True
        users = list(node.users)
        with gm.graph.inserting_after(last_placeholder[0] if node.op == "placeholder" else node):
            quant = gm.graph.call_module(paths[value.group], (node,), arguments)
        if node.op == "placeholder":
            last_placeholder = [quant]
        for user in users:
            if value.readers is None or user.name in value.readers:
                user.replace_input_with(node, quant)


def _is_same_in_every_pass(node: fx.Node, found: set[fx.Node]) -> bool:
    """Whether a value is a parameter or a buffer, or computed from such values only."""
    inputs = node.all_input_nodes
    return node.op == "get_attr" or (bool(inputs) and found.issuperset(inputs))


def _is_same_in_training(node: fx.Node, found: set[fx.Node]) -> bool:
    """The same, in training as well: not behind a module, such as dropout."""
    return _is_same_in_every_pass(node, found) and node.op != "call_module"


def _is_trained(gm: fx.GraphModule, node: fx.Node, found: set[fx.Node]) -> bool:
    """Whether a value is a parameter, or computed from one."""
    is_parameter = node.op == "get_attr" and isinstance(attribute_of(gm, node), nn.Parameter)
    return is_parameter or not found.isdisjoint(node.all_input_nodes)


def _insert_in_training(gm: fx.GraphModule) -> None:
    """Pass the values of training that stand for quantized ones of eval mode through the fake-quants of these."""
    in_training = nodes_only_in(gm.graph, training=True)
    for node in [node for node in gm.graph.nodes if node.target is eval_or_train]:
        in_eval, value = node.args
        quant = called_module(in_eval) if isinstance(in_eval, fx.Node) else None
        if isinstance(quant, FakeQuantizeBase) and value in in_training:
            with gm.graph.inserting_after(value):
                rounded = gm.graph.call_module(str(in_eval.target), (value,), dict(in_eval.kwargs))
            node.args = (in_eval, rounded)


def _mark_later_calls(gm: fx.GraphModule) -> None:
    """Tell a fake-quant which of its calls follow another one in the same pass, so that its observer unites them."""
    only = [nodes_only_in(gm.graph, training=training) for training in (False, True)]
    earlier: dict[str, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if isinstance(called_module(node), FakeQuantizeBase) and not node.kwargs.get("on_grid"):
            others = earlier.setdefault(str(node.target), [])
            # an earlier call counts if it runs in every mode in which this one runs
            if any(all(other not in nodes or node in nodes for nodes in only) for other in others):
                node.kwargs = {**node.kwargs, "same_pass": True}
            others.append(node)


def _tensor_name(node: fx.Node, taken: set[str]) -> str:
    """The name of a value in the exported file: the module path; for other calls than of modules, with the op."""
    path = module_path(node)
    if node.op in ("placeholder", "get_attr"):
        base = str(node.target)
    elif node.op == "call_module":
        base = path
    else:
        base = f"{path}.{identify(node).name}" if path else identify(node).name
    name = unused_name(base, taken)
    taken.add(name)
    return name


def _insert_weights(gm: fx.GraphModule, nodes: list[fx.Node], bn_mode: str | int, names: set[str]) -> None:
    converted: dict[int, QuantizedLayer] = {}
    called = [(str(node.target), module) for node in nodes if (module := called_module(node)) is not None]
    tied: _Tied = {id(module.weight): [] for _, module in called if isinstance(module, Table)}
    for node in nodes:
        found = annotation_of(node)
        if found is None or found.weight is None:
            continue
        module = called_module(node)
        assert module is not None
        if not isinstance(module, QuantizedLayer):
            if id(module) not in converted:
                converted[id(module)] = _qat_layer(module, found, bn_mode, str(node.target), tied)
            _keep_inner(converted[id(module)], module, str(node.target), [path for path, _ in called])
            set_module(gm, str(node.target), converted[id(module)])
        source = _fake_quant_of(node.args[0])
        if found.dynamic:
            node.kwargs = {**node.kwargs, "dynamic_input": unused_name(f"{node.target}.input", names)}
            names.add(str(node.kwargs["dynamic_input"]))
        elif source is not None and not found.weights_only:
            with gm.graph.inserting_before(node):
                fake_quant = gm.graph.get_attr(str(source.target))
            node.kwargs = {**node.kwargs, "input_fake_quant": fake_quant}


def _keep_inner(layer: nn.Module, replaced: nn.Module, path: str, called: list[str]) -> None:
    """Keep the modules in a replaced layer that the graph calls, as that of a function that reads its weight."""
    for name, inner in replaced.named_children():
        if any(f"{other}.".startswith(f"{path}.{name}.") for other in called):
            layer.add_module(name, inner)


def _fake_quant_of(value: object) -> fx.Node | None:
    """The fake-quant call that a value comes from, looking through ops that vanish in the deployed graph."""
    while isinstance(value, fx.Node):
        if isinstance(called_module(value), FakeQuantizeBase):
            return value
        if identify(value).family != IDENTITY or not value.args:
            return None
        value = value.args[0]
    return None


def _qat_layer(module: nn.Module, annotation: Annotation, bn_mode: str | int, path: str, tied: _Tied) -> QuantizedLayer:
    """The QAT layer of a plain, fused or recurrent layer, or of a table."""
    config = annotation.weight
    assert config is not None
    where = f"weight of {path!r} ({annotation.reason})"
    if isinstance(module, Table):
        return QATEmbedding(module, _weight_fake_quant(module.weight, config, AXIS, module.training, where, tied))
    if isinstance(module, RecurrentLayer):
        w, r, _ = module.stacked()
        return QATRecurrentLayer(
            module, *(_weight_fake_quant(it, config, 0, module.training, where, {}) for it in (w, r))
        )
    fused = module if isinstance(module, FusedLayer) else FusedLayer(module)  # type: ignore[arg-type]
    layer, bn = fused.layer, fused.bn
    assert type_of(layer) in WEIGHTED_TYPES
    if isinstance(bn_mode, int) and bn is not None and bn.momentum is None:
        raise ConfigError(
            f"{path}: bn_mode={bn_mode} needs a BatchNorm with a momentum, this one averages cumulatively"
        )
    axis, with_table = weighted_op(layer).axis, tied if bn is None else {}  # a BatchNorm makes another weight of it
    with eval_mode(layer):  # spectral norm iterates when it is read in training
        weight = layer.weight
    quant = _weight_fake_quant(weight, config, axis, layer.training, where, with_table)
    return qat_layer_type(layer)(layer, bn, fused.activation, quant, bn_mode)


def _weight_fake_quant(
    weight: torch.Tensor, config: TensorQConfig, axis: int, training: bool, where: str, tied: _Tied
) -> FakeQuantizeBase:
    """The fake-quant of a weight: a new one, or that of a table or layer with which it is tied."""
    for *how, quant in tied.get(id(weight), ()):
        if how == [axis, config]:
            return quant
    with _errors_name(config, where):
        quant = build_fake_quant(config, WEIGHT, axis, _number_of_scales(weight, config.scheme, axis))
        quant.attach(quant.in_blocks(weight))
    quant = _placed(quant, weight.device, training)
    tied.get(id(weight), []).append((axis, config, quant))
    return quant


def _number_of_scales(weight: torch.Tensor, scheme: QuantizeScheme, axis: int) -> int:
    """The number of channels of a weight, or of blocks."""
    size = scheme.block_size
    if size is None:
        return weight.shape[axis]
    if weight.dim() != 2 or weight.shape[1 - axis] % size:
        found = f"{weight.shape[1 - axis]} inputs" if weight.dim() == 2 else f"{weight.dim()} dimensions"
        raise ConfigError(
            f"block_size={size} is for weights of two dimensions whose number of inputs it divides; this one has "
            f"{found}, shape {tuple(weight.shape)}. Give this layer another block_size, or none, in an entry of "
            "'overrides'."
        )
    return weight.numel() // size


def _placed(quant: FakeQuantizeBase, device: torch.device, training: bool) -> FakeQuantizeBase:
    """A new fake-quant on the device of its tensor and in the mode of the model."""
    if quant.scale.device != device:
        quant = quant.to(device)
    return quant if training else quant.eval()


def _device_of(gm: nn.Module) -> torch.device:
    tensor: torch.Tensor | None = next(gm.parameters(), None)
    tensor = next(gm.buffers(), None) if tensor is None else tensor
    return torch.device("cpu") if tensor is None else tensor.device
