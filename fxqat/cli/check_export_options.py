"""Checks of the options for the file before the ladder is climbed, which can take hours."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxqat.config.config import parse_config
from fxqat.config.export_arguments import check_names, interface_names
from fxqat.onnx.opset import check_opset
from fxqat.quantization.dynamic_sizes import open_sizes
from fxqat.utils.batches import read_batch
from fxqat.utils.contexts import buffers_kept, eval_mode
from fxqat.utils.tensors import map_tensors, named_leaves


def check_without_model(export: Mapping[str, Any]) -> None:
    """Check what is wrong for every model: an opset that does not exist, names that are empty or equal.

    Args:
        export: arguments of :func:`fxqat.convert_export`; names and opset may be None.

    Raises:
        ExportError: one of them is wrong.
    """
    if export["opset_version"] is not None:
        check_opset(export["opset_version"])
    check_names(export["input_names"], export["output_names"])


def check_with_model(model: nn.Module, batch: Any, config: Path | None, export: Mapping[str, Any]) -> None:
    """Check names and open sizes against what the float model takes and returns for a batch.

    A model that does not run on the batch is left to ``prepare_by_platform``, whose error says more. So are the names
    of inputs that are not all tensors.

    Args:
        model: the float model.
        batch: one batch of data.
        config: the file with the configuration, whose ``concrete_args`` are no inputs.
        export: as for :func:`check_without_model`.

    Raises:
        ConfigError: the configuration is wrong, or the batch does not fit forward.
        ExportError: there is another number of names than of tensors, a name is taken, or ``dynamic_shapes`` does not
            fit the inputs.
    """
    fixed = dict(parse_config(config).concrete_args or {})
    inputs = read_batch(model, batch, "quantize", fixed)
    kinds = {name: p.kind for name, p in inspect.signature(model.forward).parameters.items() if name not in fixed}
    names = [name for name, kind in kinds.items() if kind == inspect.Parameter.POSITIONAL_OR_KEYWORD]
    known = len(names) >= len(inputs) and all(isinstance(value, Tensor) for value in inputs)
    names = names[: len(inputs)]
    open_sizes(one_sample(inputs), names, export["dynamic_shapes"], export["dynamic_batch"])
    outputs: list[str] = []
    with suppress(Exception), eval_mode(model), buffers_kept(model), torch.no_grad():
        by_name = dict(zip(names, inputs, strict=True)) | fixed if fixed else {}
        outputs = list(named_leaves(model(**by_name) if fixed else model(*inputs)))
    if outputs:
        asked = export["input_names"] if known else None
        interface_names(names if known else [], outputs, asked, export["output_names"])


def one_sample(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The first sample of a batch: the inputs that the file is exported with."""
    cut: tuple[Any, ...] = map_tensors(inputs, lambda tensor: tensor[:1] if tensor.dim() else tensor)
    return cut
