"""Sameness: the prepared model, its fake-quants off, computes what the float model computes.

Both run on the same inputs, with the same random numbers, four times at most:

1. in eval mode, on the given inputs;
2. in eval mode, on a batch of another size, or with one more item in the lists among the inputs;
3. in eval mode, on inputs with other values and with other weights;
4. in training, with one backward pass: outputs, the gradients of all parameters, and the buffers afterwards.

Runs 2 to 4 take the first samples of a large batch, to save time and memory, unless they differ on these.

What the float model cannot run itself is left out, and the report says so. On the meta device only shapes are compared.

Models of many layers with random weights can magnify the rounding of a float32 sum without bound. So a difference
counts only if it is larger than what a change of the last digits of inputs and weights does to the float model, or if
it remains in float64. A difference below the tolerance, as of a branch that contributes little, counts if both hold.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fxqat.errors import ConfigError, TraceError
from fxqat.fake_quantize.state import all_off
from fxqat.quantization.first_difference import first_difference
from fxqat.quantization.graph_module import QuantGraphModule, float_tensors
from fxqat.quantization.perturbed_inputs import Arguments, fewer, holds_lists, larger, of_other_values, other_weights
from fxqat.quantization.report import ANOTHER_BATCH, ANY_BATCH
from fxqat.quantization.run_values import FINE_TOLERANCE, Values, different_in, distances, gradient_of
from fxqat.tracing.trace import OVERWRITTEN
from fxqat.utils.batches import in_their_places
from fxqat.utils.contexts import (
    attributes_kept,
    buffers_kept,
    equal_random_numbers,
    in_mode,
    parameters_kept,
    users_modules,
    without_fast_path,
)
from fxqat.utils.gradients import gradients_of
from fxqat.utils.living_copies import own_copy
from fxqat.utils.tensors import call_with_tensors, flatten_tensors, map_tensors, versions_in
from fxqat.utils.torch_compat import copy_tensor_hooks

MAGNIFIED = 50.0
"""How many times larger than the effect of the last digits a difference may be and still be rounding."""

COUNTER = "num_batches_tracked"
"""A buffer that does not count where a BatchNorm with its own forward became a plain one."""

REMEDY = (
    "Its forward may take another branch than while tracing, keep state outside of buffers, read weights outside of "
    "the graph, or overwrite part of a tensor through a view. Keep the module that does it whole with "
    "prepare_custom_config_dict={'leaf_module': [its path]}, or fix the argument that decides with 'concrete_args'. "
    "check='quick' compares in eval mode on the given inputs only."
)


class SamenessError(TraceError):
    """The prepared model computes something else than the model.

    Attributes:
        where: in which run: ``"in training"``.
        path: of the module in which they begin to differ, empty for the model itself; None if that is not known.
    """

    def __init__(self, message: str, where: str, path: str | None) -> None:
        super().__init__(message)
        self.where, self.path = where, path


@dataclass(frozen=True)
class Reference:
    """The float model, to compare with.

    Args:
        model: a copy of the float model; its parameters and buffers are replaced by those of the prepared model.
        arguments: its arguments, from those of the prepared model.
        trains: whether training is compared: not if the model is for calibration only, freezes its BatchNorms or is
            known to compute something else in training.
        modes: modules of the prepared model that forward of the float model puts into the other mode, by the mode.
    """

    model: nn.Module
    arguments: Callable[[tuple[Any, ...], dict[str, Any]], Arguments]
    trains: bool = True
    modes: Mapping[bool, tuple[str, ...]] = field(default_factory=dict)


def check_now_or_at_first_call(
    prepared: QuantGraphModule,
    model: nn.Module,
    inputs: tuple[Any, ...] | None,
    concrete_args: Mapping[str, Any],
    check: str,
    trains: bool,
    modes: Mapping[bool, tuple[str, ...]],
) -> None:
    """Compare a prepared model with its float model now, or at its first call, and note the result in its report.

    Args:
        prepared: the prepared model.
        model: the float model, see :class:`Reference`.
        inputs: example inputs of the float model, None for an argument that is left out; without inputs the models are
            compared at the first call of the prepared one.
        concrete_args: arguments that the user fixed to a value: the prepared model does not have them.
        check: as for :func:`check_sameness`.
        trains: see :class:`Reference`.
        modes: the same.

    Raises:
        SamenessError: the models differ.
    """
    names = [str(node.target) for node in prepared.graph.nodes if node.op == "placeholder"]
    by_name = inputs is None and not any(name.startswith("*") for name in names)

    def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        if by_name:
            return (), {**dict(zip(names, args, strict=False)), **kwargs, **concrete_args}
        rest = iter(args)
        given = args if inputs is None else tuple(None if value is None else next(rest) for value in inputs)
        in_order, by_its_name = in_their_places(model, given, concrete_args)
        return in_order, {**kwargs, **by_its_name}

    reference = Reference(model, arguments, trains, modes)
    if inputs is None:
        first = FirstCallCheck(reference, check)
        first.handle = prepared.register_forward_pre_hook(first, with_kwargs=True)
        return
    given = tuple(value for value in inputs if value is not None)
    lines = check_sameness(prepared, reference, (given, {}), check)
    prepared.provenance.report = replace(prepared.quant_report, sameness=tuple(lines))


def check_sameness(
    prepared: QuantGraphModule, reference: Reference, inputs: Arguments, check: str = "full", strict: bool = True
) -> list[str]:
    """Compare a prepared model with its float model; neither is changed.

    Args:
        prepared: the prepared model, in any state.
        reference: the float model.
        inputs: arguments of the prepared model.
        check: ``"full"``: all four runs; ``"quick"``: the first.
        strict: raise also where only training differs, instead of a warning.

    Returns:
        What was compared and what differs, a line each.

    Raises:
        ConfigError: the float model itself does not run on the inputs (only if ``strict``).
        SamenessError: the models compute something else in run 1 or 3, or in 4.
    """
    leaves = [parameter for module in users_modules(prepared) for parameter in module.parameters()]
    with attributes_kept(prepared), attributes_kept(reference.model), parameters_kept(leaves):
        return _check_all(_Runs(prepared, reference), inputs, check, strict)


def _check_all(runs: _Runs, inputs: Arguments, check: str, strict: bool) -> list[str]:
    """Make the runs of :func:`check_sameness`."""
    found = [runs.require("on the given inputs", inputs)]
    if strict and runs.failure is not None:
        what = f"the model itself does not run on example_inputs, in eval mode: {type(runs.failure).__name__}"
        hint = "If it does run without fxqat, as flex_attention does, check='off' leaves out the comparison."
        raise ConfigError(f"{what}: {runs.failure}\n{hint}") from runs.failure
    if check == "full":
        few = fewer(inputs)
        found.append(runs.report("with longer lists" if holds_lists(inputs) else ANOTHER_BATCH, larger(few)))
        choices = [inputs] if few is inputs or found[-1] != ANY_BATCH else [few, inputs]
        with other_weights(runs.prepared):
            found.append(runs.require("on inputs with other values", *map(of_other_values, choices)))
        if runs.reference.trains:
            judge = runs.require if strict else runs.report
            found.append(judge("in training", *choices, training=True))
        else:
            found.append("not compared with the model in training")
    return [*found, *runs.overwritten_inputs()]


class FirstCallCheck:
    """A forward pre-hook that compares a model that was prepared without example inputs, at its first call.

    It removes itself then. Copies of the model, and the model that unpickling gives, do not compare.

    Args:
        reference: the float model; None: there is nothing to compare.
        check: as for :func:`check_sameness`.
    """

    fxqat_internal = True

    def __init__(self, reference: Reference | None = None, check: str = "full") -> None:
        self.reference, self.check = reference, check
        self.handle: RemovableHandle | None = None

    def __call__(self, prepared: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare if the inputs are ordinary tensors, and never again."""
        if self.reference is None or torch.compiler.is_compiling():
            return
        tensors = flatten_tensors((args, kwargs))
        ordinary = all(type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta for tensor in tensors)
        if not tensors or not ordinary:
            return
        reference, self.reference = self.reference, None
        if self.handle is not None:
            self.handle.remove()
        assert isinstance(prepared, QuantGraphModule)
        with torch.inference_mode(False):
            inputs = map_tensors(args, _ordinary), map_tensors(kwargs, _ordinary)
            lines = check_sameness(prepared, reference, inputs, self.check, strict=False)
        report = prepared.provenance.report
        prepared.provenance.report = replace(report, sameness=tuple(lines))

    def __deepcopy__(self, memo: dict[int, Any]) -> FirstCallCheck:
        return FirstCallCheck()

    def __reduce__(self) -> tuple[Any, ...]:
        return FirstCallCheck, ()


class _Gradients(nn.Module):
    """Runs a model and computes the gradients of leaves in the same call: backward may call modules again."""

    def __init__(self, model: nn.Module, leaves: Iterable[Tensor]) -> None:
        super().__init__()
        self.model, self.leaves = model, list(leaves)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[int, Tensor]]:
        """The outputs, and the gradients as of :func:`_gradients`."""
        return (outputs := self.model(*args, **kwargs)), _gradients(outputs, self.leaves)


class _Runs:
    """Runs both models on the same inputs and judges their values."""

    def __init__(self, prepared: QuantGraphModule, reference: Reference) -> None:
        self.prepared, self.reference = prepared, reference
        self.name = type(reference.model).__name__
        self.comparable = True
        self.failure: Exception | None = None
        self.differs_in: str | None = None
        self.overwrites = {"model": False, "prepared": False}
        self.parameters = {name for name, _ in reference.model.named_parameters(remove_duplicate=False)}

    def require(self, where: str, *inputs: Arguments, training: bool = False) -> str:
        """Compare, and raise :class:`SamenessError` for a difference; see :meth:`_first_without_difference`."""
        problem = self._first_without_difference(inputs, training)
        if problem:
            message = f"the traced {self.name} computes something else than the model {where}: {problem}"
            raise SamenessError(message, where, self.differs_in)
        return f"not compared with the model {where}" if problem is None else f"equal to the model {where}"

    def report(self, where: str, *inputs: Arguments, training: bool = False) -> str:
        """Compare, and log a difference as a warning; see :meth:`_first_without_difference`."""
        problem = self._first_without_difference(inputs, training)
        if not problem:
            return f"not compared with the model {where}" if problem is None else f"equal to the model {where}"
        line = f"computes something else than the model {where}: {problem}"
        logging.getLogger("fxqat").warning("the prepared %s %s", self.name, line)
        return line

    def _first_without_difference(self, choices: Iterable[Arguments], training: bool) -> str | None:
        """What differs on all of several inputs: of the last ones; empty if nothing does on some of them."""
        problem: str | None = None
        for inputs in choices:
            problem = self._difference(inputs, training)
            if problem == "":
                break
        return problem

    def overwritten_inputs(self) -> list[str]:
        """A line, which is logged, if only the model overwrites its inputs and tracing did not see it."""
        told = any(line.startswith(OVERWRITTEN) for line in self.prepared.quant_report.state_changes)
        if told or not self.overwrites["model"] or self.overwrites["prepared"]:
            return []
        line = f"{OVERWRITTEN}s: the prepared model leaves the caller's tensors as they are"
        logging.getLogger("fxqat").warning("%s", line)
        return [line]

    def _difference(self, inputs: Arguments, training: bool) -> str | None:
        """What differs; empty if nothing does, None if the models cannot be compared on these inputs."""
        if not self.comparable:
            return None
        try:
            expected = self._run_float(inputs, training)
        except Exception as error:  # noqa: BLE001  a model may raise anything
            self.failure = error
            bigger = larger(inputs)  # a batch of 1 may be too small for BatchNorm
            too_small = training and "more than 1 value per channel" in str(error) and _sizes(bigger) != _sizes(inputs)
            return self._difference(bigger, training) if too_small else None
        try:
            found = self._run_prepared(self.prepared, inputs, training)
        except Exception as error:  # noqa: BLE001
            line = next(iter(str(error).splitlines()), "")
            return f"it raises {type(error).__name__}: {line}. {REMEDY}"
        different = different_in(expected, found)
        if not different and not training:
            different = self._small_differences(expected, found, inputs)
        if not different:
            return ""
        keeps_state = bool(different_in(expected, self._run_float(inputs, training)))
        if not keeps_state and self._is_rounding(expected, found, different, inputs, training):
            return "" if self.comparable else None
        begins = self._where_they_differ(inputs, training) if _outputs_in(different) else ""
        if keeps_state:
            return f"the model itself gives other values when it is called again: it keeps state{begins}. {REMEDY}"
        return f"{_words(different)}{begins}. {REMEDY}"

    def _small_differences(self, expected: Values, found: Values, inputs: Arguments) -> list[str]:
        """The outputs that differ by less than the tolerance, by more than last digits do, and in float64 too."""
        small = different_in(expected, found, FINE_TOLERANCE)
        if not small:
            return []
        try:
            moved = self._run_float(map_tensors(inputs, _last_digits), False, _last_digits)
            effect, difference = distances(expected, moved), distances(expected, found)
            small = [name for name in small if difference[name] > effect[name]]
            exact, wide = self._run_both_in_float64(inputs, False) if small else (expected, found)
            return sorted({*small} & {*different_in(exact, wide, FINE_TOLERANCE)})
        except Exception:  # noqa: BLE001  not every model runs in float64
            return []

    def _run_both_in_float64(self, inputs: Arguments, training: bool) -> tuple[Values, Values]:
        """The values of the float model and of the prepared one, in float64."""
        wide_inputs = map_tensors(inputs, _wide)
        exact = self._run_float(wide_inputs, training, _wide)
        return exact, self._run_prepared(own_copy(self.prepared).double(), wide_inputs, training)

    def _where_they_differ(self, inputs: Arguments, training: bool) -> str:
        """The module in which the models begin to differ, in words; empty if that is not found."""
        model = self.reference.model
        self.differs_in = first_difference(self.prepared, model, inputs, self._arguments(inputs), training)
        if self.differs_in is None:
            return ""
        module = f"{self.differs_in!r} ({type(model.get_submodule(self.differs_in)).__name__})"
        return f"; they begin to differ in {module if self.differs_in else 'the forward of the model itself'}"

    def _is_rounding(
        self, expected: Values, found: Values, different: list[str], inputs: Arguments, training: bool
    ) -> bool:
        """Whether the last digits of inputs and weights change the float model's own values as much."""
        try:
            moved = self._run_float(map_tensors(inputs, _last_digits), training, _last_digits)
            effect, difference = distances(expected, moved), distances(expected, found)
            if any(difference[name] > MAGNIFIED * effect[name] for name in different):
                return False
            exact, wide = self._run_both_in_float64(inputs, training)
            if not different_in(exact, wide):
                return True
            wide_inputs = map_tensors(inputs, _wide)
            moved = self._run_float(map_tensors(wide_inputs, _last_digits), training, lambda t: _last_digits(_wide(t)))
            if not different_in(exact, moved):
                return False
        except Exception:  # noqa: BLE001  not every model runs in float64
            return False
        logging.getLogger("fxqat").warning(
            "%s: the prepared model could not be compared with the model: even in float64 the model's own values "
            "change with the last digit of its inputs and weights (random weights?)",
            self.name,
        )
        self.comparable = False
        return True

    def _arguments(self, inputs: Arguments) -> Arguments:
        return self.reference.arguments(*copy.deepcopy(inputs))

    def _run_float(
        self, inputs: Arguments, training: bool, change: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> Values:
        model, state = self.reference.model, _leaves(float_tensors(self.prepared), change)
        args, kwargs = self._arguments(inputs)
        with buffers_kept(model), in_mode(model, training), _comparable(self.prepared, training):
            run = _Gradients(model, state.values() if training else ())
            after = {f"model.{name}": tensor for name, tensor in state.items()}
            with self._watched("model", (args, kwargs)):
                outputs, gradients = call_with_tensors(run, after, args, kwargs)
        if not training:
            return Values(_outputs(outputs), {}, {})
        after = {name.removeprefix("model."): tensor for name, tensor in after.items()}
        by_name = {name: gradient_of(leaf, gradients) for name, leaf in state.items()}
        return self._after_training(outputs, after, by_name)

    def _run_prepared(self, prepared: QuantGraphModule, inputs: Arguments, training: bool) -> Values:
        args, kwargs = copy.deepcopy(inputs)
        with all_off(prepared), buffers_kept(prepared), in_mode(prepared, training), _comparable(prepared, training):
            for path in self.reference.modes.get(training, ()):
                prepared.get_submodule(path).training = not training
            with self._watched("prepared", (args, kwargs)):
                outputs = prepared(*args, **kwargs)
            if not training:
                return Values(_outputs(outputs), {}, {})
            gradients = _gradients(outputs, prepared.parameters())
            by_name = float_tensors(prepared, lambda leaf: gradient_of(leaf, gradients))
            return self._after_training(outputs, float_tensors(prepared), by_name)

    @contextmanager
    def _watched(self, which: str, inputs: Any) -> Iterator[None]:
        """Note whether a model overwrites its inputs in the block."""
        versions = versions_in(inputs)
        yield
        if versions != versions_in(inputs):
            self.overwrites[which] = True

    def _after_training(self, outputs: Any, state: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Values:
        """The values of a run in training, detached: outputs, gradients and buffers."""
        trained = [name for name in sorted(self.parameters & state.keys()) if state[name].requires_grad]
        buffers = {name: tensor for name, tensor in state.items() if name not in self.parameters}
        buffers = {name: tensor for name, tensor in buffers.items() if not name.endswith(COUNTER)}
        return Values(
            _outputs(outputs),
            {f"the gradient of {name}": gradients[name].detach() for name in trained},
            {f"buffer {name}": tensor.detach().clone() for name, tensor in buffers.items()},
        )


def _outputs(outputs: Any) -> dict[str, Tensor]:
    """The tensors that a model returned, detached."""
    return {f"output {number}": tensor.detach() for number, tensor in enumerate(flatten_tensors(outputs))}


def _gradients(outputs: Any, leaves: Iterable[Tensor]) -> dict[int, Tensor]:
    """The gradient of each leaf that has one, by its ``id``; in the loss each output has its own weight."""
    losses = [_weighted_sum(tensor) for tensor in flatten_tensors(outputs) if tensor.requires_grad]
    trained = list({id(leaf): leaf for leaf in leaves if leaf.requires_grad}.values())
    if not losses or not trained:
        return {}
    pairs = zip(trained, gradients_of(torch.stack(losses).sum(), trained), strict=True)
    return {id(leaf): gradient for leaf, gradient in pairs if gradient is not None}


def _weighted_sum(tensor: Tensor) -> Tensor:
    """A loss in which each value has a weight of its own, in float64."""
    weights = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device).add_(1).cos_()
    values = tensor.abs() if tensor.is_complex() else tensor
    return (torch.where(values.isfinite(), values, 0.0).double().reshape(-1) * weights).sum()


def _leaves(tensors: Mapping[str, Tensor], change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Copies of tensors, changed; tensors that are one stay one."""
    copies: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in copies:
            copies[id(tensor)] = change(tensor.detach()).clone().requires_grad_(tensor.requires_grad)
            copy_tensor_hooks(tensor, copies[id(tensor)])
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}


def _last_digits(tensor: Tensor) -> Tensor:
    """A tensor with other last digits."""
    if not tensor.is_floating_point():
        return tensor
    step = 4 * torch.finfo(tensor.dtype).eps
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device, tensor.dtype)
    return tensor * (1 + step * noise)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _ordinary(tensor: Tensor) -> Tensor:
    """A copy that autograd can work with, even of a tensor of inference mode."""
    return tensor.detach().clone()


def _sizes(inputs: Arguments) -> list[torch.Size]:
    return [tensor.shape for tensor in flatten_tensors(inputs)]


@contextmanager
def _comparable(model: nn.Module, training: bool) -> Iterator[None]:
    """Gradients in training only, no mixed precision, equal random numbers, and a random state that is restored."""
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(training))
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(without_fast_path())
        stack.enter_context(equal_random_numbers(model))
        yield


def _outputs_in(different: list[str]) -> bool:
    return any("output" in name for name in different)


def _words(different: list[str], limit: int = 3) -> str:
    rest = f" and {len(different) - limit} more" if len(different) > limit else ""
    return ", ".join(different[:limit]) + rest + (" differs" if len(different) == 1 else " differ")
