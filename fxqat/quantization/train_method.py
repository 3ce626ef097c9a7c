"""The modes that a model's own ``train()``, or its forward, gives to its modules, such as a frozen BatchNorm."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Mapping
from types import FunctionType

import torch
from torch import fx, nn

from fxqat.quantization.perturbed_inputs import Arguments
from fxqat.tracing.trace import copy_model
from fxqat.utils.contexts import in_mode
from fxqat.utils.train_eval_graph import differs_in_training

Modes = Mapping[bool, tuple[str, ...]]
"""Paths of the modules that ``train(mode)``, or a forward after it, leaves in the other mode, by the mode."""


def modes_by_train(model: nn.Module) -> Modes:
    """What ``train(True)`` and ``train(False)`` of a model do; empty if no module has its own ``train``."""
    if not any(type(m).train is not nn.Module.train or "train" in vars(m) for m in model.modules()):
        return {}
    found: dict[bool, tuple[str, ...]] = {}
    for mode in (True, False):
        copied = copy_model(model)
        copied.train(mode)  # not every train() returns its model
        found[mode] = _left(copied, mode)
    return {mode: paths for mode, paths in found.items() if paths}


def modes_by_forward(model: nn.Module, inputs: Arguments | None) -> Modes:
    """The modes that one forward leaves behind, from all modules in training and from all in eval mode.

    A forward that raises an error, because it wants targets in training, counts up to the error.

    Args:
        model: the model; a copy runs.
        inputs: its arguments; None for none.

    Returns:
        Nothing without inputs, or if no forward of a module sets a mode.
    """
    found: dict[bool, tuple[str, ...]] = {}
    if inputs is None or not any(map(_may_set_modes, {type(module) for module in model.modules()})):
        return found
    for mode in (True, False):
        copied, (args, kwargs) = copy_model(model), copy.deepcopy(inputs)
        with in_mode(copied, mode), torch.no_grad(), torch.random.fork_rng(devices=()):
            with contextlib.suppress(Exception):
                copied(*args, **kwargs)
            found[mode] = _left(copied, mode)
    return {mode: paths for mode, paths in found.items() if paths}


def _left(model: nn.Module, mode: bool) -> tuple[str, ...]:
    """Paths of the modules that are in the other mode."""
    return tuple(path for path, module in model.named_modules() if path and module.training is not mode)


def _may_set_modes(kind: type[nn.Module]) -> bool:
    """Whether the forward of a class, or a method that it names, calls something named ``eval`` or ``train``."""
    named, open_names = set[str](), {"forward"}
    while open_names:
        named |= open_names
        methods = [vars(base).get(name) for base in kind.__mro__ for name in open_names - {"train", "eval"}]
        codes = [inspect.unwrap(method).__code__ for method in methods if isinstance(method, FunctionType)]
        open_names = {name for code in codes for name in code.co_names} - named
    return not named.isdisjoint(("train", "eval"))


def modes_in(prepared: nn.Module, root: nn.Module, modes: Modes) -> Modes:
    """The same by the paths of the prepared model, which shares its modules with ``root``, the traced model."""
    paths = {id(module): path for path, module in prepared.named_modules()}
    return {
        mode: tuple(paths[id(module)] for module in map(root.get_submodule, names) if id(module) in paths)
        for mode, names in modes.items()
    }


def modes_lost(gm: fx.GraphModule, root: nn.Module, modes: Modes) -> Iterator[str]:
    """A line for each module whose forward was traced and may depend on the mode that the model gives to it."""
    held = {id(module) for module in gm.modules()} if differs_in_training(gm.graph) else {}
    for mode, names in modes.items() if held else ():
        for name in names:
            module = root.get_submodule(name)
            if id(module) not in held and type(module).__module__.partition(".")[0] != "torch":
                kept = "training" if not mode else "eval mode"
                yield f"the model itself puts {name} into {kept}: the prepared model does that for layers only"
