"""Switch the observers and fake-quants of a prepared model on and off.

Every function is idempotent, accepts a model wrapped by DDP or ``torch.compile``, and raises
:class:`~fxqat.errors.CalibrationError` if the model has no fake-quant. The switches are Python bools in the state dict.
Under ``torch.distributed`` the ranks agree on the ranges when observers are switched off, so every rank must call the
function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fxqat.errors import CalibrationError, ConfigError
from fxqat.fake_quantize.base import ACTIVATION, WEIGHT, FakeQuantizeBase
from fxqat.utils.torch_compat import unwrap

ALL = "fake_quant"


def named_fake_quants(model: nn.Module) -> Iterator[tuple[str, FakeQuantizeBase]]:
    """Every fake-quant of a model once, with its path."""
    for name, module in model.named_modules():
        if isinstance(module, FakeQuantizeBase):
            yield name, module


def enable_calibration(model: nn.Module) -> None:
    """Observers on, fake-quant off: the next forward passes collect ranges."""
    _switch(model, ALL, observe=True, quantize=False)


def enable_calibration_woquantization(model: nn.Module, quantizer_type: str = ALL) -> None:
    """Observers on for one kind and off for the rest; fake-quant off.

    Args:
        model: a prepared model.
        quantizer_type: ``"weight_fake_quant"``, ``"act_fake_quant"`` or ``"fake_quant"`` for both.

    Raises:
        ConfigError: ``quantizer_type`` is none of these.
        CalibrationError: the model has no fake-quant.
    """
    _switch(model, quantizer_type, observe=True, quantize=False)


def enable_calibration_quantization(model: nn.Module, quantizer_type: str = ALL) -> None:
    """Observers and fake-quant on for one kind, both off for the rest.

    Args and errors: as :func:`enable_calibration_woquantization`.
    """
    _switch(model, quantizer_type, observe=True, quantize=True)


def enable_quantization(model: nn.Module, weight_cali_on: bool = False, act_cali_on: bool = False) -> None:
    """Fake-quant on; observers off, or on where asked.

    Args:
        model: a prepared and calibrated model.
        weight_cali_on: the observers of weights stay on.
        act_cali_on: the observers of activations stay on.

    Raises:
        CalibrationError: an observer saw no data, or saw NaN or infinity (the message names the fake-quants), or the
            model has no fake-quant.
    """
    quants = _fake_quants(model)
    for _, quant in quants:
        observe = weight_cali_on if quant.kind == WEIGHT else act_cali_on
        _set_observer(quant, observe and quant.scheme.fixed_range is None)
    require_calibrated(model)
    for _, quant in quants:
        quant.fake_quant_enabled = True


def disable_all(model: nn.Module) -> None:
    """Observers and fake-quant off: the model computes in float."""
    _switch(model, ALL, observe=False, quantize=False)


def enable_all(model: nn.Module) -> None:
    """Observers and fake-quant on."""
    _switch(model, ALL, observe=True, quantize=True)


def require_calibrated(model: nn.Module) -> None:
    """Check that every fake-quant has a finite range.

    Raises:
        CalibrationError: some have none (the message names them), or the model has no fake-quant.
    """
    quants = _fake_quants(model)
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
            "prepare the model again."
        )


def is_calibrated(model: nn.Module) -> bool:
    """Whether every fake-quant has a finite range."""
    return all(q.observer.has_seen_data() and q.observer.is_finite() for _, q in named_fake_quants(model))


@contextmanager
def switches_kept(model: nn.Module) -> Iterator[None]:
    """Restore the switches of all fake-quants after the block."""
    before = [(quant, quant.get_extra_state()) for _, quant in named_fake_quants(model)]
    try:
        yield
    finally:
        for quant, state in before:
            quant.set_extra_state(state)


def _switch(model: nn.Module, quantizer_type: str, *, observe: bool, quantize: bool) -> None:
    if quantizer_type not in (WEIGHT, ACTIVATION, ALL):
        raise ConfigError(f"quantizer_type must be {WEIGHT!r}, {ACTIVATION!r} or {ALL!r}, got {quantizer_type!r}")
    if observe:
        _forget_noise(model)
    for _, quant in _fake_quants(model):
        chosen = quantizer_type in (ALL, quant.kind)
        _set_observer(quant, observe and chosen)
        quant.fake_quant_enabled = quantize and chosen


def _forget_noise(model: nn.Module) -> None:
    """Drop the comparison with the float model, which is no longer that of the ranges."""
    provenance = getattr(unwrap(model), "provenance", None)
    if provenance is not None:
        provenance.noise = None


def _set_observer(quant: FakeQuantizeBase, enabled: bool) -> None:
    if quant.observer_enabled and not enabled and quant.observer.reduce_over_ranks():
        quant.update_from_observer()
    if enabled and not quant.observer_enabled:
        quant.observed_state = ()
    quant.observer_enabled = enabled


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
