"""The vocabulary of quantization: how one tensor is quantized, with which observer and which fake-quant.

Frozen values, so that a backend is a table that can be compared and printed. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from fxqat.errors import ConfigError

MIN_BIT_WIDTH = 2
MAX_BIT_WIDTH = 16
FLOAT32_BITS = 24
"""Significant bits of a float32."""

BLOCKS_OPSET = 21
"""The first opset whose QuantizeLinear and DequantizeLinear take one scale per block."""

STORAGE_OPSETS: Mapping[int, int] = MappingProxyType({2: 25, 4: 21, 8: 13, 16: 21})
"""For the width of an integer type, the first opset whose QuantizeLinear and DequantizeLinear take it per channel."""


def _frozen(values: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    return MappingProxyType(dict(values or {}))


@dataclass(frozen=True)
class QuantizeScheme:
    """How one tensor is mapped to integers.

    Args:
        bit_width: number of bits of the integer, 2 to 16.
        signed: two's-complement range if true, else the range starts at 0.
        symmetric: the zero point is fixed at the middle of the range.
        per_channel: one scale per output channel instead of one per tensor.
        narrow_range: drop the most negative integer, so that the range is symmetric around the zero point.
        scale_bits: significant bits of a scale: 24 is any float32, 1 a power of two. With few bits the products of
            integers and scales, and nearly all sums of them, are exact in float32, so every runtime computes the same
            sums in any order.
        fixed_range: the real range ``(low, high)`` if it is known without calibration (sigmoid, softmax).
        even_zero_point: of an asymmetric scheme, the zero point is an even number. An engine that adds the zero point
            before it rounds halves to even then rounds the same way as QuantizeLinear, which adds it afterwards.
        nonnegative: of an asymmetric scheme, no value is negative (the result of a ReLU), and the zero point is fixed
            at the smallest integer. Engines fuse a ReLU only then.
        flat_outside: the real range ``(low, high)`` outside of which what reads the value is flat, such as SiLU below
            -8. An observer sees the value clamped to it. Two schemes that differ in it are equal: their integers mean
            the same.
        block_size: of a per-channel scheme of a weight with two dimensions, one scale per so many weights of an output
            channel, neighbours along the input features, instead of one for all of them.

    Raises:
        ConfigError: ``bit_width`` is no integer from 2 to 16, ``scale_bits`` none from 1 to 24, ``block_size`` none
            from 2 on or without ``per_channel``, or ``fixed_range`` is empty.

    Example:
        >>> QuantizeScheme(bit_width=8, narrow_range=True).quant_min
        -127
        >>> QuantizeScheme(bit_width=4, signed=False).quant_max
        15
        >>> print(QuantizeScheme(per_channel=True))
        int8 sym per-channel
    """

    bit_width: int = 8
    signed: bool = True
    symmetric: bool = True
    per_channel: bool = False
    narrow_range: bool = False
    scale_bits: int = FLOAT32_BITS
    fixed_range: tuple[float, float] | None = None
    even_zero_point: bool = False
    nonnegative: bool = False
    flat_outside: tuple[float, float] | None = field(default=None, compare=False)
    block_size: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizeScheme:
        return self  # nothing in it can be changed, and copies of a model are made often

    def __post_init__(self) -> None:
        limits = {"bit_width": (MIN_BIT_WIDTH, MAX_BIT_WIDTH), "scale_bits": (1, FLOAT32_BITS)}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name} must be an integer from {low} to {high}, got {value!r}")
        blocks = self.block_size
        if blocks is not None and (isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 2):
            raise ConfigError(f"block_size must be an integer of at least 2, or None, got {blocks!r}")
        if blocks is not None and not self.per_channel:
            raise ConfigError(f"block_size={blocks} divides the scales of output channels: it needs per_channel=True")
        if self.fixed_range is not None and not self.fixed_range[0] < self.fixed_range[1]:
            raise ConfigError(f"fixed_range must be (low, high) with low < high, got {self.fixed_range}")

    @property
    def quant_min(self) -> int:
        """Smallest integer of the range (inclusive)."""
        low = -(1 << (self.bit_width - 1)) if self.signed else 0
        return low + int(self.narrow_range)

    @property
    def quant_max(self) -> int:
        """Largest integer of the range (inclusive)."""
        return (1 << (self.bit_width - 1)) - 1 if self.signed else (1 << self.bit_width) - 1

    @property
    def symmetric_zero_point(self) -> int:
        """The zero point of the scheme if it is symmetric."""
        return 0 if self.signed else 1 << (self.bit_width - 1)

    @property
    def fixed_zero_point(self) -> int | None:
        """The zero point if the scheme fixes it, None if it depends on the range."""
        if self.symmetric:
            return self.symmetric_zero_point
        return self.quant_min if self.nonnegative else None

    @property
    def zero_point_step(self) -> int:
        """Zero points are multiples of this number; a fixed one may be any."""
        return 2 if self.even_zero_point and self.fixed_zero_point is None else 1

    def storage_width(self, opset_version: int) -> int:
        """Bits of the integer type that stores a value in a file of the given opset.

        The narrowest type of ``STORAGE_OPSETS`` that fits. Before opset 25, 2 bits are stored in 4. Other widths are
        never stored wider than they need: export refuses an opset that lacks their type.
        """
        has_two = opset_version >= STORAGE_OPSETS[2]
        return next(width for width in STORAGE_OPSETS if width >= self.bit_width and (width > 2 or has_two))

    def storage(self, opset_version: int) -> str:
        """The integer type that stores the values in a file of the given opset, as numpy and ONNX spell it."""
        return f"{'int' if self.signed else 'uint'}{self.storage_width(opset_version)}"

    def fills_storage(self, opset_version: int) -> bool:
        """Whether the range covers the whole type, so that QuantizeLinear's saturation clamps to the range.

        Always false for 2-bit types: ONNX Runtime's kernel (seen in 1.31) wraps around beyond 2**31 steps.
        """
        width = self.storage_width(opset_version)
        return width > 2 and self.bit_width == width and not self.narrow_range

    def __str__(self) -> str:
        parts = [f"{'int' if self.signed else 'uint'}{self.bit_width}", "sym" if self.symmetric else "asym"]
        parts.append("per-channel" if self.per_channel else "per-tensor")
        parts += [] if self.block_size is None else [f"in blocks of {self.block_size}"]
        parts += [word for flag, word in ((self.narrow_range, "narrow"), (self.scale_bits == 1, "pot")) if flag]
        if self.fixed_range is not None:
            parts.append(f"fixed[{self.fixed_range[0]:g},{self.fixed_range[1]:g}]")
        return " ".join(parts)


@dataclass(frozen=True)
class TensorQConfig:
    """A scheme with its observer and its fake-quant.

    Args:
        scheme: how the tensor is quantized.
        observer: name of a row in ``fxqat.observer.observers`` or an observer class.
        fake_quantize: name of a row in ``fxqat.fake_quantize.fake_quantizes`` or a fake-quant class.
        observer_args: extra keyword arguments of the observer.
        fake_quantize_args: extra keyword arguments of the fake-quant.
        scale_bits_asked: the user chose the scheme's ``scale_bits``, so that no rule of a backend raises them.
    """

    scheme: QuantizeScheme
    observer: Any = "MinMax"
    fake_quantize: Any = "Learnable"
    observer_args: Mapping[str, Any] = field(default_factory=_frozen)
    fake_quantize_args: Mapping[str, Any] = field(default_factory=_frozen)
    scale_bits_asked: bool = field(default=False, compare=False)

    def with_scheme(self, **changes: Any) -> TensorQConfig:
        """A copy with changes to the scheme; observer and fake-quant stay."""
        return replace(self, scheme=replace(self.scheme, **changes))

    # a mappingproxy cannot be pickled, a dict can
    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        return state | {key: dict(state[key]) for key in ("observer_args", "fake_quantize_args")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


@dataclass(frozen=True)
class QConfig:
    """How one layer is quantized; None leaves a tensor in float.

    Args:
        weight: the layer's own weight.
        activation: the values the layer reads.
        output: the value the layer produces.
    """

    weight: TensorQConfig | None
    activation: TensorQConfig | None
    output: TensorQConfig | None


@dataclass(frozen=True)
class QuantizedTensor:
    """One quantized tensor of an exported model, as in the ONNX file and its JSON.

    Args:
        name: the tensor's name in the ONNX file.
        kind: ``"activation"``, ``"weight"``, ``"bias"``, or ``"dynamic"``: an activation whose scale and zero point are
            computed at run time, and are empty here.
        module: path, in the prepared model, of the layer that owns it or of its fake-quant.
        dtype: integer type in the file, e.g. ``"int8"``.
        scheme: its scheme; None for a bias, which is int32 with scale ``input scale * weight scale``.
        axis: channel axis of ``scale``, None per tensor; with blocks, the axis along which they lie.
        scale: real units per step, float32 values; those of blocks in the order of ONNX's tensor of scales.
        zero_point: integers, one for each scale.
    """

    name: str
    kind: str
    module: str
    dtype: str
    scheme: QuantizeScheme | None
    axis: int | None
    scale: tuple[float, ...]
    zero_point: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """The entry of the parameter file (see ``fxqat/onnx/schema.json``)."""
        scheme = self.scheme
        limit = 2**31
        return {
            "kind": self.kind,
            "module": self.module,
            "dtype": self.dtype,
            "bit_width": scheme.bit_width if scheme else 32,
            "signed": scheme.signed if scheme else True,
            "symmetric": scheme.symmetric if scheme else True,
            "axis": self.axis,
            **({} if scheme is None or scheme.block_size is None else {"block_size": scheme.block_size}),
            "quant_min": scheme.quant_min if scheme else -limit,
            "quant_max": scheme.quant_max if scheme else limit - 1,
            "scale": list(self.scale),
            "zero_point": list(self.zero_point),
        }
