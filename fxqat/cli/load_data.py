"""DATA on the command line: batches of inputs, with labels where it has them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fxqat.cli.load_model import named
from fxqat.cli.preprocessing import Preprocessing
from fxqat.errors import ConfigError
from fxqat.tools.ladder import Evaluate
from fxqat.utils.batches import described

IMAGES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm"}

Sample = tuple[Tensor, int | None]


def load_batches(
    data: str, preprocessing: Preprocessing | None, batch_size: int = 8, samples: int | None = None
) -> list[Any]:
    """The batches that DATA gives, without labels.

    Args:
        data: a folder of images, also in subfolders; a ``.tar`` of images; an ``.npz`` or ``.npy`` of inputs, where
            uint8 arrays are pixels; or ``FILE.py:NAME`` or ``package.module:NAME``: batches, or a function that returns
            them.
        preprocessing: how images become inputs.
        batch_size: samples in a batch; batches of a loader stay as they are.
        samples: at most so many samples, spread over the data; batches of a loader.

    Raises:
        ConfigError: there is no such data, or it cannot be read.
    """
    if is_named(data):
        found = named(data, "DATA")
        if callable(found) and not hasattr(found, "__iter__"):
            try:
                found = found()
            except Exception as cause:
                raise ConfigError(f"DATA {data}() fails: {type(cause).__name__}: {cause}") from cause
        if not isinstance(found, Iterable) or isinstance(found, (str, Tensor)):
            expected = "batches (a list, a generator, a DataLoader), or a function without arguments that returns them"
            raise ConfigError(f"DATA {data!r}: expected {expected}; got {described(found)}")
        batches = list(islice(found, samples))
        if not batches:
            raise ConfigError(f"DATA {data!r} gives no batch")
        return batches
    return [inputs for inputs, _ in _batches(data, preprocessing, batch_size, samples)]


def load_evaluation(
    data: str, preprocessing: Preprocessing | None, batch_size: int = 8, samples: int | None = None
) -> Evaluate:
    """The function of ``--eval``: one that is named, or 100 or 0 for each sample with a label: the top-1 in percent.

    Args:
        data: a function of a model, see ``evaluate`` of :func:`fxqat.quantize`; or data as for :func:`load_batches`,
            with labels: a folder with a subfolder for each class, in the order of their names; a ``.tar`` with a
            ``.cls`` file beside each image; an ``.npz`` with arrays ``x`` and ``y``.
        preprocessing: as for :func:`load_batches`.
        batch_size: the same.
        samples: the same.

    Raises:
        ConfigError: there is no such data, or it has no labels.
    """
    if is_named(data):
        function = named(data, "--eval")
        if not callable(function):
            raise ConfigError(f"--eval {data!r}: expected a function of a model, got {type(function).__name__}")
        return function  # type: ignore[no-any-return]
    batches = [(inputs, labels) for inputs, labels in _batches(data, preprocessing, batch_size, samples)]
    if any(label is None for _, labels in batches for label in labels):
        raise ConfigError(
            f"--eval {data!r} has no labels: expected a folder with a subfolder for each class, a .tar with .cls "
            "files, an .npz with arrays x and y, or FILE.py:FUNCTION"
        )

    def hits(model: nn.Module) -> Tensor:
        found = []
        for inputs, labels in batches:
            outputs = model(inputs)
            outputs = outputs if isinstance(outputs, Tensor) else next(iter(outputs.values()))
            found.append(100.0 * (outputs.argmax(1) == torch.tensor(labels)))
        return torch.cat(found)

    return hits


def is_named(data: str) -> bool:
    """Whether DATA names an object of a Python file or package."""
    return ":" in data and not Path(data).exists()


def kind_of(data: str) -> str:
    """``"named"``, ``"images"``, ``"pixels"`` (arrays of uint8), ``"arrays"``, or ``"none"`` if it cannot be read."""
    path = Path(data)
    if is_named(data):
        return "named"
    if path.suffix not in (".npz", ".npy"):
        return "images"
    try:
        content = np.load(path, mmap_mode="r")
        inputs = content if isinstance(content, np.ndarray) else content["x"]
    except (OSError, ValueError, KeyError):
        return "none"  # reading it tells why
    return "pixels" if inputs.dtype == np.uint8 else "arrays"


def _batches(
    data: str, preprocessing: Preprocessing | None, batch_size: int, samples: int | None
) -> Iterator[tuple[Tensor, list[int | None]]]:
    path = Path(data)
    if path.is_dir():
        found = _folder(path, preprocessing, samples)
    elif path.suffix in (".npz", ".npy") and path.is_file():
        found = _arrays(path, preprocessing, samples)
    elif path.suffix == ".tar" and path.is_file():
        found = _tar(path, preprocessing, samples)
    else:
        raise ConfigError(f"DATA {data!r}: expected a folder of images, a .tar, .npz or .npy file, or module:NAME")
    while batch := list(islice(found, batch_size)):
        if len({x.shape for x, _ in batch}) > 1:
            raise ConfigError(f"DATA {data!r}: images of several sizes: give --resize and --crop")
        yield torch.stack([x for x, _ in batch]), [label for _, label in batch]


def _spread(values: list[Any], count: int | None) -> list[Any]:
    """At most so many values, evenly spread."""
    if count is None or count >= len(values):
        return values
    return [values[i * len(values) // count] for i in range(count)]


def _opened(file: Any, name: str, preprocessing: Preprocessing | None) -> Tensor:
    from PIL import Image, UnidentifiedImageError

    if preprocessing is None:
        raise ConfigError("images need their preprocessing: --resize --crop --mean --std")
    try:
        with Image.open(file) as image:
            return preprocessing.image(image)
    except (UnidentifiedImageError, OSError) as error:
        raise ConfigError(f"{name} is not an image: {error}") from error


def _folder(folder: Path, preprocessing: Preprocessing | None, samples: int | None) -> Iterator[Sample]:
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGES)
    if not paths:
        raise ConfigError(f"DATA {str(folder)!r} holds no image ({', '.join(sorted(IMAGES))})")
    classes = sorted({path.relative_to(folder).parts[0] for path in paths if len(path.relative_to(folder).parts) > 1})
    for path in _spread(paths, samples):
        parts = path.relative_to(folder).parts
        yield _opened(path, str(path), preprocessing), classes.index(parts[0]) if len(parts) > 1 else None


def _tar(path: Path, preprocessing: Preprocessing | None, samples: int | None) -> Iterator[Sample]:
    with tarfile.open(path) as archive:
        members = {Path(member.name): member for member in archive.getmembers() if member.isfile()}
        images = sorted(name for name in members if name.suffix.lower() in IMAGES)
        if not images:
            raise ConfigError(f"DATA {str(path)!r} holds no image")

        def content(name: Path) -> bytes:
            file = archive.extractfile(members[name])
            assert file is not None
            return file.read()

        for name in _spread(images, samples):
            label = name.with_suffix(".cls")
            number = int(content(label)) if label in members else None
            yield _opened(io.BytesIO(content(name)), str(name), preprocessing), number


def _arrays(path: Path, preprocessing: Preprocessing | None, samples: int | None) -> Iterator[Sample]:
    content = np.load(path)
    arrays = {"x": content} if isinstance(content, np.ndarray) else dict(content)
    inputs = arrays.pop("x", None)
    if inputs is None:
        raise ConfigError(f"DATA {str(path)!r}: expected an array named x, got {', '.join(arrays)}")
    labels = arrays.get("y")
    for i in _spread(list(range(len(inputs))), samples):
        x = torch.from_numpy(np.ascontiguousarray(inputs[i]))
        if x.dtype == torch.uint8:
            if preprocessing is None:
                raise ConfigError(f"DATA {str(path)!r} holds pixels (uint8): give --mean and --std")
            x = preprocessing.pixels(x)
        elif x.is_floating_point():
            x = x.float()
        yield x, None if labels is None else int(labels[i])
