"""Post-training quantization: from the float model to the calibrated one in one call."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from fxqat.calibrate import calibrate
from fxqat.config.config import parse_config
from fxqat.custom_quantizer.backend_type import BackendType
from fxqat.custom_quantizer.spec import BackendSpec
from fxqat.errors import ConfigError
from fxqat.fake_quantize.state import enable_quantization
from fxqat.prepare_by_platform import prepare_by_platform
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools.post_training.correct_bias import correct_bias as correct_every_bias
from fxqat.tools.post_training.equalize import equalize as equalize_layers
from fxqat.tools.post_training.reconstruct import Reconstruction
from fxqat.tools.post_training.reconstruct import reconstruct as reconstruct_segments
from fxqat.tools.post_training.smooth import smooth as smooth_norms
from fxqat.utils.batches import check_batches, example_of
from fxqat.utils.flags import check_flags


def ptq(
    model: nn.Module,
    batches: Iterable[Any],
    backend: BackendType | BackendSpec | str = BackendType.TSQAT,
    prepare_custom_config_dict: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    equalize: bool = False,
    replace_relu6: bool = False,
    smooth: bool = False,
    reconstruct: str | Reconstruction | None = None,
    correct_bias: bool = False,
    compare: bool = True,
    progress: bool = False,
) -> QuantGraphModule:
    """Quantize a trained model without labels.

    1. ``prepare_by_platform`` with the first batch as example inputs;
    2. cross-layer equalization (:mod:`fxqat.tools.post_training.equalize`) and SmoothQuant
       (:mod:`fxqat.tools.post_training.smooth`), on request;
    3. calibration;
    4. reconstruction (:mod:`fxqat.tools.post_training.reconstruct`) and bias correction
       (:mod:`fxqat.tools.post_training.correct_bias`), on request. With both, each segment is corrected before it is
       learned, and after it where that lowers the error.

    Args:
        model: a float model; not changed.
        batches: batches of inputs, see :func:`fxqat.calibrate`; all are kept in memory.
        backend: as for :func:`fxqat.prepare_by_platform`.
        prepare_custom_config_dict: the same.
        equalize: equalize consecutive layers and absorb high biases.
        replace_relu6: when equalizing, replace each ReLU6 between two layers by ReLU.
        smooth: move large channels of the outputs of LayerNorm and RMSNorm into the weights that read them.
        reconstruct: ``"GPTQ"``, ``"AdaRound"``, ``"BRECQ"``, ``"QDrop"`` or a :class:`Reconstruction`.
        correct_bias: correct the bias of every layer.
        compare: compare the calibrated model with the float model, see :func:`fxqat.calibrate`. With ``reconstruct``
            or ``correct_bias`` only its warnings remain: the result is no longer that of the model.
        progress: show progress bars if the output is a terminal.

    Returns:
        The prepared and calibrated model in eval mode with its fake-quants on: evaluate, finetune or export it.

    Raises:
        ConfigError: no batches, a batch that does not fit the model, ``replace_relu6`` without ``equalize``,
            ``smooth`` without a layer that can be smoothed, or as ``prepare_by_platform``.
    """
    flags = {"equalize": equalize, "replace_relu6": replace_relu6, "smooth": smooth, "correct_bias": correct_bias}
    check_flags(ConfigError, "ptq", **flags, compare=compare, progress=progress)
    check_batches(batches, "ptq")
    batches = list(batches)
    if not batches:
        raise ConfigError("ptq: needs at least one batch of inputs")
    if replace_relu6 and not equalize:
        raise ConfigError("ptq: replace_relu6 is part of the equalization; set equalize=True as well")
    fixed = parse_config(prepare_custom_config_dict).concrete_args or {}
    example = example_of(model, batches[0], "ptq", fixed)
    gm = prepare_by_platform(model, backend, prepare_custom_config_dict, example_inputs=example).eval()
    if equalize:
        equalize_layers(gm, batches, replace_relu6=replace_relu6)
    if smooth:
        smooth_norms(gm, batches)
    calibrate(gm, batches, progress=progress, compare=compare)
    enable_quantization(gm)
    if reconstruct is not None:
        reconstruct_segments(gm, batches, reconstruct, correct_bias=correct_bias, progress=progress)
    elif correct_bias:
        correct_every_bias(gm, batches)
    return gm
