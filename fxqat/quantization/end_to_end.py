"""End to end: how far the fake-quant model, and the exported file, are from the float model.

The parity certificate compares the file with the fake-quant model only, so it also holds for a model that quantization
has destroyed. These figures go into its document beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch

from fxqat.nn.deployed import Normalize
from fxqat.onnx.ort_runs import run
from fxqat.quantization.capture import Captured
from fxqat.quantization.compare_with_float import compare_outputs, measure_noise
from fxqat.quantization.deployed_copy import deployed_copy
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.quantization.quantization_noise import MIN_COSINE, OutputNoise
from fxqat.utils.tensors import flatten_tensors, map_tensors


@torch.no_grad()
def end_to_end(
    gm: QuantGraphModule,
    inputs: tuple[Any, ...],
    normalizers: Sequence[Normalize | None],
    captured: Captured,
    proto: onnx.ModelProto,
) -> dict[str, Any]:
    """Compare float model, fake-quant model and file on the example inputs, and warn if they are far apart.

    The float model is the prepared model with its fake-quants off: after training, it has the trained weights.

    Args:
        gm: the prepared model, not fitted to quantization errors; not changed.
        inputs: inputs of the file, raw where there is a normalizer.
        normalizers: see :func:`~fxqat.quantization.deployed_copy.deployed_copy`.
        captured: the outputs of the fake-quant model and of the float model.
        proto: the file.

    Returns:
        A dict for JSON: ``"example_inputs"`` has, for each output, ``"fake_quant"`` and ``"file"``, each compared with
        the float model; ``"calibration"`` has the outputs of ``gm.quantization_noise``, or is None.
    """
    inputs = map_tensors(inputs, lambda tensor: tensor.detach().cpu())
    arrays = [tensor.numpy() for tensor in flatten_tensors(inputs)]
    feeds = dict(zip([value.name for value in proto.graph.input], arrays, strict=True))
    file = run(proto, feeds, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    names = [value.name for value in proto.graph.output]
    found = {}
    for name, exact, other in zip(names, captured.in_float.values(), captured.outputs.values(), strict=True):
        both = {"fake_quant": other, "file": file[name]}
        found[name] = {key: compare_outputs(_named(name, exact), _named(name, y))[0] for key, y in both.items()}
    if any(each.cosine < MIN_COSINE for of_output in found.values() for each in of_output.values()):
        logging.getLogger("fxqat").warning(
            "convert_export: an output has a cosine below %s to that of the float model, which is this model with its "
            "fake-quants off. After training with few bits that can be right: judge by your own metric. On the example "
            "inputs, %s",
            MIN_COSINE,
            measure_noise(deployed_copy(gm, normalizers), [inputs]).warning(),
        )
    noise = gm.quantization_noise
    return {
        "example_inputs": [
            {"name": name} | {key: _figures(each) for key, each in of_output.items()}
            for name, of_output in found.items()
        ],
        "calibration": None if noise is None else [{"name": each.name} | _figures(each) for each in noise.outputs],
    }


def _named(name: str, values: np.ndarray) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(values))}


def _figures(noise: OutputNoise) -> dict[str, float]:
    return {"changed": noise.changed} if noise.difference is None else asdict(noise.difference)
