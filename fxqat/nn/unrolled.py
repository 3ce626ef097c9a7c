"""A recurrent layer as plain operations, step by step, for targets without an operator for it.

Every product, sum, sigmoid and tanh is an operation of its own, which a backend quantizes by its table. The weights of
all steps are those of two linear layers, one for the input and one for the state, so that each has one quantizer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxqat.nn.recurrent import CELLS


class UnrolledLayer(nn.Module):
    """One direction of one layer of a recurrent module, over a fixed number of steps.

    Args:
        module: an ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN``; its parameters are shared, not copied.
        number: number of the layer in it.
        reverse: whether it runs from the last step to the first.
        steps: the number of steps.
    """

    def __init__(self, module: nn.RNNBase, number: int, reverse: bool, steps: int) -> None:
        super().__init__()
        self.mode, self.steps, self.reverse = module.mode, steps, reverse
        self.training = module.training
        end = f"_l{number}" + ("_reverse" if reverse else "")
        for name, kind in (("of_input", "ih"), ("of_state", "hh")):
            bias = getattr(module, f"bias_{kind}{end}", None)
            setattr(self, name, _linear(getattr(module, f"weight_{kind}{end}"), bias))
        projection = getattr(module, f"weight_hr{end}", None)
        self.projection = None if projection is None else _linear(projection, None)

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Apply the layer.

        Args:
            x: ``(T, N, I)``.
            states: hidden state and, for an LSTM, cell state at the start, each ``(N, H)``.

        Returns:
            The hidden states of all steps, ``(T, N, H)``, and the states at the end, each ``(N, H)``.
        """
        products = self.of_input(x)
        outputs: list[Tensor] = []
        for step in reversed(range(self.steps)) if self.reverse else range(self.steps):
            states = self._step(products[step], *states)
            outputs.append(states[0])
        return torch.stack(outputs[::-1] if self.reverse else outputs), *states

    def _step(self, product: Tensor, h: Tensor, c: Tensor | None = None) -> tuple[Tensor, ...]:
        of_state = self.of_state(h)
        if self.mode == "GRU":
            (r_x, z_x, n_x), (r_h, z_h, n_h) = _gates(product, 3), _gates(of_state, 3)
            r, z = torch.sigmoid(r_x + r_h), torch.sigmoid(z_x + z_h)
            new = torch.tanh(n_x + r * n_h)
            return (new + z * (h - new),)
        total = product + of_state
        if c is None:
            return (torch.tanh(total) if self.mode == "RNN_TANH" else torch.relu(total),)
        i, f, g, o = _gates(total, len(CELLS[self.mode].gates))
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h if self.projection is None else self.projection(h), c


def _gates(values: Tensor, count: int) -> tuple[Tensor, ...]:
    parts = torch.chunk(values, count, -1)
    return tuple(parts[gate] for gate in range(count))


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = weight
    layer.bias = bias  # type: ignore[assignment]  # torch declares it as a parameter
    return layer
