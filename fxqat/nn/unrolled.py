"""A recurrent layer as plain operations, step by step, for targets without an operator for it.

Every product, sum, sigmoid and tanh is an operation of its own, which a backend quantizes by its table. The two linear
layers, of the input and of the state, are called by all steps, so that each has one weight and one quantizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxqat.nn.recurrent import CELLS, step_mask, unstacked

Function = Callable[[Any], Any]


def unroll(
    mode: str,
    x: Any,
    states: Sequence[Any],
    steps: Sequence[int],
    of_input: Function,
    of_state: Function,
    projection: Function = lambda h: h,
    named: Callable[[Any, str], Any] = lambda value, name: value,
    mask: Any = None,
) -> tuple[Any, ...]:
    """One direction of one layer.

    Args:
        mode: ``"LSTM"``, ``"GRU"``, ``"RNN_TANH"`` or ``"RNN_RELU"``.
        x: ``(T, N, I)``, a tensor or a proxy of one.
        states: hidden state and, for an LSTM, cell state at the start, each ``(N, H)``.
        steps: the T numbers of the steps, in the order in which they are computed.
        of_input: the linear layer of the input.
        of_state: the linear layer of the hidden state.
        projection: the linear layer without bias of the hidden state of an LSTM with projections.
        named: gives a name, ``"hidden"`` or ``"cell"``, to a state.
        mask: whether a sample has a step, ``(T, N, 1)``; None if all have all.

    Returns:
        The hidden states of all steps, ``(T, N, H)``, zeros where a sample has none, and the states at the end, each
        ``(N, H)``.
    """
    products = of_input(x)
    hidden, cell = (*states, None)[:2]
    outputs: dict[int, Any] = {}
    for step in steps:
        before = hidden, cell
        product, of_hidden = products[step], of_state(hidden)
        if mode == "LSTM":
            i, f, g, o = _gates(product + of_hidden, 4)
            cell = named(torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g), "cell")
            hidden = projection(torch.sigmoid(o) * torch.tanh(cell))
        elif mode == "GRU":
            (r_x, z_x, n_x), (r_h, z_h, n_h) = _gates(product, 3), _gates(of_hidden, 3)
            z, new = torch.sigmoid(z_x + z_h), torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h)
            hidden = new + z * (hidden - new)
        else:
            hidden = {"RNN_TANH": torch.tanh, "RNN_RELU": torch.relu}[mode](product + of_hidden)
        hidden = outputs[step] = named(hidden, "hidden")
        if mask is not None:
            hidden = torch.where(mask[step], hidden, before[0])
            cell = cell if cell is None else torch.where(mask[step], cell, before[1])
    stacked = torch.stack([outputs[step] for step in sorted(outputs)])
    stacked = stacked if mask is None else stacked.masked_fill(~mask, 0)
    return (stacked, hidden) if cell is None else (stacked, hidden, cell)


def unrolled_layer(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    lengths: Tensor | None,
    h: Tensor | None,
    c: Tensor | None,
    mode: str,
    directions: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.ops.fxqat.recurrent`` as plain operations; its arguments and results."""
    given = unstacked(mode, directions, w, r, b)
    mask = None if lengths is None else step_mask(x, lengths).unsqueeze(2)
    outputs, finals = [], []
    for number, (w_d, r_d, *biases) in enumerate(given):
        pairs = zip((w_d, r_d), biases or (None, None), strict=True)
        of_input, of_state = (partial(F.linear, weight=weight, bias=bias) for weight, bias in pairs)
        zeros = x.new_zeros(x.shape[1], r_d.shape[1])
        states = [zeros if state is None else state[number] for state in (h, c)][: CELLS[mode].num_states]
        steps = range(x.shape[0])[:: -1 if number else 1]
        output, *final = unroll(mode, x, states, steps, of_input, of_state, mask=mask)
        outputs.append(output)
        finals.append(final)
    last = [torch.stack(states) for states in zip(*finals, strict=True)]
    return torch.stack(outputs, 1), last[0], last[-1]


def _gates(values: Any, count: int) -> tuple[Any, ...]:
    parts = torch.chunk(values, count, -1)
    return tuple(parts[gate] for gate in range(count))


def linear_of(module: nn.RNNBase, kind: str, end: str) -> nn.Linear | None:
    """A linear layer that shares a weight of a recurrent module, and its bias; None if there is no such weight.

    Args:
        module: the recurrent module.
        kind: ``"ih"``, ``"hh"`` or ``"hr"``.
        end: ending of the names, such as ``"_l0_reverse"``.
    """
    weight: Tensor | None = getattr(module, f"weight_{kind}{end}", None)
    if weight is None:
        return None
    bias = getattr(module, f"bias_{kind}{end}", None)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]  # torch declares parameters as tensors
    return layer.train(module.training)
