"""Capture: what the fake-quant model computes, as the integers that the exported file must compute.

Beside the integers and the outputs, one run shows what is not in the file:

1. hooks of the user: the model runs without those that the file does not have; it is an error if they change an output;
2. buffers that the model updates, and parameters that a module overwrites, which was not traced: the file has no
   state, each run starts from them as they are now;
3. random numbers that the model draws in eval mode: the file draws others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxqat.errors import ExportError
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.nn.deployed import Normalize
from fxqat.nn.qat import QATLayer
from fxqat.nn.recurrent import QATRecurrentLayer
from fxqat.numerics import dynamic_quantize, quantize
from fxqat.quantization.deployed_copy import deployed_copy
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.quantization.user_hooks import drop_hooks, lost_hooks
from fxqat.utils.contexts import hooked, users_modules
from fxqat.utils.tensors import map_tensors, named_leaves

SELECTING = {"topk": "TopK", "sort": "TopK", "argsort": "TopK", "msort": "TopK"}
SELECTING |= {"kthvalue": "TopK", "median": "TopK"}
SELECTING |= {"max": "ArgMax", "argmax": "ArgMax", "min": "ArgMin", "argmin": "ArgMin"}
SELECTING |= {"cummax": "ArgMax", "cummin": "ArgMin"}
"""The operators of ONNX that torch's selecting functions become."""


@dataclass(frozen=True)
class Captured:
    """One run of the deployed model.

    Args:
        integers: int32 arrays by tensor name.
        outputs: the model's outputs in order, by their default names (:func:`~fxqat.utils.tensors.named_leaves`).
        selections: the indices that sorts and maxima gave, in order, by the operator that they become in ONNX.
        hooks: the user's hooks that the file does not have.
        updated: names of the buffers and parameters that the run changed.
        carried: those of them whose new values change the outputs of the next run.
        draws: whether the model draws random numbers.
        reals: float32 arrays by tensor name: the values before they were rounded. Empty unless asked for.
        in_float: the outputs with every fake-quant off, with the same random numbers. Empty unless asked for.
    """

    integers: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    selections: Mapping[str, list[np.ndarray]]
    hooks: tuple[str, ...]
    updated: tuple[str, ...]
    carried: tuple[str, ...]
    draws: bool = False
    reals: Mapping[str, np.ndarray] = field(default_factory=dict)
    in_float: Mapping[str, np.ndarray] = field(default_factory=dict)


@torch.no_grad()
def capture(
    gm: QuantGraphModule,
    inputs: tuple[Any, ...],
    normalizers: Sequence[Normalize | None] = (),
    with_reals: bool = False,
    with_float: bool = False,
    spoiled: Collection[str] = (),
) -> Captured:
    """Run a deployed copy and record every quantized value.

    Args:
        gm: the prepared model; not changed.
        inputs: inputs of the file, raw where there is a normalizer.
        normalizers: see :func:`~fxqat.quantization.deployed_copy.deployed_copy`.
        with_reals: keep the values before they are rounded, too.
        with_float: run the model with its fake-quants off, too.
        spoiled: names of activations that get other values, which are wrong; see :func:`has_effect`.

    Raises:
        ExportError: the model does not run on the inputs, a hook changes its outputs, or an output is complex.
    """
    work = deployed_copy(gm, normalizers)
    hooks = lost_hooks(work)
    drop_hooks(work)
    integers: dict[str, np.ndarray] = {}
    reals: dict[str, np.ndarray] = {}

    def record(quant: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Tensor) -> None:
        scale, zero_point = quant.qparams()  # type: ignore[operator]
        scheme: Any = quant.scheme
        q = quantize(args[0], scale, zero_point, scheme.quant_min, scheme.quant_max)
        integers[kwargs["tensor_name"]] = q.to(torch.int32).numpy()
        if with_reals:
            reals[kwargs["tensor_name"]] = args[0].float().numpy().copy()

    def record_dynamic(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Tensor) -> None:
        name = kwargs.get("dynamic_input")
        if name is not None:
            integers[name] = dynamic_quantize(args[0])[0].to(torch.int32).numpy()
            if with_reals:
                reals[name] = args[0].float().numpy().copy()

    def spoil(quant: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rounded: Tensor) -> Tensor | None:
        if kwargs["tensor_name"] not in spoiled:
            return None
        return rounded + 1e6 * torch.arange(1, rounded.numel() + 1, dtype=rounded.dtype).reshape(rounded.shape)

    layers = [module for module in work.modules() if isinstance(module, (QATLayer, QATRecurrentLayer))]
    activations = [quant for _, quant in named_fake_quants(work) if quant.kind == "act_fake_quant"]
    before = _state(work)
    with (
        hooked(activations, record, with_kwargs=True),
        hooked(activations if spoiled else (), spoil, with_kwargs=True),
        hooked(layers, record_dynamic, with_kwargs=True),
        _Selections() as selections,
        _seeded() as drawn,
    ):
        outputs = _run(work, inputs)
    complex_ones = [f"{name!r} is {output.dtype}" for name, output in outputs.items() if output.is_complex()]
    if complex_ones:
        raise ExportError(
            f"output {', '.join(complex_ones)}: ONNX has no complex outputs. Return torch.view_as_real(...) of it, or "
            "its real and imaginary parts."
        )
    if hooks:
        with _seeded():
            _check_hooks(hooks, outputs, _run(deployed_copy(gm, normalizers), inputs))
    after = _state(work)
    updated = [name for name in after if name not in before or not _same({name: before[name]}, {name: after[name]})]

    def carries(name: str) -> bool:
        _set_state(work, before | {name: after[name]})
        with _seeded():
            return not _same(_run(work, inputs), outputs)

    carried = tuple(name for name in updated if carries(name))
    in_float = {}
    if with_float:
        _set_state(work, {name: tensor for name, tensor in before.items() if name in updated})
        for _, quant in named_fake_quants(work):
            quant.fake_quant_enabled = False
        with _seeded():
            in_float = _arrays(_run(work, inputs))
    selected = selections.found
    found = (tuple(hooks), tuple(updated), carried, any(drawn))
    return Captured(integers, _arrays(outputs), selected, *found, reals, in_float)


def has_effect(
    names: Collection[str],
    gm: QuantGraphModule,
    inputs: tuple[Any, ...],
    normalizers: Sequence[Normalize | None],
    captured: Captured,
) -> bool:
    """Whether the values of quantized activations have an effect on an output or on another quantized tensor.

    ``h = torch.zeros(2, 3); h[:, 0:3] = y`` overwrites all values of ``h``. The exporter leaves such a tensor out.

    Args:
        names: of the activations.
        gm: as for :func:`capture`.
        inputs: as for :func:`capture`.
        normalizers: as for :func:`capture`.
        captured: what the model computes from these inputs.
    """
    found = capture(gm, inputs, normalizers, spoiled=names)
    others = captured.integers.keys() - set(names)
    same = all(np.array_equal(found.integers[name], captured.integers[name]) for name in others)
    pairs = zip(found.outputs.values(), captured.outputs.values(), strict=True)
    return not (same and all(np.array_equal(a, b, equal_nan=True) for a, b in pairs))


def _arrays(outputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: output.detach().numpy() for name, output in outputs.items()}


@contextmanager
def _seeded() -> Iterator[list[bool]]:
    """Equal random numbers in each such block; filled at its end: whether any were drawn."""
    drawn: list[bool] = []
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        yield drawn
        drawn.append(not torch.equal(before, torch.get_rng_state()))


def _of_smallest(result: Any, input: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Tensor:
    """The indices of the ``k`` smallest values, of which ``kthvalue`` selects the last one as it did."""
    own: Tensor = result.indices
    if not input.dim():
        return own
    found = torch.topk(input, k, dim, largest=False).indices
    own = own if keepdim else own.unsqueeze(dim)
    return torch.cat([found.narrow(dim, 0, k - 1), own], dim)


def _of_half(result: Any, input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The same of ``median``."""
    if dim is None:
        return torch.topk(input.flatten(), (input.numel() + 1) // 2, largest=False).indices
    return _of_smallest(result, input, (input.shape[dim] + 1) // 2 if input.dim() else 1, dim, keepdim)


_OF_OPERATOR: dict[str, Callable[..., Tensor]] = {
    "msort": lambda _, *args, **kwargs: torch.sort(*args, **kwargs, dim=0).indices,
    "kthvalue": _of_smallest,
    "median": _of_half,
}
"""Functions whose operator gives other indices than they do, or any at all; from their result and arguments."""


class _Selections(TorchFunctionMode):
    """Records the indices that sorts and maxima give."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[np.ndarray]] = defaultdict(list)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one function and record its indices."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        kind = SELECTING.get(name)
        indices = getattr(result, "indices", None) if isinstance(result, tuple) else result
        if name in _OF_OPERATOR:
            indices = _OF_OPERATOR[name](result, *args, **(kwargs or {}))
        if kind is not None and isinstance(indices, Tensor) and indices.dtype == torch.int64:
            self.found[kind].append(indices.detach().numpy().copy())
        return result


def _run(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    try:
        outputs = model(*map_tensors(inputs, lambda tensor: tensor.detach().cpu()))
        return {name: tensor.clone() for name, tensor in named_leaves(outputs).items()}
    except Exception as cause:  # the user's model may raise anything
        raise ExportError(f"the model does not run on example_inputs: {cause}") from cause


def _check_hooks(hooks: Sequence[str], without: dict[str, Tensor], with_hooks: dict[str, Tensor]) -> None:
    if not _same(without, with_hooks):
        raise ExportError(
            f"hooks change the outputs of the prepared model, and the file would not have them: {', '.join(hooks)}. "
            "Remove them (handle.remove()), or compute this in forward() before the model is prepared."
        )


def _same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t.nan_to_num(), b[name].nan_to_num()) for name, t in a.items())


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what a run may change: the buffers, and the parameters of modules with the user's code."""
    found = dict(model.named_buffers())
    own = {id(module) for module in users_modules(model)}
    for path, module in model.named_modules():
        found |= dict(module.named_parameters(path)) if id(module) in own else {}
    return {name: tensor.clone() for name, tensor in found.items()}


def _set_state(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        is_parameter = isinstance(getattr(module, name, None), nn.Parameter)
        setattr(module, name, nn.Parameter(value.clone()) if is_parameter else value.clone())
