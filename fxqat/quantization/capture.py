"""Capture: what the fake-quant model computes, as the integers that the exported file must compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fxqat.errors import ExportError
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.nn.deployed import Normalize
from fxqat.numerics import quantize
from fxqat.quantization.deployed_copy import deployed_copy
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.utils.contexts import hooked
from fxqat.utils.tensors import flatten_tensors, map_tensors


@torch.no_grad()
def capture(
    gm: QuantGraphModule, inputs: tuple[Any, ...], normalizers: Sequence[Normalize | None] = ()
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Run a deployed copy and record every quantized value.

    Args:
        gm: the prepared model; not changed.
        inputs: inputs of the file, raw where there is a normalizer.
        normalizers: see :func:`~fxqat.quantization.deployed_copy.deployed_copy`.

    Returns:
        ``(integers, outputs)``: int32 arrays by tensor name, and the model's float outputs in order.

    Raises:
        ExportError: the model does not run on the inputs.
    """
    work = deployed_copy(gm, normalizers)
    integers: dict[str, np.ndarray] = {}

    def record(quant: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Tensor) -> None:
        scale, zero_point = quant.qparams()  # type: ignore[operator]
        scheme: Any = quant.scheme
        q = quantize(args[0], scale, zero_point, scheme.quant_min, scheme.quant_max)
        integers[kwargs["tensor_name"]] = q.to(torch.int32).numpy()

    activations = [quant for _, quant in named_fake_quants(work) if quant.kind == "act_fake_quant"]
    with hooked(activations, record, with_kwargs=True):
        try:
            outputs = flatten_tensors(work(*map_tensors(inputs, lambda tensor: tensor.detach().cpu())))
        except Exception as cause:  # the user's model may raise anything
            raise ExportError(f"the model does not run on example_inputs: {cause}") from cause
    return integers, [output.detach().numpy() for output in outputs]
