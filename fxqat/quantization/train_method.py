"""The modes that a model's own ``train()`` gives to its modules, such as a BatchNorm that always is in eval mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx, nn

from fxqat.tracing.trace import copy_model
from fxqat.utils.train_eval_graph import differs_in_training

Modes = Mapping[bool, tuple[str, ...]]
"""Paths of the modules that ``train(mode)`` leaves in the other mode, by the mode."""


def modes_by_train(model: nn.Module) -> Modes:
    """What ``train(True)`` and ``train(False)`` of a model do; empty if no module has its own ``train``."""
    if not any(type(m).train is not nn.Module.train or "train" in vars(m) for m in model.modules()):
        return {}
    found: dict[bool, tuple[str, ...]] = {}
    for mode in (True, False):
        copied = copy_model(model)
        copied.train(mode)
        found[mode] = tuple(path for path, module in copied.named_modules() if path and module.training is not mode)
    return {mode: paths for mode, paths in found.items() if paths}


def modes_in(prepared: nn.Module, root: nn.Module, modes: Modes) -> Modes:
    """The same by the paths of the prepared model, which shares its modules with ``root``, the traced model."""
    paths = {id(module): path for path, module in prepared.named_modules()}
    return {
        mode: tuple(paths[id(module)] for module in map(root.get_submodule, names) if id(module) in paths)
        for mode, names in modes.items()
    }


def modes_lost(gm: fx.GraphModule, root: nn.Module, modes: Modes) -> Iterator[str]:
    """A line for each module whose forward was traced and may depend on the mode that ``train()`` gives to it."""
    held = {id(module) for module in gm.modules()} if differs_in_training(gm.graph) else {}
    for mode, names in modes.items() if held else ():
        for name in names:
            module = root.get_submodule(name)
            if id(module) not in held and type(module).__module__.partition(".")[0] != "torch":
                kept = "training" if not mode else "eval mode"
                yield f"train() of the model leaves {name} in {kept}: the prepared model does that for layers only"
