"""Products: the product of a value and a parameter becomes a call of a linear layer's function.

Cases:

1. ``x @ weight`` in any spelling (``matmul``, ``mm``, ``addmm``) becomes ``linear_product(x, weight)``, whose output
   channels are the weight's columns.
2. ``x @ weight.T`` becomes ``F.linear(x, weight)``, in any spelling of the transpose, and ``F.linear(x, weight.T)`` the
   product of case 1.
3. So does a weight that is computed from parameters alone, if its shape is known.
4. A parameter ``(out_features,)`` that is added to the product, or that ``addmm`` adds, is the bias. Any other value
   that ``addmm`` adds is added to the result.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional as F

from fxqat.nn.product_layer import linear_product
from fxqat.ops.identify import identify, operands
from fxqat.quantization.computed_weights import original_of
from fxqat.utils.fx_graph import attribute_of, only_user
from fxqat.utils.node_meta import MODE, SHAPE, SPELLING, kind_of

PRODUCTS = (torch.matmul, torch.linalg.matmul, torch.mm, operator.matmul, "matmul", "__matmul__", "mm")
"""The products whose second operand is ``(in_features, out_features)`` if it has two dimensions."""
TRANSPOSES = ("t", "T", "mT", "adjoint", "H", "mH")


class Weight(NamedTuple):
    """The weight of a product.

    Args:
        node: reads the parameter.
        outputs: number of output channels.
        transposed: whether the product is with its transpose.
    """

    node: fx.Node
    outputs: int
    transposed: bool


def products_to_linear(gm: fx.GraphModule, computed: set[fx.Node]) -> None:
    """Rewrite such products, in place.

    Args:
        gm: a graph module.
        computed: its :func:`~fxqat.quantization.computed_weights.parameter_values`.
    """
    for node in list(gm.graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue  # an input or a module may be named "matmul"
        if node.target is F.linear:
            _turn_linear(gm, node, computed)  # case 2
            continue
        is_addmm = node.target in (torch.addmm, "addmm")
        if not is_addmm and node.target not in PRODUCTS:
            continue
        found = operands(node, identify(node))
        if not len(found) == len((*node.args, *node.kwargs)) == (3 if is_addmm else 2):
            continue  # called with more (alpha, beta, out), or a value times itself
        added, x, second = found if is_addmm else (None, *found)
        weight = _weight(gm, second, computed)
        if weight is None or not isinstance(x, fx.Node) or x in computed:
            continue
        bias = added if _is_bias(gm, added, weight) else None
        following = only_user(node) if added is None else None
        if following is not None and _adds(following) and following.meta.get(MODE) == node.meta.get(MODE):
            bias = next(
                (o for o in operands(following, identify(following)) if _is_bias(gm, o, weight)), None
            )  # case 4
        last = node if bias is None or following is None else following
        function = F.linear if weight.transposed else linear_product
        with gm.graph.inserting_before(last):
            new = gm.graph.call_function(function, (x, weight.node, bias))
            new.meta = dict(last.meta) | {SPELLING: node.target}
            if added is not None and bias is None:
                product, new = new, gm.graph.call_function(torch.add, (added, new))
                new.meta = dict(product.meta)
        last.replace_all_uses_with(new)
        for unread in dict.fromkeys((last, node, second)):
            if not unread.users and unread is not weight.node:
                gm.graph.erase_node(unread)


def _turn_linear(gm: fx.GraphModule, node: fx.Node, computed: set[fx.Node]) -> None:
    """Turn ``F.linear(x, weight.T)`` into ``linear_product(x, weight)``."""
    second = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    weight = _weight(gm, second, computed)
    if isinstance(second, fx.Node) and weight is not None and weight.transposed:
        node.replace_input_with(second, weight.node)
        node.kwargs = {{"input": "x"}.get(name, name): value for name, value in node.kwargs.items()}
        node.meta[SPELLING] = node.target
        node.target = linear_product
        if not second.users:
            gm.graph.erase_node(second)


def _weight(gm: fx.GraphModule, node: Any, computed: set[fx.Node]) -> Weight | None:
    """The second operand of a product as a weight; None if it is no parameter of two dimensions."""
    if not isinstance(node, fx.Node):
        return None
    transposed = _is_transpose(node)
    source = node.all_input_nodes[0] if transposed else node
    parameter = _parameter(gm, source)
    if parameter is not None:
        shape, is_float = tuple(parameter.shape), parameter.is_floating_point()
    else:
        shape, is_float = source.meta.get(SHAPE, ()), kind_of(source) == "float"
        is_float = is_float and original_of(gm, source, computed) is not None  # case 3
    if len(shape) != 2 or not is_float:
        return None
    return Weight(source, shape[0 if transposed else 1], transposed)


def _is_transpose(node: fx.Node) -> bool:
    """Whether a node exchanges the two dimensions of a matrix."""
    name = str(getattr(node.target, "__name__", node.target))
    if name in TRANSPOSES:
        return True
    if name == "getattr":
        return node.args[1] in TRANSPOSES
    rest: Any = node.args[1] if len(node.args) == 2 else node.args[1:]
    exchanges = name in ("transpose", "swapaxes", "swapdims", "permute") and not node.kwargs
    return exchanges and isinstance(rest, (tuple, list)) and tuple(rest) in ((0, 1), (1, 0), (-1, -2), (-2, -1))


def _adds(node: fx.Node) -> bool:
    return identify(node).name == "add" and len(node.args) == 2 and not node.kwargs


def _is_bias(gm: fx.GraphModule, node: Any, weight: Weight) -> bool:
    parameter = _parameter(gm, node)
    return parameter is not None and tuple(parameter.shape) == (weight.outputs,)


def _parameter(gm: fx.GraphModule, node: Any) -> nn.Parameter | None:
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value = attribute_of(gm, node)
    return value if isinstance(value, nn.Parameter) else None
