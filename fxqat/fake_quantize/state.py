"""Switch the observers and fake-quants of a prepared model on and off.

Every function is idempotent, accepts a model wrapped by DDP or ``torch.compile``, and raises
:class:`~fxqat.errors.CalibrationError` if the model has no fake-quant. The switches are part of the state dict.
Under ``torch.distributed`` the ranks agree on the ranges when observers are switched off, so every rank must call the
function.

When observers are switched off, calibration ends. A warning of the logger ``fxqat`` then names the activations that
were 0 in all batches, and the tensors with values beyond ``LARGEST``.

The functions switch the given model only. If they switch fake-quant on while a deep copy of the model, such as an
``AveragedModel``, has other switches, a warning says so, once for each copy. A copy that was switched itself is on its
own.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fxqat.errors import CalibrationError, ConfigError
from fxqat.fake_quantize.base import ACTIVATION, WEIGHT, FakeQuantizeBase
from fxqat.numerics import SCALE_MIN
from fxqat.utils.flags import check_flags
from fxqat.utils.living_copies import LivingCopies
from fxqat.utils.meta_tensors import require_values
from fxqat.utils.torch_compat import unwrap

ALL = "fake_quant"

LARGEST = 1e10
"""The largest magnitude, in real units, that calibration accepts without a warning."""


def named_fake_quants(model: nn.Module) -> Iterator[tuple[str, FakeQuantizeBase]]:
    """Every fake-quant of a model once, with its path."""
    for name, module in model.named_modules():
        if isinstance(module, FakeQuantizeBase):
            yield name, module


def enable_calibration(model: nn.Module, keep: bool = False) -> None:
    """Observers on, fake-quant off: the next forward passes collect ranges.

    Args:
        model: a prepared model.
        keep: whether observers that are switched on keep the ranges of an earlier calibration and extend them; by
            default they start anew. Observers that are on already go on.

    Raises:
        ConfigError: ``keep`` is no bool.
        CalibrationError: the model has no fake-quant, or is on the meta device.
    """
    check_flags(ConfigError, "enable_calibration", keep=keep)
    _switch(model, ALL, observe=True, quantize=False, keep=keep)


def enable_calibration_woquantization(model: nn.Module, quantizer_type: str = ALL, keep: bool = False) -> None:
    """Observers on for one kind and off for the rest; fake-quant off.

    Args:
        model: a prepared model.
        quantizer_type: ``"weight_fake_quant"``, ``"act_fake_quant"`` or ``"fake_quant"`` for both.
        keep: as for :func:`enable_calibration`.

    Raises:
        ConfigError: ``quantizer_type`` is none of these, or ``keep`` is no bool.
        CalibrationError: the model has no fake-quant, or is on the meta device.
    """
    check_flags(ConfigError, "enable_calibration_woquantization", keep=keep)
    _switch(model, quantizer_type, observe=True, quantize=False, keep=keep)


def enable_calibration_quantization(model: nn.Module, quantizer_type: str = ALL, keep: bool = False) -> None:
    """Observers and fake-quant on for one kind, both off for the rest.

    Args and errors: as :func:`enable_calibration_woquantization`.
    """
    check_flags(ConfigError, "enable_calibration_quantization", keep=keep)
    _switch(model, quantizer_type, observe=True, quantize=True, keep=keep)


def enable_quantization(model: nn.Module, weight_cali_on: bool = False, act_cali_on: bool = False) -> None:
    """Fake-quant on; observers off, or on where asked. Ranges stay.

    A model whose activations are float or quantized at run time needs no calibration: its weights are observed here if
    they were not.

    Args:
        model: a prepared and calibrated model.
        weight_cali_on: the observers of weights stay on.
        act_cali_on: the observers of activations stay on.

    Raises:
        ConfigError: a flag is no bool.
        CalibrationError: an observer saw no data, or saw NaN or infinity (the message names the fake-quants), or the
            model has no fake-quant or is on the meta device.
    """
    flags = {"weight_cali_on": weight_cali_on, "act_cali_on": act_cali_on}
    check_flags(ConfigError, "enable_quantization", **flags)
    quants = _fake_quants(model)
    require_values(model, CalibrationError)
    on = {WEIGHT: weight_cali_on, ACTIVATION: act_cali_on}
    _set_observers((name, quant, on[quant.kind] and quant.scheme.fixed_range is None) for name, quant in quants)
    if all(quant.kind == WEIGHT for _, quant in quants):
        _observe_weights(model)
    require_calibrated(model)
    for _, quant in quants:
        quant.fake_quant_enabled = True
    _tell_copies(model, quantize=True)


def _observe_weights(model: nn.Module) -> None:
    """Show each weight that no forward pass showed to its observer."""
    for module in model.modules():
        weights_of: Any = getattr(module, "quantized_weights", tuple)
        for _, quant, weight in weights_of():
            if not quant.observer.has_seen_data():
                quant.observe(weight.detach())


def disable_all(model: nn.Module) -> None:
    """Observers and fake-quant off: the model computes in float."""
    _switch(model, ALL, observe=False, quantize=False)


def enable_all(model: nn.Module) -> None:
    """Observers and fake-quant on. Ranges stay and are extended."""
    _switch(model, ALL, observe=True, quantize=True)


@contextmanager
def all_off(model: nn.Module) -> Iterator[None]:
    """Observers and fake-quant off for the block, without a word to the other ranks; afterwards as they were."""
    with switches_kept(model):
        for _, quant in named_fake_quants(model):
            quant.observer_enabled = quant.fake_quant_enabled = False
        yield


def require_calibrated(model: nn.Module) -> None:
    """Check that every fake-quant has a finite range.

    Raises:
        CalibrationError: some have none (the message names them), or the model has no fake-quant or is on the meta
            device.
    """
    quants = _fake_quants(model)
    require_values(model, CalibrationError)
    unseen = [name for name, quant in quants if not quant.observer.has_seen_data()]
    if unseen:
        raise CalibrationError(
            f"{len(unseen)} of {len(quants)} fake-quants saw no data: {_some(unseen)}. "
            "Call enable_calibration(model) and run the model on representative batches first."
        )
    broken = [name for name, quant in quants if not quant.observer.is_finite()]
    if broken:
        raise CalibrationError(
            f"NaN or infinity reached {len(broken)} of {len(quants)} fake-quants during calibration: {_some(broken)}. "
            "Start with the first: look for NaN in the calibration data and for overflow in the float model, then "
            "calibrate again."
        )


def is_calibrated(model: nn.Module) -> bool:
    """Whether every fake-quant has a finite range."""
    return all(q.observer.has_seen_data() and q.observer.is_finite() for _, q in named_fake_quants(model))


@contextmanager
def switches_kept(model: nn.Module) -> Iterator[None]:
    """Restore the switches of all fake-quants after the block."""
    before = [(quant, quant.observer_enabled, quant.fake_quant_enabled) for _, quant in named_fake_quants(model)]
    try:
        yield
    finally:
        for quant, *switches in before:
            quant.observer_enabled, quant.fake_quant_enabled = switches


@contextmanager
def restored_on_failure(model: nn.Module) -> Iterator[None]:
    """If the block raises: switches, ranges, scales and zero points of all fake-quants are as before, in place.

    So is the comparison with the float model. All tensors of the fake-quants are copied for the block.
    """
    kept = [(part, _state_of(part)) for _, quant in named_fake_quants(model) for part in quant.modules()]
    provenance = getattr(unwrap(model), "provenance", None)
    noise = getattr(provenance, "noise", None)
    try:
        yield
    except BaseException:  # Ctrl-C, too
        with torch.no_grad():
            for part, (attributes, tensors) in kept:
                vars(part).update(attributes)
                for tensor, content in tensors:
                    tensor.copy_(content)
        if provenance is not None:
            provenance.noise = noise
        raise


def _state_of(part: nn.Module) -> tuple[dict[str, Any], list[tuple[torch.Tensor, torch.Tensor]]]:
    """The attributes of a module, containers copied, and its own tensors with a copy of each."""
    attributes = {name: copy.copy(v) if isinstance(v, (dict, list, set)) else v for name, v in vars(part).items()}
    tensors = (*part.parameters(recurse=False), *part.buffers(recurse=False))
    return attributes, [(tensor, tensor.detach().clone()) for tensor in tensors]


def _switch(model: nn.Module, quantizer_type: str, *, observe: bool, quantize: bool, keep: bool = True) -> None:
    if quantizer_type not in (WEIGHT, ACTIVATION, ALL):
        raise ConfigError(f"quantizer_type must be {WEIGHT!r}, {ACTIVATION!r} or {ALL!r}, got {quantizer_type!r}")
    if observe:
        require_values(model, CalibrationError)
        _forget_noise(model)
    quants = [(name, quant, quantizer_type in (ALL, quant.kind)) for name, quant in _fake_quants(model)]
    _set_observers(((name, quant, observe and chosen) for name, quant, chosen in quants), keep)
    for _, quant, chosen in quants:
        quant.fake_quant_enabled = quantize and chosen
    _tell_copies(model, quantize)


def _forget_noise(model: nn.Module) -> None:
    """Drop the comparison with the float model, which is no longer that of the ranges."""
    provenance = getattr(unwrap(model), "provenance", None)
    if provenance is not None:
        provenance.noise = None


def _set_observers(wanted: Iterable[tuple[str, FakeQuantizeBase, bool]], keep: bool = True) -> None:
    """Switch observers, given as ``(name, fake-quant, on)``."""
    ended: dict[str, FakeQuantizeBase] = {}
    for name, quant, enabled in wanted:
        if quant.observer_enabled and not enabled:
            ended[name] = quant
            if quant.observer.reduce_over_ranks():
                quant.update_from_observer()
        if enabled and not quant.observer_enabled:
            quant.observed_state = ()
            if not keep:
                quant.forget_range()
        quant.observer_enabled = enabled
    _tell_extremes(ended)


@torch.no_grad()
def _tell_extremes(quants: dict[str, FakeQuantizeBase]) -> None:
    """Log the fake-quants that saw only zeros without need, or values that are too large to be data."""
    zeros, huge = [], []
    for name, quant in quants.items():
        if quant.scheme.fixed_range is None and quant.observer.has_seen_data() and quant.observer.is_finite():
            reach = float(torch.maximum(-quant.observer.min_val, quant.observer.max_val).max())
            # a range of zeros may be widened to the smallest scale
            if quant.kind == ACTIVATION and not quant.always_zero and reach <= SCALE_MIN * 2**quant.scheme.bit_width:
                zeros.append(name)
            if reach > LARGEST:
                huge.append(name)
    if zeros:
        logging.getLogger("fxqat").warning(
            f"calibration: {len(zeros)} of {len(quants)} fake-quants saw only zeros: {_some(zeros)}. Any other value "
            "will be clipped to almost 0 there. Check the calibration data, calibrate again with data that reaches "
            "these values, or leave them float. Observe a branch that starts with zeros, and is trained now, while it "
            "is trained: enable_quantization(model, act_cali_on=True), and for the end enable_quantization(model)."
        )
    if huge:
        logging.getLogger("fxqat").warning(
            f"calibration: values beyond {LARGEST:g} reached {len(huge)} of {len(quants)} fake-quants: {_some(huge)}. "
            "Ordinary values will be rounded to 0 there. Look for overflow and for numbers that stand for infinity, "
            "or leave these values float."
        )


def _tell_copies(model: nn.Module, quantize: bool) -> None:
    """Note that a model was switched, and log the copies of it that were left behind if it now quantizes."""
    for module in model.modules():
        copies = getattr(module, "living_copies", None)
        if isinstance(copies, LivingCopies):
            copies.switched = True
            if quantize and _left_behind(module, copies):
                gc.collect()  # copies that only the garbage collector knows are not in use
                for left in _left_behind(module, copies):
                    copies.found.discard(left)
                    logging.getLogger("fxqat").warning(
                        f"a copy of the model (an averaged model, or any deepcopy) has other switches or ranges than "
                        f"{type(module).__name__} has now: {_some(_different(module, left))}. It computes without "
                        "quantization, or with other ranges. Make such a copy after enable_quantization(model), "
                        "or update it with copy.load_state_dict(model.state_dict()). If it is meant to be so, call "
                        "disable_all(copy)."
                    )


def _left_behind(model: nn.Module, copies: LivingCopies) -> list[nn.Module]:
    """The copies that differ from the model and were never switched themselves."""
    return [copy for copy in copies.found if not copy.living_copies.switched and _different(model, copy)]


def _different(model: nn.Module, copy: nn.Module) -> list[str]:
    """The fake-quants whose switches differ, or whose observed range is more than twice as wide in one of the two.

    An average of parameters does not follow a calibration: what is learned is relative to the calibrated range.
    """
    found = dict(named_fake_quants(copy))
    pairs = [(name, quant, found[name]) for name, quant in named_fake_quants(model) if name in found]
    return [name for name, quant, other in pairs if _switches(quant) != _switches(other) or _other_range(quant, other)]


def _switches(quant: FakeQuantizeBase) -> tuple[bool, bool]:
    return quant.observer_enabled, quant.fake_quant_enabled


def _other_range(quant: FakeQuantizeBase, other: FakeQuantizeBase) -> bool:
    one, two = (torch.maximum(-each.observer.min_val, each.observer.max_val) for each in (quant, other))
    return bool(((one > 2 * two) | (two > 2 * one)).any())


def _fake_quants(model: nn.Module) -> list[tuple[str, FakeQuantizeBase]]:
    quants = list(named_fake_quants(model))
    if not quants:
        raise CalibrationError(
            f"{type(model).__name__} has no fake-quant: pass the model that prepare_by_platform returned"
        )
    return quants


def _some(names: list[str], limit: int = 8) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
