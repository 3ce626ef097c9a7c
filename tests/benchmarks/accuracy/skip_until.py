"""How many layers of MobileNetV2 need weights of 8 bits when all others have 4, by the order in which they are widened.

DIR is the folder of ``mobilenet_v2_imagenet.py``.

    python tests/benchmarks/accuracy/skip_until.py --data DIR --output docs/evidence/accuracy_skip_until.rst
"""

from __future__ import annotations

import argparse
import random
import textwrap
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import mobilenet_v2_imagenet as mobilenet
import torch
from prettytable import PrettyTable
from torch import nn

from fxqat.tools import WidthBank, sensitivity, skip_until, weight_bytes
from fxqat.tools.mixed_precision.sensitivity import METHODS

CALIBRATION, TESTED, LOSS, DRAWS = 64, 300, 2.0, 3
CONFIG = {"extra_qconfig_dict": {"w_observer": "MSE", "w_qscheme": {"narrow_range": False}}}


def least_prefix(bank: WidthBank, order: list[str], good: Callable[[nn.Module], bool]) -> int:
    """The least number of first units in the order that have to be wide, by bisection; all of them are enough."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        wide = set(order[:middle])
        widths = {name: 8 if name in wide else 4 for name in order}
        low, high = (low, middle) if good(bank.mix(widths)) else (middle + 1, high)
    return low


def main() -> None:
    """Measure, print the table, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=["fisher"])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    images, labels = mobilenet.load_data(arguments.data)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    batches = list(images[order[:CALIBRATION]].split(16))
    tested = order[CALIBRATION : CALIBRATION + TESTED]
    images, labels = images[tested], labels[tested]
    model = mobilenet.load_model(arguments.data)

    def top1(gm: nn.Module) -> float:
        return 100 * float((mobilenet.classes(gm, images) == labels).float().mean())

    baseline = top1(model)
    bank = WidthBank(model, batches, (4, 8), (8,), "ONNXRuntime", CONFIG)
    weights = [name for name, unit in bank.units.items() if unit.is_weight]
    size = weight_bytes(bank)

    def row(name: str, seconds: float, count: float, found: str, bytes_: str) -> list[str]:
        return [name, f"{seconds:.0f}", f"{count:g} of {len(weights)}", found, bytes_]

    table = PrettyTable(["order", "scores, s", "layers of 8 bits", "top-1", "weights, kB"], align="l", hrules=1)
    target = baseline - LOSS
    uniform = {bits: top1(bank.mix({name: bits for name in weights})) for bits in (4, 8)}
    if uniform[8] < target:
        raise SystemExit(
            f"with 8 bits in all layers top-1 is {uniform[8]:.1f}, below the target {target:.1f}: nothing to compare"
        )
    curves = []
    for method in arguments.methods:
        scores = sensitivity(bank, batches, method, progress=True)
        found = skip_until(bank, top1, target, scores.scores)
        curves.append(f"By ``{method}``::\n\n{textwrap.indent(str(found), '    ')}")
        count = sum(found.widths[name] == 8 for name in weights)
        kilobytes = f"{size.of(found.widths) / 1000:.0f}"
        table.add_row(row(f"skip_until by {method}", scores.seconds, count, f"{found.curve[-1].metric:.1f}", kilobytes))
        print(table, flush=True)

    def good(gm: nn.Module) -> bool:
        return top1(gm) >= target

    began = time.perf_counter()
    first = least_prefix(bank, weights, good)
    table.add_row(row("the first k", 0, first, "", ""))
    last = least_prefix(bank, weights[::-1], good)
    table.add_row(row("the last k", 0, last, "", ""))
    drawn = [least_prefix(bank, random.Random(seed).sample(weights, len(weights)), good) for seed in range(DRAWS)]
    table.add_row(row(f"random, mean of {', '.join(map(str, drawn))}", 0, sum(drawn) / DRAWS, "", ""))
    print(table, f"{time.perf_counter() - began:.0f} s")
    text = f"""Layers that need 8 bits
=======================

The number of layers of MobileNetV2 that need weights of 8 bits, when all others have 4, to keep top-1 within {LOSS:g}
points of the float model, at {target:.1f} % or more. ``skip_until`` widens layers from 4 to 8 bits in the order of
their scores (:doc:`/howto/mixed_precision`) until the target is reached. For comparison: the least number of first
layers, of last layers, and of layers in random orders.

Measured on {TESTED} ImageNet photos, without training: float {baseline:.1f} %, all weights of 8 bits
{uniform[8]:.1f} %, all of 4 bits {uniform[4]:.1f} %. Backend ONNXRuntime, weight observer MSE, activations of 8 bits,
calibrated on {CALIBRATION} other photos. *scores, s*: seconds to compute the scores.

Written by ``tests/benchmarks/accuracy/skip_until.py`` with torch {torch.__version__} on {date.today()}; do not edit.

{table.get_string()}

{(chr(10) * 2).join(curves)}
"""
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
