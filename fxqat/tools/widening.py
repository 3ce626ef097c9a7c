"""What the ladder can widen: tensors with the widths that a backend can run, and choices of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from fxqat.custom_quantizer.spec import BackendSpec
from fxqat.scheme import QuantizeScheme
from fxqat.tools.mixed_precision.units import Unit, Widths

WIDE = 8
"""The most bits that a tensor with fewer bits gets; one that has as many is left float."""


@dataclass(frozen=True)
class Place:
    """A tensor whose width can be chosen, its scheme, and the rules that leave it float."""

    unit: Unit
    scheme: QuantizeScheme
    float_rules: list[Mapping[str, Any]] = field(default_factory=list)

    def levels(self, spec: BackendSpec) -> list[int]:
        """The larger bit widths that the backend can run."""
        tensor = "weight" if self.unit.is_weight else "value"
        wider = range(self.scheme.bit_width + 1, WIDE + 1)
        return [bits for bits in wider if spec.takes(tensor, replace(self.scheme, bit_width=bits))]

    def rules(self, bits: int, spec: BackendSpec, given: Collection[str]) -> list[Mapping[str, Any]]:
        """The rules that give the tensor so many bits, or leave it float.

        With the most bits, it has the backend's observer unless one is given: that of a recipe is for few bits.
        """
        if bits > WIDE:
            return self.float_rules
        config = spec.weight if self.unit.is_weight else spec.activation
        part, name = ("weight", "w_observer") if self.unit.is_weight else ("value", "a_observer")
        rules = self.unit.rules(bits)
        if bits == WIDE and name not in given:
            for rule in rules:
                rule[part] |= {"observer": config.observer, "observer_args": dict(config.observer_args)}
        return list(rules)


def uniform_choices(places: Mapping[str, Place], spec: BackendSpec) -> list[Widths]:
    """For each two widths: all weights that have fewer bits than the first get so many, all activations the second.

    Activations have at least as many bits as weights: at the same cost, that was better wherever both were measured.
    """
    levels = {name: place.levels(spec) for name, place in places.items()}
    weights, values = (
        {name: own for name, own in levels.items() if places[name].unit.is_weight is is_weight}
        for is_weight in (True, False)
    )
    found: list[Widths] = []
    for w, a in product(*([0, *sorted(set().union(*each.values()))] for each in (weights, values))):
        widths = _up_to(w, weights) | _up_to(a, values)
        if widths and widths not in found and (w <= a or not any(values.values())):
            found.append(widths)
    return found


def _up_to(most: int, levels: Mapping[str, list[int]]) -> Widths:
    """The largest width of each tensor that is not more; nothing for those that have as many already."""
    return {name: max(b for b in own if b <= most) for name, own in levels.items() if own and own[0] <= most}


def first(widths: Widths, number: int) -> Widths:
    """The first of some widths."""
    return dict(list(widths.items())[:number])


def doubled(most: int) -> list[int]:
    """1, 2, 4, ... and the most; nothing if that is not at least 1."""
    return [*(2**i for i in range(max(most, 0).bit_length()) if 2**i < most), *([most] if most > 0 else [])]


def halve(enough: int, is_enough: Callable[[int], bool]) -> None:
    """Look for a smaller number between one that is enough and its half, which is not."""
    low, high = 0 if enough == 1 else 2 ** ((enough - 1).bit_length() - 1), enough
    while high - low > max(1, high // 8):
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
