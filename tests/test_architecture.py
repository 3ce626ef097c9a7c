"""The house rules, read from the source: layers, cycles, private names, purity of import, copy-paste, checks per test.

The rules are those of ``CONTRIBUTING.rst``. Nothing here runs the package except the test of import purity, which does
so in a fresh process.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fxqat"
FILES = sorted(PACKAGE.rglob("*.py"))
COMPAT = "fxqat.utils.torch_compat"
REEXPORTS = ("fxqat.utils.state", "fxqat.utils.utils")
"""Paths that users know; they may import upwards and nothing inside the package may import them."""

HOUSE: tuple[tuple[str, ...], ...] = (
    ("__init__", "__main__"),
    ("cli",),
    ("tools",),
    ("prepare_by_platform", "calibrate", "convert_export", "export_tflite", "checkpoint"),
    ("custom_quantizer",),
    ("config",),
    ("custom_symbolic_opset", "litert_conversion"),
    ("quantization",),
    ("tracing",),
    ("ops",),
    ("fuser_method_mappings",),
    ("nn",),
    ("tflite",),
    ("observer", "fake_quantize", "onnx"),
    ("numerics", "utils"),
    ("scheme",),
    ("errors", "version"),
)
"""The rooms of the package from the roof down: a room may import itself and every room below its floor."""

FLOORS = {room: len(HOUSE) - floor for floor, rooms in enumerate(HOUSE) for room in rooms}
FRONT_DOORS = HOUSE[3]
"""They may import each other: saving a checkpoint exports the file."""


def module_name(path: Path) -> str:
    """Dotted name of a file of the package; a package is its ``__init__``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts)


MODULES = {module_name(path): path for path in FILES}


@cache
def tree_of(path: Path) -> ast.Module:
    """Syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports_of(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """``(line, module, name)`` of every import, inside functions too; ``name`` is None for ``import module``."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, "." * node.level + (node.module or ""), alias.name) for alias in node.names)


def target_of(module: str, name: str | None) -> str | None:
    """The module of the package that an import reaches, None for other packages."""
    if module.partition(".")[0] != "fxqat":
        return None
    for candidate in (f"{module}.{name}", module):
        if candidate in MODULES:
            return candidate
    return f"{module}.__init__"


def room_of(module: str) -> str:
    """The room of a module: a folder or file at the top of the package."""
    return module.split(".")[1]


EDGES = {
    name: [(line, target) for line, module, what in imports_of(path) if (target := target_of(module, what))]
    for name, path in MODULES.items()
}


def test_every_module_has_a_place() -> None:
    rooms = {room_of(name) for name in MODULES}
    assert rooms == set(FLOORS)
    assert len(MODULES) > 40


def test_imports_go_down() -> None:
    wrong = []
    for name, edges in EDGES.items():
        room = room_of(name)
        for line, target in edges:
            other = room_of(target)
            same = room == other or {room, other} <= set(FRONT_DOORS)
            allowed = same or FLOORS[other] < FLOORS[room] or name in REEXPORTS
            wrong += [] if allowed and target != name else [f"{name}:{line} imports {target}"]
    assert wrong == []
    assert sum(map(len, EDGES.values())) > 500


def test_there_are_no_import_cycles() -> None:
    state: dict[str, str] = {}
    cycles: list[list[str]] = []

    def visit(name: str, trail: list[str]) -> None:
        state[name] = "open"
        for target in {target for _, target in EDGES[name]}:
            if state.get(target) == "open":
                cycles.append([*trail[trail.index(target) :], target])
            elif target not in state:
                visit(target, [*trail, target])
        state[name] = "done"

    for name in MODULES:
        if name not in state:
            visit(name, [name])
    assert cycles == []
    assert set(state) == set(MODULES)


def test_the_defining_module_is_imported_by_its_full_name() -> None:
    files = MODULES.items()
    relative = [f"{name}:{line}" for name, path in files for line, module, _ in imports_of(path) if module[:1] == "."]
    edges = [(f"{name}:{line} {target}", target) for name, found in EDGES.items() for line, target in found]
    assert relative == []
    assert [words for words, target in edges if target.endswith("__init__") or target not in MODULES] == []
    assert [words for words, target in edges if target in REEXPORTS] == []


def test_a_package_init_only_re_exports() -> None:
    trees = {name: tree_of(path) for name, path in MODULES.items() if path.stem == "__init__" or name in REEXPORTS}
    others = [
        f"{name}:{node.lineno}"
        for name, tree in trees.items()
        for node in tree.body[1:]
        if not isinstance(node, ast.ImportFrom) and not _assigns_all(node)
    ]
    assert others == []
    assert len(trees) > 10


def _assigns_all(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def test_torch_quantization_is_not_used() -> None:
    banned = ("torch.ao", "torch.quantization", "torchao")
    found = []
    for name, path in MODULES.items():
        imported = [f"{module}.{what}" if what else module for _, module, what in imports_of(path)]
        chains = [ast.unparse(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)]
        used = [text for text in imported + chains if any(text == b or text.startswith(f"{b}.") for b in banned)]
        found += [f"{name}: {text}" for text in used]
    assert found == []
    assert [name for name, path in MODULES.items() if "import_module" in path.read_text(encoding="utf-8")] == []


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def private_uses(path: Path) -> list[str]:
    """Private names that a file takes from somewhere else: imports, attributes of others, ``getattr`` by name."""
    found = []
    for line, module, name in imports_of(path):
        if any(map(_is_private, [*module.split("."), name or ""])):
            found.append(f"{line}: import {module}.{name}")
    own = _private_members(path)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and ast.unparse(node) != "os._exit":  # documented
            if not (_on_self(node) and node.attr in own):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            found += [
                f"{node.lineno}: {ast.unparse(node)}" for text in texts if _is_private(text) and text != "_fields"
            ]
    return found


def _on_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _private_members(path: Path) -> set[str]:
    """Private attributes of ``self`` that a file assigns, and functions it defines."""
    members = {node.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _on_self(node):
            members.add(node.attr)
    return members


def test_private_names_of_others_are_used_in_one_file_only() -> None:
    found = {name: uses for name, path in MODULES.items() if (uses := private_uses(path))}
    compat = found.pop(COMPAT)
    assert found == {}
    assert any("_version" in use for use in compat)
    assert any("_orig_mod" in use for use in compat)


def test_what_is_hidden_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "import torch\nclass A:\n    def f(self, x):\n        from fxqat.nn.qat import QATLayer\n"
        "        self._own = x._version\n        return self._own, self._modules, getattr(x, '_orig_mod')\n"
    )
    assert [(module, name) for _, module, name in imports_of(path)] == [("torch", None), ("fxqat.nn.qat", "QATLayer")]
    assert [use.partition(": ")[2] for use in sorted(private_uses(path))] == [
        "x._version",
        "getattr(x, '_orig_mod')",
        "self._modules",
    ]
    assert target_of("fxqat.nn.qat", "QATLayer") == "fxqat.nn.qat"
    assert target_of("fxqat.nn", "QATLayer") == "fxqat.nn.__init__"


def reachable(start: str) -> set[str]:
    """Modules of the package that importing one brings in, by the imports it writes."""
    seen, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += [target for _, target in EDGES[name]]
    return seen


def test_the_onnx_side_knows_no_torch() -> None:
    names = [name for name in MODULES if name.startswith("fxqat.onnx.")]
    imports = [
        (each, module) for each in set().union(*map(reachable, names)) for _, module, _ in imports_of(MODULES[each])
    ]
    assert [pair for pair in imports if pair[1].partition(".")[0] in ("torch", "torchvision", "timm")] == []
    nodes = [(name, node) for name in names for node in ast.walk(tree_of(MODULES[name])) if isinstance(node, ast.Name)]
    assert [name for name, node in nodes if node.id == "torch"] == []
    assert len(nodes) > 100


def test_file_names_differ() -> None:
    """Whoever looks for a file finds it by its name."""
    found = defaultdict(list)
    for name, path in MODULES.items():
        if path.stem not in ("__init__", "base") and name not in REEXPORTS:
            found[path.stem].append(name)
    assert {stem: names for stem, names in found.items() if len(names) > 1} == {}
    assert len(found) > 40


EDITS = ("erase_node", "inserting_before", "inserting_after", "replace_all_uses_with", "replace_input_with")
GRAPH_PASSES = (
    "cli.onnx_sizes",
    "tracing.leaf_tracer",
    "tracing.value_tracer",
    "tracing.train_eval_fork",
    "tracing.written_constants",
    "tracing.layer_hooks",
    "tracing.batch_norm_calls",
    "quantization.drop_unread",
    "quantization.split_parameters",
    "quantization.products",
    "quantization.standardize",
    "quantization.in_place",
    "quantization.split_ops",
    "quantization.packed_sequences",
    "quantization.split_recurrent",
    "quantization.fuse",
    "quantization.insert",
    "quantization.raw_inputs",
    "quantization.fold_constants",
    "quantization.lower",
    "quantization.leaf_sizes",
    "utils.fold_parameters",
    "litert_conversion",
    "utils.train_eval_graph",
)
"""The modules that edit an fx graph, in the order in which they run; CONTRIBUTING has the same list."""


def test_only_these_passes_change_a_graph() -> None:
    editing = set()
    for name, path in MODULES.items():
        if name.startswith("fxqat.onnx."):  # graphs of onnx_ir, which has methods of the same names
            continue
        calls = [node.func for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
        edits = {call.attr for call in calls if isinstance(call, ast.Attribute)} & set(EDITS)
        if edits and not name.startswith("fxqat.onnx."):  # graphs of onnx_ir have methods of the same names
            editing.add(name)
    assert editing == {f"fxqat.{module}" for module in GRAPH_PASSES}
    assert len(GRAPH_PASSES) == len(set(GRAPH_PASSES))


def test_contributing_names_the_same_passes() -> None:
    text = (ROOT / "CONTRIBUTING.rst").read_text(encoding="utf-8")
    named = re.findall(r"^\d+\. ``([a-z_/]+)\.py``", text, re.MULTILINE)
    assert tuple(path.replace("/", ".") for path in named) == GRAPH_PASSES


def test_contributing_shows_the_same_house() -> None:
    text = (ROOT / "CONTRIBUTING.rst").read_text(encoding="utf-8")
    block = text.partition("top down::")[2].partition("\n* ")[0]
    floors = [re.split(r"\s{2,}", line.strip())[0].split(" | ") for line in block.splitlines() if line.strip()]
    shown = [tuple(room.strip("/").removesuffix(".py") for room in floor) for floor in floors]
    assert tuple(shown) == HOUSE


def test_a_file_fits_in_the_head() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length > 500} == {}
    assert [name for name, path in MODULES.items() if not ast.get_docstring(tree_of(path))] == []


PURITY = r"""
import importlib, logging, os, random, sys, warnings
import numpy, onnx, onnx_ir, onnxruntime, onnxscript, prettytable, torch, torchvision, yaml, easydict, jinja2
import matplotlib.figure, matplotlib.backends.backend_svg
import torch.onnx, torch.fx, torch.export, torch.distributed, torch.nn.functional, torch.library
from onnxscript import opset18
import onnx.version_converter, onnx.checker, torchvision.ops

def contents(value):
    return len(value) if isinstance(value, (dict, list, set)) else None

def namespaces():
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] in ("torch", "onnx", "onnxscript", "onnx_ir", "onnxruntime", "torchvision", "numpy"):
            for key, value in list(vars(module).items()):
                if type(value).__name__ != "module" and key not in ("__path__", "__warningregistry__", "__cached__"):
                    found[name, key] = (id(value), contents(value))
    return found

def objects():
    kinds = [torch.Tensor, torch.nn.Module, torch.fx.Graph, torch.fx.Node, torch.fx.GraphModule, torch.fx.Tracer]
    return {(kind.__name__, key): id(value) for kind in kinds for key, value in vars(kind).items()}

def settings():
    loggers = [logging.getLogger(), *(l for l in logging.Logger.manager.loggerDict.values()
                                      if isinstance(l, logging.Logger))]
    return {
        "filters": list(warnings.filters), "showwarning": warnings.showwarning,
        "handlers": {logger.name: (list(logger.handlers), logger.level, logger.disabled)
                     for logger in loggers if not logger.name.startswith("fxqat")},
        "environment": dict(os.environ), "path": list(sys.path), "hook": sys.excepthook,
        "dtype": torch.get_default_dtype(), "threads": torch.get_num_threads(), "grad": torch.is_grad_enabled(),
        "seed": torch.get_rng_state().tolist(), "random": random.getstate(), "numpy": str(numpy.random.get_state()),
        "deterministic": torch.are_deterministic_algorithms_enabled(), "ops": sorted(map(str, dir(torch.ops))),
    }

def registries():
    found = {}
    for name, module in sys.modules.items():
        if name.startswith("torch.onnx"):
            for key, value in vars(module).items():
                inner = getattr(value, "__dict__", {})
                if type(value).__module__.startswith("torch.onnx") and not isinstance(value, type):
                    found[name, key] = {k: (id(v), contents(v)) for k, v in inner.items()}
    return found

def snapshot():
    return [namespaces(), objects(), settings(), registries()]

def differences(old, new):
    changed = {key for a, b in zip(old, new) for key in a if key not in b or b[key] != a[key]} - {"ops"}
    modules = {key[0] for key in old[0]}
    return changed | {key for key in set(new[0]) - set(old[0]) if key[0] in modules} | (set(new[1]) - set(old[1]))

def identity(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

# what defining operators changes by itself is learned from a namespace of our own
start = snapshot()
torch.library.custom_op("purity_probe::identity", mutates_args=())(identity).register_fake(torch.empty_like)
before = snapshot()
allowed = differences(start, before) | {("torch.ops", "fxqat")}
modules = sys.argv[1:]
for name in modules:
    importlib.import_module(name)
after = snapshot()
changed = sorted(map(str, differences(before, after) - allowed))
namespaces_added = set(after[2]["ops"]) - set(before[2]["ops"])
own = [n for n in logging.Logger.manager.loggerDict if n.startswith("fxqat")]
handlers = [n for n in own if logging.getLogger(n).handlers]

# that the comparison can see what it is for
torch.nn.functional.relu, torch.Tensor.__add__, torch.fx.Node.erased = torch.sin, torch.Tensor.__sub__, True
warnings.filterwarnings("ignore", module="fxqat")
logging.getLogger("torch").addHandler(logging.NullHandler())
torch.onnx.ops.__all__.append("fxqat")
seen = [str(key) for key in differences(after, snapshot())]
print(repr({"seen": sorted(seen), "imported": len(modules), "changed": changed, "handlers": handlers,
            "ops": sorted(namespaces_added - {"fxqat"}), "looked_at": len(before[0])}))
"""


PLUGINS = ("fxqat.tools.training.lightning_callback", "fxqat.tools.training.huggingface_callback")
"""Subclasses of what a trainer defines: only users of the trainer import them, and it is what changes the process."""


def test_importing_changes_nothing_outside_the_package() -> None:
    names = [name.removesuffix(".__init__") for name in MODULES if name not in PLUGINS]
    done = subprocess.run([sys.executable, "-c", PURITY, *names], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    assert result["imported"] == len(MODULES) - len(PLUGINS)
    assert result["looked_at"] > 10_000
    assert result["changed"] == []
    assert (result["handlers"], result["ops"]) == ([], [])
    for part in ("'relu'", "'__add__'", "erased", "filters", "handlers", "'torch.onnx.ops'"):
        assert any(part in key for key in result["seen"]), part


# gauges


def code_lines(path: Path) -> list[tuple[int, str]]:
    """``(line, text)`` of the code of a file, less comments, docstrings, imports and ``__all__``; spaces normalised."""
    source = path.read_text(encoding="utf-8")
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if (
            is_text
            or isinstance(node, (ast.Import, ast.ImportFrom))
            or (isinstance(node, ast.stmt) and _assigns_all(node))
        ):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    words: dict[int, list[str]] = defaultdict(list)
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in ignored and token.start[0] not in skipped:
            words[token.start[0]].append(token.string)
    return [(line, " ".join(texts)) for line, texts in sorted(words.items())]


def repeated(files: list[Path], length: int = 6) -> tuple[int, dict[str, list[str]]]:
    """Number of code lines, and the lines in runs of ``length`` equal lines that occur more than once, by file."""
    places: dict[tuple[str, ...], list[tuple[Path, list[int]]]] = defaultdict(list)
    total = 0
    for path in files:
        lines = code_lines(path)
        total += len(lines)
        for i in range(len(lines) - length + 1):
            window = lines[i : i + length]
            places[tuple(text for _, text in window)].append((path, [line for line, _ in window]))
    copied: dict[str, set[int]] = defaultdict(set)
    for occurrences in places.values():
        if len(occurrences) > 1:
            for path, numbers in occurrences:
                copied[str(path.relative_to(path.anchor))].update(numbers)
    return total, {name: sorted(numbers) for name, numbers in copied.items()}


def test_little_is_copied() -> None:
    total, copied = repeated(FILES)
    share = sum(map(len, copied.values())) / total
    assert total > 2000
    assert share < 0.05, copied


def test_the_gauge_of_copies_sees_a_copy(tmp_path: Path) -> None:
    body = "\n".join(f"    value = value + {i}  # {i}" for i in range(7))
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text(f'"""A."""\n\n\ndef one(value):\n    """One."""\n{body}\n    return value\n')
    second.write_text(
        f'"""B."""\nimport os\n\n\ndef two(value):\n{body.replace("+ ", "+")}\n    return os.sep * value\n'
    )
    total, copied = repeated([first, second])
    assert total == 18
    assert [len(numbers) for numbers in copied.values()] == [7, 7]


def checks_in(function: ast.AST, helpers: dict[str, int]) -> int:
    """Checks in a function: asserts, ``raises`` and ``warns`` blocks, ``assert_*`` calls, those in helpers included."""
    count = 0
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            count += 1
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            count += helpers.get(name, int(name in ("raises", "warns") or name.startswith("assert_")))
    return count


TEST_FILES = sorted((ROOT / "tests").rglob("test_*.py"))


def test_tests_check_at_least_twice() -> None:
    unchecked, few = [], []
    for path in TEST_FILES:
        functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)]
        helpers = {f.name: checks_in(f, {}) for f in functions if not f.name.startswith("test_")}
        counts = {f.name: checks_in(f, helpers) for f in functions if f.name.startswith("test_")}
        unchecked += [f"{path.name}: {name}" for name, count in counts.items() if count == 0]
        few += [path.name] if sum(counts.values()) < 2 * len(counts) else []
    assert unchecked == []
    assert few == []
