"""Float models by name, and their weights from a file."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torchvision
from checkpointing import read_file
from errors import UserError
from torch import Tensor, nn

# Auxiliary heads serve the training of the original; they are neither trained nor shipped here.
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
WITHOUT_AUXILIARY = {"aux_logits": False, "init_weights": True}


def build_model(arch: str, num_classes: int, image_size: int) -> nn.Module:
    """An untrained torchvision classifier, checked to take images of `image_size`.

    Raises:
        UserError: no such model, or its layers leave nothing of images this small.
    """
    known = torchvision.models.list_models(module=torchvision.models)
    if arch not in known:
        near = difflib.get_close_matches(arch, known, n=3) or known[:3]
        raise UserError(f"-a {arch}: torchvision has no classification model of that name; near it: {', '.join(near)}")
    options: dict[str, Any] = {}
    if arch in ("googlenet", "inception_v3"):
        options = WITHOUT_AUXILIARY
    elif arch.startswith("vit_"):
        options = {"image_size": image_size}
    try:
        model = torchvision.models.get_model(arch, weights=None, num_classes=num_classes, **options)
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, image_size, image_size))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UserError(f"-a {arch} does not take images of {image_size} px: {error}") from error
    return model


def load_weights(model: nn.Module, path: Path) -> None:
    """Put the weights of a file into the model.

    Args:
        model: the float model.
        path: a state dict, bare or under "state_dict", with or without the "module." of a parallel wrapper.

    Raises:
        UserError: not such a file, or the weights of another model.
    """
    content = read_file(path)
    state = content.get("state_dict", content) if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(
            f"{path} holds no state dict: --model-path takes what torch.save(model.state_dict(), ...) wrote"
        )
    state = {name.removeprefix("module."): value for name, value in state.items()}
    state = {name: value for name, value in state.items() if not name.startswith(AUXILIARY)}
    difference = first_difference(model.state_dict(), state)
    if difference:
        raise UserError(f"{path} holds the weights of another model: {difference}")
    model.load_state_dict(state)


def first_difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    """In words, the first tensor that is missing, of another shape, or unknown to the model; None if they agree."""
    for name, value in expected.items():
        if name not in found:
            return f"{name} is not in the file"
        if found[name].shape != value.shape:
            return f"{name} is {tuple(found[name].shape)} in the file and {tuple(value.shape)} in the model"
    unknown = [name for name in found if name not in expected]
    return f"the model has no {unknown[0]}" if unknown else None
