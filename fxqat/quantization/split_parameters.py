"""Split parameters: a parameter of which the graph reads only slices becomes several parameters.

Cross attention splits one packed weight into three, and applies each third to another input. As a parameter, each third
is the weight of a linear layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from fxqat.ops.identify import identify
from fxqat.utils.fx_graph import attribute_of, called_module, unique_name


class SplitParameter(NamedTuple):
    """The replacement of a parameter.

    Args:
        parts: the new parameters.
        dim: the dimension along which they are concatenated.
    """

    parts: tuple[nn.Parameter, ...]
    dim: int


def split_parameters(gm: fx.GraphModule) -> dict[int, SplitParameter]:
    """Split such parameters, in place. The part ``i`` of ``weight`` is named ``weight_i``.

    Args:
        gm: a traced graph module.

    Returns:
        The replacements, by ``id`` of the parameter.
    """
    in_modules = {id(p) for node in gm.graph.nodes for p in getattr(called_module(node), "parameters", tuple)()}
    found: dict[int, SplitParameter] = {}
    for node in [node for node in gm.graph.nodes if node.op == "get_attr"]:
        parameter = attribute_of(gm, node)
        if isinstance(parameter, nn.Parameter) and id(parameter) not in in_modules and _is_only_split(node):
            parts = _split(next(iter(node.users)), parameter.detach())
            read = {range(len(parts))[_index(item)] for split in node.users for item in split.users}
            if 1 < len(parts) == len(read):
                found[id(parameter)] = _replace(gm, node, parameter, parts)
    return found


def _is_only_split(node: fx.Node) -> bool:
    """Whether all readers of a node are equal splits, of which only items are read."""
    splits = list(node.users)
    same = {repr((split.target, split.args[1:], sorted(split.kwargs.items()))) for split in splits}
    items = [item for split in splits for item in split.users]
    return (
        len(same) == 1
        and all(identify(split).name == "split" and split.all_input_nodes == [node] for split in splits)
        and all(str(getattr(split.target, "__name__", split.target)) != "unbind" for split in splits)
        and all(identify(item).name == "getitem" and isinstance(item.args[1], int) for item in items)
    )


def _index(item: fx.Node) -> int:
    index = item.args[1]
    assert isinstance(index, int)
    return index


def _split(split: fx.Node, data: Tensor) -> tuple[Tensor, ...]:
    """Run a split node on the data of its parameter."""
    replace: Any = lambda node: data  # noqa: E731  torch's types are narrower
    args, kwargs = fx.node.map_arg((split.args, split.kwargs), replace)
    function: Any = getattr(Tensor, str(split.target)) if split.op == "call_method" else split.target
    return tuple(function(*args, **kwargs))


def _replace(gm: fx.GraphModule, node: fx.Node, parameter: nn.Parameter, parts: tuple[Tensor, ...]) -> SplitParameter:
    path, _, name = str(node.target).rpartition(".")
    owner = gm.get_submodule(path)
    splits = list(node.users)
    parameters, reads = [], []
    for i, part in enumerate(parts):
        parameters.append(nn.Parameter(part.clone(), parameter.requires_grad))
        last = unique_name(owner, f"{name}_{i}")
        owner.register_parameter(last, parameters[-1])
        with gm.graph.inserting_before(node):
            reads.append(gm.graph.get_attr(f"{path}.{last}" if path else last))
    for split in splits:
        for item in list(split.users):
            read = reads[_index(item)]
            read.meta = dict(item.meta)
            item.replace_all_uses_with(read)
            gm.graph.erase_node(item)
        gm.graph.erase_node(split)
    dim = next(dim for dim, size in enumerate(parameter.shape) if parts[0].shape[dim] != size)
    return SplitParameter(tuple(parameters), dim)
