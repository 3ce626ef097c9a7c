"""Keep integers that OpenVINO drops, or at which it fails.

Behind a QuantizeLinear goes a Clip of its integers to the whole range of their type. No integer changes: integers of a
type lie within its range. OpenVINO keeps a QuantizeLinear whose integers an operator reads. It is added in four places
(seen in OpenVINO 2026.4):

1. Conv -> QuantizeLinear -> DequantizeLinear -> Add or Sub, nothing else reading the rounded values. OpenVINO computes
   it in one kernel that does not round the result of the convolution: up to a fifth of the sums are off by one. With an
   operator between Conv and QuantizeLinear, as Relu, it rounds.
2. Concat -> QuantizeLinear -> DequantizeLinear -> QuantizeLinear, each the only reader of the one before. Relu may
   stand behind Concat; operators that add or multiply constants, or clamp, before the second QuantizeLinear. OpenVINO
   merges the DequantizeLinear and these operators with the second QuantizeLinear, then moves the first one before
   Concat and copies its reader with one input instead of all: the process ends with a segmentation fault.
3. QuantizeLinear of a constant, as of position embeddings, or of what is computed from constants. If its
   DequantizeLinear is an operand of Add or Mul, OpenVINO rejects the file: it looks for the input of an operator where
   the constant is. With Clip it computes the integers when it compiles.
4. Concat along another dimension than the last -> QuantizeLinear -> DequantizeLinear -> MatMul or Gemm, and others that
   read the rounded values. OpenVINO gives Concat a zero point for each element of its dimension, which it then cannot
   broadcast in the product, and rejects the file (``torch.roll`` before a linear layer).

Source: OpenVINO, ``low_precision_transformations/src``: ``move_fake_quantize.cpp``, ``fake_quantize.cpp``, ``add.cpp``.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from fxqat.onnx.integer_clamps import TYPES, clip_integers
from fxqat.onnx.narrow_types import input_of

ADDITIONS = ("Add", "Sub")
PRODUCTS = ("MatMul", "Gemm")
MERGED = ("Add", "Sub", "Mul", "Div", "BatchNormalization", "Relu", "Clip", "Max", "Min", "Identity")
"""Operators that OpenVINO merges with the QuantizeLinear behind them, if all their inputs but one are constants."""


class KeepIntegers(ir.passes.InPlacePass):
    """Put an integer Clip where OpenVINO would drop a QuantizeLinear or fail."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Add the Clips in place."""
        quantizers = [node for node in model.graph if node.op_type == "QuantizeLinear" and _has_type(node)]
        constants = _constants(model.graph)
        found = [
            node
            for node in quantizers
            if _is_dropped(node) or _is_moved(node) or input_of(node, 0) in constants or _is_multiplied(node)
        ]
        for node in found:
            zero_point = input_of(node, 2).const_value
            assert zero_point is not None  # checked by _has_type
            limits = np.iinfo(zero_point.dtype.numpy())
            clip_integers(model.graph, node, np.array([limits.min, limits.max], zero_point.dtype.numpy()))
        return ir.passes.PassResult(model, modified=bool(found))


def _has_type(quantizer: ir.Node) -> bool:
    """Whether the integers have a type that Clip takes."""
    zero_point = input_of(quantizer, 2).const_value
    return zero_point is not None and zero_point.dtype.numpy().type in TYPES


def _is_dropped(quantizer: ir.Node) -> bool:
    """Case 1."""
    source, reader = input_of(quantizer, 0).producer(), _reader_of_reals(quantizer)
    return source is not None and source.op_type == "Conv" and reader is not None and reader.op_type in ADDITIONS


def _is_moved(quantizer: ir.Node) -> bool:
    """Case 2."""
    if _concat_before(quantizer) is None:
        return False
    reader = _reader_of_reals(quantizer)
    while reader is not None and reader.op_type in MERGED and _reads_constants_beside_one(reader):
        reader = _only_reader(reader)
    return reader is not None and reader.op_type == "QuantizeLinear"


def _is_multiplied(quantizer: ir.Node) -> bool:
    """Case 4."""
    concat = _concat_before(quantizer)
    if concat is None or _joins_last(concat):
        return False
    reals = [use.node.outputs[0] for use in quantizer.outputs[0].uses() if use.node.op_type == "DequantizeLinear"]
    return any(use.node.op_type in PRODUCTS for value in reals for use in value.uses())


def _concat_before(quantizer: ir.Node) -> ir.Node | None:
    """The Concat whose result is rounded, Relu between them or not."""
    source = input_of(quantizer, 0).producer()
    if source is not None and source.op_type == "Relu":
        source = input_of(source, 0).producer()
    return source if source is not None and source.op_type == "Concat" else None


def _joins_last(concat: ir.Node) -> bool:
    """Whether a Concat joins along the last dimension."""
    shape = input_of(concat, 0).shape
    return concat.attributes["axis"].as_int() in (-1, None if shape is None else len(shape) - 1)


def _constants(graph: ir.Graph) -> set[ir.Value]:
    """Case 3: the initializers, and what is computed from them; the exporter folds no large tensor."""
    found = set(graph.initializers.values())
    for node in graph:
        given = [value for value in node.inputs if value is not None]
        if node.op_type == "Constant" or (given and found.issuperset(given)):
            found.update(node.outputs)
    return found


def _reader_of_reals(quantizer: ir.Node) -> ir.Node | None:
    """The only node that reads the rounded reals, None if there are several or others read the integers."""
    reader = _only_reader(quantizer)
    return None if reader is None or reader.op_type != "DequantizeLinear" else _only_reader(reader)


def _only_reader(node: ir.Node) -> ir.Node | None:
    """The node that reads the result of a node, None if there are several or the result is an output of the model."""
    uses = tuple(node.outputs[0].uses())
    return uses[0].node if len(uses) == 1 and not node.outputs[0].is_graph_output() else None


def _reads_constants_beside_one(node: ir.Node) -> bool:
    """Whether all inputs of a node but one are constants."""
    return sum(value is not None and value.const_value is None for value in node.inputs) == 1
