"""Float models by name, from torchvision, timm or a file of the user's, and their weights."""

import difflib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from checkpointing import read_file
from errors import UserError
from torch import Tensor, nn

# Auxiliary heads serve the training of the original; they are neither trained nor shipped here.
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
WITHOUT_AUXILIARY = {"aux_logits": False, "init_weights": True}


def build_model(zoo: str, arch: str, num_classes: int, image_size: int, *, pretrained: bool = False) -> nn.Module:
    """A classifier, checked to take images of `image_size`.

    Args:
        zoo: "torchvision" or "timm".
        arch: a model of the zoo; or `FILE.py:NAME`, a class or function of the user's, called with `num_classes`.
        num_classes: outputs of the model.
        image_size: pixels of a side.
        pretrained: with the zoo's weights; a head for other classes is drawn anew.

    Raises:
        UserError: no such model, no such weights, or its layers leave nothing of images this small.
    """
    try:
        model = maker_of(zoo, arch, image_size)(num_classes)
        if pretrained:
            load_pretrained(model, zoo, arch, image_size)
        with torch.no_grad():
            output = model.eval()(torch.zeros(1, 3, image_size, image_size))
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        raise UserError(f"-a {arch} does not take images of {image_size} px: {' '.join(str(error).split())}") from error
    if not isinstance(output, Tensor) or output.shape != (1, num_classes):
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise UserError(f"-a {arch} gives {shape}, not (images, {num_classes}) as a classifier does")
    return model


def maker_of(zoo: str, arch: str, image_size: int) -> Callable[..., nn.Module]:
    """What makes the model for a number of classes."""
    if ".py:" in arch:
        return own_model(arch)
    if zoo == "timm":
        if not timm.is_model(arch):  # it knows names with the tag of their weights, too
            check_known(arch, timm.list_models(), "timm")
        sized = {"img_size": image_size} if arch.startswith(("vit_", "deit", "swin", "beit")) else {}
        return lambda classes, **options: timm.create_model(arch, num_classes=classes, **sized, **options)
    check_known(arch, torchvision.models.list_models(module=torchvision.models), "torchvision")
    options: dict[str, Any] = {}
    if arch in ("googlenet", "inception_v3"):
        options = WITHOUT_AUXILIARY
    elif arch.startswith("vit_"):
        options = {"image_size": image_size}
    return lambda classes: torchvision.models.get_model(arch, weights=None, num_classes=classes, **options)


def check_known(arch: str, known: list[str], zoo: str) -> None:
    """Refuse a name that the zoo does not have."""
    if arch not in known:
        near = difflib.get_close_matches(arch, known, n=3) or known[:3]
        raise UserError(f"-a {arch}: {zoo} has no classification model of that name; near it: {', '.join(near)}")


def own_model(arch: str) -> Callable[..., nn.Module]:
    """The class or function that `FILE.py:NAME` names, called with `num_classes=`."""
    file, _, name = arch.rpartition(":")
    spec = importlib.util.spec_from_file_location(f"own_{Path(file).stem}", file)
    try:
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module  # where dataclasses look for it
        spec.loader.exec_module(module)
        maker = getattr(module, name)
    except (OSError, AttributeError, SyntaxError, ImportError) as error:
        raise UserError(f"-a {arch}: {' '.join(str(error).split())}") from error
    return lambda classes: maker(num_classes=classes)


def load_pretrained(model: nn.Module, zoo: str, arch: str, image_size: int) -> None:
    """Put the zoo's weights into a model, but for a head with other classes."""
    if ".py:" in arch:
        raise UserError("--pretrained: a model of your own has no weights in the zoo; give --model-path")
    try:
        if zoo == "timm":
            state = timm.create_model(arch, pretrained=True).state_dict()
        else:
            state = torchvision.models.get_model(arch, weights="DEFAULT").state_dict()
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--pretrained: no weights of {arch} from {zoo}: {reason}. Give --model-path") from error
    own = model.state_dict()
    fitting = {name: value for name, value in state.items() if name in own and value.shape == own[name].shape}
    missing = [name for name in own if name not in fitting]
    if len(missing) > 2:  # weight and bias of the head
        raise UserError(f"--pretrained: the weights of {arch} do not fit the model: {missing[0]} is not among them")
    model.load_state_dict(fitting, strict=False)


def load_weights(model: nn.Module, path: Path, flag: str = "--model-path") -> None:
    """Put the weights of a file into the model.

    Args:
        model: the float model.
        path: a state dict, bare or under "state_dict", with or without the "module." of a parallel wrapper.
        flag: that named the file.

    Raises:
        UserError: not such a file, or the weights of another model.
    """
    content = read_file(path)
    state = content.get("state_dict", content) if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path} holds no state dict: {flag} takes what torch.save(model.state_dict(), ...) wrote")
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
