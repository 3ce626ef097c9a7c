"""The front door to calibration: observers watch each value while some batches pass through the model."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from operator import length_hint
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from fxqat.errors import ConfigError
from fxqat.fake_quantize.state import disable_all, enable_calibration, named_fake_quants, restored_on_failure
from fxqat.quantization.compare_with_float import compare_if_possible
from fxqat.utils.batches import check_batches, described, forward_of, read_batch
from fxqat.utils.contexts import eval_mode
from fxqat.utils.flags import check_flags
from fxqat.utils.tensors import map_tensors
from fxqat.utils.torch_compat import unwrap


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    max_batches: int | None = None,
    progress: bool = True,
    keep: bool = False,
    compare: bool = True,
) -> int:
    """Run batches through a prepared model while its observers watch, in eval mode and without gradients.

    Afterwards observers and fake-quants are off, and every module is in the mode that it was in:
    :func:`fxqat.enable_quantization` switches the fake-quants on. A second call starts anew, unless ``keep`` is true.
    A call that fails, as at a batch of another shape, changes nothing: switches, ranges and scales are as before it.
    A warning of the logger ``fxqat`` names activations that were 0 in all batches, and values beyond 1e10. Under
    ``torch.distributed`` every rank must call it; the ranks agree on the ranges at the end.

    Args:
        model: a prepared model, also wrapped by DDP or ``torch.compile``.
        batches: an iterable (list, generator, DataLoader) of batches on any device. A batch is a tensor, a tuple or
            list of the arguments of forward, or a dict of them by name. Labels are ignored: one item more than forward
            has arguments, as of a DataLoader of ``(x, y)``, or the keys ``label``, ``labels``, ``target``, ``targets``.
        max_batches: at most so many; None for all.
        progress: show a progress bar if the output is a terminal.
        keep: add the batches to those of an earlier calibration.
        compare: afterwards, compare the quantized model with the float model on the first batch, a copy of which is
            kept until then; see :func:`fxqat.compare_with_float`. The result is ``gm.quantization_noise``.

    Returns:
        The number of batches that were used.

    Raises:
        CalibrationError: the model holds no fake-quant: it is not a model of ``prepare_by_platform``.
        ConfigError: there are no batches, ``max_batches`` is not a positive integer, a flag is no bool, or a batch does
            not fit forward; the message says what the batch is and what forward takes.

    Example:
        >>> from fxqat import enable_quantization, prepare_by_platform
        >>> gm = prepare_by_platform(nn.Linear(4, 2), "TSQAT")
        >>> calibrate(gm, [(torch.ones(3, 4), torch.tensor([0, 1, 1]))])
        1
        >>> enable_quantization(gm)
    """
    check_flags(ConfigError, "calibrate", progress=progress, keep=keep, compare=compare)
    counts = isinstance(max_batches, int) and not isinstance(max_batches, bool) and max_batches >= 1
    if max_batches is not None and not counts:
        raise ConfigError(f"calibrate: max_batches must be at least 1, or None for all batches, got {max_batches}")
    check_batches(batches, "calibrate")
    gm = unwrap(model)
    with restored_on_failure(gm):
        count, kept = _observe(model, batches, max_batches, progress, keep, compare)
    if kept is not None:
        compare_if_possible(gm, kept, "calibrate")
    return count


def _observe(
    model: nn.Module, batches: Iterable[Any], max_batches: int | None, progress: bool, keep: bool, compare: bool
) -> tuple[int, tuple[Any, ...] | None]:
    """Show the batches to the observers: how many there were, and a copy of the first if it is to be compared."""
    enable_calibration(model, keep=True)
    gm = unwrap(model)
    if not keep:  # also after a calibration loop of the user's own, which left the observers on
        for _, quant in named_fake_quants(gm):
            quant.forget_range()
    total = min(filter(None, (length_hint(batches), max_batches)), default=None)
    bar = tqdm(islice(batches, max_batches), "calibrate", total, leave=False, disable=None if progress else True)
    count = 0
    kept: tuple[Any, ...] | None = None
    with eval_mode(gm):
        for batch in bar:
            inputs = read_batch(gm, batch, f"calibrate, batch {count}")
            if compare and kept is None:
                kept = map_tensors(inputs, torch.clone)
            _run(gm, inputs, batch, f"calibrate, batch {count}")
            count += 1
    if not count:
        raise ConfigError("calibrate: needs at least one batch of inputs")
    disable_all(model)
    return count, kept


def _run(gm: nn.Module, inputs: tuple[Any, ...], batch: Any, where: str) -> None:
    try:
        gm(*inputs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(
            f"{where}: {forward_of(gm)} fails on {described(batch)}: {type(error).__name__}: {error}"
        ) from error
