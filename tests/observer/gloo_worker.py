"""Observers in two processes under gloo: each calibrates on its own data, then the ranks agree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fxqat.errors import CalibrationError
from fxqat.fake_quantize.state import enable_calibration, enable_quantization
from fxqat.observer.kl import KLObserver
from fxqat.observer.observers import OBSERVERS
from fxqat.scheme import QuantizeScheme
from tests.builders import make_fake_quant

WHOLE = ("Average", "KL", "HistogramL2", "PoTFloor", "PoTMode")
"""Observers with the range of one process that sees all data; the others take the union over ranks."""


def batches_of(rank: int) -> list[torch.Tensor]:
    """Rank 0 has one batch, rank 1 has three; neither holds both extremes."""
    generator = torch.Generator().manual_seed(rank)
    count = 1 if rank == 0 else 3
    offset = -2.0 if rank == 0 else 2.0
    return [torch.randn(4, 3, 8, 8, generator=generator) + offset + i for i in range(count)]


def results(rank: int) -> dict[str, Any]:
    """The results of this rank in each case; a process group is running."""
    return {
        "quantizers": _quantizers(rank),
        "again": _calibrated_twice(rank, keep=True),
        "anew": _calibrated_twice(rank, keep=False),
        "nan": _nan_on_one_rank(rank),
        "one_empty": _nothing_on_one_rank(rank),
    }


def quantizers(names: Iterable[str]) -> nn.ModuleDict:
    """An activation fake-quant for each of these observers, and a per-channel one."""
    quants = nn.ModuleDict()
    for name in names:
        scheme = QuantizeScheme(signed=False, symmetric=False, scale_bits=1 if name.startswith("PoT") else 24)
        quants[name] = make_fake_quant(scheme, observer=OBSERVERS[name])
    quants["per_channel"] = make_fake_quant(QuantizeScheme(per_channel=True), axis=1, channels=3)
    return quants


def _quantizers(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """The range of each quantizer before and after the ranks agree."""
    quants = quantizers(OBSERVERS)
    enable_calibration(quants)
    for batch in batches_of(rank):
        for quant in quants.values():
            quant(batch)
    local = {name: (quant.observer.min_val.clone(), quant.observer.max_val.clone()) for name, quant in quants.items()}
    enable_quantization(quants)
    return {
        name: {
            "local_min": local[name][0],
            "local_max": local[name][1],
            "min": quant.observer.min_val,
            "max": quant.observer.max_val,
            "scale": quant.scale.detach(),
            "zero_point": quant.zero_point.detach(),
        }
        for name, quant in quants.items()
    }


def _calibrated_twice(rank: int, keep: bool) -> dict[str, torch.Tensor]:
    """The observers after two rounds of calibration, each on half of the batches, with an agreement after each."""
    quants = quantizers(WHOLE)
    for half in range(2):
        enable_calibration(quants, keep=keep)
        for batch in batches_of(rank):
            for quant in quants.values():
                quant(batch[half::2] * (half + 1))
        enable_quantization(quants)
    return quants.state_dict()


def _nothing_on_one_rank(rank: int) -> dict[str, torch.Tensor]:
    """Only rank 1 has data; and a quantizer whose range is fixed, which is calibrated like the others."""
    quants = quantizers(("MinMax", *WHOLE))
    quants["fixed"] = make_fake_quant(QuantizeScheme(fixed_range=(0.0, 1.0)), observer=KLObserver)
    enable_calibration(quants)
    for batch in batches_of(rank) if rank == 1 else ():
        for quant in quants.values():
            quant(batch)
    enable_quantization(quants)
    return quants.state_dict()


def _nan_on_one_rank(rank: int) -> dict[str, Any]:
    """Only rank 1 sees NaN; what ``enable_quantization`` raises on this rank."""
    quants = nn.ModuleDict({"quant": make_fake_quant()})
    enable_calibration(quants)
    x = torch.tensor([1.0, -1.0, 0.5])
    x[0] = float("nan") if rank == 1 else 1.0
    quants["quant"](x)
    try:
        enable_quantization(quants)
    except CalibrationError as error:
        return {"raised": str(error)}
    return {"raised": ""}
