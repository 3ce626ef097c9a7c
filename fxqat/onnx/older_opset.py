"""Write a model as one of opset 17, for converters that know no newer operators.

1. Axes that ReduceMean and its like read as an input since opset 18 become their attribute again; Split into equal
   parts needs no number of them; Reshape to sizes without a 0 needs no ``allowzero``; Gelu becomes Erf and arithmetic;
2. the model is declared as one of opset 17. Later versions of the operators in :data:`SAME` only take more types; a
   model with another operator that changed since is refused.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

NEWEST = 17
"""The opset."""

SAME = {
    "Acos", "Asin", "Atan", "AveragePool", "BatchNormalization", "Cast", "Celu", "Constant", "ConstantOfShape",
    "Conv", "ConvTranspose", "Cos", "DepthToSpace", "Dropout", "Einsum", "Elu", "Equal", "EyeLike", "Flatten",
    "GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "HardSwish", "Identity", "InstanceNormalization", "IsInf",
    "IsNaN", "MaxPool", "Mish", "Mod", "NonZero", "Pad", "Range", "Reshape", "Resize", "RoiAlign", "Round",
    "ScatterND", "Selu", "Shape", "Sin", "Size", "Softplus", "Softsign", "SpaceToDepth", "Squeeze", "Tan",
    "ThresholdedRelu", "TopK", "Transpose", "Unsqueeze"
}  # fmt: skip
"""Operators whose versions after opset 17 compute the same, with the inputs and attributes that they had before."""

LATER = {
    "Pad": (3, ()),
    "Resize": (4, ("axes", "antialias", "keep_aspect_ratio_policy")),
    "AveragePool": (1, ("dilations",)),
}
"""Of some of them, the number of inputs and the attributes that came later."""


class AsOpset17(ir.passes.InPlacePass):
    """Write the operators as they were in opset 17.

    Raises:
        NotImplementedError: there is an operator that opset 17 does not have.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the model in place."""
        opset = model.opset_imports[""]
        for node in list(model.graph):
            _as_before(node, model.graph, opset)  # case 1
        common.RemoveUnusedNodesPass()(model)
        model.opset_imports[""] = min(opset, NEWEST)  # case 2
        return ir.passes.PassResult(model, modified=True)


def _as_before(node: ir.Node, graph: ir.Graph, opset: int) -> None:
    """Write a node as it was in opset 17."""
    name = node.op_type
    if name == "Gelu":
        _write_gelu(node, graph)
        return
    since = onnx.defs.get_schema(name, opset, node.domain).since_version if node.domain in ("", "ai.onnx") else 0
    inputs, attributes = LATER.get(name, (len(node.inputs), ()))
    has_later = any(value is not None for value in node.inputs[inputs:]) or any(
        a in node.attributes for a in attributes
    )
    without_allowzero(node)
    if name.startswith("Reduce") and name != "ReduceSum":
        axes = node.inputs[1] if len(node.inputs) > 1 else None
        if axes is not None and axes.const_value is None:
            raise NotImplementedError(f"{name} whose axes are computed")
        if axes is not None and axes.const_value is not None:
            node.attributes["axes"] = ir.AttrInt64s("axes", axes.const_value.numpy().tolist())
            node.resize_inputs(1)
        node.attributes.pop("noop_with_empty_axes", None)
    elif name == "Split" and "num_outputs" in node.attributes:
        without_number_of_parts(node)
        if "num_outputs" in node.attributes:
            raise NotImplementedError("Split into parts of unequal or unknown size")
    elif since > NEWEST and (name not in SAME or has_later) and name != "Split":
        raise NotImplementedError(f"{name} of opset {since}")


def without_allowzero(node: ir.Node) -> None:
    """Remove the ``allowzero`` of a Reshape (opset 14) that has no effect: no size is 0."""
    if node.op_type == "Reshape" and "allowzero" in node.attributes:
        sizes = None if node.inputs[1] is None else ir.convenience.get_const_tensor(node.inputs[1])
        if node.attributes["allowzero"].as_int() == 0 or (sizes is not None and 0 not in sizes.numpy()):
            node.attributes.pop("allowzero")


def without_number_of_parts(node: ir.Node) -> None:
    """Remove the ``num_outputs`` of a Split (opset 18) into equal parts, as it splits without."""
    if node.op_type == "Split" and "num_outputs" in node.attributes:
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
        whole = None if node.inputs[0] is None or node.inputs[0].shape is None else node.inputs[0].shape[axis]
        parts = {None if part.shape is None else part.shape[axis] for part in node.outputs}
        is_even = isinstance(whole, int) and whole % len(node.outputs) == 0
        if is_even or (len(parts) == 1 and isinstance(parts.pop(), int)):
            node.attributes.pop("num_outputs")


def _write_gelu(node: ir.Node, graph: ir.Graph) -> None:
    """``x * 0.5 * (1 + erf(x / sqrt(2)))``, the definition of ONNX Gelu (opset 20)."""
    if "approximate" in node.attributes and node.attributes["approximate"].as_string() != "none":
        raise NotImplementedError("Gelu with approximate='tanh'")
    value, result = node.inputs[0], node.outputs[0]

    def constant(number: float, what: str) -> ir.Value:
        name = f"{result.name}_{what}"
        made = ir.Value(name=name, const_value=ir.tensor(np.float32(number), name=name))
        graph.register_initializer(made)
        return made

    scaled = ir.node("Div", [value, constant(math.sqrt(2.0), "root")])
    erf = ir.node("Erf", [scaled.outputs[0]])
    added = ir.node("Add", [erf.outputs[0], constant(1.0, "one")])
    product = ir.node("Mul", [value, added.outputs[0]])
    half = ir.node("Mul", [product.outputs[0], constant(0.5, "half")])
    made = [scaled, erf, added, product, half]
    graph.insert_before(node, made)
    name = result.name
    ir.convenience.replace_all_uses_with(result, half.outputs[0], replace_graph_outputs=True)
    graph.remove(node, safe=True)
    half.outputs[0].name, half.outputs[0].type, half.outputs[0].shape = name, result.type, result.shape
