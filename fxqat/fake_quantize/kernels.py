"""Compiled kernels for the fake-quantization of tensors on a CPU (float32) and on a GPU (half precision, too).

``kernels.c`` is built when fxqat is installed, if there is a C compiler. Those for GPUs are in
:mod:`~fxqat.fake_quantize.triton_kernels` and :mod:`~fxqat.fake_quantize.triton_scales`, which Triton compiles at the
first use. Without them, or with the environment variable ``FXQAT_KERNELS=0``, torch's operators compute the same, more
slowly (:mod:`~fxqat.fake_quantize.straight_through`, :mod:`~fxqat.fake_quantize.following`).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
import zlib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fxqat.fake_quantize.layout import PER_CHANNEL_BITS, Layout, memory_layout, with_strides_of
from fxqat.numerics import fake_quantize
from fxqat.utils.torch_compat import is_plain, is_recorded

SWITCH = "FXQAT_KERNELS"
"""The environment variable that switches the kernels off when it is ``0``.

It is read when fxqat is imported; for the kernels of a GPU, when the first tensor there is rounded.
"""

SOURCE = Path(__file__).with_name("kernels.c")
"""What the kernels are built from. They hold its checksum, so that those of another version are not used."""

CODE_BELOW, CODE_ABOVE, CODE_NAN, CODES_PER_STEP = -128, 127, -127, 252
"""Codes of elements below and above the range, of NaN, and the number of codes of a whole step for those inside."""


def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, and what is said about it."""
    if os.environ.get(SWITCH) == "0":
        return None, f"switched off by {SWITCH}=0"
    files = [Path(__file__).with_name(f"_kernels{suffix}") for suffix in EXTENSION_SUFFIXES]
    found = next((file for file in files if file.exists()), None)
    if found is None:
        return None, "not built"
    try:
        library = ctypes.CDLL(str(found), mode=getattr(os, "RTLD_NOW", 0))
        if ctypes.c_uint32.in_dll(library, "fxqat_source").value != zlib.crc32(SOURCE.read_bytes()):
            return None, "not used: built from another version of kernels.c; install fxqat again"
        pointers: list[Any] = [ctypes.c_void_p]
        sizes: list[Any] = [ctypes.c_int64]
        numbers: list[Any] = [ctypes.c_int]
        library.fxqat_forward.argtypes = pointers * 9 + sizes * 3 + numbers * 6
        library.fxqat_forward.restype = None
        library.fxqat_forward_again.argtypes = pointers * 3 + sizes * 3 + numbers * 3
        library.fxqat_forward_again.restype = None
        single: list[Any] = [ctypes.c_float]
        library.fxqat_round_bias.argtypes = pointers * 7 + sizes + numbers * 3 + single * 2
        library.fxqat_round_bias.restype = None
        library.fxqat_bn_factor.argtypes = pointers * 3 + sizes + single
        library.fxqat_bn_factor.restype = None
        library.fxqat_growth.argtypes = pointers * 4 + sizes * 3 + numbers + single + numbers
        library.fxqat_growth.restype = ctypes.c_int
        library.fxqat_backward.argtypes = pointers * 7 + sizes * 3 + numbers * 3 + [ctypes.c_double] + numbers
        library.fxqat_backward.restype = ctypes.c_int
    except (OSError, AttributeError, ValueError) as error:
        return None, f"not loaded: {error}"
    return library, "in use"


LIBRARY, STATE = _load()
"""The kernels for CPUs, or None; and what is said about them: "in use", or why not."""

GPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@functools.cache
def gpu_kernels(device: torch.device) -> ModuleType | None:
    """The kernels for a GPU; None if they are switched off, or do not work there, which is logged."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        from fxqat.fake_quantize import triton_kernels

        x = torch.linspace(-20.0, 20.0, 9999, dtype=torch.float32, device=device)
        scale = x.new_tensor(0.1)
        found, *_ = triton_kernels.forward(
            x, scale, None, None, None, None, Layout(1, 1, 9999, 0), -128, 127, 1, 24, False
        )
        if torch.equal(found, fake_quantize(x, scale, None, -128, 127)):
            return triton_kernels
        reason = "their results are not those of torch's operators"
    except Exception as error:  # noqa: BLE001  no Triton, no C compiler for it, a GPU that it does not support
        reason = f"{type(error).__name__}: {error}"
    logging.getLogger("fxqat").warning(
        "Fake-quant on %s runs on torch's operators, which is slower: its kernels cannot be used (%s). "
        "Set the environment variable %s=0 to go without this message.",
        device,
        reason,
        SWITCH,
    )
    return None


def usable(tensor: Tensor) -> bool:
    """Whether the kernels can take a tensor: in the memory of the CPU, float32; or in that of a GPU.

    Outside of compilers, tracers and torch's modes only: those must see operators.
    """
    if is_recorded() or not is_plain(tensor):
        return False
    if tensor.is_cuda:
        return tensor.dtype in GPU_DTYPES and gpu_kernels(tensor.device) is not None
    return LIBRARY is not None and tensor.dtype is torch.float32


def _is_parameter(values: Tensor, beside: Tensor) -> bool:
    """Whether the kernels can take a scale or the like of a tensor that they take."""
    return (
        values.dtype is torch.float32
        and is_plain(values)
        and values.is_contiguous()
        and values.get_device() == beside.get_device()
    )


def layout(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    factor: Tensor | None,
    used_scale: Tensor | None,
    unit_scale: Tensor | None,
    axis: int | None,
) -> Layout | None:
    """How the kernels see these tensors; None if torch's operators must compute the fake-quantization."""
    if not usable(x) or x.numel() == 0:
        return None
    if x.is_cuda and zero_point is not None and zero_point.dim() != scale.dim():
        return None
    per_channel = 0
    channels = 1
    for bit, values in zip(PER_CHANNEL_BITS, (scale, zero_point, factor, used_scale, unit_scale), strict=True):
        if values is None:
            continue
        if not _is_parameter(values, x):
            return None
        if values.dim():
            if axis is None or values.dim() != 1 or x.dim() == 0 or values.shape[0] != x.shape[axis]:
                return None
            per_channel |= bit
            channels = values.shape[0]
    return memory_layout(x, channels, axis, per_channel)


def _on_gpu(tensor: Tensor) -> ModuleType:
    module = gpu_kernels(tensor.device)
    assert module is not None
    return module


def _scales_on_gpu() -> ModuleType:
    from fxqat.fake_quantize import triton_scales

    return triton_scales


def forward(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    factor: Tensor | None,
    used_scale: Tensor | None,
    unit_scale: Tensor | None,
    where: Layout,
    quant_min: int,
    quant_max: int,
    zero_point_step: int,
    scale_bits: int,
    with_codes: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round x to the grid.

    Args:
        x: float32, any shape, in any strides.
        scale: what is learned; this and the next four as for ``FakeQuantizeSTE``.
        zero_point: the learned zero point, or None.
        factor: divides the grid, or None.
        used_scale: replaces the scale, or None.
        unit_scale: multiplies ``scale``, or None.
        where: the result of :func:`layout` for these tensors.
        quant_min: smallest integer, inclusive.
        quant_max: largest integer, inclusive.
        zero_point_step: the zero point in use is a multiple of it.
        scale_bits: significant bits of the scale in use.
        with_codes: whether the backward pass will have codes instead of x.

    Returns:
        ``(x_hat, table, codes)``: x_hat of x's shape; the table ``(3, channels)`` of grid, zero point, and scale in use
        with the sign of ``scale``, divided by ``unit_scale``; int8 codes of x's shape, or None.
    """
    if x.is_cuda:
        parameters = (where, quant_min, quant_max, zero_point_step, scale_bits, with_codes)
        return _on_gpu(x).forward(x, scale, zero_point, factor, used_scale, unit_scale, *parameters)  # type: ignore[no-any-return]
    assert LIBRARY is not None
    x_hat = torch.empty_like(x)
    x = with_strides_of(x_hat, x)
    table = x_hat.new_empty((3, where.channels))  # float32 as x is, whatever the default dtype
    codes = torch.empty_like(x_hat, dtype=torch.int8) if with_codes else None
    LIBRARY.fxqat_forward(
        x.data_ptr(),
        x_hat.data_ptr(),
        None if codes is None else codes.data_ptr(),
        table.data_ptr(),
        scale.data_ptr(),
        None if zero_point is None else zero_point.data_ptr(),
        None if factor is None else factor.data_ptr(),
        None if used_scale is None else used_scale.data_ptr(),
        None if unit_scale is None else unit_scale.data_ptr(),
        *where,
        quant_min,
        quant_max,
        zero_point_step,
        scale_bits,
        torch.get_num_threads(),
    )
    return x_hat, table, codes


def forward_again(x: Tensor, table: Tensor, where: Layout, quant_min: int, quant_max: int) -> Tensor:
    """The first result of :func:`forward`, once more.

    Args:
        x: of :func:`forward`.
        table: its second result.
        where: of :func:`layout`.
        quant_min: smallest integer, inclusive.
        quant_max: largest integer, inclusive.
    """
    if x.is_cuda:
        return _on_gpu(x).forward_again(x, table, where, quant_min, quant_max)  # type: ignore[no-any-return]
    assert LIBRARY is not None
    x_hat = torch.empty_like(x)
    pointers = (with_strides_of(x_hat, x).data_ptr(), x_hat.data_ptr(), table.data_ptr())
    LIBRARY.fxqat_forward_again(*pointers, *where[:3], quant_min, quant_max, torch.get_num_threads())
    return x_hat


def bn_factor(variance: Tensor, gamma: Tensor | None, eps: float) -> Tensor | None:
    """The divisor of a weight's grid in a layer with BatchNorm: :func:`fxqat.nn.fold.grid_factor`.

    Args:
        variance: the running variance, float32, ``(channels,)``.
        gamma: the weight of BatchNorm, ``(channels,)``, or None for ones.
        eps: of BatchNorm.

    Returns:
        ``(channels,)``; None if torch's operators must compute it.
    """
    given = (variance,) if gamma is None else (variance, gamma)
    if not usable(variance) or variance.is_cuda or not all(_is_parameter(values, variance) for values in given):
        return None
    return bn_factor_on_cpu(variance, gamma, eps)


def bn_factor_on_cpu(variance: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """:func:`bn_factor` of contiguous float32 tensors on the CPU, without its checks."""
    assert LIBRARY is not None
    factor = torch.empty_like(variance)
    pointer = None if gamma is None else gamma.data_ptr()
    LIBRARY.fxqat_bn_factor(variance.data_ptr(), pointer, factor.data_ptr(), variance.numel(), eps)
    return factor


def growth(
    weight: Tensor, factor: Tensor | None, magnitude: Tensor, axis: int | None, smallest: float
) -> Tensor | None:
    """:func:`fxqat.fake_quantize.following.growth`; None if torch's operators must compute it."""
    shapes = ((),) if axis is None else ((), (weight.shape[axis],))
    if not usable(weight) or magnitude.shape not in shapes or (factor is not None and factor.shape != shapes[-1]):
        return None
    if not all(_is_parameter(values, weight) for values in (magnitude, factor) if values is not None):
        return None
    if weight.is_cuda:
        return _scales_on_gpu().growth(weight, factor, magnitude, axis, smallest)  # type: ignore[no-any-return]
    assert LIBRARY is not None
    channels = 1 if factor is None and magnitude.dim() == 0 else math.prod(shapes[-1])
    dense = weight if weight.is_contiguous() else with_strides_of(torch.empty_like(weight), weight)
    where = memory_layout(dense, channels, axis, magnitude.dim())
    ratio = torch.empty_like(magnitude)
    tensors = (dense, factor, magnitude, ratio)
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    if LIBRARY.fxqat_growth(*pointers, *where, smallest, torch.get_num_threads()):
        raise MemoryError("no memory for the largest values of a weight")
    return ratio


def round_bias(
    bias: Tensor,
    input_scale: Tensor,
    weight_scale: Tensor,
    input_unit: Tensor | None,
    weight_unit: Tensor | None,
    input_bits: int,
    weight_bits: int,
    bias_limit: float,
    int32_limit: float,
) -> tuple[Tensor, Tensor] | None:
    """The weight scale in use and the rounding of the bias: the formulas of ``fxqat/nn/bias.py`` in one call.

    Args:
        bias: float32, ``(out_channels,)``.
        input_scale: ``()``, as learned.
        weight_scale: ``()`` or ``(out_channels,)``, as learned.
        input_unit: multiplies the input scale, or None.
        weight_unit: of the shape of the weight scale, multiplies it, or None.
        input_bits: significant bits of the input scale in use.
        weight_bits: those of the weight scale in use.
        bias_limit: the largest bias integer for which the weight scale is not raised.
        int32_limit: the largest bias integer.

    Returns:
        ``(weight_scale, error)``: the weight scale in use, of its shape; and what the rounding adds to the bias, of the
        bias's shape. None if torch's operators must compute them.
    """
    if not usable(bias) or input_scale.dim() or weight_scale.shape not in ((), bias.shape):
        return None
    pairs = ((input_scale, input_unit), (weight_scale, weight_unit))
    if any(unit is not None and unit.shape != scale.shape for scale, unit in pairs):
        return None
    tensors = (bias, input_scale, weight_scale, input_unit, weight_unit)
    if not all(_is_parameter(values, bias) for values in tensors if values is not None):
        return None
    parameters = (input_bits, weight_bits, bias_limit, int32_limit)
    if bias.is_cuda:
        return _scales_on_gpu().round_bias(*tensors, *parameters)  # type: ignore[no-any-return]
    return round_bias_on_cpu(*tensors, *parameters)


def round_bias_on_cpu(
    bias: Tensor,
    input_scale: Tensor,
    weight_scale: Tensor,
    input_unit: Tensor | None,
    weight_unit: Tensor | None,
    input_bits: int,
    weight_bits: int,
    bias_limit: float,
    int32_limit: float,
) -> tuple[Tensor, Tensor]:
    """:func:`round_bias` of contiguous float32 tensors on the CPU, without its checks."""
    assert LIBRARY is not None
    used_scale, error = torch.empty_like(weight_scale), torch.empty_like(bias)
    tensors = (bias, input_scale, weight_scale, input_unit, weight_unit, used_scale, error)
    sizes = (bias.numel(), weight_scale.dim(), input_bits, weight_bits)
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    LIBRARY.fxqat_round_bias(*pointers, *sizes, bias_limit, int32_limit)
    return used_scale, error


def backward(
    saved: Tensor,
    grad: Tensor,
    table: Tensor,
    where: Layout,
    quant_min: int,
    quant_max: int,
    grad_scale: float,
    needs_scale: bool,
    needs_zero_point: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, scale and zero point.

    Args:
        saved: x, or the codes of :func:`forward`.
        grad: the gradient of x_hat, of its dtype.
        table: of :func:`forward`.
        where: of :func:`layout`.
        quant_min: smallest integer, inclusive.
        quant_max: largest integer, inclusive.
        grad_scale: multiplies the gradients of scale and zero point.
        needs_scale: whether to return the gradient of the scale, else None.
        needs_zero_point: whether to return that of the zero point, else None.

    Raises:
        MemoryError: there is no memory for the sums.
    """
    if grad.is_cuda:
        parameters = (where, quant_min, quant_max, grad_scale, needs_scale, needs_zero_point)
        return _on_gpu(grad).backward(saved, grad, table, *parameters)  # type: ignore[no-any-return]
    assert LIBRARY is not None
    grad_x = torch.empty_like(saved, dtype=torch.float32)
    grad, saved = with_strides_of(grad_x, grad), with_strides_of(grad_x, saved)
    shapes = [(where.channels,) if where.per_channel & bit else () for bit in PER_CHANNEL_BITS[:2]]
    grad_s = grad_x.new_empty(shapes[0]) if needs_scale else None
    grad_z = grad_x.new_empty(shapes[1]) if needs_zero_point else None
    is_codes = saved.dtype == torch.int8
    pointer = saved.data_ptr()
    failed = LIBRARY.fxqat_backward(
        None if is_codes else pointer,
        pointer if is_codes else None,
        grad.data_ptr(),
        grad_x.data_ptr(),
        None if grad_s is None else grad_s.data_ptr(),
        None if grad_z is None else grad_z.data_ptr(),
        table.data_ptr(),
        *where,
        quant_min,
        quant_max,
        grad_scale,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("no memory for the sums of the scale's gradient")
    return grad_x, grad_s, grad_z
