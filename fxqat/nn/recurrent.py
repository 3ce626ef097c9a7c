"""Recurrent layers: one layer of an LSTM, GRU or RNN, in the layout of ONNX's operator of the same name.

A layer computes in float inside. What surrounds the operator in the file is simulated: the integers of its weights and
its bias, and (by the fake-quants before and after the layer) of its input, its states and its outputs.

With T steps, N samples, D directions, I features in, H features out and G gates:

* ``W`` is ``(D * G * H, I)``, ``R`` is ``(D * G * H, H)``: the rows of all directions, the gates in ONNX's order;
* ``B`` is ``(D * 2 * G * H,)``: for each direction the bias of the input, then that of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.fake_quantize.straight_through import DynamicQuantizeSTE
from fxqat.nn.bias import fake_quantize_bias, floor_for, weight_scale_floor
from fxqat.nn.kept_weights import deployed
from fxqat.nn.quantized_layer import QuantizedLayer
from fxqat.utils.tensors import widened
from fxqat.utils.torch_compat import tensor_version


@dataclass(frozen=True)
class Cell:
    """What tells LSTM, GRU and RNN apart.

    Args:
        op: name of the op in fxqat's table.
        function: torch's function for the whole layer.
        gates: for each gate of ONNX's order, its number in torch's.
        num_states: 2 if it has a cell state beside the hidden state.
    """

    op: str
    function: Callable[..., tuple[Tensor, ...]]
    gates: tuple[int, ...]
    num_states: int = 1


CELLS: dict[str, Cell] = {
    "LSTM": Cell("lstm", torch.lstm, (0, 3, 1, 2), 2),  # torch: input, forget, cell, output; ONNX: i, o, f, c
    "GRU": Cell("gru", torch.gru, (1, 0, 2)),  # torch: reset, update, new; ONNX: z, r, h
    "RNN_TANH": Cell("rnn", torch.rnn_tanh, (0,)),
    "RNN_RELU": Cell("rnn", torch.rnn_relu, (0,)),
}
"""By the ``mode`` of torch's recurrent layers."""

LAYER, UNROLLED, WHOLE = "layer", "unrolled", "whole"
"""The forms of a recurrent module: an operator for each layer, plain operations (``fxqat.nn.unrolled``), left alone."""

RECURRENT_TYPES: tuple[type[nn.RNNBase], ...] = (nn.LSTM, nn.GRU, nn.RNN)


class RecurrentLayer(nn.Module):
    """One layer of a recurrent module, with its parameters under their names there.

    Args:
        module: an ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` without projections, or another such layer; its parameters are
            shared, not copied.
        number: number of the layer in it.
    """

    def __init__(self, module: nn.RNNBase | RecurrentLayer, number: int = 0) -> None:
        super().__init__()
        self.mode: str = module.mode
        self.hidden_size: int = module.hidden_size
        self.bidirectional: bool = module.bidirectional
        self.bias: bool = module.bias
        self.number = number
        self.training = module.training
        kinds = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if module.bias else ()))
        ends = (f"_l{number}", f"_l{number}_reverse") if module.bidirectional else (f"_l{number}",)
        self.names = [[f"{kind}{end}" for kind in kinds] for end in ends]
        for name in chain(*self.names):
            self.register_parameter(name, getattr(module, name))

    @property
    def cell(self) -> Cell:
        """LSTM, GRU or RNN."""
        return CELLS[self.mode]

    def forward(self, x: Tensor, *states: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, ...]:
        """Apply the layer.

        Args:
            x: ``(T, N, I)``.
            states: hidden state and, for an LSTM, cell state at the start, each ``(D, N, H)``; zeros by default.
            lengths: the number of steps of each sample, integers ``(N,)``; T by default.

        Returns:
            The hidden states of all steps, ``(T, D, N, H)``, and the states at the end, each ``(D, N, H)``. After the
            end of a sample its hidden states are zeros.
        """
        self._check(x)
        return run_layer(self.mode, x, states, self._given(), self.training, lengths)

    def stacked(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The parameters as ONNX takes them, ``W``, ``R`` and ``B`` (None without bias), in at least float32."""
        gates = self.cell.gates
        directions = [[_reordered(widened(tensor), gates) for tensor in given] for given in self._given()]
        w, r = (torch.cat([given[place] for given in directions]) for place in range(2))
        return w, r, torch.cat([bias for given in directions for bias in given[2:]]) if self.bias else None

    def parameter_versions(self) -> tuple[object, ...]:
        """The versions of all parameters, which change when one is written to."""
        return tuple(tensor_version(parameter) for parameter in self.parameters(recurse=False))

    def extra_repr(self) -> str:
        """The kind and the sizes, for printing."""
        return f"{self.mode}, hidden_size={self.hidden_size}, bidirectional={self.bidirectional}"

    def _check(self, x: Tensor) -> None:
        if x.dim() != 3:
            raise ConfigError(
                f"a recurrent layer ({self.mode}) got an input of {x.dim()} dimensions {tuple(x.shape)}, without a "
                "batch. Prepare the model with example_inputs, so that fxqat sees that."
            )

    def _given(self) -> list[list[Tensor]]:
        """The parameters of each direction, in the order of torch's functions."""
        return [[getattr(self, name) for name in names] for names in self.names]


class QATRecurrentLayer(RecurrentLayer, QuantizedLayer):
    """A recurrent layer with fake-quant of its weights; its bias is int32 at the scale of the products of its input.

    All directions have one fake-quant for ``W`` and one for ``R``: each is one tensor of the file.

    Args:
        layer: the float layer; its parameters are shared.
        weight_ih_fake_quant: of ``W``, axis 0.
        weight_hh_fake_quant: of ``R``, axis 0.
    """

    weight_names: ClassVar = ("weight_ih", "weight_hh")

    def __init__(
        self, layer: RecurrentLayer, weight_ih_fake_quant: FakeQuantizeBase, weight_hh_fake_quant: FakeQuantizeBase
    ) -> None:
        super().__init__(layer, layer.number)
        self.weight_ih_fake_quant = weight_ih_fake_quant
        self.weight_hh_fake_quant = weight_hh_fake_quant

    def forward(
        self,
        x: Tensor,
        *states: Tensor,
        lengths: Tensor | None = None,
        input_fake_quant: FakeQuantizeBase | None = None,
        dynamic_input: str | None = None,
    ) -> tuple[Tensor, ...]:
        """Apply the layer: see :class:`RecurrentLayer`.

        Args:
            x: the input, quantized or not.
            states: the states at the start.
            lengths: the number of steps of each sample.
            input_fake_quant: the fake-quant that produced x, None if x is float; the bias scale depends on it.
            dynamic_input: not None if an LSTM quantizes the input and the hidden state of each step at run time.
        """
        self._check(x)
        self._observe()
        if not (self.weight_ih_fake_quant.fake_quant_enabled or self.weight_hh_fake_quant.fake_quant_enabled):
            return super().forward(x, *states, lengths=lengths)
        quants = (*self.weight_fake_quants(), input_fake_quant)
        w, r, b = deployed(self, quants, lambda: self.deployed_tensors(input_fake_quant))
        w, r, b = w.to(x.dtype), r.to(x.dtype), b if b is None else b.to(x.dtype)
        if dynamic_input is not None:
            return dynamic_lstm(x, states, w, r, b, lengths)
        given = unstacked(self.mode, len(self.names), w, r, b)
        return run_layer(self.mode, x, states, given, self.training, lengths)

    def weight_values(self) -> tuple[Tensor, Tensor]:
        """``W`` and ``R``."""
        w, r, _ = self.stacked()
        return w, r

    def weight_tensors(self) -> list[list[Tensor]]:
        """The parameters of ``W`` and of ``R``, in torch's order of gates."""
        return [list(tensors) for tensors in zip(*self._given(), strict=True)][: len(self.weight_names)]

    def deployed_tensors(self, input_fake_quant: FakeQuantizeBase | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The parameters of the file, ``W``, ``R`` and ``B``, with gradients."""
        w, r, b = self.stacked()
        is_on = input_fake_quant is not None and input_fake_quant.fake_quant_enabled
        for quant, weight in zip(self.weight_fake_quants(), (w, r), strict=True):
            quant.follow(weight)
        w_scale, b_scale = self.deployed_scales(b, input_fake_quant if is_on else None)
        w_quant, r_quant = self.weight_ih_fake_quant, self.weight_hh_fake_quant
        if w_quant.fake_quant_enabled:
            w = w_quant.quantize(w, used_scale=w_scale)
            b = b if b is None or b_scale is None else fake_quantize_bias(b, b_scale)
        return w, r_quant.quantize(r) if r_quant.fake_quant_enabled else r, b

    def deployed_scales(
        self, bias: Tensor | None, input_fake_quant: FakeQuantizeBase | None
    ) -> tuple[Tensor, Tensor | None]:
        """The scales in use for ``W`` and ``B``; that of ``W`` is raised where the bias would not fit into int32.

        Args:
            bias: ``B``, or None.
            input_fake_quant: the fake-quant of the layer's input, None if that is float.

        Returns:
            ``(scale of W, scale of B)``, each ``()`` or one for each row; None for a bias that stays float, as that of
            weights in blocks does.
        """
        scale = self.weight_ih_fake_quant.used_scale()
        if bias is None or input_fake_quant is None or self.weight_ih_fake_quant.scheme.block_size is not None:
            return scale, None
        input_scale = input_fake_quant.used_scale()
        by_row = bias.abs().reshape(len(self.names), 2, -1).amax(1).flatten()
        scale = torch.maximum(scale, floor_for(scale, weight_scale_floor(by_row, input_scale), 1))
        bias_scale = input_scale * scale
        if scale.dim():
            bias_scale = bias_scale.reshape(len(self.names), 1, -1).expand(-1, 2, -1).flatten()
        return scale, bias_scale

    def _observe(self) -> None:
        """Show the weights to the observers, unless they are unchanged since the last time."""
        state = self.parameter_versions()
        if any(quant.observer_enabled and quant.observed_state != state for quant in self.weight_fake_quants()):
            for _, quant, weight in self.quantized_weights():
                if quant.observer_enabled:
                    quant.observe(weight.detach())
                    quant.observed_state = state


class StepDropout(nn.Dropout):
    """Dropout between two layers.

    With lengths, it draws a random number for each value of the packed sequence, as torch's recurrent modules do.
    """

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Drop values in training.

        Args:
            x: ``(T, N, ...)``, zeros after the end of a sample.
            lengths: the number of steps of each sample, ``(N,)``; None if all have T.
        """
        if lengths is None or not self.training:
            return super().forward(x)
        packed = pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
        return _padded(packed, super().forward(packed.data), x.shape[0])


def _reordered(tensor: Tensor, gates: Sequence[int]) -> Tensor:
    """A parameter of one direction with its gates in another order."""
    parts = _parts(tensor, len(gates))
    return torch.cat([parts[gate] for gate in gates]) if len(gates) > 1 else tensor


def _parts(tensor: Tensor, count: int) -> Sequence[Tensor]:
    """Equal parts of a tensor's rows; of one part LiteRT's converter makes no list."""
    return tensor.chunk(count) if count > 1 else [tensor]


def unstacked(mode: str, directions: int, w: Tensor, r: Tensor, b: Tensor | None) -> list[list[Tensor]]:
    """Parameters in ONNX's layout as torch's functions take them: the inverse of :meth:`RecurrentLayer.stacked`.

    They may have a dimension of directions, as the arguments of ONNX's operators.
    """
    w, r = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (w, r))
    b = None if b is None else b.flatten()
    gates = CELLS[mode].gates
    back = [gates.index(gate) for gate in range(len(gates))]
    given = [list(pair) for pair in zip(_parts(w, directions), _parts(r, directions), strict=True)]
    for direction, bias in enumerate([] if b is None else _parts(b, directions)):
        given[direction] += bias.chunk(2)
    return [[_reordered(tensor, back) for tensor in tensors] for tensors in given]


def run_layer(
    mode: str,
    x: Tensor,
    states: Sequence[Tensor],
    given: Sequence[Sequence[Tensor]],
    training: bool = False,
    lengths: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """One recurrent layer of torch.

    Args:
        mode: key of :data:`CELLS`.
        x: ``(T, N, I)``.
        states: ``(D, N, H)`` each; empty for zeros.
        given: for each direction the two weights, then the two biases if it has any.
        training: whether the layer is trained.
        lengths: the number of steps of each sample, ``(N,)``; None if all have T.

    Returns:
        As :meth:`RecurrentLayer.forward`.
    """
    cell, directions, hidden = CELLS[mode], len(given), given[0][1].shape[1]
    states = states or [x.new_zeros(directions, x.shape[1], hidden)] * cell.num_states
    options = (len(given[0]) == 4, 1, 0.0, training, directions == 2)
    parameters = list(chain(*given))
    if lengths is None:
        y, *last = cell.function(x, _as_given(states), parameters, *options, False)
    else:
        packed = pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
        order, back = packed.sorted_indices, packed.unsorted_indices
        assert order is not None  # as enforce_sorted is False
        assert back is not None
        first = _as_given([state.index_select(1, order) for state in states])
        y, *last = cell.function(packed.data, packed.batch_sizes, first, parameters, *options)
        y = _padded(packed, y, x.shape[0])
        last = [state.index_select(1, back) for state in last]
    return y.unflatten(2, (directions, hidden)).transpose(1, 2), *last


def _padded(packed: PackedSequence, values: Tensor, steps: int) -> Tensor:
    """Other values of a packed sequence, padded with zeros, ``(steps, N, ...)``."""
    sequence = PackedSequence(values, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
    return pad_packed_sequence(sequence, total_length=steps)[0]


def _as_given(states: Sequence[Tensor]) -> Any:
    """The states at the start as torch's functions take them."""
    return list(states) if len(states) == 2 else states[0]


def step_mask(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Whether a sample has a step, ``(T, N)``.

    Args:
        x: ``(T, N, ...)``.
        lengths: the number of steps of each sample, ``(N,)``; None if all have T.
    """
    numbers = torch.arange(x.shape[0], device=x.device).unsqueeze(1).expand(x.shape[:2])
    return numbers < (x.shape[0] if lengths is None else lengths.to(x.device))


def _backwards(x: Tensor, lengths: Tensor | None) -> Tensor:
    """The steps of each sample in the opposite order, ``(T, N, C)``; what follows their end is not defined."""
    if lengths is None:
        return x.flip(0)
    steps = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return x.gather(0, (lengths.to(x.device) - 1 - steps).clamp_min(0).unsqueeze(2).expand_as(x))


def dynamic_lstm(
    x: Tensor, states: Sequence[Tensor], w: Tensor, r: Tensor, b: Tensor | None, lengths: Tensor | None = None
) -> tuple[Tensor, ...]:
    """An LSTM that quantizes at run time, as ONNX Runtime's DynamicQuantizeLSTM computes it.

    The input has one range, of the steps up to the longest sample's, and the hidden states of all samples have one in
    each step; after the end of a sample they are zeros, as in the operator that writes the output of all steps. (With
    several threads ONNX Runtime gives each thread's samples their own.)

    Args:
        x: ``(T, N, I)``.
        states: hidden and cell state at the start, ``(D, N, H)`` each; empty for zeros.
        w: ``(D * 4 * H, I)``, its values rounded; gates in ONNX's order.
        r: ``(D * 4 * H, H)``, the same.
        b: ``(D * 8 * H,)``, or None.
        lengths: the number of steps of each sample, ``(N,)``; None if all have T.

    Returns:
        As :meth:`RecurrentLayer.forward`.

    Source: ONNX Runtime, contrib operator com.microsoft.DynamicQuantizeLSTM, version 1.
    """
    hidden, num_steps = r.shape[1], x.shape[0]
    directions = r.shape[0] // (4 * hidden)
    h, c = states or [x.new_zeros(directions, x.shape[1], hidden)] * 2
    x = x if lengths is None else x[: int(lengths.max())]
    rounded, mask = DynamicQuantizeSTE.apply(x), step_mask(x, lengths).unsqueeze(2)
    outputs, last = [], []
    for d in range(directions):
        w_d, r_d = w.chunk(directions)[d], r.chunk(directions)[d]
        bias = None if b is None else b.chunk(directions)[d].unflatten(0, (2, -1)).sum(0)
        products = F.linear(rounded, w_d, bias)
        state, cell = h[d], c[d]
        steps: list[Tensor] = []
        for t, product in enumerate(_backwards(products, lengths) if d else products):
            gates = product + F.linear(DynamicQuantizeSTE.apply(steps[-1] if steps else state), r_d)
            i, o, f, new = gates.chunk(4, -1)
            next_cell = f.sigmoid() * cell + i.sigmoid() * new.tanh()
            output = o.sigmoid() * next_cell.tanh()
            if lengths is None:
                state, cell = output, next_cell
            else:
                state, cell = torch.where(mask[t], output, state), torch.where(mask[t], next_cell, cell)
                output = output.where(mask[t], 0)
            steps.append(output)
        y = torch.stack(steps)
        outputs.append(_backwards(y, lengths).where(mask, 0) if d else y)
        last.append((state, cell))
    y = F.pad(torch.stack(outputs, 1), (0, 0, 0, 0, 0, 0, 0, num_steps - x.shape[0]))
    return y, *(torch.stack(states) for states in zip(*last, strict=True))


@torch.library.custom_op("fxqat::recurrent", mutates_args=())
def recurrent(
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
    """ONNX's operator for a recurrent layer, with its arguments and its results.

    Args:
        x: ``(T, N, I)``.
        w: ``(D, G * H, I)`` or ``(D * G * H, I)``.
        r: ``(D, G * H, H)`` or ``(D * G * H, H)``.
        b: ``(D, 2 * G * H)`` or ``(D * 2 * G * H,)``; None for zeros.
        lengths: the number of steps of each sample, integers ``(N,)``; None for T.
        h: the hidden state at the start, ``(D, N, H)``; None for zeros.
        c: the same for the cell state.
        mode: key of :data:`CELLS`.
        directions: D.

    Returns:
        As :meth:`RecurrentLayer.forward`; without a cell state, the hidden state comes twice.
    """
    given = unstacked(mode, directions, w, r, b)
    y, *last = run_layer(mode, x, [state for state in (h, c) if state is not None], given, lengths=lengths)
    return y.contiguous(), last[0].clone(), last[-1].clone()


@recurrent.register_fake
def _(x: Tensor, w: Tensor, r: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    directions = others[-1]
    last = x.new_empty(directions, x.shape[1], r.shape[-1])
    return x.new_empty(x.shape[0], directions, x.shape[1], r.shape[-1]), last, torch.empty_like(last)


@torch.library.custom_op("fxqat::up_to_longest", mutates_args=())
def up_to_longest(x: Tensor, lengths: Tensor) -> Tensor:
    """The steps that at least one sample has.

    Args:
        x: ``(T, N, ...)``.
        lengths: the number of steps of each sample, integers ``(N,)``.

    Returns:
        The first of the T steps, as many as the longest sample has.
    """
    return x[: int(lengths.max())].clone()


@up_to_longest.register_fake
def _(x: Tensor, lengths: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), *x.shape[1:])


def _keep_steps(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.left_out = inputs[0].shape[0] - output.shape[0]


def _steps_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.cat([grad, grad.new_zeros(ctx.left_out, *grad.shape[1:])]), None


up_to_longest.register_autograd(_steps_backward, setup_context=_keep_steps)
