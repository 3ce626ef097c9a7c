"""Parameters that are read in parts only become their parts.

Attention with keys of its own applies the thirds of one packed weight to three inputs. Each third is then a weight like
any other, of a linear layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from fxqat.ops.identify import identify
from fxqat.utils.fx_graph import attribute_of, called_module, unique_name


class SplitParameter(NamedTuple):
    """What became of a parameter.

    Args:
        parts: the parameters that took its place.
        dim: the dimension along which they make it up.
    """

    parts: tuple[nn.Parameter, ...]
    dim: int


def split_parameters(gm: fx.GraphModule) -> dict[int, SplitParameter]:
    """Replace such parameters in the graph, in place. A part is named like the parameter, with its number behind.

    Args:
        gm: a traced graph module.

    Returns:
        The parts by ``id`` of the parameter.
    """
    held = {id(p) for node in gm.graph.nodes for p in getattr(called_module(node), "parameters", tuple)()}
    found: dict[int, SplitParameter] = {}
    for node in [node for node in gm.graph.nodes if node.op == "get_attr"]:
        parameter = attribute_of(gm, node)
        if isinstance(parameter, nn.Parameter) and id(parameter) not in held and _is_split_alike(node):
            parts = _split(next(iter(node.users)), parameter.detach())
            read = {range(len(parts))[_place(item)] for split in node.users for item in split.users}
            if 1 < len(parts) == len(read):
                found[id(parameter)] = _replace(gm, node, parameter, parts)
    return found


def _is_split_alike(node: fx.Node) -> bool:
    """Whether all that reads a node are items of splits, and the splits are the same."""
    splits = list(node.users)
    same = {repr((split.target, split.args[1:], sorted(split.kwargs.items()))) for split in splits}
    items = [item for split in splits for item in split.users]
    return (
        len(same) == 1
        and all(identify(split).name == "split" and split.all_input_nodes == [node] for split in splits)
        and all(str(getattr(split.target, "__name__", split.target)) != "unbind" for split in splits)
        and all(identify(item).name == "getitem" and isinstance(item.args[1], int) for item in items)
    )


def _place(item: fx.Node) -> int:
    place = item.args[1]
    assert isinstance(place, int)
    return place


def _split(split: fx.Node, data: Tensor) -> tuple[Tensor, ...]:
    put_in: Any = lambda node: data  # noqa: E731  torch's types are narrower
    args, kwargs = fx.node.map_arg((split.args, split.kwargs), put_in)
    function: Any = getattr(Tensor, str(split.target)) if split.op == "call_method" else split.target
    return tuple(function(*args, **kwargs))


def _replace(gm: fx.GraphModule, node: fx.Node, parameter: nn.Parameter, parts: tuple[Tensor, ...]) -> SplitParameter:
    path, _, name = str(node.target).rpartition(".")
    owner = gm.get_submodule(path)
    splits, made = list(node.users), []
    reads = []
    for place, part in enumerate(parts):
        made.append(nn.Parameter(part.clone(), parameter.requires_grad))
        last = unique_name(owner, f"{name}_{place}")
        owner.register_parameter(last, made[-1])
        with gm.graph.inserting_before(node):
            reads.append(gm.graph.get_attr(f"{path}.{last}" if path else last))
    for split in splits:
        for item in list(split.users):
            read = reads[_place(item)]
            read.meta = dict(item.meta)
            item.replace_all_uses_with(read)
            gm.graph.erase_node(item)
        gm.graph.erase_node(split)
    dim = next(dim for dim, size in enumerate(parameter.shape) if parts[0].shape[dim] != size)
    return SplitParameter(tuple(made), dim)
