"""What every fake-quant module is: an observer, quantization parameters, two switches and a gradient."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from fxqat.errors import ConfigError
from fxqat.fake_quantize.straight_through import FakeQuantizeSTE
from fxqat.numerics import choose_qparams, covered_range, valid_scale, valid_zero_point
from fxqat.scheme import QuantizeScheme

WEIGHT = "weight_fake_quant"
ACTIVATION = "act_fake_quant"


class Observer(Protocol):
    """What a fake-quant needs of the observer it is given (see ``fxqat.observer.base``)."""

    min_val: Tensor
    max_val: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Watch one tensor."""

    def reduce_over_ranks(self) -> bool:
        """Agree with the other ranks, if there are any."""

    def has_seen_data(self) -> bool:
        """Whether a tensor was watched."""

    def is_finite(self) -> bool:
        """Whether the range is usable."""


class FakeQuantizeBase(nn.Module):
    """Simulates the rounding of one tensor.

    Subclasses have ``scale`` and ``zero_point``, as parameters or as buffers, or as properties that follow from what
    they have instead; these write them in :meth:`store`.

    Args:
        scheme: how the tensor is quantized.
        observer: the observer that supplies the range; its buffers have the shape of the parameters.
        kind: ``"weight_fake_quant"`` or ``"act_fake_quant"``, what the state functions select by.
        axis: the channel axis, for per-channel schemes and folding factors; None for activations.

    Attributes:
        scale: real units per step, ``()`` or ``(channels,)``. Read it through :meth:`qparams`, which keeps it valid.
        zero_point: integers (float32 storage) of the same shape.
        observer_enabled: whether forward watches its input.
        fake_quant_enabled: whether forward rounds its input.
        observed_state: for the owner of a weight, what it showed to the observer last; empty when observers go on.
        scale_bits: significant bits of the scale in use.
        learned: of the class: whether training moves scale or zero point.
        weights_only: of the class: whether only weights can be quantized so.

    Raises:
        ConfigError: the tensor is an activation, and the method is for weights only.
    """

    learned: ClassVar[bool] = False
    weights_only: ClassVar[bool] = False
    scale: Tensor
    zero_point: Tensor

    def __init__(self, scheme: QuantizeScheme, observer: Observer, kind: str, axis: int | None = None) -> None:
        super().__init__()
        if self.weights_only and kind != WEIGHT:
            raise ConfigError(
                f"{type(self).__name__} is for weights: what it does to them goes into the stored integers, and an "
                "activation has none. Choose another fake-quant for activations, such as Learnable or PACT."
            )
        self.scheme = scheme
        self.kind = kind
        self.axis = axis
        self.observer = observer
        self.observer_enabled = False
        self.fake_quant_enabled = False
        self.observed_state: tuple[object, ...] = ()
        self.scale_bits = scheme.scale_bits
        self.has_zero_point = not (scheme.symmetric and scheme.symmetric_zero_point == 0)
        if scheme.fixed_range is not None:
            low, high = scheme.fixed_range
            observer.min_val.fill_(low)
            observer.max_val.fill_(high)

    def forward(self, x: Tensor, tensor_name: str = "", on_grid: bool = False, input_kept: bool = False) -> Tensor:
        """Watch and round one tensor, as the switches say.

        Args:
            x: the tensor, any shape; its dtype is kept.
            tensor_name: the name the value has in the exported file; used by export, without effect here.
            on_grid: the value already lies on this quantizer's grid (a pass-through op of a quantized value), so that
                rounding it again would change nothing; only export writes a Q/DQ pair here.
            input_kept: x is kept for the backward pass anyhow, so that keeping it here costs no memory.
        """
        if on_grid or not isinstance(x, Tensor):  # an optional input may be None
            return x
        if self.observer_enabled:
            self.observe(x)
        return self.quantize(x, input_kept=input_kept) if self.fake_quant_enabled else x

    def observe(self, x: Tensor) -> None:
        """Watch one tensor and update the parameters from the range."""
        if self.scheme.fixed_range is None:
            self.observer(self.target(x))
            self.update_from_observer()

    @torch.no_grad()
    def update_from_observer(self) -> None:
        """Set scale and zero point from the observed range; nothing happens while nothing was seen."""
        seen = self.observer.min_val <= self.observer.max_val
        scale, zero_point = choose_qparams(self.observer.min_val, self.observer.max_val, self.scheme)
        self.store(torch.where(seen, scale, self.scale), torch.where(seen, zero_point, self.zero_point))

    @torch.no_grad()
    def store(self, scale: Tensor, zero_point: Tensor) -> None:
        """Write scale and zero point into what they are kept in."""
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)

    def attach(self, weight: Tensor) -> None:
        """Learn which weight will be quantized, for state of its shape; called once, by the layer's maker."""

    def target(self, x: Tensor, factor: Tensor | None = None, used_scale: Tensor | None = None) -> Tensor:
        """The real tensor that is rounded in the place of x: x itself, unless a method says otherwise.

        Observers, training and the export of weights ask it, so that the integers of all of them are the same. The Q/DQ
        pair of an activation rounds x itself.

        Args: as :meth:`quantize`; the result, too, is what is multiplied by ``factor``.
        """
        return x

    def qparams(self) -> tuple[Tensor, Tensor]:
        """The parameters in use: ``(scale, zero_point)``, detached, valid (see the numerics contract).

        Returns:
            scale: float32 within ``[SCALE_MIN, SCALE_MAX]``; zero_point: float32 integers within the range.
        """
        with torch.no_grad():
            zero_point = valid_zero_point(self.zero_point, self.scheme.quant_min, self.scheme.quant_max)
            return self.used_scale(), zero_point

    @torch.no_grad()
    def used_scale(self) -> Tensor:
        """The first of :meth:`qparams` alone."""
        return valid_scale(self.scale, self.scale_bits)

    def quantize(
        self, x: Tensor, factor: Tensor | None = None, used_scale: Tensor | None = None, input_kept: bool = True
    ) -> Tensor:
        """Round ``x`` to the grid, with gradients.

        Args:
            x: any shape.
            factor: ``(channels,)`` along ``axis``; quantize ``x * factor`` and divide the factor out again. The grid
                is scaled instead of the tensor, so this costs nothing: ``fq(x * f; s) / f == fq(x; s / f)``.
            used_scale: a scale to use instead, ``(channels,)`` or ``()``, with the scale's gradient (where the bias
                needs a larger one).
            input_kept: as in :meth:`forward`; a parameter is.
        """
        scheme = self.scheme
        zero_point = self.zero_point if self.has_zero_point else None
        return FakeQuantizeSTE.apply(  # type: ignore[no-any-return]
            self.target(x, factor, used_scale),
            self.scale,
            zero_point,
            factor,
            used_scale,
            scheme.quant_min,
            scheme.quant_max,
            self.axis,
            self.grad_scale(x),
            self.scale_bits,
            input_kept,
        )

    def grad_scale(self, x: Tensor) -> float:
        """The multiplier of the parameters' gradients; of no effect where they are not learned."""
        return 1.0

    def set_qparams(self, scale: Tensor, zero_point: Tensor) -> None:
        """Overwrite the parameters, and the observed range with the range they cover."""
        with torch.no_grad():
            self.store(scale, zero_point)
            low, high = covered_range(scale, zero_point, self.scheme)
            self.observer.min_val.copy_(low)
            self.observer.max_val.copy_(high)

    def get_extra_state(self) -> dict[str, bool]:
        """The switches, saved with the state dict."""
        return {"observer_enabled": self.observer_enabled, "fake_quant_enabled": self.fake_quant_enabled}

    def set_extra_state(self, state: dict[str, bool]) -> None:
        """Restore the switches."""
        self.observer_enabled = bool(state["observer_enabled"])
        self.fake_quant_enabled = bool(state["fake_quant_enabled"])

    def extra_repr(self) -> str:
        """Scheme and switches, for printing."""
        return f"{self.scheme}, observer={self.observer_enabled}, fake_quant={self.fake_quant_enabled}"

    def initial_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point before calibration: of the fixed range if there is one, else one unit per step."""
        if self.scheme.fixed_range is not None:
            return choose_qparams(self.observer.min_val, self.observer.max_val, self.scheme)
        zero_point = self.scheme.symmetric_zero_point if self.scheme.symmetric else self.scheme.quant_min
        shape = self.observer.min_val.shape
        return torch.ones(shape), torch.full(shape, float(zero_point))
