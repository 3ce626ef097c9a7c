"""Remove nodes that a pass has replaced, with the constants that only they read."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir


def remove_unread(graph: ir.Graph, nodes: Iterable[ir.Node]) -> None:
    """Remove those of the nodes whose results nothing reads, in order, and the initializers that nothing reads then."""
    for node in nodes:
        if not any(value.uses() for value in node.outputs):
            read = [value for value in node.inputs if value is not None]
            graph.remove(node, safe=True)
            drop_unread(graph, read)


def drop_unread(graph: ir.Graph, values: Iterable[ir.Value]) -> None:
    """Remove those of the values that are initializers and that nothing reads."""
    for value in values:
        if value.is_initializer() and not value.uses() and not value.is_graph_output():
            graph.initializers.pop(str(value.name), None)
