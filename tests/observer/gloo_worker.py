"""What each process of ``test_distributed`` does. Imports fxqat late, so that the order of imports can differ."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

WHOLE = ("Average", "KL", "HistogramL2", "PoTFloor", "PoTMode")
"""Observers that give the range of all data, as one process that sees all of it; of the others the union is taken."""


def batches_of(rank: int) -> list[torch.Tensor]:
    """Rank 0 has one batch, rank 1 has three; neither holds both extremes."""
    generator = torch.Generator().manual_seed(rank)
    count = 1 if rank == 0 else 3
    offset = -2.0 if rank == 0 else 2.0
    return [torch.randn(4, 3, 8, 8, generator=generator) + offset + i for i in range(count)]


def work(rank: int, world_size: int, folder: str) -> None:
    """Join the group, calibrate on this rank's data, and save what came out."""
    torch.set_num_threads(1)
    if rank == 0:
        import fxqat  # noqa: F401  before the group exists; rank 1 imports it afterwards
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    try:
        results = {
            "quantizers": _quantizers(rank),
            "again": _calibrated_twice(rank),
            "nan": _nan_on_one_rank(rank),
            "one_empty": _nothing_on_one_rank(rank),
        }
    finally:
        torch.distributed.destroy_process_group()
    torch.save(results, Path(folder) / f"rank{rank}.pt")


def quantizers(names: Iterable[str]) -> nn.ModuleDict:
    """One activation quantizer for each of some observers, and a per-channel one."""
    from fxqat.observer.observers import OBSERVERS
    from fxqat.scheme import QuantizeScheme
    from tests.builders import make_fake_quant

    quants = nn.ModuleDict()
    for name in names:
        scheme = QuantizeScheme(signed=False, symmetric=False, scale_bits=1 if name.startswith("PoT") else 24)
        quants[name] = make_fake_quant(scheme, observer=OBSERVERS[name])
    quants["per_channel"] = make_fake_quant(QuantizeScheme(per_channel=True), axis=1, channels=3)
    return quants


def _quantizers(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """The range of each quantizer before and after the ranks agree."""
    from fxqat.fake_quantize.state import enable_calibration, enable_quantization
    from fxqat.observer.observers import OBSERVERS

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


def _calibrated_twice(rank: int) -> dict[str, torch.Tensor]:
    """The observers after two rounds of calibration, each on half of the batches, with an agreement after each."""
    from fxqat.fake_quantize.state import enable_calibration, enable_quantization

    quants = quantizers(WHOLE)
    for half in range(2):
        enable_calibration(quants)
        for batch in batches_of(rank):
            for quant in quants.values():
                quant(batch[half::2] * (half + 1))
        enable_quantization(quants)
    return {key: value for key, value in quants.state_dict().items() if isinstance(value, torch.Tensor)}


def _nothing_on_one_rank(rank: int) -> dict[str, torch.Tensor]:
    """Only rank 1 has data; and a quantizer whose range is fixed, which is calibrated like the others."""
    from fxqat.fake_quantize.state import enable_calibration, enable_quantization
    from fxqat.observer.kl import KLObserver
    from fxqat.scheme import QuantizeScheme
    from tests.builders import make_fake_quant

    quants = quantizers(("MinMax", *WHOLE))
    quants["fixed"] = make_fake_quant(QuantizeScheme(fixed_range=(0.0, 1.0)), observer=KLObserver)
    enable_calibration(quants)
    for batch in batches_of(rank) if rank == 1 else ():
        for quant in quants.values():
            quant(batch)
    enable_quantization(quants)
    return {key: value for key, value in quants.state_dict().items() if isinstance(value, torch.Tensor)}


def _nan_on_one_rank(rank: int) -> dict[str, Any]:
    """Only rank 1 sees NaN; what ``enable_quantization`` raises on this rank."""
    from fxqat.errors import CalibrationError
    from fxqat.fake_quantize.state import enable_calibration, enable_quantization
    from tests.builders import make_fake_quant

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
