"""Float models by name, from torchvision, timm or a Python file, and their weights."""

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

# Auxiliary heads were used to train the original model; they are neither trained nor exported here.
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
WITHOUT_AUXILIARY = {"aux_logits": False, "init_weights": True}


def build_model(zoo: str, arch: str, num_classes: int, image_size: int, *, pretrained: bool = False) -> nn.Module:
    """A classifier that takes images of `image_size`.

    Args:
        zoo: "torchvision" or "timm".
        arch: a model of the zoo; or `FILE.py:NAME`, a class or function that is called with `num_classes`.
        num_classes: outputs of the model.
        image_size: pixels of a side.
        pretrained: load the zoo's weights; a head with another number of classes keeps its random weights.

    Raises:
        UserError: the model or its weights do not exist, or the model cannot take images of this size.
    """
    try:
        model = maker_of(zoo, arch, image_size)(num_classes)
        if pretrained:
            load_pretrained(model, zoo, arch, image_size)
        with torch.no_grad():
            output = model.eval()(torch.zeros(1, 3, image_size, image_size))
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        raise UserError(f"-a {arch} cannot take images of {image_size} px: {' '.join(str(error).split())}") from error
    if not isinstance(output, Tensor) or output.shape != (1, num_classes):
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise UserError(f"-a {arch} returns {shape}; a classifier returns (images, {num_classes})")
    return model


def maker_of(zoo: str, arch: str, image_size: int) -> Callable[..., nn.Module]:
    """A function that builds the model for a number of classes."""
    if ".py:" in arch:
        return own_model(arch)
    if zoo == "timm":
        if not timm.is_model(arch):  # also accepts names with a weight tag, such as resnet18.a1_in1k
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
        raise UserError(f"-a {arch}: {zoo} has no classification model of that name; similar: {', '.join(near)}")


def own_model(arch: str) -> Callable[..., nn.Module]:
    """A function that calls the class or function of `FILE.py:NAME` with `num_classes=`."""
    file, _, name = arch.rpartition(":")
    spec = importlib.util.spec_from_file_location(f"own_{Path(file).stem}", file)
    try:
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module  # dataclasses look their module up there
        spec.loader.exec_module(module)
        maker = getattr(module, name)
    except (OSError, AttributeError, SyntaxError, ImportError) as error:
        raise UserError(f"-a {arch}: {' '.join(str(error).split())}") from error
    return lambda classes: maker(num_classes=classes)


def load_pretrained(model: nn.Module, zoo: str, arch: str, image_size: int) -> None:
    """Load the zoo's weights into a model, except for a head with another number of classes."""
    if ".py:" in arch:
        raise UserError("--pretrained: the zoo has no weights for your own model; give --model-path")
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
        raise UserError(f"--pretrained: the weights of {arch} do not fit the model: {missing[0]} is missing or differs")
    model.load_state_dict(fitting, strict=False)


def load_weights(model: nn.Module, path: Path, flag: str = "--model-path") -> None:
    """Load the weights in a file into the model.

    Args:
        model: the float model.
        path: file with a state dict, bare or under "state_dict", with or without the prefix "module.".
        flag: the flag that names the file, for the error.

    Raises:
        UserError: the file holds no state dict, or that of another model.
    """
    content = read_file(path)
    state = content.get("state_dict", content) if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path} has no state dict: {flag} takes a file of torch.save(model.state_dict(), ...)")
    state = {name.removeprefix("module."): value for name, value in state.items()}
    state = {name: value for name, value in state.items() if not name.startswith(AUXILIARY)}
    difference = first_difference(model.state_dict(), state)
    if difference:
        raise UserError(f"{path} has the weights of another model: {difference}")
    model.load_state_dict(state)


def first_difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    """The first tensor that is missing, has another shape, or is not in the model, in words; None if all agree."""
    for name, value in expected.items():
        if name not in found:
            return f"{name} is not in the file"
        if found[name].shape != value.shape:
            return f"{name} is {tuple(found[name].shape)} in the file and {tuple(value.shape)} in the model"
    unknown = [name for name in found if name not in expected]
    return f"the model has no {unknown[0]}" if unknown else None
