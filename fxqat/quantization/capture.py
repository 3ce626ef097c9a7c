"""Capture: what the fake-quant model computes, as the integers that the exported file should compute."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fxqat.fake_quantize.state import named_fake_quants
from fxqat.numerics import quantize
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.utils.tensors import flatten_tensors, map_tensors


def deployed_copy(gm: QuantGraphModule) -> QuantGraphModule:
    """A copy on the CPU that computes what is deployed: eval mode, every fake-quant on, every observer off."""
    work = copy.deepcopy(gm).cpu().eval()
    for _, quant in named_fake_quants(work):
        quant.observer_enabled = False
        quant.fake_quant_enabled = True
    return work


@torch.no_grad()
def capture(gm: QuantGraphModule, inputs: tuple[Any, ...]) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Run a deployed copy and record every quantized value.

    Args:
        gm: the prepared model; not changed.
        inputs: the model's inputs.

    Returns:
        ``(integers, outputs)``: int32 arrays by tensor name, and the model's float outputs in order.
    """
    work = deployed_copy(gm)
    integers: dict[str, np.ndarray] = {}
    with _recording(work, integers):
        outputs = flatten_tensors(work(*map_tensors(inputs, lambda tensor: tensor.detach().cpu())))
    return integers, [output.detach().numpy() for output in outputs]


@contextmanager
def _recording(gm: nn.Module, integers: dict[str, np.ndarray]) -> Iterator[None]:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Tensor) -> None:
        scheme = module.scheme
        scale, zero_point = module.qparams()  # type: ignore[operator]
        q = quantize(args[0], scale, zero_point, scheme.quant_min, scheme.quant_max)  # type: ignore[union-attr,arg-type]
        integers[kwargs["tensor_name"]] = q.to(torch.int32).numpy()

    hooks = [
        quant.register_forward_hook(record, with_kwargs=True)
        for _, quant in named_fake_quants(gm)
        if quant.kind == "act_fake_quant"
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
