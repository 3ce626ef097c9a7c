"""The prepared model: a GraphModule that keeps its report and provenance when it is copied or pickled."""

from __future__ import annotations

import copy
import logging
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxqat.errors import ConfigError, FxqatError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.quantization.dtype_casts import follow_dtype
from fxqat.quantization.left_out import LeftOut
from fxqat.quantization.quantization_noise import QuantizationNoise
from fxqat.quantization.report import QuantReport
from fxqat.quantization.split_parameters import SplitParameter
from fxqat.utils.closures import rebind_functions
from fxqat.utils.fx_graph import copy_modes, set_attribute
from fxqat.utils.living_copies import LivingCopies
from fxqat.utils.tensors import copies_by_hand
from fxqat.utils.torch_compat import HOOKS, SeesConversion, SeesLoading, keep_local_under_ddp, unwrap
from fxqat.utils.train_eval_graph import TrainEvalGraphModule


@dataclass(frozen=True)
class SplitTensor:
    """A tensor of the float model that the prepared model holds in several parts.

    Args:
        names: names of the parts in the prepared model's state dict, in order.
        dim: the dimension along which they are concatenated.
    """

    names: tuple[str, ...]
    dim: int


@dataclass
class Provenance:
    """Where a prepared model comes from: the float model, the backend and the decisions.

    Args:
        backend: name of the backend.
        report: what was quantized, what was not, and why.
        tensor_names: name in the float model's state dict -> name in the prepared model's.
        split_tensors: name in the float model's state dict -> its parts (``fxqat.quantization.split_parameters``).
        unread: tensors of the float model that the graph does not read (auxiliary heads), by name.
        preserved: dotted paths of the attributes that were copied from the float model.
        config: how each tensor is quantized (``fxqat.config.effective``).
        fitted_by: the tool that fitted weights or biases to quantization errors, such as ``"reconstruct"``. Then the
            model without its fake-quants is no longer the float model. Empty if none did.
        noise: the comparison of the calibrated model with the float model; None before it.
        runtime: the runtime for which files of the model are written, see ``BackendSpec``.
        modes: paths of the modules that ``train(mode)`` leaves in the other mode, by the mode
            (``fxqat.quantization.train_method``).
        example_inputs: the inputs that the model was prepared with, on the CPU, as arguments of the prepared model;
            None if there were none. Exports take them if none are given.
        left_out: the arguments of the float model's forward that the prepared model does not have.
    """

    backend: str
    report: QuantReport
    tensor_names: dict[str, str]
    split_tensors: dict[str, SplitTensor]
    unread: dict[str, Tensor]
    preserved: tuple[str, ...] = field(default=())
    config: dict[str, Any] = field(default_factory=dict)
    fitted_by: str = ""
    noise: QuantizationNoise | None = None
    runtime: str = ""
    modes: Mapping[bool, tuple[str, ...]] = field(default_factory=dict)
    example_inputs: tuple[Any, ...] | None = None
    left_out: LeftOut = LeftOut()


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter and persistent buffer under every name it has in the state dict."""
    names = set(model.state_dict(keep_vars=True))
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(name, tensor) for name, tensor in tensors if name in names]


def make_provenance(
    prepared: nn.Module,
    report: QuantReport,
    config: dict[str, Any],
    float_tensors: Sequence[tuple[str, Tensor]],
    split: Mapping[int, SplitParameter],
    preserved: tuple[str, ...],
    runtime: str = "",
) -> Provenance:
    """Find the tensors of the float model in the prepared model, which shares them.

    Args:
        prepared: the prepared model.
        report: what was decided.
        config: how each tensor is quantized.
        float_tensors: of the float model, as :func:`named_tensors` gives them.
        split: the parameters that were split, by ``id``.
        preserved: dotted paths of the attributes that are copied from the float model.
        runtime: the runtime for which files are written.
    """
    names = {id(tensor): name for name, tensor in reversed(named_tensors(prepared))}
    tensor_names: dict[str, str] = {}
    split_tensors: dict[str, SplitTensor] = {}
    unread: dict[str, Tensor] = {}
    for name, tensor in float_tensors:
        replacement = split.get(id(tensor))
        if id(tensor) in names:
            tensor_names[name] = names[id(tensor)]
        elif replacement is not None and all(id(part) in names for part in replacement.parts):
            split_tensors[name] = SplitTensor(tuple(names[id(part)] for part in replacement.parts), replacement.dim)
        else:
            unread[name] = tensor
    return Provenance(
        backend=report.backend,
        report=replace(report, unread=tuple(unread)),
        tensor_names=tensor_names,
        split_tensors=split_tensors,
        unread=unread,
        preserved=preserved,
        config=config,
        runtime=runtime,
    )


def float_tensors(gm: QuantGraphModule, of: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> dict[str, Tensor]:
    """The parameters and persistent buffers of the float model, by their names in its state dict.

    Args:
        gm: the prepared model.
        of: a tensor to take instead of each, such as its gradient, of the same shape.
    """
    state = gm.state_dict(keep_vars=True)
    tensors = {name: of(state[inside]) for name, inside in gm.provenance.tensor_names.items()}
    for name, found in gm.provenance.split_tensors.items():
        tensors[name] = torch.cat([of(state[part]) for part in found.names], found.dim)
    return tensors | {name: of(tensor) for name, tensor in gm.provenance.unread.items()}


class QuantGraphModule(SeesConversion, SeesLoading, TrainEvalGraphModule):
    """A graph module with fake-quant in it, as ``prepare_by_platform`` returns it.

    It is called, trained, moved, copied, pickled and compiled as the model it was made from, and its ``state_dict()``
    holds tensors only. ``calibrate``, the state functions, ``save_checkpoint`` and ``convert_export`` take it, also in
    the wrappers of DDP, averages and ``torch.compile``.

    The state functions warn about living copies (averaged models) that they leave behind.
    """

    provenance: Provenance
    living_copies: LivingCopies

    @property
    def quant_report(self) -> QuantReport:
        """For each node, what was decided and why."""
        return self.provenance.report

    @property
    def quantization_noise(self) -> QuantizationNoise | None:
        """The calibrated model against the float model.

        It is kept until the model is calibrated again, other scales are loaded, or weights or biases are fitted to
        quantization errors; None if it was not compared since.
        """
        return self.provenance.noise

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a module is replaced by a module or None only."""
        if name in self.__dict__.get("_modules", ()) and not isinstance(value, (nn.Module, type(None))):
            is_class = isinstance(value, type)
            given = f"the class {value.__name__}" if is_class else f"{reprlib.repr(value)} ({type(value).__name__})"
            raise ConfigError(
                f"{name!r} of the prepared model is a module ({type(getattr(self, name)).__name__}): expected a "
                f"torch.nn.Module or None in its place, got {given}. Replace the layer in the float model, by an "
                "object and not a class, and prepare that model"
            )
        super().__setattr__(name, value)

    def train(self, mode: bool = True) -> QuantGraphModule:
        """Set the mode of all modules as the model's own ``train()`` does."""
        super().train(mode)
        others = self.provenance.modes.get(mode, ()) if "provenance" in vars(self) else ()
        for path, module in self.named_modules() if others else ():
            if path in others:
                module.training = not mode
        return self

    def convert(self, move: Callable[[], None]) -> None:
        """Convert the tensors to another device or type, and the graph's casts to their type (``dtype_casts``)."""
        before = self._dtype()
        move()
        after = self._dtype()
        if before is None or after is None or before is after:
            return
        left = list(dict.fromkeys(follow_dtype(self.graph, before, after)))
        self.recompile()
        if left:
            logging.getLogger("fxqat").warning(
                "the prepared model was converted to %s, but its graph casts to %s as before: %s. If the model casts "
                "to another type there, convert the float model instead, before prepare_by_platform",
                *(after, before, "; ".join(left)),
            )

    def take_names(self, state: dict[str, Any], prefix: str) -> None:
        """Take tensors by their names in the float model, too: with ``strict=False`` its state dict loads whole."""
        if "provenance" in vars(self):
            _take_float_names(self, state, prefix)

    def _dtype(self) -> torch.dtype | None:
        """The type of the float model's parameters."""
        held = dict(self.named_parameters(remove_duplicate=False)) if "provenance" in vars(self) else {}
        names = self.provenance.tensor_names.values() if held else ()
        dtypes = (held[name].dtype for name in names if name in held)
        return next((dtype for dtype in dtypes if dtype.is_floating_point), None)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantGraphModule:
        memo.update({key: copied for key, copied in copies_by_hand(self).items() if key not in memo})
        result: Any = super().__deepcopy__(memo)
        rebind_functions(result, memo)
        _carry_over(self, result, memo)
        _keep_ranges_local(result)
        result.living_copies = LivingCopies()
        self.__dict__.setdefault("living_copies", LivingCopies()).found.add(result)
        return result  # type: ignore[no-any-return]


def _take_float_names(gm: QuantGraphModule, state: dict[str, Any], prefix: str) -> None:
    """Give the tensors in a state dict of the float model the names that they have in the prepared model.

    Those that the prepared model does not have are put where it remembers them. What does not fit stays as it is.
    """
    found = gm.provenance
    own = {**dict(gm.named_parameters(remove_duplicate=False)), **dict(gm.named_buffers(remove_duplicate=False))}
    for name in {*found.tensor_names, *found.split_tensors, *found.unread} - own.keys():
        tensor = state.get(prefix + name)
        if not isinstance(tensor, Tensor):
            continue
        if name in found.tensor_names:
            pieces = {found.tensor_names[name]: tensor}
        elif name in found.split_tensors:
            names, dim = found.split_tensors[name].names, found.split_tensors[name].dim
            sizes = [own[part].shape[dim] for part in names]
            if tensor.dim() <= dim or tensor.shape[dim] != sum(sizes):
                continue
            pieces = dict(zip(names, tensor.split(sizes, dim), strict=True))
        elif tensor.shape == found.unread[name].shape:
            found.unread[name].detach().copy_(tensor)
            pieces = {}
        else:
            continue
        del state[prefix + name]
        state.update({prefix + part: piece for part, piece in pieces.items()})


def make_quant_graph_module(gm: nn.Module, graph: fx.Graph, name: str) -> QuantGraphModule:
    """Make a prepared model, without provenance.

    Args:
        gm: holds the modules and tensors, which the result shares.
        graph: calls the modules of ``gm``.
        name: name of the result's class.
    """
    result = QuantGraphModule(gm, graph, name)
    copy_modes(gm, result)
    _keep_ranges_local(result)
    return result


def _keep_ranges_local(gm: nn.Module) -> None:
    """Keep DDP from overwriting observer buffers: each rank observes its own data until the ranges are reduced."""
    keep_local_under_ddp(gm, [name for name, _ in gm.named_buffers() if ".observer." in name])


def _carry_over(holder: nn.Module, target: nn.Module, memo: dict[int, Any]) -> None:
    source: dict[str, Any] = holder.__dict__
    target.provenance = copy.deepcopy(source["provenance"], memo)
    for name in HOOKS:
        setattr(target, name, copy.deepcopy(source[name], memo))
    for path in source["provenance"].preserved:
        set_attribute(target, path, copy.deepcopy(attrgetter(path)(holder), memo))


def prepared_model(model: nn.Module, error: type[FxqatError]) -> QuantGraphModule:
    """The prepared model inside a DDP, AveragedModel or ``torch.compile`` wrapper, or the model itself.

    Args:
        model: the model that the user gave.
        error: the class of the error.

    Raises:
        error: the model was not prepared, or is inside another module.
    """
    gm = unwrap(model)
    if isinstance(gm, QuantGraphModule):
        return gm
    message = f"expected a model that prepare_by_platform returned, got {type(model).__name__}"
    modules = gm.named_modules() if isinstance(gm, nn.Module) else ()
    inside = [path for path, module in modules if isinstance(module, QuantGraphModule)]
    raise error(f"{message}. It holds one: pass its {inside[0]!r}" if inside else message)


def require_float_model(gm: QuantGraphModule, caller: str) -> None:
    """Raise if a prepared model with its fake-quants off is not the float model.

    Args:
        gm: the prepared model.
        caller: names the function in the error.

    Raises:
        ConfigError: its weights or biases were fitted to quantization errors.
    """
    tool = gm.provenance.fitted_by
    if tool:
        when = "only once" if tool == caller else f"before {tool}"
        raise ConfigError(
            f"{caller} compares with the float model, which this model without its fake-quants no longer is: {tool} "
            "fitted weights or biases of it to quantization errors. Prepare and calibrate the model again, and call "
            f"{caller} {when}; to reconstruct and correct biases, use reconstruct(..., correct_bias=True)"
        )


def mark_fitted(gm: QuantGraphModule, tool: str) -> None:
    """Remember that a tool fits weights or biases, see ``Provenance.fitted_by``; the comparison from before is dropped.

    Call it before they change: an interrupt may leave some of them fitted.
    """
    gm.provenance.fitted_by = tool
    gm.provenance.noise = None


def finished_model(model: nn.Module, error: type[FxqatError]) -> QuantGraphModule:
    """As :func:`prepared_model`; the weights must be what the fake-quants round.

    Args:
        model: the model that the user gave.
        error: the class of the error.

    Raises:
        error: as of :func:`prepared_model`, or the rounding of the weights is being learned.
    """
    gm = prepared_model(model, error)
    if any(isinstance(module, FakeQuantizeBase) and module.temporary for module in gm.modules()):
        raise error(
            "the rounding of the model's weights is being learned, and they are not on their grid yet. Leave the block "
            "of train_rounding first; a copy that was made inside stays as it is"
        )
    return gm
