"""Where two models begin to differ: the first module whose value the prepared model does not compute."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxqat.fake_quantize.state import all_off
from fxqat.nn.fused import FusedLayer
from fxqat.nn.qat import QATLayer
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.quantization.perturbed_inputs import Arguments
from fxqat.utils.closures import copy_with_closures
from fxqat.utils.contexts import buffers_kept, equal_random_numbers, hooked, in_mode
from fxqat.utils.fx_graph import called_module, module_path
from fxqat.utils.living_copies import own_copy
from fxqat.utils.tensors import flatten_tensors, is_close
from fxqat.utils.train_eval_graph import graph_of_mode

TOLERANCE = 1e-3
"""Relative to the largest value."""


@torch.no_grad()
def first_difference(
    prepared: QuantGraphModule, model: nn.Module, inputs: Arguments, float_inputs: Arguments, training: bool
) -> str | None:
    """The path of the module in which the models begin to differ; None if that is not found.

    The prepared model computes several outputs of a module in as many nodes, and not those that nobody reads: one of
    them is enough.

    Args:
        prepared: the prepared model.
        model: the float model, with the same weights.
        inputs: positional and keyword arguments of the prepared model.
        float_inputs: those of the float model.
        training: the mode.
    """
    expected: list[tuple[str, list[Tensor]]] = []
    model, prepared = copy_with_closures(model), own_copy(prepared)  # forward may overwrite parameters
    paths = {module: path for path, module in model.named_modules()}

    def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        expected.append((paths[module], [tensor.clone() for tensor in flatten_tensors(output)]))

    try:
        with (
            buffers_kept(model),
            in_mode(model, training),
            hooked(paths, keep),
            equal_random_numbers(model),
        ):
            model(*copy.deepcopy(float_inputs[0]), **copy.deepcopy(float_inputs[1]))
        computed = _computed(prepared, inputs, training)
    except Exception:  # noqa: BLE001  the difference may be an error
        return None
    for path, tensors in expected:
        values = computed.get(path)
        choices = [tensors, *([tensor] for tensor in tensors)]
        if path and values and tensors and not any(_are_close(a, b) for a, b in product(choices, values)):
            return path
    return ""


def _computed(prepared: QuantGraphModule, inputs: Arguments, training: bool) -> dict[str, list[list[Tensor]]]:
    """The values that the prepared model computes inside each module, by the path of the module.

    A layer that was fused with the modules after it does not compute the value of its own module: it is left out.
    """
    result: dict[str, list[list[Tensor]]] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            tensors = [tensor.clone() for tensor in flatten_tensors(value)]
            module = called_module(n)
            is_fused = isinstance(module, (QATLayer, FusedLayer)) and (module.bn or module.activation)
            owners = module_path(n).split(".")
            for length in range(1, len(owners) + (not is_fused)):
                result.setdefault(".".join(owners[:length]), []).append(tensors)
            return value

    graph = fx.GraphModule(prepared, graph_of_mode(prepared.graph, training))
    with (
        all_off(prepared),
        buffers_kept(prepared),
        in_mode(prepared, training),
        equal_random_numbers(prepared),
    ):
        args, kwargs = copy.deepcopy(inputs)
        names = [str(node.target) for node in graph.graph.nodes if node.op == "placeholder"]
        Recorder(graph).run(*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs))
    return result


def _are_close(expected: list[Tensor], found: list[Tensor]) -> bool:
    same = len(expected) == len(found)
    return same and all(is_close(a, b, TOLERANCE) for a, b in zip(expected, found, strict=True))
