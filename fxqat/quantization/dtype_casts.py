"""Casts to the type of the model's tensors, after the prepared model was converted by ``bfloat16()`` or ``half()``.

The graph holds the type that ``x.dtype`` was while tracing.

1. A cast whose source line names a ``dtype``, and no type, follows the model: ``y.to(x.dtype)``.
2. Any other cast stays as it is, such as ``y.to(torch.float32)``, and is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fxqat.utils.source import line_of_node, takes_dtype_of_another


def follow_dtype(graph: fx.Graph, old: torch.dtype, new: torch.dtype) -> Iterator[str]:
    """Change the casts of case 1, in place.

    Args:
        graph: the graph of a prepared model.
        old: the type of its tensors before.
        new: their type now.

    Yields:
        The source lines of case 2, or the names of nodes without one.
    """
    for node in graph.nodes:
        arguments = node.args, node.kwargs
        changed = fx.node.map_aggregate(arguments, lambda a: new if a is old else a)
        if changed == arguments:
            continue
        if takes_dtype_of_another(line_of_node(node)):
            node.args, node.kwargs = _pair(changed)
        else:
            yield line_of_node(node) or node.name


def _pair(arguments: Any) -> tuple[Any, Any]:
    args, kwargs = arguments
    return args, kwargs
