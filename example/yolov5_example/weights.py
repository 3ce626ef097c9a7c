"""Weights from files: of this example, tensors by name, or a published pickle, of which no code is run."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from errors import UserError
from torch import Tensor

SAFE = {
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(
        ("torch", f"{kind}Storage")
        for kind in ("Half", "Float", "Double", "Long", "Int", "Short", "Char", "Byte", "Bool", "BFloat16")
    ),
}
"""What a pickle may name besides classes that stand for themselves: makers of tensors, all of them torch's own."""


class Inert:
    """Stands for an object of any class of a pickle: its attributes, and nothing that runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.attributes: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> "Inert":
        return Inert()

    def __setstate__(self, state: Any) -> None:
        self.attributes = state if isinstance(state, dict) else {}

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Of a list."""

    def extend(self, values: Any) -> None:
        """Of a list."""


class InertUnpickler(pickle.Unpickler):
    """Reads a pickle; classes and functions that are not in `SAFE` are replaced."""

    def find_class(self, module: str, name: str) -> Any:
        """What a name in the pickle means."""
        return super().find_class(module, name) if (module, name) in SAFE else type(name, (Inert,), {})


def read_published(path: Path) -> Inert | dict[str, Any]:
    """The content of a published checkpoint, with inert objects in it.

    Raises:
        UserError: it cannot be read.
    """
    module = SimpleNamespace(Unpickler=InertUnpickler, load=None, __name__="inert")
    try:
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=module)
    except OSError as error:
        raise UserError(f"--weights {path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a foreign pickle may end in any way
        raise UserError(f"--weights {path} is not a file of weights: {str(error).splitlines()[0]}") from error


def tensors_of(module: Inert, prefix: str = "") -> dict[str, Tensor]:
    """The state dict of a model that was pickled."""
    found: dict[str, Tensor] = {}
    for part in ("_parameters", "_buffers"):
        for name, value in module.attributes.get(part, {}).items():
            if isinstance(value, Tensor):
                found[prefix + name] = value.detach()
    for name, child in module.attributes.get("_modules", {}).items():
        if isinstance(child, Inert):
            found |= tensors_of(child, f"{prefix}{name}.")
    return found
