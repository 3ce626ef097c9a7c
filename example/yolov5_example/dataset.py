"""Data sets of pictures with boxes: `data.yaml`, folders or zips of pictures, and label files."""

import os
import zipfile
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from errors import UserError
from logs import LOG, progress
from PIL import Image

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")


@dataclass(frozen=True)
class File:
    """A file on disk, or in a zip."""

    name: str
    zip: Path | None = None

    def __str__(self) -> str:
        return self.name if self.zip is None else f"{self.zip}/{self.name}"

    def open(self) -> Any:
        """Open the file; works in any process."""
        return open(self.name, "rb") if self.zip is None else archive(self.zip, os.getpid()).open(self.name)

    def exists(self) -> bool:
        """Whether the file exists."""
        if self.zip is None:
            return os.path.isfile(self.name)
        return self.name in archive(self.zip, os.getpid()).NameToInfo


@lru_cache
def archive(path: Path, process: int) -> zipfile.ZipFile:
    """An open zip; processes cannot share one, so the cache has one for each."""
    return zipfile.ZipFile(path)


@dataclass(frozen=True)
class Picture:
    """A picture with labels.

    Args:
        file: the image file.
        size: width and height in px.
        labels: (objects, 5): class, then center x, center y, width and height from 0 to 1.
    """

    file: File
    size: tuple[int, int]
    labels: np.ndarray

    def load(self) -> Image.Image:
        """The picture in RGB.

        Raises:
            UserError: the file is damaged.
        """
        try:
            with self.file.open() as opened:
                return Image.open(opened).convert("RGB")
        except (OSError, SyntaxError) as error:
            raise UserError(f"{self.file} cannot be read as an image: {error}") from error


@dataclass(frozen=True)
class Description:
    """The content of a `data.yaml`: `names` (a list, or a dict by number), `train`, `val`, and their folder `path`.

    Args:
        file: the `data.yaml`.
        names: names of the classes.
        parts: folders, zips or lists (`.txt`) of the pictures of "train" and "val".
    """

    file: Path
    names: tuple[str, ...]
    parts: dict[str, Path]

    def pictures(self, part: str) -> list[Picture]:
        """The pictures of "train" or "val"."""
        return scan(self.parts[part], len(self.names))


def read_description(file: Path) -> Description:
    """Read a `data.yaml`, given by its path or its folder.

    Raises:
        UserError: the file cannot be read, or lacks a key.
    """
    file = file / "data.yaml" if file.is_dir() else file
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--data {file} cannot be read: {' '.join(str(error).split())}") from error
    missing = [key for key in ("train", "val", "names") if not isinstance(content, dict) or key not in content]
    if missing:
        raise UserError(f"--data {file}: expected the keys train, val and names; missing: {', '.join(missing)}")
    names = content["names"]
    if isinstance(names, dict) and set(names) == set(range(len(names))):
        names = [names[i] for i in range(len(names))]
    if not isinstance(names, list):
        raise UserError(f"--data {file}: names must be a list, or have the keys 0, 1, 2, ...; got {names!r}")
    if content.get("nc", len(names)) != len(names):
        raise UserError(f"--data {file}: nc is {content['nc']}, but there are {len(names)} names")
    root = str(content.get("path") or ".")
    parts = {part: beside(file, os.path.join(root, str(content[part]))) for part in ("train", "val")}
    return Description(file, tuple(map(str, names)), parts)


def beside(file: Path, name: str) -> Path:
    """A path that a file names: relative to the file's folder, or, if only that exists, to the working directory."""
    path = file.parent / name
    return Path(name) if not path.exists() and os.path.exists(name) else path


def scan(place: Path, num_classes: int) -> list[Picture]:
    """All pictures in a folder, zip or list, with their labels; logs how many have problems.

    The labels of `images/.../a.jpg` are in `labels/.../a.txt`; without a folder `images`, next to the picture.

    Raises:
        UserError: there are no pictures, or a label is wrong.
    """
    found: list[Picture] = []
    count: Counter[str] = Counter()
    files = [file for file in files_in(place) if file.name.lower().endswith(SUFFIXES)]
    for file in progress(files, f"Scanning labels {place}", "file"):
        try:
            with file.open() as opened:
                size = Image.open(opened).size
        except (OSError, SyntaxError):  # of PIL's errors, the first
            count["corrupt"] += 1
            LOG.warning("%s is not an image: skipped", file)
            continue
        label = replace(file, name=label_of(file.name))
        labels = parse(label, num_classes) if label.exists() else np.zeros((0, 5))
        unique = np.unique(labels, axis=0)
        count["found" if label.exists() else "missing"] += 1
        count["empty"] += label.exists() and not len(labels)
        count["duplicate"] += len(labels) - len(unique)
        found.append(Picture(file, size, unique.astype(np.float32)))
    if not found:
        raise UserError(f"{place} has no pictures ({', '.join(SUFFIXES)})")
    kinds = ("found", "missing", "empty", "duplicate", "corrupt")
    counts = ", ".join(f"{count[kind]} {kind}" for kind in kinds if count[kind] or kind != "corrupt")
    LOG.info("Scanning labels %s (%s, for %d images)", place, counts, len(found))
    return found


def files_in(place: Path) -> list[File]:
    """All files in a folder or zip, or the pictures that the lines of a `.txt` file name.

    Raises:
        UserError: it does not exist, is not a zip, or a line names no picture.
    """
    if place.suffix == ".txt" and place.is_file():
        return listed(place)
    try:
        if place.suffix == ".zip":
            return [File(name, place) for name in sorted(archive(place, os.getpid()).namelist())]
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{place} cannot be read: {error}") from error
    if not place.is_dir():
        raise UserError(f"{place}: the data.yaml names it, but there is no such folder, zip or list (.txt)")
    return [File(str(file)) for file in sorted(place.rglob("*"))]


def listed(place: Path) -> list[File]:
    """The pictures in a list; each line is a path, see `beside`.

    Raises:
        UserError: a line names no picture.
    """
    found = []
    for i, line in enumerate(place.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        path = beside(place, line.strip())
        if path.suffix.lower() not in SUFFIXES or not path.is_file():
            raise UserError(
                f"{place}, line {i}: expected a picture ({', '.join(SUFFIXES)}), found no such file: {path}"
            )
        found.append(File(str(path)))
    return found


def label_of(name: str) -> str:
    """The path of a picture's label file."""
    before, folder, after = f"/{name}".rpartition("/images/")
    named = f"{before}/labels/{after}" if folder else f"/{name}"
    return named[1:].rpartition(".")[0] + ".txt"


def parse(file: File, num_classes: int) -> np.ndarray:
    """The labels in a file, (objects, 5).

    Raises:
        UserError: a line is not a label, or its class does not exist.
    """
    rows = []
    with file.open() as opened:
        lines = opened.read().decode("utf-8", "replace").splitlines()
    for i, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = [float(word) for word in line.split()]
        except ValueError:
            row = []
        if len(row) != 5 or row[0] % 1 or not all(0 <= value <= 1 for value in row[1:]):
            raise UserError(f"{file}, line {i}: expected `class x y width height`, the last four 0 to 1; got {line!r}")
        if not 0 <= row[0] < num_classes:
            raise UserError(f"{file}, line {i}: class {row[0]:.0f}, but the data.yaml names {num_classes} classes")
        rows.append(row)
    return np.array(rows).reshape(-1, 5)
