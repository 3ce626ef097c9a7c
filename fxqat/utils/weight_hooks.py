"""Hooks of torch that compute a parameter before each call: pruning, and the old weight_norm and spectral_norm."""

from __future__ import annotations

from torch import nn
from torch.nn.utils import prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fxqat.utils.torch_compat import forward_hooks, name_of_pruned

HOOKED = "has forward hooks, which a quantized layer would not run"


def weight_hooks(module: nn.Module) -> list[tuple[object, str]]:
    """What computes parameters of a module, each as ``(the hook, name of the parameter)``."""
    found: list[tuple[object, str]] = []
    for hook in forward_hooks(module)[1].values():
        if isinstance(hook, prune.BasePruningMethod):
            found.append((hook, name_of_pruned(hook)))
        elif isinstance(hook, (WeightNorm, SpectralNorm)):
            found.append((hook, hook.name))
    return found


def has_other_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks beside those that compute its parameters."""
    return len(weight_hooks(module)) < sum(map(len, forward_hooks(module)))


def why_hooks_forbid(module: nn.Module) -> str:
    """Why a layer that has forward hooks stays float, with the remedy if torch's own hooks are the only ones."""
    computed = weight_hooks(module)
    if not computed or has_other_hooks(module):
        return HOOKED
    kind = _kind(computed[0][0])
    calls = {_removal(hook, name) for hook, name in computed}
    return (
        f"{kind} computes its {' and '.join(name for _, name in computed)} before each call, which a quantized layer "
        f"would not do; make it permanent before prepare_by_platform: {', '.join(sorted(calls))}"
    )


def make_weights_permanent_(module: nn.Module) -> None:
    """Replace computed parameters of a module, without its submodules, by parameters with their values."""
    for hook, name in weight_hooks(module):
        if isinstance(hook, WeightNorm):
            remove_weight_norm(module, name)
        elif isinstance(hook, SpectralNorm):
            remove_spectral_norm(module, name)
        else:
            prune.remove(module, name)


def _kind(hook: object) -> str:
    if isinstance(hook, prune.BasePruningMethod):
        return "torch.nn.utils.prune"
    return "torch.nn.utils." + ("weight_norm" if isinstance(hook, WeightNorm) else "spectral_norm")


def _removal(hook: object, name: str) -> str:
    if isinstance(hook, prune.BasePruningMethod):
        return f"torch.nn.utils.prune.remove(module, {name!r})"
    return f"torch.nn.utils.remove_{_kind(hook).rpartition('.')[2]}(module, {name!r})"
