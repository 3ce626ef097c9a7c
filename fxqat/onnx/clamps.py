"""Clamps: Relu and Clip before a Q node of 4 or 2 bits are written as Max and Min, which compute the same.

ONNX Runtime (seen in 1.31) drops a Relu before such a node whatever its zero point is, and so computes something else
at its default optimization level; at a Clip it fails. Its rules know the types of 8 and 16 bits only. They also see a
clamp that stands behind operators that move values, because it pulls Q nodes through those.

Source: ONNX Runtime, ``optimizer/qdq_transformer``: ``relu_quantizelinear.cc``, ``clip_quantizelinear.cc`` and
``qdq_propagation.cc``.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from fxqat.onnx.narrow_types import NARROW

MOVING = ("Flatten", "Identity", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
ZERO = "fxqat_zero"
"""The initializer that Max compares with in place of Relu."""


def write_clamps(model: onnx.ModelProto) -> onnx.ModelProto:
    """Rewrite those clamps, in place, and return the model."""
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    producers = {name: node for node in model.graph.node for name in node.output}
    clamps = set()
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear" and types[node.input[2]] in NARROW.values():
            source = producers.get(node.input[0])
            while source is not None and source.op_type in MOVING:
                source = producers.get(source.input[0])
            if source is not None and (
                source.op_type == "Relu" or (source.op_type == "Clip" and any(source.input[1:]))
            ):
                clamps.add(source.output[0])
    if clamps:
        nodes = [new for old in model.graph.node for new in (_bounded(old) if old.output[0] in clamps else [old])]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        model.graph.initializer.append(numpy_helper.from_array(np.zeros((), np.float32), ZERO))
    return model


def _bounded(clamp: onnx.NodeProto) -> list[onnx.NodeProto]:
    """``Max(x, 0)`` of a Relu; ``Min(Max(x, low), high)`` of a Clip, less the bound that it does not have."""
    bounds = [("Max", ZERO)] if clamp.op_type == "Relu" else zip(("Max", "Min"), clamp.input[1:], strict=False)
    given = [(kind, bound) for kind, bound in bounds if bound]
    names = [f"{clamp.output[0]}_bounded", clamp.output[0]][-len(given) :]
    sources = [clamp.input[0], *names]
    return [
        helper.make_node(kind, [source, bound], [name], name=f"{clamp.name}_{kind.lower()}")
        for (kind, bound), source, name in zip(given, sources, names, strict=False)
    ]
