"""Name the outputs of the model.

1. If there is one name per output, the outputs get these names.
2. If an output is also an input of the model, or the numbers differ, the exporter's names stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir


class NameOutputs(ir.passes.InPlacePass):
    """Rename the outputs.

    Args:
        names: the names, in the order of the outputs.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rename the outputs in place."""
        outputs = model.graph.outputs
        fits = len(outputs) == len(self.names) and not any(value.is_graph_input() for value in outputs)
        if fits:  # case 1
            for value, name in zip(outputs, self.names, strict=True):
                value.name = name
        return ir.passes.PassResult(model, modified=fits)
