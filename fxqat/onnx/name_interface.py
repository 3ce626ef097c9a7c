"""Name the inputs and outputs of the model.

1. An output that is an input, an initializer, or the same value as an output before it, passes through an Identity, so
   that it can have a name of its own.
2. Inputs and outputs get their names, in order.
3. Any other value that had one of these names gets an unused one.

A file with another number of inputs or outputs than of names is refused: a name would be that of another tensor. Before
all other passes, :class:`UniqueNames` sees to it that no two values have one name.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from fxqat.errors import ExportError
from fxqat.utils.unused_names import unused_name


class NameInterface(ir.passes.InPlacePass):
    """Rename inputs and outputs.

    Args:
        inputs: names of the inputs.
        outputs: names of the outputs, different from each other and from those of the inputs.
    """

    def __init__(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.inputs, self.outputs = inputs, outputs

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rename in place."""
        graph = model.graph
        for what, values, names in (("input", graph.inputs, self.inputs), ("output", graph.outputs, self.outputs)):
            if len(values) != len(names):
                raise ExportError(
                    f"the exported file has {len(values)} {what}s, the model {len(names)}: {', '.join(names)}. An "
                    f"{what} that the exporter drops or adds cannot be named: leave it out of forward()"
                )
        for place, value in enumerate(graph.outputs):  # case 1
            if value.producer() is None or value in graph.outputs[:place]:
                identity = ir.node("Identity", [value])
                identity.outputs[0].shape, identity.outputs[0].type = value.shape, value.type
                graph.append(identity)
                graph.outputs[place] = identity.outputs[0]
        pairs = zip((*graph.inputs, *graph.outputs), (*self.inputs, *self.outputs), strict=True)
        named = {value: name for value, name in pairs if value.name != name}
        made = [value for node in graph.all_nodes() for value in node.outputs]
        values = [*graph.inputs, *graph.initializers.values(), *made]
        taken = {value.name for value in values} | set(named.values())
        for value in values:  # also those that are named below: their old names may be the new ones of others
            if value.name in named.values():
                value.name = unused_name(str(value.name), taken)  # case 3
                taken.add(value.name)
        for value, name in named.items():  # case 2
            value.name = name
        return ir.passes.PassResult(model, modified=bool(named))


class UniqueNames(ir.passes.InPlacePass):
    """Rename inputs and results of nodes that have the name of a parameter or buffer.

    Torch's exporter names what a graph computes apart from what the model stores: a buffer ``mul`` and a product, or a
    buffer and an argument of ``forward`` called ``x``, have one name.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rename in place."""
        graph = model.graph
        values = [*graph.inputs, *(value for node in graph.all_nodes() for value in node.outputs)]
        taken = {*graph.initializers, *(value.name for value in values)}
        clashing = [value for value in values if value.name in graph.initializers]
        for value in clashing:
            value.name = unused_name(str(value.name), taken)
            taken.add(value.name)
        return ir.passes.PassResult(model, modified=bool(clashing))
