"""The op of a node, and its operands."""

from __future__ import annotations

import builtins
import inspect
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from fxqat.nn.embedding import QATEmbedding
from fxqat.nn.fused import FusedLayer
from fxqat.nn.qat import QATLayer
from fxqat.nn.recurrent import RecurrentLayer
from fxqat.ops.families import ACTIVATION, MATH, NORM, PASS_THROUGH, RECURRENT, UNBOUNDED, WEIGHTED, Op
from fxqat.ops.table import IN_PLACE_OPERATORS, OPS, OUT_OF_PLACE, UNKNOWN
from fxqat.utils.fx_graph import argument, called_module
from fxqat.utils.node_meta import INFINITE, kind_of
from fxqat.utils.own_forward import type_of
from fxqat.utils.training_only import is_idle

OPERAND_NAMES = (
    *("input", "tensors", "tensor", "self", "query", "key", "value", "x1", "x2", "tensor1", "tensor2", "end"),
    *("weight", "other", "exponent", "mat", "mat1", "mat2", "batch1", "batch2", "vec"),
)
TRANSPOSES = ("T", "mT", "H", "mH")

_BY_NAME = {op.name: op for op in OPS}
_BY_MODULE = {kind: op for op in OPS for kind in op.modules}
_BY_FUNCTION = {function: op for op in OPS for function in op.functions}
_BY_METHOD = {method: op for op in OPS for method in op.methods}
_BY_FUNCTION_NAME = {function.__name__: op for op in OPS for function in op.functions}
_NAMESPACES = ("", "torch", "operator", "F", "Tensor")


def op_named(name: str) -> Op | None:
    """The row with a name; None if there is none."""
    return _BY_NAME.get(name)


def op_spelled(spelling: Callable[..., Any] | str) -> Op | None:
    """The row that has a spelling: a function, a method of tensors, or the name of either or of the op.

    Example:
        >>> {op_spelled(spelling).name for spelling in (torch.add, operator.iadd, torch.Tensor.add_, "torch.add")}
        {'add'}
    """
    if isinstance(spelling, str):
        namespace, _, name = spelling.rpartition(".")
        if namespace.partition(".")[0] not in _NAMESPACES:
            return None
        return _BY_NAME.get(name) or _BY_FUNCTION_NAME.get(name) or _BY_METHOD.get(name)
    name = getattr(spelling, "__name__", "")
    is_method = getattr(torch.Tensor, name, None) is spelling
    return _BY_METHOD.get(name) if is_method else _BY_FUNCTION.get(spelling)


def identify(node: fx.Node) -> Op:
    """The op of a node; ``UNKNOWN`` if no row has its spelling.

    The op of a fused or QAT layer is the op of the layer in it. Some ops depend on their arguments:

    1. ``pad`` with a constant other than 0 inserts new values: no pass-through;
    2. ``interpolate`` in mode nearest only repeats values: a pass-through;
    3. ``max_pool`` that also returns indices is opaque;
    4. the attributes ``T``, ``mT``, ``H`` and ``mH`` are ``permute``, ``values`` and ``indices`` are items of a tuple,
       any other attribute is a size;
    5. ``max`` and ``min`` of two tensors are ``maximum`` and ``minimum``; along a dimension they also return indices;
    6. item 1 of an op that returns values and indices holds the indices (torchvision's operator for ``roi_pool``
       returns both);
    7. ``masked_fill`` with 0 is a pass-through, ``where`` with another number inserts new values. ``masked_fill``,
       ``where``, constructors and products are unbounded with a number that stands for infinity;
    8. an item of a recurrent layer is an output of this layer;
    9. the operators ``//`` and ``%`` are integer arithmetic on sizes, elementwise ops on float tensors;
    10. a user's module that returns its input in eval mode is ``stochastic_depth``: :mod:`fxqat.utils.training_only`.
    """
    if node.op == "call_module":
        module = called_module(node)
        return _argument_cases(node, identify_module(module), module)
    if node.op == "call_function":
        if node.target is builtins.getattr:
            return _attribute(node)
        found = _BY_FUNCTION.get(node.target) if callable(node.target) else None
        return _argument_cases(node, found or UNKNOWN, None)
    if node.op == "call_method":
        return _argument_cases(node, _BY_METHOD.get(str(node.target), UNKNOWN), None)
    return UNKNOWN


def identify_module(module: nn.Module | None) -> Op:
    """The op of a module object."""
    if isinstance(module, FusedLayer):
        return identify_module(module.layer)
    if isinstance(module, RecurrentLayer):
        return _BY_NAME[module.cell.op]
    if isinstance(module, (QATLayer, QATEmbedding)):
        name = module.layer_type
        return next(op for op in OPS if any(kind.__name__ == name for kind in op.modules))
    return _BY_MODULE.get(type_of(module), _BY_NAME["stochastic_depth"] if is_idle(module) else UNKNOWN)


def is_stateless_layer(node: fx.Node) -> bool:
    """Whether a node calls a layer of torch that computes the same whenever it gets the same."""
    module = called_module(node)
    has_buffers = module is not None and next(module.buffers(), None) is not None
    return module is not None and not has_buffers and identify(node).family in (WEIGHTED, NORM, ACTIVATION)


def keeps_output(node: fx.Node) -> bool:
    """Whether the value of a node stays in memory until the backward pass, whatever reads it."""
    if node.op in ("placeholder", "get_attr"):
        return True
    module = called_module(node)
    if isinstance(module, (FusedLayer, QATLayer)):
        return identify_module(module.activation).keeps_output
    return identify(node).keeps_output


def _argument_cases(node: fx.Node, op: Op, module: nn.Module | None) -> Op:
    case = _CASES.get(op.name)
    return op if case is None else case(node, op, module)


def _attribute(node: fx.Node) -> Op:
    name = node.args[1]
    if name in TRANSPOSES:
        return _BY_NAME["permute"]
    if name == "values":
        return _BY_NAME["getitem"]
    return _BY_NAME["indices" if name == "indices" else "size"]


def _pad(node: fx.Node, op: Op, module: nn.Module | None) -> Op:
    position = 2 if node.target is torch.constant_pad_nd else 3
    value = getattr(module, "value", 0) if module is not None else argument(node, position, "value", 0)
    return op if value in (0, 0.0, None) else _bounded(UNKNOWN, value)


def _interpolate(node: fx.Node, op: Op, module: nn.Module | None) -> Op:
    return replace(op, family=PASS_THROUGH) if interpolation_mode(node).startswith("nearest") else op


def _max_pool(node: fx.Node, op: Op, module: nn.Module | None) -> Op:
    position = 2 if op.name.startswith("adaptive") else 6
    return UNKNOWN if getattr(module, "return_indices", False) or argument(node, position, "return_indices", 0) else op


def _extremum(node: fx.Node, op: Op, module: nn.Module | None) -> Op:
    if node.target not in (torch.max, torch.min, "max", "min"):
        return op  # amax and amin return values only
    second = argument(node, 1, "dim")
    is_tensor = isinstance(second, fx.Node) and kind_of(second) != "plain"
    if is_tensor or "other" in node.kwargs:
        return _BY_NAME[f"{op.name}imum"]
    return op if second is None else _BY_NAME[f"{op.name}_dim"]


def _median(node: fx.Node, op: Op, module: nn.Module | None) -> Op:
    return replace(op, gives_tuple=argument(node, 1, "dim") is not None)


def _item(node: fx.Node, op: Op, module: nn.Module | None) -> Op:
    source, index = node.args
    if not isinstance(source, fx.Node):
        return op
    if isinstance(called_module(source), RecurrentLayer):
        return replace(identify(source), inputs=0, gives_tuple=False)
    if isinstance(index, slice):  # part of a tuple
        return replace(op, gives_tuple=identify(source).gives_tuple)
    return _BY_NAME["indices"] if index == 1 and gives_indices(identify(source)) else op


def _fill(node: fx.Node, op: Op, module: nn.Module | None) -> Op:
    value = argument(node, 2, "value")
    if value in (0, 0.0) and not isinstance(value, fx.Node):
        return replace(op, family=PASS_THROUGH)
    return _bounded(op, value)


def _where(node: fx.Node, op: Op, module: nn.Module | None) -> Op:
    values = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, (int, float))]
    return _bounded(replace(op, family=MATH) if any(values) else op, *values)


def _assign_item(node: fx.Node, op: Op, module: nn.Module | None) -> Op:
    value = node.args[2]
    if isinstance(value, fx.Node) or value == 0:
        return op
    return _bounded(replace(op, family=MATH), value)


def _mul(node: fx.Node, op: Op, module: nn.Module | None) -> Op:
    return _bounded(op, *node.args, *node.kwargs.values())


def _constructor(node: fx.Node, op: Op, module: nn.Module | None) -> Op:
    if node.target in (torch.full, torch.full_like, "new_full"):
        return _bounded(op, argument(node, 2 if node.op == "call_method" else 1, "fill_value"))
    return op


def _integer(node: fx.Node, op: Op, module: nn.Module | None) -> Op:
    names = {operator.floordiv: "floor_divide", operator.mod: "remainder"}
    return _BY_NAME[names[node.target]] if node.target in names and kind_of(node) == "float" else op


def _roi_pool(node: fx.Node, op: Op, module: nn.Module | None) -> Op:
    return replace(op, gives_tuple=node.target is torch.ops.torchvision.roi_pool)


_CASES: dict[str, Callable[[fx.Node, Op, nn.Module | None], Op]] = {
    "pad": _pad,
    "interpolate": _interpolate,
    **dict.fromkeys((name for name in _BY_NAME if "max_pool" in name), _max_pool),
    "max": _extremum,
    "min": _extremum,
    "median": _median,
    "getitem": _item,
    "assign_item": _assign_item,
    "roi_pool": _roi_pool,
    "masked_fill": _fill,
    "where": _where,
    "mul": _mul,
    "constructor": _constructor,
    "integer": _integer,
}
"""By row, the function that looks at the arguments of a call."""


def _bounded(op: Op, *values: Any) -> Op:
    infinite = any(isinstance(value, (int, float)) and not abs(value) < INFINITE for value in values)
    return replace(op, family=UNBOUNDED) if infinite else op


def gives_indices(op: Op) -> bool:
    """Whether an op returns a tuple of values and their indices."""
    return op.gives_tuple and op.family != RECURRENT and op.name != "split"


def operands(node: fx.Node, op: Op) -> list[Any]:
    """The arguments of a call that can be quantized values, positional or keyword, in the order of the op."""
    found = list(node.args[: op.inputs])
    by_keyword = [node.kwargs[name] for name in OPERAND_NAMES if name in node.kwargs]
    return found + by_keyword[: op.inputs - len(found)]


def poles(node: fx.Node, op: Op) -> list[Any]:
    """The operands near a singularity: divisors, arguments of logarithms, roots and reciprocals."""
    found = operands(node, op)
    if op.name == "pow" and len(found) > 1 and isinstance(found[1], (int, float)) and found[1] < 1:
        return found[:1]
    return [found[position] for position in op.poles if position < len(found)]


def interpolation_mode(node: fx.Node) -> str:
    """The mode of a call of ``interpolate`` or of a module ``Upsample``."""
    module = called_module(node)
    return str(module.mode if isinstance(module, nn.Upsample) else argument(node, 3, "mode", "nearest"))


NO_WRITES = (
    "requires_grad_",
    "detach_",
    "share_memory_",
    "rename_",
    "set_",
    "resize_",
    "apply_",
    "map_",
    "as_strided_",
)
"""Methods whose names look like those of writes to a tensor."""


def works_in_place(node: fx.Node) -> bool:
    """Whether a call overwrites its first operand."""
    if node.op == "call_module":
        return getattr(called_module(node), "inplace", False) is True
    if node.op == "call_method":
        name = str(node.target)
        return out_of_place_method(name) != name and name not in NO_WRITES and hasattr(torch.Tensor, name)
    if node.op != "call_function":
        return False
    return node.target in OUT_OF_PLACE or _has_inplace_set(node)


def _has_inplace_set(node: fx.Node) -> bool:
    """Whether a function is called with ``inplace=True``, by keyword, by position or by default."""
    try:
        call = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # torch's builtin functions have no signature; none of them has the option
        return False
    call.apply_defaults()
    return call.arguments.get("inplace") is True


def out_of_place_method(name: str) -> str:
    """The method that computes the same out of place; the name itself if it overwrites nothing.

    Example:
        >>> out_of_place_method("relu_"), out_of_place_method("__iadd__"), out_of_place_method("__add__")
        ('relu', '__add__', '__add__')
    """
    if name.endswith("__"):
        base = name.removeprefix("__i").removesuffix("__")
        return f"__{base}__" if name.startswith("__i") and base in IN_PLACE_OPERATORS else name
    return name.removesuffix("_")
