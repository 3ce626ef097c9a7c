"""Fold tensors that an exported program computes from its parameters alone, by operators that ONNX does not have.

A model may compute tensors from parameters: the inverse of an invertible convolution, the kernel of a state space
model, in complex numbers. In an exported file parameters are constants, and so is what is computed from them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument


def fold_parameters(program: torch.export.ExportedProgram, is_translatable: Callable[[fx.Node], bool]) -> None:
    """Replace such tensors by constants, in place.

    What ONNX can compute stays: weights are stored as integers, with the operators that dequantize them.

    Args:
        program: an exported program that writes to no tensor.
        is_translatable: whether a node has a translation into ONNX.
    """
    values = _parameters(program)
    fixed: set[fx.Node] = set()
    folded: dict[fx.Node, None] = {}
    for node in program.graph.nodes:
        read = node.all_input_nodes
        if node in values:
            fixed.add(node)
        elif _is_determined(node) and fixed.issuperset(read):
            fixed.add(node)
            is_part = any(each in folded and not _is_tensor(each) for each in read)
            if is_part or any(map(_is_complex, (node, *read))) or not is_translatable(node):
                folded[node] = None
    with torch.no_grad():
        for node in folded:
            if _is_tensor(node) and not folded.keys() >= node.users.keys():
                value = _computed(node, values)
                values[_add_constant(program, node, value)] = value
    for node in reversed(folded):
        if not node.users:
            program.graph.erase_node(node)
    if folded:
        program.graph.eliminate_dead_code()
        program.graph_module.recompile()


def _parameters(program: torch.export.ExportedProgram) -> dict[fx.Node, Any]:
    """The inputs of the graph that are parameters, buffers or constants, with their values."""
    signature = program.graph_signature
    named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    named |= signature.inputs_to_lifted_tensor_constants
    stored = {**program.state_dict, **program.constants}
    written = set(signature.buffers_to_mutate.values())
    inputs = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in named]
    return {node: stored[named[node.name]] for node in inputs if named[node.name] not in written}


def _is_determined(node: fx.Node) -> bool:
    """Whether a node calls an operator whose arguments determine its result, and not one of higher order."""
    drawn = torch.Tag.nondeterministic_seeded
    return node.target is operator.getitem or drawn not in getattr(node.target, "tags", (drawn,))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _is_complex(node: fx.Node) -> bool:
    return _is_tensor(node) and node.meta["val"].is_complex()


def _computed(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """The value of a node, which is kept in ``values`` with those that it is computed from."""
    for read in node.all_input_nodes:
        if read not in values:
            _computed(read, values)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values[node]


def _add_constant(program: torch.export.ExportedProgram, node: fx.Node, value: Tensor) -> fx.Node:
    """Let the readers of a node read a constant of the program; its input of the graph."""
    with program.graph.inserting_before(next(iter(program.graph.nodes))):
        constant: fx.Node = program.graph.placeholder(f"{node.name}_folded")
    constant.meta = {**node.meta}
    node.replace_all_uses_with(constant)
    program.constants[constant.name] = value.contiguous()
    spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(constant.name), constant.name)
    program.graph_signature.input_specs.insert(0, spec)
    return constant
