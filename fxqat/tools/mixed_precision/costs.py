"""What widths cost: memory of weights, and the size of the file.

Every cost is the largest of some rows, and each row adds up what units cost by their widths, alone or two together:
that is what an integer program takes (``fxqat.tools.mixed_precision.choose``).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fxqat.convert_export import convert_export
from fxqat.nn.qat import QATLayer
from fxqat.onnx.opset import DEFAULT
from fxqat.scheme import STORAGE_OPSETS
from fxqat.tools.mixed_precision.bank import WidthBank
from fxqat.tools.mixed_precision.units import quant_at


@dataclass(frozen=True)
class Row:
    """A sum over units.

    Args:
        single: what a unit adds at each width, by its name and bits.
        pairs: what two units add at each two widths, 0 or more, by their names and bits.
        fixed: what is added whatever the choice.
    """

    single: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    pairs: Mapping[tuple[str, str], Mapping[tuple[int, int], float]] = field(default_factory=dict)
    fixed: float = 0.0

    def of(self, widths: Mapping[str, int]) -> float:
        """The sum for some widths."""
        together = sum(added[widths[a], widths[b]] for (a, b), added in self.pairs.items())
        return self.fixed + sum(added[widths[name]] for name, added in self.single.items()) + together


@dataclass(frozen=True)
class Cost:
    """The largest of its rows.

    Args:
        name: what it is.
        unit: what it is counted in.
        rows: see :class:`Row`.
    """

    name: str
    unit: str
    rows: tuple[Row, ...]

    def of(self, widths: Mapping[str, int]) -> float:
        """What these widths cost."""
        return max(row.of(widths) for row in self.rows)


def weight_bytes(bank: WidthBank) -> Cost:
    """Memory of the weights: elements times bits over 8."""
    return Cost("weights", "bytes", (per_bit(bank, {name: count / 8 for name, count in _elements(bank).items()}),))


def average_weight_bits(bank: WidthBank) -> Cost:
    """Bits of a weight, averaged over all elements."""
    counts = _elements(bank)
    shares = {name: count / sum(counts.values()) for name, count in counts.items()}
    return Cost("average weight", "bits", (per_bit(bank, shares),))


def file_bytes(bank: WidthBank, inputs: Sequence[Any]) -> Cost:
    """Size of the ONNX file that ``convert_export`` writes: weights are stored in 4, 8 or 16 bits, the rest is fixed.

    Args:
        bank: of a model, which is exported once, at the most bits that each unit may have and the opset that any choice
            takes, to see what the rest is.
        inputs: of the model, as the file takes them.

    Raises:
        ExportError: the model cannot be exported.
    """
    opset = max(STORAGE_OPSETS[bits] for name in bank.units for bits in stored_bits(bank, name).values())
    added: dict[str, dict[int, float]] = {}
    for name, count in _elements(bank).items():
        channels = bank.quant(name, bank.widths[name][-1]).scale.numel()  # each has a zero point
        added[name] = {
            bits: math.ceil(count * width / 8) + math.ceil(channels * width / 8)
            for bits, width in stored_bits(bank, name).items()
        }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "widest.onnx"
        convert_export(bank.mix({}), tuple(inputs), path, opset_version=max(opset, DEFAULT), verify=False)
        size = path.stat().st_size
    weights = sum(sizes[bank.widths[name][-1]] for name, sizes in added.items())
    return Cost("file", "bytes", (Row(added, fixed=size - weights),))


def stored_bits(bank: WidthBank, name: str) -> dict[int, int]:
    """For each width of a unit, how many bits an integer takes in the file."""
    scheme = quant_at(bank.model, bank.units[name].path).scheme
    return {bits: replace(scheme, bit_width=bits).storage_width(DEFAULT) for bits in bank.widths[name]}


def per_bit(bank: WidthBank, factors: Mapping[str, float], fixed: float = 0.0) -> Row:
    """A row in which each bit of a unit adds the same."""
    return Row({name: {b: factor * b for b in bank.widths[name]} for name, factor in factors.items()}, fixed=fixed)


def _elements(bank: WidthBank) -> dict[str, int]:
    """How many elements each weight has."""
    layers = {unit.name: unit.layer for unit in bank.units.values() if unit.layer is not None}
    return {name: _weight_of(bank, path).numel() for name, path in layers.items()}


def _weight_of(bank: WidthBank, path: str) -> Tensor:
    layer = bank.model.get_submodule(path)
    assert isinstance(layer, QATLayer)
    return layer.weight
