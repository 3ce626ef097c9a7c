"""The deployed copy: the prepared model as it computes when it is deployed.

1. on the CPU, in eval mode, without gradients;
2. every fake-quant on, every observer off;
3. its graph only has what runs in eval mode;
4. inputs that the file takes raw are normalized first;
5. in float32, if it was trained in half precision: weights, inputs, and the types that its graph names;
6. weights that hooks of torch compute (pruning, the old weight_norm) are parameters with these values.

It shares the memory of the parameters, except those of the user's own modules, whose code may write them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from fxqat.errors import ExportError
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.nn.deployed import Normalize
from fxqat.nn.parametrized import PARAMETRIZED, make_permanent_
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.quantization.raw_inputs import normalize_inputs
from fxqat.utils.contexts import users_modules
from fxqat.utils.living_copies import own_copy
from fxqat.utils.tensors import HALF, map_tensors, widened
from fxqat.utils.torch_compat import BatchNorm, is_sharded
from fxqat.utils.train_eval_graph import differs_in_training, select_mode
from fxqat.utils.weight_hooks import make_weights_permanent_


def deployed_copy(gm: QuantGraphModule, normalizers: Sequence[Normalize | None] = ()) -> QuantGraphModule:
    """The deployed copy of a prepared model.

    Args:
        gm: the prepared model; not changed.
        normalizers: what each input passes through first, None for nothing; empty if no input is raw.

    Raises:
        ExportError: the model is sharded or float64, or a parameter is NaN.
    """
    if any(is_sharded(parameter) for parameter in gm.parameters()):
        raise ExportError(
            "the model is sharded (FSDP), and this process holds a part of it. Save a checkpoint, and load it into a "
            "model that is prepared in the same way and not sharded: that one can be exported."
        )
    if any(parameter.dtype == torch.float64 for parameter in gm.parameters()):
        raise ExportError("the model is float64, but the file computes in float32: call gm.float() before the export")
    undefined = _not_a_number(gm)
    if undefined:
        more = f" and {len(undefined) - 1} more" if undefined[1:] else ""
        raise ExportError(
            f"{undefined[0]}{more} of the model: NaN, training "
            "has diverged. Load an earlier checkpoint; fxqat.tools.NaNGuard skips the steps that cause it"
        )
    memo: dict[int, Any] = {}
    written = {id(parameter) for module in users_modules(gm) for parameter in module.parameters()}
    for parameter in gm.parameters():
        if type(parameter) is nn.Parameter and id(parameter) not in written:
            memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    work = own_copy(gm, memo).cpu().eval()
    targets = [str(node.target) for node in work.graph.nodes]
    for path, module in list(work.named_modules()):
        make_weights_permanent_(module)
        is_read = any(target.startswith(f"{path}.parametrizations.") for target in targets)
        if type(module) in PARAMETRIZED.values() and not is_read:
            make_permanent_(module)
    work.requires_grad_(False)
    for _, quant in named_fake_quants(work):
        quant.observer_enabled = False
        quant.fake_quant_enabled = True
    is_half = is_half_precision(gm)
    is_changed = is_half or differs_in_training(work.graph) or any(normalizers)
    select_mode(work.graph, training=False)
    if is_half:
        _to_float32_(work)
    normalize_inputs(work, normalizers)
    if is_changed:
        work.recompile()
    return work


def _not_a_number(gm: nn.Module) -> list[str]:
    statistics = [
        (f"{path}.{name}", buffer)
        for path, module in gm.named_modules()
        if isinstance(module, BatchNorm)
        for name, buffer in module.named_buffers(recurse=False)
    ]
    named = (*gm.named_parameters(), *statistics)
    return [name for name, tensor in named if tensor.is_floating_point() and tensor.isnan().any()]


def is_half_precision(gm: nn.Module) -> bool:
    """Whether parameters of a model are float16 or bfloat16."""
    return any(parameter.dtype in HALF for parameter in gm.parameters())


def deployed_inputs(gm: QuantGraphModule, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs of the deployed copy: those that the model has, see ``LeftOut``; in half precision as float32.

    Raises:
        ExportError: an input that it does not have is another one than in its graph.
    """
    try:
        inputs, _ = gm.provenance.left_out.without(inputs, {})
    except TypeError as cause:
        raise ExportError(f"example_inputs: {cause}") from cause
    if not is_half_precision(gm):
        return inputs
    return map_tensors(inputs, widened)  # type: ignore[no-any-return]


def _to_float32_(work: fx.GraphModule) -> None:
    """Convert tensors in half precision, and conversions to it."""
    for tensor in chain(work.parameters(), work.buffers()):
        tensor.data = widened(tensor.data)
    for node in work.graph.nodes:
        node.args, node.kwargs = (map_aggregate(a, _float32_for_half) for a in (node.args, node.kwargs))
        if node.op == "call_method" and node.target in ("half", "bfloat16"):
            node.target = "float"


def _float32_for_half(argument: Any) -> Any:
    return torch.float32 if isinstance(argument, torch.dtype) and argument in HALF else argument
