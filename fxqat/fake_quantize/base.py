"""The base of all fake-quants: an observer, quantization parameters, two switches and a gradient."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fxqat.errors import CheckpointError, ConfigError
from fxqat.fake_quantize.following import growth
from fxqat.fake_quantize.straight_through import fake_quantize_ste
from fxqat.numerics import (
    SCALE_MIN,
    choose_qparams,
    covered_range,
    from_blocks,
    in_blocks,
    per_axis,
    valid_scale,
    valid_zero_point,
)
from fxqat.scheme import QuantizeScheme
from fxqat.utils.torch_compat import KeepsDtype, SeesLoading

WEIGHT = "weight_fake_quant"
ACTIVATION = "act_fake_quant"
SWITCHES = ("observer_enabled", "fake_quant_enabled")

ON = 16
"""A switch that is on, in a state dict. An average that is truncated to 15 reads as on; a sum of several fits uint8."""


class Observer(Protocol):
    """What a fake-quant requires of its observer (see ``fxqat.observer.base``)."""

    min_val: Tensor
    max_val: Tensor

    def __call__(self, x: Tensor, same_pass: bool = False) -> Tensor:
        """Watch one tensor; ``same_pass``: it is not the first one of this pass through the model."""

    def reduce_over_ranks(self) -> bool:
        """Agree with the other ranks on one range; returns whether there are any."""

    def reset(self) -> None:
        """Forget all tensors."""

    def has_seen_data(self) -> bool:
        """Whether it watched a tensor."""

    def is_finite(self) -> bool:
        """Whether the range is finite."""


class FakeQuantizeBase(KeepsDtype, SeesLoading):
    """Simulates the rounding of one tensor. Its own tensors stay float32 in a model in half precision.

    A scheme with blocks has a scale for each row of the weight in blocks, see :meth:`in_blocks`: to the observer and to
    the methods that a subclass writes, these rows are the channels, and the axis is 0.

    A subclass has ``scale`` and ``zero_point`` as parameters or buffers. Or it computes them, as properties, from other
    parameters, which :meth:`store` then sets.

    Args:
        scheme: how the tensor is quantized.
        observer: supplies the range; its buffers have the shape of ``scale``.
        kind: ``"weight_fake_quant"`` or ``"act_fake_quant"``; the state functions select by it.
        axis: the channel axis, for per-channel schemes and folding factors; None for activations.

    Attributes:
        axis: of what is rounded: the channel axis, 0 with blocks.
        channel_axis: of the tensor, with blocks or without.
        scale: real units per step, ``()`` or ``(channels,)``, of blocks ``(blocks,)``. Read it through :meth:`qparams`,
            which keeps it valid.
        zero_point: integers (float32 storage) of the same shape.
        follows: the range follows the weight or parameter in training, see :meth:`follow`.
        magnitude: if so, the largest absolute value that the scale is for, in the shape of the scale; 0 if scale and
            zero point were set and no training step followed.
        observer_enabled: whether forward watches its input.
        fake_quant_enabled: whether forward rounds its input.
        observed_state: the state of the weight that its layer last showed to the observer; empty if it must be shown
            again.
        scale_bits: significant bits of the scale in use.
        always_zero: the model makes zeros of what it rounds, whatever its inputs are.
        ends_occur: the ends of the observed range are in every pass among the values, as those of a parameter are: the
            scale covers them, and half of the values at least, whatever the observer says. Otherwise a scalar parameter
            could be clipped, and have no gradient.
        learned: (of the class) training moves scale or zero point.
        weights_only: (of the class) the method quantizes weights only.
        temporary: (of the class) it replaces another one while the weight's rounding is learned. Until that is back,
            the model is not saved or exported.

    Raises:
        ConfigError: ``kind`` is an activation, but the method quantizes weights only.
    """

    learned: ClassVar[bool] = False
    weights_only: ClassVar[bool] = False
    temporary: ClassVar[bool] = False
    scale: Tensor
    zero_point: Tensor
    magnitude: Tensor

    def __init__(self, scheme: QuantizeScheme, observer: Observer, kind: str, axis: int | None = None) -> None:
        super().__init__()
        if self.weights_only and kind != WEIGHT:
            raise ConfigError(
                f"{type(self).__name__} is for weights only: it changes the stored integers, and an activation has "
                "none. Choose another fake-quant for activations, such as Learnable or PACT."
            )
        self.scheme = scheme
        self.kind = kind
        self.channel_axis = axis
        self.axis = axis if scheme.block_size is None else 0
        self.observer = observer
        self.observer_enabled = False
        self.fake_quant_enabled = False
        self.always_zero = False
        self.ends_occur = False
        self.follows = False
        self.observed_state: tuple[object, ...] = ()
        self.scale_bits = scheme.scale_bits
        self.has_zero_point = scheme.fixed_zero_point != 0
        if kind == WEIGHT:
            self.let_follow()
        if scheme.fixed_range is not None:
            low, high = scheme.fixed_range
            observer.min_val.fill_(low)
            observer.max_val.fill_(high)

    def forward(
        self,
        x: Tensor,
        tensor_name: str = "",
        on_grid: bool = False,
        input_kept: bool = False,
        same_pass: bool = False,
    ) -> Tensor:
        """Watch one tensor, and round it, if the switches are on.

        Args:
            x: the tensor, any shape; None is returned as it is.
            tensor_name: the name of the value in the exported file; only export uses it.
            on_grid: the value is on this fake-quant's grid already (a pass-through op took it from a quantized value)
                and is returned as it is. Only export writes a Q/DQ pair here.
            input_kept: another op keeps x for the backward pass, so that saving it here costs no memory.
            same_pass: the model called this fake-quant in the same pass already, with another value.

        Returns:
            The tensor, of x's shape and dtype.
        """
        if on_grid or not isinstance(x, Tensor):  # an optional input may be None
            return x
        if self.observer_enabled:
            self.observe(x, same_pass)
        if self.follows:
            self.follow(x)
        return self.quantize(x, input_kept=input_kept) if self.fake_quant_enabled else x

    def observe(self, x: Tensor, same_pass: bool = False) -> None:
        """Watch one tensor and update scale and zero point from the range; a fixed range stays.

        Args:
            x: the tensor.
            same_pass: as in :meth:`forward`.
        """
        if self.scheme.fixed_range is None:
            # an observer of a user's own may take the tensor only
            seen = self.as_read(self.target(self.in_blocks(x)))
            self.observer(seen, **({"same_pass": True} if same_pass else {}))
            if self.ends_occur and seen.numel():
                self._reach_half(seen.detach().float())
            self.update_from_observer()
            if self.follows and seen.numel():
                self._growth(x)

    @torch.no_grad()
    def _reach_half(self, x: Tensor) -> None:
        """Widen the range so that it holds half of the values.

        The range of least error leaves out all values of a parameter if they are equal, and then none has a gradient.
        """
        low, high = torch.aminmax(x)
        share = torch.where(x < 0, x / low, x / high).nan_to_num(nan=0.0).median()  # of its side; 0 / 0 where all are 0
        self.observer.min_val.copy_(torch.minimum(self.observer.min_val, low * share))
        self.observer.max_val.copy_(torch.maximum(self.observer.max_val, high * share))

    def observe_changed(self, weight: Tensor, state: tuple[object, ...] = ()) -> None:
        """Show a weight to the observer if that is on, unless the weight is unchanged since the last time.

        Args:
            weight: the weight.
            state: what changes with it; empty if it always counts as changed.
        """
        if self.observer_enabled and (not state or state != self.observed_state):
            self.observe(weight.detach())
            self.observed_state = state

    def forget_range(self) -> None:
        """Let the observer start anew; a fixed range stays, and so do scale and zero point until there is data."""
        if self.scheme.fixed_range is None:
            self.observer.reset()
        self.observed_state = ()

    @torch.no_grad()
    def update_from_observer(self) -> None:
        """Set scale and zero point from the observed range; without data they stay."""
        seen = self.observer.min_val <= self.observer.max_val
        scale, zero_point = choose_qparams(self.observer.min_val, self.observer.max_val, self.scheme, self.ends_occur)
        self.store_calibrated(torch.where(seen, scale, self.scale), torch.where(seen, zero_point, self.zero_point))

    def store_calibrated(self, scale: Tensor, zero_point: Tensor) -> None:
        """Write scale and zero point; they are for the weight as it is now."""
        self.store(scale, zero_point)
        if self.follows:
            self.magnitude.zero_()

    @torch.no_grad()
    def store(self, scale: Tensor, zero_point: Tensor) -> None:
        """Write scale and zero point to the parameters or buffers that hold them."""
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)

    def let_follow(self) -> None:
        """Have the range follow in training what is rounded: a weight, or a parameter that has a range of its own."""
        self.follows = True
        self.register_buffer("magnitude", torch.zeros_like(self.observer.min_val))

    @torch.no_grad()
    def follow(self, weight: Tensor, factor: Tensor | None = None) -> None:
        """In training, let the range grow and shrink with the largest absolute value of a weight or parameter.

        A weight changes in training, and even more if BatchNorm, whose statistics change, is folded into it. Values
        outside of the range are clipped and have no gradient. So before each training step the scale is multiplied by
        the ratio of :attr:`magnitude` to that of the step before. The ratio has no gradient. A fixed range stays, and
        so does one that is observed or whose rounding is learned.

        Args:
            weight: the weight.
            factor: ``(channels,)`` along ``channel_axis``: the weight is ``weight * factor``.
        """
        ready = self.training and self.fake_quant_enabled and not self.observer_enabled
        if not ready or self.temporary or self.scheme.fixed_range is not None or weight.numel() == 0:
            return
        self.rescale(self._growth(weight, factor))

    def _growth(self, weight: Tensor, factor: Tensor | None = None) -> Tensor:
        """Set :attr:`magnitude` to that of a weight; the ratio of the two, of the shape of the scale."""
        factor = None if factor is None else self.per_scale(factor)
        smallest = SCALE_MIN * self.scheme.quant_max  # what the scale of a weight of zeros covers
        return growth(self.in_blocks(weight.detach()), factor, self.magnitude, self.axis, smallest)

    @torch.no_grad()
    def rescale(self, ratio: Tensor) -> None:
        """Multiply the scale by a ratio of its shape; a subclass that computes its scale overrides this."""
        self.scale.mul_(ratio)

    def take_names(self, state: dict[str, Any], prefix: str) -> None:
        """Take what older versions saved, which is without ``magnitude``."""
        if self.follows and f"{prefix}_extra_state" in state:
            state.setdefault(f"{prefix}magnitude", torch.zeros_like(self.magnitude))

    def attach(self, weight: Tensor) -> None:
        """Allocate state in the shape of the weight (in blocks); called once, when the layer is made."""

    def in_blocks(self, x: Tensor) -> Tensor:
        """What is rounded: x, or ``(blocks, block_size)`` if the scheme has blocks.

        Args:
            x: the weight.
        """
        size, axis = self.scheme.block_size, self.channel_axis
        return x if size is None or axis is None else in_blocks(x, size, axis)

    def from_blocks(self, values: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of :meth:`in_blocks`.

        Args:
            values: rows of the blocks, of any length.
            shape: of the weight.
        """
        axis = self.channel_axis
        return values if self.scheme.block_size is None or axis is None else from_blocks(values, shape, axis)

    def per_scale(self, values: Tensor) -> Tensor:
        """Repeat values of the channels, ``(channels,)``, so that each scale has one."""
        if self.scheme.block_size is None:
            return values
        blocks = self.scale.numel() // values.numel()
        return values.repeat(blocks) if self.channel_axis else values.repeat_interleave(blocks)

    def per_weight(self, values: Tensor, weight: Tensor) -> Tensor:
        """Expand values of the shape of the scale to the shape of a weight."""
        rows = self.in_blocks(weight)
        return self.from_blocks(per_axis(values, rows.dim(), self.axis).expand_as(rows), weight.shape)

    def target(self, x: Tensor, factor: Tensor | None = None, used_scale: Tensor | None = None) -> Tensor:
        """The real tensor that is rounded instead of x; x itself in most methods.

        Observers, training and the export of weights use it, so that all of them see the same integers. The Q/DQ pair
        of an activation rounds x itself.

        Args: as :meth:`quantize`, but x in blocks; the result is multiplied by ``factor`` as x is.
        """
        return x

    def as_read(self, x: Tensor) -> Tensor:
        """Clamp x to the scheme's ``flat_outside``: beyond it, the ops that read the value are flat."""
        return x if self.scheme.flat_outside is None else x.clamp(*self.scheme.flat_outside)

    def qparams(self) -> tuple[Tensor, Tensor]:
        """The parameters in use, detached, whatever was trained.

        Returns:
            ``(scale, zero_point)``, both float32: the scale within ``[SCALE_MIN, SCALE_MAX]``, the zero point an
            integer within ``[quant_min, quant_max]``, even if the scheme wants that.
        """
        with torch.no_grad():
            scheme = self.scheme
            zero_point = valid_zero_point(self.zero_point, scheme.quant_min, scheme.quant_max, scheme.zero_point_step)
            return self.used_scale(), zero_point

    def scale_and_unit(self) -> tuple[Tensor, Tensor | None]:
        """What is learned of the scale, and what multiplies it, of its shape; None if nothing does."""
        return self.scale, None

    @torch.no_grad()
    def used_scale(self) -> Tensor:
        """The scale in use: the first result of :meth:`qparams`."""
        return valid_scale(self.scale, self.scale_bits)

    def quantize(
        self, x: Tensor, factor: Tensor | None = None, used_scale: Tensor | None = None, input_kept: bool = True
    ) -> Tensor:
        """Round ``x`` to the grid, with gradients.

        Args:
            x: any shape.
            factor: ``(channels,)`` along ``channel_axis``; quantizes ``x * factor`` and divides the result by it. The
                grid is divided instead of the tensor, so this costs nothing: ``fq(x * f; s) / f == fq(x; s / f)``.
            used_scale: of the shape of the scale; replaces the scale (where the bias needs a larger one). The gradient
                still goes to ``scale``.
            input_kept: as in :meth:`forward`; true for parameters.

        Returns:
            Of x's shape and dtype.
        """
        if self.scheme.block_size is None:
            return self.rounded(x, factor, used_scale, input_kept)
        factor = None if factor is None else self.per_scale(factor)
        return self.from_blocks(self.rounded(self.in_blocks(x), factor, used_scale, input_kept), x.shape)

    def rounded(self, x: Tensor, factor: Tensor | None, used_scale: Tensor | None, input_kept: bool) -> Tensor:
        """Round a tensor in blocks, see :meth:`quantize`; the factor has a value for each. Subclasses override this."""
        scheme = self.scheme
        scale, unit_scale = self.scale_and_unit()
        zero_point = self.zero_point if self.has_zero_point else None
        return fake_quantize_ste(
            self.target(x, factor, used_scale),
            scale,
            zero_point,
            factor,
            used_scale,
            unit_scale,
            scheme.quant_min,
            scheme.quant_max,
            self.axis,
            self.grad_scale(x),
            self.scale_bits,
            input_kept or not torch.is_grad_enabled(),
            scheme.zero_point_step,
        )

    def grad_scale(self, x: Tensor) -> float:
        """The multiplier of the gradients of scale and zero point, where these are learned."""
        return 1.0

    def set_qparams(self, scale: Tensor, zero_point: Tensor) -> None:
        """Set scale and zero point, and the observed range to the range that they cover."""
        with torch.no_grad():
            self.store_calibrated(scale, zero_point)
            low, high = covered_range(scale, zero_point, self.scheme)
            self.observer.min_val.copy_(low)
            self.observer.max_val.copy_(high)

    def get_extra_state(self) -> Tensor:
        """The switches in the order of ``SWITCHES``, for the state dict: uint8, ``(2,)``, each 0 or ``ON``.

        A new tensor: the module itself holds Python bools, so that training does not read them from the device.
        """
        switches = [ON * self.observer_enabled, ON * self.fake_quant_enabled]
        return torch.tensor(switches, dtype=torch.uint8, device=self.observer.min_val.device)

    def set_extra_state(self, state: Any) -> None:
        """Restore the switches.

        Args:
            state: as :meth:`get_extra_state` returns it, or a dict of bools, as fxqat saved it at first.

        Raises:
            CheckpointError: it is neither.
        """
        self.observer_enabled, self.fake_quant_enabled = read_switches(state)

    def extra_repr(self) -> str:
        """Scheme and switches, for printing."""
        switches = f"observer={self.observer_enabled}, fake_quant={self.fake_quant_enabled}"
        flat = self.scheme.flat_outside
        return f"{self.scheme}, {switches}" + ("" if flat is None else f", flat outside [{flat[0]:g}, {flat[1]:g}]")

    def initial_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point before calibration: from the fixed range if there is one, else scale 1."""
        if self.scheme.fixed_range is not None:
            return choose_qparams(self.observer.min_val, self.observer.max_val, self.scheme)
        fixed = self.scheme.fixed_zero_point
        zero_point = self.scheme.quant_min if fixed is None else fixed
        shape = self.observer.min_val.shape
        return torch.ones(shape, dtype=torch.float32), torch.full(shape, float(zero_point), dtype=torch.float32)


def read_switches(state: Any) -> tuple[bool, bool]:
    """The switches in an extra state: ``(observer_enabled, fake_quant_enabled)``.

    Raises:
        CheckpointError: it is neither a tensor of two numbers nor a dict with the two names.
    """
    if isinstance(state, Tensor) and state.shape == (len(SWITCHES),):
        observer, fake_quant = (state.detach().float() > ON / 2).tolist()
        return observer, fake_quant
    if isinstance(state, dict) and all(isinstance(state.get(name), bool) for name in SWITCHES):
        return state["observer_enabled"], state["fake_quant_enabled"]
    raise CheckpointError(
        f"the extra state of a fake-quant must be a tensor of shape {(len(SWITCHES),)} (or a dict of {SWITCHES}, as "
        f"older versions saved it), got {state!r:.80}. The state dict is damaged; save it again."
    )
