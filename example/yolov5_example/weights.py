"""Weights from files: of this example, tensors by name, or a published pickle, of which no code is run."""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from errors import UserError
from model import ANCHORS, GENERATIONS, SIZES, Yolo
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

    attributes: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        self = super().__new__(cls)
        self.attributes = {}
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.attributes = state if isinstance(state, dict) else {}


class InertUnpickler(pickle.Unpickler):
    """Reads a pickle; classes and functions that are not in `SAFE` are replaced."""

    def find_class(self, module: str, name: str) -> Any:
        """What a name in the pickle means."""
        return super().find_class(module, name) if (module, name) in SAFE else type(name, (Inert,), {})


def read_weights(path: Path) -> dict[str, Any]:
    """The content of a file: `state_dict`, in float32, and what is known beside it (`names`, `extra`).

    Raises:
        UserError: it cannot be read, or holds no detector.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"--weights {path} cannot be read: {error.strerror or error}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile):
        content = read_published(path)
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        state, names = content["state_dict"], content.get("names")
        found = {"names": names, "extra": content.get("extra", {})}
    else:
        model = content.get("ema") or content.get("model") if isinstance(content, Mapping) else content
        if not isinstance(model, Inert):
            raise UserError(
                f"--weights {path}: expected a state_dict or a published model, found {type(model).__name__}"
            )
        state, found = tensors_of(model), {"names": model.attributes.get("names"), "extra": {}}
    state = {name.removeprefix("module."): value.detach() for name, value in state.items() if "anchor_grid" not in name}
    return {"state_dict": {k: v.float() if v.is_floating_point() else v for k, v in state.items()}, **found}


def read_published(path: Path) -> Any:
    """The content of a published checkpoint, with inert objects in it."""
    module = SimpleNamespace(Unpickler=InertUnpickler, load=None, __name__="inert")
    try:
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=module)
    except Exception as error:  # a foreign pickle may end in any way
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--weights {path} is neither a file of tensors nor a published model: {reason}") from error


def tensors_of(module: Inert, prefix: str = "") -> dict[str, Tensor]:
    """The state dict of a model that was pickled."""
    found: dict[str, Tensor] = {}
    for part in ("_parameters", "_buffers"):
        tensors = module.attributes.get(part) or {}
        found |= {prefix + name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    for name, child in (module.attributes.get("_modules") or {}).items():
        found |= tensors_of(child, f"{prefix}{name}.") if isinstance(child, Inert) else {}
    return found


def build_for(state: Mapping[str, Tensor], where: str) -> Yolo:
    """The model that has these weights, found by their shapes, with them.

    Raises:
        UserError: no size of any generation has such.
    """
    head = [name for name in state if name.endswith(".m.0.bias") and name.startswith("model.24.")]
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    outputs = state[head[0]].numel() // len(ANCHORS[0]) if head else 0
    for generation in GENERATIONS:
        for size in SIZES if outputs > 5 else ():
            with torch.device("meta"):
                candidate = Yolo(size, outputs - 5, generation)
            if {name: tuple(value.shape) for name, value in candidate.state_dict().items()} == shapes:
                model = Yolo(size, outputs - 5, generation)
                model.load_state_dict(dict(state))
                return model
    raise UserError(
        f"{where}: its {len(state)} tensors are not those of YOLOv5 {', '.join(SIZES)} of the generations "
        f"{' and '.join(GENERATIONS)}, which this example builds"
    )
