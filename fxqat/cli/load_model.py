"""MODEL on the command line: where a float model comes from, its weights, its inputs and its preprocessing."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fxqat.cli.preprocessing import Preprocessing
from fxqat.cli.read_exported import read_exported
from fxqat.cli.read_onnx import compare_with_file, read_onnx
from fxqat.errors import ConfigError
from fxqat.utils.batches import read_batch

FORMS = (
    "torchvision:NAME, timm:NAME, transformers:CONFIG_FOLDER, FILE.py:FACTORY, package.module:FACTORY, FILE.pt2 or "
    "FILE.onnx"
)


@dataclass(frozen=True)
class Source:
    """A float model from the command line.

    Args:
        model: the model in eval mode.
        input_shape: shape of its input for one sample, where its library knows it.
        preprocessing: how images become its input, where its library knows it.
        input_names: names of its inputs, where a file gives them.
        output_names: names of its outputs; the same.
        batch_size: the only batch size that it takes, where a file fixes it.
        file: the ONNX file that it was read from, with these weights.
    """

    model: nn.Module
    input_shape: tuple[int, ...] | None = None
    preprocessing: Preprocessing | None = None
    input_names: tuple[str, ...] | None = None
    output_names: tuple[str, ...] | None = None
    batch_size: int | None = None
    file: Path | None = None

    def check(self, batch: Any) -> None:
        """Compare the model on a batch with the ONNX file that it was read from, if there is one.

        Raises:
            ConfigError: it does not compute the same.
        """
        if self.file is not None:
            compare_with_file(self.model, self.file, read_batch(self.model, batch, "MODEL"))

    def batches_of(self, given: int | None) -> int:
        """The batch size to read data with: the one that is given, of the file, or 8.

        Raises:
            ConfigError: another one is given than that of the file.
        """
        if given is not None and self.batch_size not in (None, given):
            raise ConfigError(f"--batch-size {given}: the file takes batches of {self.batch_size} only")
        return given or self.batch_size or 8


def load_model(name: str, weights: str | os.PathLike[str] | None = None) -> Source:
    """Make the float model that MODEL names.

    Args:
        name: see :data:`FORMS`. A factory is called without arguments and returns a module; a module is taken as it is.
        weights: a state dict as ``.safetensors``, or saved by torch: itself, or under ``state_dict`` or ``model``, as
            in a checkpoint of :func:`fxqat.save_checkpoint`.

    Raises:
        ConfigError: there is no such model, it cannot be made, or the weights do not fit.
    """
    kind, _, rest = name.rpartition(":")
    if kind in LIBRARIES:
        source = LIBRARIES[kind](rest)
    elif name.endswith(".pt2"):
        source = Source(read_exported(_existing(name)))
    elif name.endswith(".onnx"):
        source = _onnx_file(_existing(name))
    elif kind:
        source = Source(_from_factory(kind, rest))
    else:
        raise ConfigError(f"MODEL {name!r}: expected {FORMS}")
    if weights is not None:
        _load_weights(source.model, Path(weights))
        source = replace(source, file=None)
    source.model.eval()
    return source


def imported(where: str) -> ModuleType:
    """The module of a file or of a dotted name.

    The folder of the file, or the working directory, stays the first on the path of imports, as for a Python script:
    factories, models and data import when they are called.

    Raises:
        ConfigError: there is none, or it cannot be imported.
    """
    try:
        if not where.endswith(".py"):
            _import_from(Path.cwd())
            module: ModuleType = pkgutil.resolve_name(f"{where}:")
            return module
        path = _existing(where)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)  # so that what it defines can be pickled
        _import_from(path.resolve().parent)
        spec.loader.exec_module(module)
        return module
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error


def _import_from(folder: Path) -> None:
    if sys.path[:1] != [str(folder)]:
        sys.path.insert(0, str(folder))


def named(text: str, what: str) -> Any:
    """What ``FILE.py:NAME`` or ``package.module:NAME`` names.

    Raises:
        ConfigError: it does not exist.
    """
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise ConfigError(f"{what} {text!r}: expected FILE.py:NAME or package.module:NAME")
    module = imported(where)
    if not hasattr(module, name):
        known = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(f"{what} {text!r}: {where} has no {name!r}; it has {', '.join(known[:12])}")
    return getattr(module, name)


def _from_factory(where: str, name: str) -> nn.Module:
    found = named(f"{where}:{name}", "MODEL")
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise ConfigError(
                f"MODEL {where}:{name} is {type(found).__name__}; expected a function that returns a module"
            )
        try:
            found = found()
        except Exception as error:
            raise ConfigError(f"MODEL {where}:{name}() fails: {type(error).__name__}: {error}") from error
    if not isinstance(found, nn.Module):
        raise ConfigError(f"MODEL {where}:{name}() returned {type(found).__name__}; expected a torch.nn.Module")
    return found


def _torchvision(name: str) -> Source:
    from torchvision import models

    try:
        model = models.get_model(name, weights=None)
        weights = models.get_model_weights(name)
    except ValueError as error:
        raise ConfigError(f"MODEL torchvision:{name}: {error}") from error
    transforms = next((each.transforms() for each in weights), None)
    if not hasattr(transforms, "crop_size"):
        return Source(model)
    preset: Any = transforms
    size = preset.crop_size[0]
    mean, std = tuple(preset.mean), tuple(preset.std)
    return Source(
        model, (3, size, size), Preprocessing(preset.resize_size[0], size, mean, std, preset.interpolation.value)
    )


def _timm(name: str) -> Source:
    import timm
    from timm.data.config import resolve_data_config

    try:
        model = timm.create_model(name, pretrained=False)
    except RuntimeError as error:
        raise ConfigError(f"MODEL timm:{name}: {error}") from error
    config = resolve_data_config({}, model=model)
    channels, size, _ = config["input_size"]
    resize = round(size / config["crop_pct"])
    return Source(
        model,
        (channels, size, size),
        Preprocessing(resize, size, tuple(config["mean"]), tuple(config["std"]), config["interpolation"]),
    )


def _transformers(folder: str) -> Source:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("MODEL transformers:...: pip install transformers") from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        name = next(iter(config.architectures or ()), None)
        model: Any = getattr(transformers, name)(config) if name else transformers.AutoModel.from_config(config)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"MODEL transformers:{folder}: expected a folder with a config.json: {error}") from error
    return Source(model)


LIBRARIES = {"torchvision": _torchvision, "timm": _timm, "transformers": _transformers}


def _onnx_file(path: Path) -> Source:
    model, proto = read_onnx(path)
    constants = {tensor.name for tensor in proto.graph.initializer}
    inputs = [value for value in proto.graph.input if value.name not in constants]
    sizes = [tuple(max(d.dim_value, 0) for d in value.type.tensor_type.shape.dim) for value in inputs]
    shape = sizes[0][1:] if len(sizes) == 1 and all(sizes[0][1:]) else None
    return Source(
        model,
        shape,
        input_names=tuple(value.name for value in inputs),
        output_names=tuple(value.name for value in proto.graph.output),
        batch_size=next((size[0] or None for size in sizes if size), None),
        file=path,
    )


def _existing(path: str) -> Path:
    if not Path(path).is_file():
        raise ConfigError(f"no file {path}")
    return Path(path)


def _load_weights(model: nn.Module, path: Path) -> None:
    state = _state_dict(path)
    known = model.state_dict().keys()
    if not state.keys() & known:
        state = {name.removeprefix("module.").removeprefix("model."): tensor for name, tensor in state.items()}
    missing, unknown = sorted(known - state.keys()), sorted(state.keys() - known)
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    if missing or unknown:
        parts = [
            f"{len(names)} {what} ({', '.join(names[:3])} ...)"
            for names, what in ((missing, "missing"), (unknown, "unknown"))
            if names
        ]
        raise ConfigError(f"--weights {path} does not fit {type(model).__name__}: {'; '.join(parts)}")
    try:
        model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise ConfigError(f"--weights {path} does not fit {type(model).__name__}: {error}") from error


def _state_dict(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        content = torch.load(path, map_location="cpu", weights_only=True)
    except ImportError as error:
        raise ConfigError(f"--weights {path}: pip install safetensors") from error
    except Exception as error:
        raise ConfigError(f"--weights {path}: no state dict: {type(error).__name__}: {error}") from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ConfigError(f"--weights {path}: expected a state dict, or a dict with one under 'state_dict' or 'model'")
    return content


def example_inputs(given: Sequence[str], source: Source) -> tuple[Any, ...] | dict[str, Any]:
    """Random inputs of the shapes that ``--input`` gives, or that the model's library knows.

    Args:
        given: each ``[NAME=]SHAPE[:DTYPE]``, such as ``1x3x224x224`` or ``tokens=1x16:int64``.
        source: the model.

    Returns:
        A tuple, or a dict if they have names.

    Raises:
        ConfigError: an entry cannot be read, or there is none.
    """
    if not given:
        if source.input_shape is None:
            raise ConfigError("give the shape of the model's input: --input 1x3x224x224 (once for each input)")
        return (random_input((1, *source.input_shape), torch.float32),)
    values = [parse_input(text) for text in given]
    names = [name for name, _ in values]
    if any(names) and not all(names):
        raise ConfigError(f"--input: give a name for each input or for none, got {', '.join(given)}")
    return {name: value for name, value in values if name} if any(names) else tuple(value for _, value in values)


def parse_input(text: str) -> tuple[str, Tensor]:
    """Name, which may be empty, and random values of ``[NAME=]SHAPE[:DTYPE]``.

    Raises:
        ConfigError: the text has another form.
    """
    name, _, rest = text.rpartition("=")
    shape, _, dtype = rest.partition(":")
    found = getattr(torch, dtype or "float32", None)
    try:
        sizes = tuple(int(size) for size in shape.split("x"))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1 or not isinstance(found, torch.dtype):
        raise ConfigError(f"--input {text!r}: expected [NAME=]SHAPE[:DTYPE], such as 1x3x224x224 or tokens=1x16:int64")
    return name, random_input(sizes, found)


def parse_dynamic_shapes(given: Sequence[str]) -> dict[str, Any] | tuple[Any, ...] | None:
    """The ``dynamic_shapes`` of ``convert_export``; None if every size is fixed.

    Args:
        given: for each input ``[INPUT=]AXIS:SIZE,...``, such as ``2:height,3:width``; with names for all, or in order.

    Raises:
        ConfigError: an entry has another form.

    Example:
        >>> parse_dynamic_shapes(["x=2:height,3:width"])
        {'x': {2: 'height', 3: 'width'}}
    """
    found: list[tuple[str, dict[int, str]]] = []
    for text in given:
        name, _, rest = text.rpartition("=")
        pairs = [entry.partition(":") for entry in rest.split(",")]
        if not all(axis.isdecimal() and size.isidentifier() for axis, _, size in pairs):
            raise ConfigError(f"--dynamic-shapes {text!r}: expected [INPUT=]AXIS:SIZE,..., such as x=2:height,3:width")
        found.append((name, {int(axis): size for axis, _, size in pairs}))
    names = [name for name, _ in found if name]
    if names and len(set(names)) < len(found):
        raise ConfigError(f"--dynamic-shapes: give one name for each input or none, got {', '.join(given)}")
    return dict(found) if names else tuple(axes for _, axes in found) or None


def random_input(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The same random values each time: normally distributed, bytes of pixels, or 0 and 1."""
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 256 if dtype == torch.uint8 else 2, shape, generator=generator).to(dtype)
