"""What the callbacks of all trainers have in common: how quantization-aware training begins, and what is left of it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from typing import Any

from torch import nn

from fxqat.calibrate import calibrate
from fxqat.convert_export import convert_export
from fxqat.errors import ConfigError
from fxqat.fake_quantize.state import enable_quantization, is_calibrated
from fxqat.quantization.graph_module import QuantGraphModule


def prepared_inside(model: nn.Module) -> tuple[str, QuantGraphModule]:
    """The one prepared model in another model, with its path there: ``""`` if it is the model itself.

    Raises:
        ConfigError: there is none, or there are several.
    """
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, QuantGraphModule)]
    if len(found) != 1:
        paths = ", ".join(path for path, _ in found) or "none"
        raise ConfigError(
            f"expected one model of prepare_by_platform in {type(model).__name__}, found {paths}. Prepare the model "
            "before you give it to the trainer."
        )
    return found[0]


class QuantizationSteps:
    """Calibrate and switch fake-quant on before training; export afterwards.

    Args:
        calibration: batches, as for :func:`fxqat.calibrate`; None for the training data.
        max_batches: at most so many batches of the calibration; None for all.
        export: the ONNX file; None for none.
        options: further arguments of :func:`fxqat.convert_export`.

    Raises:
        ConfigError: ``options`` are no arguments of ``convert_export``, or are given without ``export``.
    """

    def __init__(
        self,
        calibration: Iterable[Any] | None = None,
        max_batches: int | None = 16,
        export: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        if export is None and options:
            raise ConfigError(f"{type(self).__name__}: {', '.join(options)}: options of the export, but export is None")
        if export is not None:
            try:
                inspect.signature(convert_export).bind(None, file_path=export, **options)
            except TypeError as error:
                raise ConfigError(f"{type(self).__name__}: convert_export: {error}") from error
        self.calibration = calibration
        self.max_batches = max_batches
        self.export = export
        self.options = options

    def begin(self, model: nn.Module, training_data: Iterable[Any]) -> None:
        """Calibrate the prepared model in a model and switch its fake-quant on.

        A calibrated one, as of a run that is resumed, keeps its ranges.
        """
        gm = prepared_inside(model)[1]
        if not is_calibrated(gm):
            calibrate(gm, training_data if self.calibration is None else self.calibration, self.max_batches)
        enable_quantization(gm)

    def end(self, gm: QuantGraphModule) -> None:
        """Export a trained model if there is a file for it."""
        if self.export is not None:
            convert_export(gm, file_path=self.export, **self.options)
