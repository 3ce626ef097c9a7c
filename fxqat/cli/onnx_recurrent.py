"""The recurrent operators of ONNX as modules of torch, for onnx2torch, which has none.

Source: operators LSTM, GRU and RNN of opset 7 and 14. Their gates are in another order than torch's: ``iofc`` and
``ifgo`` for LSTM, ``zrh`` and ``rzn`` for GRU.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""The number of each of torch's gates among those of ONNX."""

ACTIVATIONS = {
    "LSTM": (["Sigmoid", "Tanh", "Tanh"],),
    "GRU": (["Sigmoid", "Tanh"],),
    "RNN": (["Tanh"], ["Relu"]),
}
"""The functions that torch has, of one direction; the first are ONNX's if none are given."""

REFUSED = {"clip": None, "input_forget": 0, "layout": 0}
"""Attributes for which torch has only this value."""


class Recurrent(nn.Module):
    """A layer of torch, called as ONNX calls its operator.

    Args:
        layer: a layer of one or both directions.
        is_reverse: whether its one direction is the reverse one.
        outputs: number of outputs of the operator that are in use, from the first.
        has_lengths: whether it is called with the number of steps of each sample.
    """

    def __init__(self, layer: nn.RNNBase, is_reverse: bool, outputs: int, has_lengths: bool) -> None:
        super().__init__()
        self.layer, self.is_reverse, self.outputs, self.has_lengths = layer, is_reverse, outputs, has_lengths

    def forward(self, x: Tensor, *given: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Values ``(T, N, C)`` to outputs ``(T, directions, N, H)``, and the last states ``(directions, N, H)``.

        Args:
            x: the values.
            given: the lengths, ``(N,)``, if it has them, then the states at the start.
        """
        states = given[1:] if self.has_lengths else given
        state: Any = states if len(states) == 2 else next(iter(states), None)
        if self.has_lengths:
            packed = pack_padded_sequence(x, given[0].cpu(), enforce_sorted=False)
            y, last = self.layer(packed, state)
            y, _ = pad_packed_sequence(y, total_length=x.shape[0])
        else:
            y, last = self.layer(x.flip(0) if self.is_reverse else x, state)
            y = y.flip(0) if self.is_reverse else y
        y = y.unflatten(-1, (2 if self.layer.bidirectional else 1, self.layer.hidden_size)).transpose(1, 2)
        return y if self.outputs == 1 else (y, *(last if isinstance(last, tuple) else (last,)))[: self.outputs]


def register_recurrent() -> None:
    """Teach onnx2torch the operators, unless a later release of it knows them."""
    from onnx2torch.node_converters.registry import add_converter

    for kind in GATES:
        for version in (7, 14):
            with suppress(ValueError):
                add_converter(operation_type=kind, version=version)(_convert)


def _convert(node: Any, graph: Any) -> Any:
    """The module of a node, and the names of its inputs and outputs."""
    from onnx2torch.utils.common import OnnxMapping, OperationConverterResult, get_const_value

    kind, attributes = node.operation_type, node.attributes
    names = [*node.input_values, *[""] * 8][:8]
    x, *weights, lengths, initial_h, initial_c, peepholes = names
    direction = attributes.get("direction", "forward")
    number = 2 if direction == "bidirectional" else 1
    functions = attributes.get("activations", ACTIVATIONS[kind][0] * number)
    refused = [key for key, value in REFUSED.items() if attributes.get(key, value) != value]
    refused += ["sequence_lens and direction='reverse'"] if lengths and direction == "reverse" else []
    refused += ["peepholes"] if peepholes else []
    refused += ["activations"] if functions not in [each * number for each in ACTIVATIONS[kind]] else []
    refused += ["linear_before_reset=0"] if kind == "GRU" and not attributes.get("linear_before_reset", 0) else []
    if refused:
        raise NotImplementedError(f"{kind} with {', '.join(refused)}")
    w, r, b = (get_const_value(name, graph) if name else None for name in weights)
    assert isinstance(w, Tensor)
    assert isinstance(r, Tensor)
    options = {"nonlinearity": functions[0].lower()} if kind == "RNN" else {}
    layer: nn.RNNBase = getattr(nn, kind)(
        w.shape[2], r.shape[2], bias=b is not None, bidirectional=number == 2, **options
    )
    for i, suffix in enumerate(("", "_reverse")[:number]):
        parts = {"weight_ih": w[i], "weight_hh": r[i]}
        parts |= dict(zip(("bias_ih", "bias_hh"), b[i].chunk(2), strict=True)) if isinstance(b, Tensor) else {}
        for name, value in parts.items():
            gates = value.chunk(len(GATES[kind]))
            with torch.no_grad():
                getattr(layer, f"{name}_l0{suffix}").copy_(torch.cat([gates[gate] for gate in GATES[kind]]))
    states = [initial_h, *([initial_c] if kind == "LSTM" else [])]
    states = [] if all(_is_zero(name, graph) for name in states) else states
    return OperationConverterResult(
        Recurrent(layer, direction == "reverse", len(node.output_values), bool(lengths)),
        OnnxMapping((x, *([lengths] if lengths else []), *states), node.output_values),
    )


def _is_zero(name: str, graph: Any) -> bool:
    """Whether a state is none, or zeros of a size that is computed."""
    if not name or name in graph.initializers or name in graph.input_values:
        return not name
    producer, _ = graph.value_as_node_output(name)
    value = producer.attributes.get("value")
    return producer.operation_type == "ConstantOfShape" and (value is None or not value.to_torch().any())
