"""The debug bundle: one zip file with which somebody else sees the same failure."""

from __future__ import annotations

import ast
import json
import platform
import sys
import sysconfig
import traceback
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

import onnx
import torch
from torch import Tensor, nn

from fxqat.calibrate import calibrate
from fxqat.cli.load_model import LIBRARIES, example_inputs, load_model
from fxqat.convert_export import convert_export
from fxqat.errors import ConfigError
from fxqat.fake_quantize import kernels
from fxqat.prepare_by_platform import prepare_by_platform
from fxqat.utils.files import atomic_path
from fxqat.utils.temporary import temporary_folder
from fxqat.utils.tensors import map_tensors

PACKAGES = (
    "fxqat",
    "torch",
    "torchvision",
    "timm",
    "transformers",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "onnxruntime",
    "numpy",
)

SCRIPT = '''"""Reproduce: python reproduce.py, in the folder of this file, with the versions of versions.json."""

import json
from pathlib import Path

from fxqat.cli.write_bundle import Setup, run_steps

outcome = run_steps(Setup(**json.loads(Path("setup.json").read_text())))
print(outcome.traceback)
print(outcome.summary)
'''


@dataclass(frozen=True)
class Setup:
    """What is run, in the words of the command line.

    Args:
        model: MODEL.
        weights: file of its weights; None for random ones.
        inputs: shapes of its inputs, as ``--input`` gives them.
        backend: name of the backend.
        config: YAML file of the configuration; None for none.
    """

    model: str
    weights: str | None
    inputs: Sequence[str]
    backend: str
    config: str | None


@dataclass
class Outcome:
    """What happened.

    Args:
        summary: that it worked, or class and first line of the error.
        traceback: the full traceback, or empty.
        structure: the model's modules, if it could be loaded.
        inputs: types and shapes of its inputs; the same.
        report: the report and the certificate, if it came so far.
        model: the float model, if it could be loaded.
    """

    summary: str = "prepared, calibrated and exported"
    traceback: str = ""
    structure: str = "not loaded"
    inputs: str = "not made"
    report: str = "not prepared"
    model: nn.Module | None = None


def run_steps(setup: Setup) -> Outcome:
    """Load, prepare, calibrate and export a model, always on the same random inputs and, if random, weights."""
    outcome = Outcome()
    try:
        with torch.random.fork_rng(devices=[]), temporary_folder() as folder:
            torch.manual_seed(0)
            source = load_model(setup.model, None if setup.weights is None else Path(setup.weights))
            outcome.model, outcome.structure = source.model, str(source.model)
            inputs = example_inputs(setup.inputs, source)
            outcome.inputs = str(map_tensors(inputs, _described))
            gm = prepare_by_platform(source.model, setup.backend, setup.config, example_inputs=inputs).eval()
            outcome.report = str(gm.quant_report)
            calibrate(gm, [inputs], progress=False)
            found = convert_export(gm, inputs, folder / "model.onnx")
            outcome.report += f"\n{found.certificate}"
    except Exception as error:
        lines = str(error).splitlines() or [""]
        outcome.summary, outcome.traceback = f"{type(error).__name__}: {lines[0]}", traceback.format_exc()
    return outcome


def write_bundle(path: Path, setup: Setup, with_weights: bool) -> str:
    """Load, prepare, calibrate and export a model on random inputs, and write what is needed to do it again.

    Args:
        path: the zip file to write.
        setup: what is run.
        with_weights: whether the weights go into the file.

    Returns:
        What happened: ``"prepared, calibrated and exported"``, or the first line of the error.

    Raises:
        ConfigError: the file cannot be written, MODEL names no file, or its file holds the weights and they were not
            asked for.
    """
    inside, sources = _sources(setup.model)
    if not with_weights and setup.model.endswith((".onnx", ".pt2")):
        raise ConfigError(f"{setup.model} holds the model with its weights: give --with-weights if they may be shown")
    before = set(sys.modules)
    outcome = run_steps(setup)
    if sources and setup.model.rpartition(":")[0] not in LIBRARIES:
        sources |= _imported_files(setup.model.rpartition(":")[0], set(sys.modules) - before)
    texts = {
        "reproduce.py": SCRIPT,
        "versions.json": json.dumps(_versions(), indent=1),
        "structure.txt": outcome.structure,
        "inputs.txt": outcome.inputs,
        "report.txt": outcome.report,
        "outcome.txt": f"{outcome.summary}\n\n{outcome.traceback}",
    }
    there = replace(setup, model=inside, weights=None, config=None)
    if setup.config is not None:
        there = replace(there, config="config.yaml")
        sources["config.yaml"] = Path(setup.config)
    with (
        atomic_path(path, ConfigError) as target,
        temporary_folder() as folder,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        if with_weights and setup.weights is not None:
            there = replace(there, weights=f"weights{Path(setup.weights).suffix}")
            sources[str(there.weights)] = Path(setup.weights)
        elif with_weights and outcome.model is not None and ":" in setup.model:
            there = replace(there, weights="weights.pth")
            sources["weights.pth"] = folder / "weights.pth"
            torch.save(outcome.model.state_dict(), sources["weights.pth"])
        for name, source in sources.items():
            archive.write(source, name)
        for name, text in (texts | {"setup.json": json.dumps(asdict(there), indent=1)}).items():
            archive.writestr(name, text)
    return outcome.summary


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return {**found, "kernels of fake-quant on CPU": kernels.STATE}


def _sources(model: str) -> tuple[str, dict[str, Path]]:
    """The name of MODEL inside the bundle, and the user's files that it is made from, by their names there."""
    kind, _, rest = model.rpartition(":")
    if kind == "transformers":
        folder = Path(rest).resolve()
        configs = [path for path in folder.glob("*config.json") if path.is_file()]
        return f"{kind}:{folder.name}", {f"{folder.name}/{path.name}": path for path in configs}
    path = Path(kind or rest)
    if path.suffix not in (".py", ".onnx", ".pt2"):
        return model, {} if kind in ("torchvision", "timm") or not kind else _python_files(kind)
    if not path.is_file():
        raise ConfigError(f"no file {path}")
    files = {path.name: path}
    if path.suffix == ".onnx":
        files |= {name: path.parent / name for name in _external_data(path)}
    return path.name + (f":{rest}" if kind else ""), files | (_python_files(str(path)) if kind else {})


def _python_files(where: str) -> dict[str, Path]:
    """The user's Python files that a file or a module imports, by their paths from the folder they are imported from.

    They are found without being run. Installed packages, the standard library and fxqat are not the user's.
    """
    first = _first_root(where)
    roots = _own_roots(where)
    found: dict[str, Path] = {}
    pending = [Path(where).name.removesuffix(".py") if where.endswith(".py") else where]
    while pending:
        parts = pending.pop().split(".")
        if parts[0] == "fxqat":
            continue
        for name in ("/".join(parts[:end]) for end in range(1, len(parts) + 1)):
            files = ((root, root / file) for root in roots for file in (f"{name}/__init__.py", f"{name}.py"))
            root, path = next(((root, path) for root, path in files if path.is_file()), (first, first))
            key = str(path.relative_to(root))
            if path.is_file() and key not in found:
                found[key] = path
                pending += _imports(path, path.relative_to(root).parent.parts)
    return found


def _imported_files(where: str, modules: set[str]) -> dict[str, Path]:
    """The user's files among modules that were imported, also by a name that only the running code knows."""
    root = _first_root(where).resolve()
    files = [Path(file).resolve() for name in modules if (file := getattr(sys.modules[name], "__file__", None))]
    own = [file for file in files if file.suffix == ".py" and file.is_relative_to(root) and _is_own(file.parent)]
    return {str(file.relative_to(root)): file for file in own}


def _first_root(where: str) -> Path:
    return Path(where).parent if where.endswith(".py") else Path.cwd()


def _own_roots(where: str) -> list[Path]:
    """The folders that a file or a module of the user imports from, the first one first."""
    folders = (str(_first_root(where)), *sys.path)
    return list(dict.fromkeys(Path(folder).resolve() for folder in folders if _is_own(Path(folder))))


def _is_own(folder: Path) -> bool:
    """Whether a folder of the path of imports is the user's, and exists."""
    standard = Path(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"} & set(folder.parts)
    return folder.is_dir() and not installed and not folder.resolve().is_relative_to(standard)


def _imports(path: Path, package: Sequence[str]) -> Iterator[str]:
    """The dotted names that a file of a package may import."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError:
        return  # loading the model tells of it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from filter(None, (base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)))


def _external_data(path: Path) -> set[str]:
    try:
        proto = onnx.load(str(path), load_external_data=False)
    except Exception:  # loading the model tells of it
        return set()
    entries = [entry for tensor in proto.graph.initializer for entry in tensor.external_data]
    return {entry.value for entry in entries if entry.key == "location"}
