"""Weights from files: a checkpoint of this example, a state dict, or a published pickle, whose code is not run."""

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
"""What a pickle may load: functions of torch that make tensors. Everything else becomes :class:`Inert`."""


class Inert:
    """Replaces an object of any class in a pickle; holds its attributes and runs none of its code."""

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
    """Reads a pickle; replaces classes and functions that are not in `SAFE`."""

    def find_class(self, module: str, name: str) -> Any:
        """The class or function of a name in the pickle."""
        return super().find_class(module, name) if (module, name) in SAFE else type(name, (Inert,), {})


def read_weights(path: Path) -> dict[str, Any]:
    """The content of a file: `state_dict` in float32, `names` of the classes, and `extra` of a checkpoint.

    Raises:
        UserError: the file cannot be read, or has no detector.
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
    """The content of a published checkpoint, with `Inert` objects."""
    module = SimpleNamespace(Unpickler=InertUnpickler, load=None, __name__="inert")
    try:
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=module)
    except Exception as error:  # a pickle can raise anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--weights {path} is neither a state dict nor a published model: {reason}") from error


def tensors_of(module: Inert, prefix: str = "") -> dict[str, Tensor]:
    """The state dict of a pickled model."""
    found: dict[str, Tensor] = {}
    for part in ("_parameters", "_buffers"):
        tensors = module.attributes.get(part) or {}
        found |= {prefix + name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    for name, child in (module.attributes.get("_modules") or {}).items():
        found |= tensors_of(child, f"{prefix}{name}.") if isinstance(child, Inert) else {}
    return found


def build_for(state: Mapping[str, Tensor], where: str) -> Yolo:
    """The model with these weights; its size and generation are found by the shapes.

    Raises:
        UserError: the shapes fit no size of any generation.
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
        f"{where}: its {len(state)} tensors do not fit YOLOv5 of any size ({', '.join(SIZES)}) and generation "
        f"({', '.join(GENERATIONS)})"
    )
