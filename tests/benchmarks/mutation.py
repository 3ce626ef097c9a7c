"""Do the tests notice a wrong line? Mutations of the package, drawn with a fixed seed.

A mutation changes one place of one line of ``fxqat/``: a comparison, a constant, the sign of an operator, ``and``,
``or`` or ``not``, or it drops a statement. It is named by the function, the text of its line and the place in it: so
the same mutation can be made in another version of the package, where the function may be in another file.

::

    python tests/benchmarks/mutation.py draw --tree . --count 60 --output mutations.json
    python tests/benchmarks/mutation.py run --tree . --mutations mutations.json --results after.jsonl
    python tests/benchmarks/mutation.py report --results before.jsonl after.jsonl

``run`` works on a copy of the tree. For each mutation it runs, with ``-x`` and within a limit of time, the tests named
after the mutated file, then those that import it, those of the whole pipeline, and those in the same folder. Mutations
that have a line in the results are not run again. A mutation that is killed takes about 20 seconds, one that survives
up to the limit.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from prettytable import PrettyTable, TableStyle

SEED = 23
PIPELINE = (
    "tests/custom_quantizer/test_golden.py",
    "tests/test_prepare_by_platform.py",
    "tests/test_convert_export.py",
    "tests/test_checkpoint.py",
    "tests/test_op_table.py",
    "tests/op_table/test_op_table.py",
    "tests/ops/test_op_table.py",
)
"""Tests of the whole way, as far as a tree has them: they cover every stage."""

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: (" is ", " is not "),
    ast.IsNot: (" is not ", " is "),
    ast.In: (" in ", " not in "),
    ast.NotIn: (" not in ", " in "),
}
OPERATORS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")}
BOOLEANS = {ast.And: (" and ", " or "), ast.Or: (" or ", " and ")}


@dataclass(frozen=True)
class Mutation:
    """One changed place.

    Args:
        function: qualified name of the function around it.
        line: the line, without indentation.
        nth: which of the equal lines of the function it is, from 0.
        column: where in the line the change begins.
        old: what stands there.
        new: what takes its place.
    """

    function: str
    line: str
    nth: int
    column: int
    old: str
    new: str

    def __str__(self) -> str:
        mutated = self.line[: self.column] + self.new + self.line[self.column + len(self.old) :]
        return f"{self.function}: {self.line}  ->  {mutated}"


def functions_of(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = f"{prefix}{node.name}"
            if isinstance(node, ast.FunctionDef):
                yield name, node
            yield from functions_of(node, f"{name}.")


def mutations_of(source: str) -> Iterator[Mutation]:
    """Every mutation of a file, in order."""
    lines = source.splitlines()
    for name, function in functions_of(ast.parse(source)):
        seen: dict[str, list[int]] = {}
        for number in range(function.lineno, (function.end_lineno or function.lineno) + 1):
            seen.setdefault(lines[number - 1].strip(), []).append(number)
        for row, column, old, new in _changes(function, lines):
            text = lines[row - 1]
            indent = len(text) - len(text.lstrip())
            if text[column : column + len(old)] == old and text.isascii():
                stripped = text.strip()
                yield Mutation(name, stripped, seen[stripped].index(row), column - indent, old, new)


def _changes(function: ast.FunctionDef, lines: list[str]) -> Iterator[tuple[int, int, str, str]]:
    """``(row, column, old, new)`` of every change in a function's own body."""
    waiting: list[ast.AST] = list(function.body)
    if ast.get_docstring(function) is not None:
        waiting.pop(0)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Raise, ast.Assert, ast.JoinedStr)):
            continue  # functions inside have their own turn; the words of errors are not what tests are for
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from _between(node.left, node.comparators[0], COMPARISONS[type(node.ops[0])], lines)
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            yield from _between(node.left, node.right, OPERATORS[type(node.op)], lines)
        elif isinstance(node, ast.BoolOp):
            yield from _between(node.values[0], node.values[1], BOOLEANS[type(node.op)], lines)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            yield node.lineno, node.col_offset, "not " if isinstance(node.op, ast.Not) else "-", ""
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
            text = ast.get_source_segment("\n".join(lines), node) or ""
            new = str(not node.value) if isinstance(node.value, bool) else repr(node.value + 1)
            yield node.lineno, node.col_offset, text, new
        elif _can_be_dropped(node):
            assert isinstance(node, ast.stmt)
            text = lines[node.lineno - 1][node.col_offset : node.end_col_offset]
            yield node.lineno, node.col_offset, text, "pass"


def _can_be_dropped(node: ast.AST) -> bool:
    """Whether a node is a statement of one line that is there for its effect."""
    if isinstance(node, ast.Expr):
        return node.lineno == node.end_lineno and not isinstance(node.value, (ast.Constant, ast.Yield, ast.YieldFrom))
    return isinstance(node, ast.AugAssign) and node.lineno == node.end_lineno


def _between(
    left: ast.expr, right: ast.expr, change: tuple[str, str], lines: list[str]
) -> Iterator[tuple[int, int, str, str]]:
    """An operator that stands between two operands on one line."""
    if left.end_lineno == right.lineno:
        row = right.lineno
        column = lines[row - 1].find(change[0], left.end_col_offset or 0, right.col_offset)
        if column >= 0:
            yield row, column, *change


def place_of(mutation: Mutation, tree: Path) -> tuple[Path, int] | None:
    """The file and the line number of a mutation in a tree; None if it is not there, or not once."""
    found = []
    for path in sorted((tree / "fxqat").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if mutation.line not in source:
            continue
        lines = source.splitlines()
        for name, function in functions_of(ast.parse(source)):
            rows = range(function.lineno, (function.end_lineno or function.lineno) + 1)
            equal = [row for row in rows if lines[row - 1].strip() == mutation.line]
            if name == mutation.function and len(equal) > mutation.nth:
                found.append((path, equal[mutation.nth]))
    return found[0] if len(found) == 1 else None


def draw(tree: Path, count: int, seed: int) -> list[Mutation]:
    """The first mutations of a random order that can be named without doubt, at most two of a function."""
    everything = [m for path in sorted((tree / "fxqat").rglob("*.py")) for m in mutations_of(path.read_text("utf-8"))]
    random.Random(seed).shuffle(everything)
    chosen: list[Mutation] = []
    for mutation in everything:
        if sum(mutation.function == other.function for other in chosen) < 2 and place_of(mutation, tree) is not None:
            chosen.append(mutation)
        if len(chosen) == count:
            break
    return chosen


def covering_tests(path: Path, tree: Path) -> list[str]:
    """Test files that cover a file: its own, those that import it, those of the whole pipeline, and its folder's."""
    inside = path.relative_to(tree)
    module = ".".join(inside.with_suffix("").parts)
    own = tree / "tests" / Path(*inside.parts[1:-1]) / f"test_{path.stem}.py"
    tests = sorted((tree / "tests").rglob("test_*.py"))
    importing = [test for test in tests if test != own and f"{module} import" in test.read_text(encoding="utf-8")]
    beside = [test for test in tests if test.parent == own.parent]
    pipeline = [tree / test for test in PIPELINE if (tree / test).exists()]
    chosen = dict.fromkeys([*([own] if own.exists() else []), *importing, *pipeline, *beside])
    return [str(test.relative_to(tree)) for test in chosen]


def apply(mutation: Mutation, path: Path, row: int) -> None:
    """Write the mutation into a file."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    text = lines[row - 1]
    start = len(text) - len(text.lstrip()) + mutation.column
    assert text[start : start + len(mutation.old)] == mutation.old
    lines[row - 1] = text[:start] + mutation.new + text[start + len(mutation.old) :]
    path.write_text("".join(lines), encoding="utf-8")


def judge(mutation: Mutation, tree: Path, workers: str, limit: float) -> dict[str, object]:
    """Run the tests on a tree with a mutation in it."""
    found = place_of(mutation, tree)
    if found is None:
        return {"outcome": "not there"}
    path, row = found
    original = path.read_text(encoding="utf-8")
    apply(mutation, path, row)
    start = time.monotonic()
    environment = dict(os.environ, PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", workers]
    command += ["-o", f"faulthandler_timeout={limit / 3:.0f}", *covering_tests(path, tree)]
    try:
        run = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
        outcome = _outcome(run)
    except subprocess.TimeoutExpired as stopped:
        hangs = b"Timeout (" in (stopped.stderr or b"")  # faulthandler: one test took a third of the time
        outcome = {"outcome": "killed", "by": "no end"} if hangs else {"outcome": "survived", "by": "out of time"}
    finally:
        path.write_text(original, encoding="utf-8")
    return outcome | {"seconds": round(time.monotonic() - start), "file": str(path.relative_to(tree))}


def _outcome(run: subprocess.CompletedProcess[str]) -> dict[str, object]:
    """Killed if a test failed, or none could be run."""
    if run.returncode == 0:
        return {"outcome": "survived"}
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {"outcome": "killed", "by": (lines or run.stdout.splitlines()[-1:] or [""])[0][:200]}


def run(arguments: argparse.Namespace) -> None:
    """Judge every mutation that has no result yet."""
    mutations = [Mutation(**entry) for entry in json.loads(arguments.mutations.read_text(encoding="utf-8"))]
    results = arguments.results
    done = len(results.read_text(encoding="utf-8").splitlines()) if results.exists() else 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignore = shutil.ignore_patterns(".git", "__pycache__", "*.egg-info")
        shutil.copytree(arguments.tree.resolve(), tree, ignore=ignore)
        if (arguments.tree.resolve().parent / "shared").exists():
            (Path(folder) / "shared").symlink_to(arguments.tree.resolve().parent / "shared")
        for mutation in mutations[done:]:
            result = {"mutation": asdict(mutation)} | judge(mutation, tree, arguments.workers, arguments.limit)
            print(f"{result['outcome']:10} {mutation}", flush=True)
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")


def report(arguments: argparse.Namespace) -> None:
    """Killed and survived, of the first mutations that every tree has."""
    runs = [[json.loads(line) for line in path.read_text("utf-8").splitlines()] for path in arguments.results]
    rows = [row for row in zip(*runs, strict=False) if all(result["outcome"] != "not there" for result in row)]
    rows = rows[: arguments.count]
    table = PrettyTable(["mutation", *[path.stem for path in arguments.results]], align="l", max_width=100)
    table.set_style(TableStyle.MARKDOWN)
    for row in rows:
        table.add_row([str(Mutation(**row[0]["mutation"])), *[result["outcome"] for result in row]])
    print(table)
    for place, path in enumerate(arguments.results):
        killed = sum(row[place]["outcome"] == "killed" for row in rows)
        print(f"{path.stem}: {killed} of {len(rows)} killed")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="draw mutations of a tree")
    drawing.add_argument("--tree", type=Path, default=Path())
    drawing.add_argument("--count", type=int, default=40)
    drawing.add_argument("--seed", type=int, default=SEED)
    drawing.add_argument("--output", type=Path, required=True)
    running = commands.add_parser("run", help="run the tests of a tree on each mutation")
    running.add_argument("--tree", type=Path, default=Path())
    running.add_argument("--mutations", type=Path, required=True)
    running.add_argument("--results", type=Path, required=True, help="lines of JSON; those that are there are kept")
    running.add_argument("--workers", default="0", help="processes of pytest-xdist for each mutation")
    running.add_argument("--limit", type=float, default=300.0, help="seconds for the tests of one mutation")
    reporting = commands.add_parser("report", help="compare the results of several trees")
    reporting.add_argument("--results", type=Path, nargs="+", required=True)
    reporting.add_argument("--count", type=int, default=40)
    arguments = parser.parse_args()
    if arguments.command == "draw":
        chosen = draw(arguments.tree.resolve(), arguments.count, arguments.seed)
        arguments.output.write_text(json.dumps([asdict(mutation) for mutation in chosen], indent=1), encoding="utf-8")
    else:
        {"run": run, "report": report}[arguments.command](arguments)


if __name__ == "__main__":
    main()
