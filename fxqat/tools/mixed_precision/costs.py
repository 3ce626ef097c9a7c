"""Costs of bit widths: memory of the weights, and file size.

A cost is the maximum of some rows. A row is a sum of terms that depend on the width of one unit or of two units: the
form that an integer program needs (``fxqat.tools.mixed_precision.choose``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fxqat.convert_export import convert_export
from fxqat.onnx.opset import DEFAULT
from fxqat.scheme import STORAGE_OPSETS
from fxqat.tools.mixed_precision.bank import WidthBank
from fxqat.tools.mixed_precision.units import layer_at
from fxqat.utils.batches import read_batch
from fxqat.utils.temporary import temporary_folder


@dataclass(frozen=True)
class Row:
    """A sum over units.

    Args:
        single: terms of one unit, by name and bits.
        pairs: terms of two units, not negative, by both names and both bits.
        fixed: constant term.
    """

    single: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    pairs: Mapping[tuple[str, str], Mapping[tuple[int, int], float]] = field(default_factory=dict)
    fixed: float = 0.0

    def of(self, widths: Mapping[str, int]) -> float:
        """The value at some widths."""
        together = sum(added[widths[a], widths[b]] for (a, b), added in self.pairs.items())
        return self.fixed + sum(added[widths[name]] for name, added in self.single.items()) + together


@dataclass(frozen=True)
class Cost:
    """The maximum of its rows.

    Args:
        name: name for messages and files.
        unit: unit of measurement.
        rows: see :class:`Row`.
    """

    name: str
    unit: str
    rows: tuple[Row, ...]

    def of(self, widths: Mapping[str, int]) -> float:
        """The value at some widths."""
        return max(row.of(widths) for row in self.rows)


def weight_bytes(bank: WidthBank) -> Cost:
    """Memory of the weights: elements times bits over 8."""
    return Cost("weights", "bytes", (per_bit(bank, {name: count / 8 for name, count in _elements(bank).items()}),))


def average_weight_bits(bank: WidthBank) -> Cost:
    """Bits per weight, averaged over all elements."""
    counts = _elements(bank)
    shares = {name: count / sum(counts.values()) for name, count in counts.items()}
    return Cost("average weight", "bits", (per_bit(bank, shares),))


def file_bytes(bank: WidthBank, inputs: Sequence[Any]) -> Cost:
    """Size of the ONNX file that ``convert_export`` writes: weights are stored in 4, 8 or 16 bits, the rest is fixed.

    Args:
        bank: the bank. Its model is exported once to measure the rest, at the largest width of each unit and with an
            opset that can store every width.
        inputs: one batch of inputs.

    Raises:
        ExportError: the model cannot be exported.
    """
    opset = max(STORAGE_OPSETS[bits] for name in bank.units for bits in stored_bits(bank, name).values())
    added: dict[str, dict[int, float]] = {}
    for name, count in _elements(bank).items():
        channels = sum(quant.scale.numel() for quant in bank.quants(name, bank.widths[name][-1]))  # a zero point each
        added[name] = {
            bits: math.ceil(count * width / 8) + math.ceil(channels * width / 8)
            for bits, width in stored_bits(bank, name).items()
        }
    with temporary_folder() as folder:
        path = folder / "widest.onnx"
        convert_export(
            bank.mix({}),
            read_batch(bank.model, inputs, "file_bytes"),
            path,
            opset_version=max(opset, DEFAULT),
            verify=False,
        )
        size = path.stat().st_size
    weights = sum(sizes[bank.widths[name][-1]] for name, sizes in added.items())
    return Cost("file", "bytes", (Row(added, fixed=size - weights),))


def stored_bits(bank: WidthBank, name: str) -> dict[int, int]:
    """For each width of a unit, the number of bits of an integer in the file."""
    scheme = bank.units[name].scheme(bank.model)
    return {bits: replace(scheme, bit_width=bits).storage_width(DEFAULT) for bits in bank.widths[name]}


def per_bit(bank: WidthBank, factors: Mapping[str, float], fixed: float = 0.0) -> Row:
    """A row that is linear in the bits: a factor for each unit."""
    return Row({name: {b: factor * b for b in bank.widths[name]} for name, factor in factors.items()}, fixed=fixed)


def _elements(bank: WidthBank) -> dict[str, int]:
    """Number of elements of each weight."""
    weights = {name: layer_at(bank.model, unit.layers[0]) for name, unit in bank.units.items() if unit.is_weight}
    return {
        name: sum(tensor.numel() for tensors in layer.weight_tensors() for tensor in tensors)
        for name, layer in weights.items()
    }
