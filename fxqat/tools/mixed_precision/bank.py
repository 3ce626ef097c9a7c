"""Calibrate a model at several bit widths once, and combine them freely without calibrating again."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxqat.calibrate import calibrate
from fxqat.config.config import parse_config
from fxqat.config.effective import effective_config
from fxqat.custom_quantizer.backend_type import BackendType, backend_spec
from fxqat.custom_quantizer.legal_schemes import check_legal
from fxqat.custom_quantizer.spec import BackendSpec
from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.fake_quantize.state import require_calibrated
from fxqat.prepare_by_platform import prepare_by_platform
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.quantization.report import QuantReport
from fxqat.tools.mixed_precision.units import Unit, find_units, layer_at
from fxqat.utils.batches import check_batches, example_of


class WidthBank:
    """The calibrated fake-quants of a model at several bit widths.

    Args:
        model: a float model; not changed.
        batches: batches to calibrate with, see :func:`fxqat.calibrate`.
        weight_widths: possible bit widths of weights.
        value_widths: possible bit widths of activations.
        backend: as for :func:`fxqat.prepare_by_platform`.
        prepare_custom_config_dict: the same; its bit widths are ignored, except for the units in ``keep``.
        keep: names of units that keep the bit width of the backend and the configuration.

    Attributes:
        units: the units by name, see :func:`fxqat.tools.mixed_precision.units.find_units`.
        widths: the possible bit widths of each unit, ascending.
        model: the prepared model with its fake-quants off, which computes what the float model computes.

    Raises:
        ConfigError: no batches, a width that is invalid or that the backend cannot run, an unknown name; or as
            ``prepare_by_platform``.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        weight_widths: Sequence[int] = (2, 3, 4, 8),
        value_widths: Sequence[int] = (8,),
        backend: BackendType | BackendSpec | str = BackendType.TSQAT,
        prepare_custom_config_dict: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        keep: Sequence[str] = (),
    ) -> None:
        check_batches(batches, "WidthBank")
        batches = list(batches)
        if not batches or not weight_widths or not value_widths:
            raise ConfigError("WidthBank: needs at least one batch of inputs, one weight width and one value width")
        fixed = parse_config(prepare_custom_config_dict).concrete_args or {}
        example = example_of(model, batches[0], "WidthBank", fixed)
        first = prepare_by_platform(model, backend, prepare_custom_config_dict, example_inputs=example).eval()
        self.units = find_units(first)
        unknown = sorted(set(keep) - set(self.units))
        if unknown:
            raise ConfigError(f"WidthBank: keep has the unknown unit {unknown[0]!r}; known: {', '.join(self.units)}")
        self._quants: dict[tuple[str, int], list[FakeQuantizeBase]] = {}
        self.widths: dict[str, tuple[int, ...]] = {}
        for name, unit in self.units.items():
            scheme = unit.scheme(first)
            tensor, given = ("weight", weight_widths) if unit.is_weight else ("value", value_widths)
            self.widths[name] = tuple(sorted({scheme.bit_width} if name in keep else set(given)))
            for bits in self.widths[name]:
                where = f"WidthBank: {tensor}_widths"
                check_legal(backend_spec(backend), tensor, replace(scheme, bit_width=bits), where, name)
        for step in range(max(map(len, self.widths.values()))):
            widths = {name: choice[min(step, len(choice) - 1)] for name, choice in self.widths.items()}
            gm = prepare_by_platform(model, backend, with_widths(first, widths), example_inputs=example).eval()
            unseen = {name: copy.deepcopy(unit.quants(gm)) for name, unit in self.units.items()}
            calibrate(gm, batches, progress=False, compare=False)
            require_calibrated(gm)
            for name, unit in self.units.items():
                self._quants[name, widths[name]] = unseen[name] if unit.is_weight else unit.quants(gm)
            self.model = gm

    def quants(self, name: str, bits: int, gm: QuantGraphModule | None = None) -> list[FakeQuantizeBase]:
        """Copies of a unit's fake-quants at a width, switched on; those of a weight are calibrated on ``gm``."""
        if (name, bits) not in self._quants:
            raise ConfigError(f"{name} can have {', '.join(map(str, self.widths[name]))} bits, not {bits}")
        unit, found = self.units[name], copy.deepcopy(self._quants[name, bits])
        if unit.is_weight:
            layer = layer_at(gm or self.model, unit.layers[0])
            with torch.no_grad():
                for quant, values in zip(found, layer.weight_values(), strict=True):
                    quant.observe(values.detach())
        for quant in found:
            quant.observer_enabled, quant.fake_quant_enabled = False, True
        return found

    def mix(self, widths: Mapping[str, int]) -> QuantGraphModule:
        """The quantized model with these bit widths, calibrated: evaluate, finetune or export it.

        Raises:
            ConfigError: see :meth:`install`.
        """
        gm = copy.deepcopy(self.model)
        self.install(gm, widths)
        return gm

    def install(self, gm: QuantGraphModule, widths: Mapping[str, int]) -> None:
        """Change the bit widths of a prepared (perhaps finetuned) model in place, and switch its fake-quants on.

        A fake-quant that already has its width is unchanged, with its learned scale.

        Args:
            gm: a model prepared from the same float model for the same backend.
            widths: bits by unit name; a unit that is not named gets its largest width.

        Raises:
            ConfigError: a name or a width is unknown, or the model is a different one.
        """
        unknown = sorted(set(widths) - set(self.units))
        if unknown:
            raise ConfigError(f"unknown unit {unknown[0]!r}; known: {', '.join(self.units)}")
        if {unit.paths for unit in find_units(gm).values()} != {unit.paths for unit in self.units.values()}:
            raise ConfigError("this model was not prepared as the model of the bank: their fake-quants differ")
        chosen = {name: widths.get(name, choice[-1]) for name, choice in self.widths.items()}
        device = next((parameter.device for parameter in gm.parameters()), torch.device("cpu"))
        for name, bits in chosen.items():
            unit = self.units[name]
            if any(old.scheme.bit_width != bits or not old.observer.has_seen_data() for old in unit.quants(gm)):
                unit.set_quants(gm, [new.to(device).train(gm.training) for new in self.quants(name, bits, gm)])
            for quant in unit.quants(gm):
                quant.fake_quant_enabled = True
        gm.provenance.config = with_widths(gm, chosen)
        gm.provenance.report = _report_of(gm, self.units)


def with_widths(gm: QuantGraphModule, widths: Mapping[str, int]) -> dict[str, Any]:
    """The effective configuration of a prepared model with other bit widths."""
    config = effective_config(gm)
    units = find_units(gm)
    for name, bits in widths.items():
        part = "weight" if units[name].is_weight else "value"
        for new in units[name].rules(bits):
            rule = next(rule for rule in config["overrides"] if rule["match"] == new["match"] and part in rule)
            rule[part]["bit_width"] = bits
    return config


def _report_of(gm: QuantGraphModule, units: Mapping[str, Unit]) -> QuantReport:
    """The report with the current schemes."""
    report = gm.quant_report
    weights = {layer: str(unit.scheme(gm)) for unit in units.values() for layer in unit.layers}
    groups = {report.row(unit.node).group: str(unit.scheme(gm)) for unit in units.values() if unit.node is not None}
    rows = tuple(
        replace(
            row,
            weight=weights.get(row.target, row.weight) if row.weight else "",
            output=groups.get(row.group, row.output) if row.output else "",
        )
        for row in report
    )
    return replace(report, rows=rows)
