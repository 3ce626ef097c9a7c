"""Write the page of the op table: every row, its spellings, what each backend does with it, and how the files compare.

Runs every case on the backends of the page; takes some minutes. Not part of pytest.

    python tests/ops/generate.py --output docs/reference/op_table.rst
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnxruntime
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

from fxqat.errors import ExportError
from fxqat.ops.table import OPS
from fxqat.quantization.report import ReportRow
from tests.ops.cases import BEYOND, CASES, TABLE, Case, grouped
from tests.ops.run_cases import Spelled, calibrate_and_train, export, prepare, spellings_of

BACKENDS = ("TSQAT", "Experimental", "ONNXRuntime", "TensorRT")
COLUMNS = ("Row", "Op", "Spellings", "TSQAT", "Experimental", "ONNXRuntime", "TensorRT", "ONNX Runtime")
WIDTHS = (5, 10, 35, 10, 10, 10, 10, 10)
INTRODUCTION = """The op table
============

Every op that fxqat knows by name, every way to write it, and what each backend does with it. The page is written by
``python tests/ops/generate.py --output docs/reference/op_table.rst``. The script runs every spelling on TSQAT and the
first spelling of each row on the other three backends: prepare, calibrate, one training step, export, comparison of the
exported file with the fake-quant model in ONNX Runtime. The tests in ``tests/ops`` run the same cases. The placement of
each spelling is in ``tests/golden/op_table-<backend>.txt``, also for the backends that have no column here.

In a spelling, ``x`` and ``y`` are computed values, ``w`` and ``b`` are parameters, ``boxes`` are regions; a module is
called on ``x``. Each spelling stands between two quantized layers. The column of a backend says how the output of the
op is quantized:

* *quantized*: with its own scale;
* *shares*: with the scale of its input, so that nothing is rounded again;
* *for its reader*: the backend has no rule for the op, which computes in float. Its output is quantized because a
  quantized layer reads it;
* *float*: not at all.

The number refers to the list of reasons below. *ONNX Runtime* is the largest share of a tensor's integers, over all
backends, that are one step off when the file runs freely. No integer is off by more.

"""


@dataclass
class Result:
    """The result of a case.

    Args:
        rows: by backend, the row of the report of its first spelling.
        off_by_1: the largest share of a tensor's values that are one step off.
        off_by_2: the same for two steps and more.
    """

    rows: dict[str, ReportRow] = field(default_factory=dict)
    off_by_1: float = 0.0
    off_by_2: float = 0.0


def run(cases: Sequence[Case], backend: str, results: list[Result]) -> None:
    """Run the cases of one group and fill in their results."""
    gm, inputs = prepare(cases, backend)
    calibrate_and_train(gm, inputs)
    spelled: list[Spelled] = spellings_of(cases, gm)
    by_case = {id(case): result for case, result in zip(cases, results, strict=True)}
    for one in reversed(spelled):
        by_case[id(one.case)].rows[backend] = one.rows[0]
    if cases[0].fails:
        return
    with tempfile.TemporaryDirectory() as folder:
        certificate = export(gm, inputs, Path(folder))
    for tensor in certificate.tensors:
        parts = tensor.name.split(".")
        if parts[0] == "branches":
            result = by_case[id(spelled[int(parts[1])].case)]
            result.off_by_1 = max(result.off_by_1, tensor.free.off_by_1)
            result.off_by_2 = max(result.off_by_2, tensor.free.off_by_2_plus)


def run_all() -> list[Result]:
    """The result of every case, in the order of the table."""
    results = [Result() for _ in CASES]
    for backend in BACKENDS:
        given = [case if backend == "TSQAT" else case.only_first() for case in CASES]
        number = {id(case): i for i, case in enumerate(given)}
        for group in grouped(given):
            try:
                run(group, backend, [results[number[id(case)]] for case in group])
            except ExportError as error:
                raise RuntimeError(f"{backend}: {[case.name for case in group]}") from error
            print(backend, group[0].name, flush=True)
    return results


class Reasons:
    """The reasons, numbered in the order in which they occur."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def cell(self, backend: str, row: ReportRow) -> str:
        """The decision of one backend in words."""
        reason = "; ".join(
            part for part in row.reason.split("; ") if not part.startswith(("read quantized by", "one scale for"))
        )
        if row.status == "float" and reason.startswith(f"{backend} has no rule"):
            return "float"
        if reason.startswith(f"computed in float: {backend} has no rule"):
            return "for its reader"
        if reason not in self.texts:
            self.texts.append(reason)
        return f"{row.status} [{self.texts.index(reason) + 1}]"


def parity(case: Case, result: Result) -> str:
    """The comparison with ONNX Runtime in words."""
    if case.fails:
        return f"not exported: {case.fails}"
    if result.off_by_2:
        raise RuntimeError(f"{case.name}: {result.off_by_2:.2%} of a tensor's values are two steps off or more")
    return f"{result.off_by_1:.2%} off by one" if result.off_by_1 else "equal"


def table(cases: Sequence[Case], results: Sequence[Result], reasons: Reasons) -> Iterator[str]:
    """The lines of a table with a line for each case."""
    yield from head(COLUMNS, WIDTHS)
    for case, result in zip(cases, results, strict=True):
        spellings = "; ".join(f"``{text}``" for text in case.spellings)
        decisions = [reasons.cell(backend, result.rows[backend]) for backend in BACKENDS]
        yield line(str(case.row), f"``{case.op}``", spellings, *decisions, parity(case, result))
    yield ""


def head(columns: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """The first lines of a table whose rows are lines; ``|`` separates the cells."""
    yield from (".. csv-table::", "   :delim: |", f"   :widths: {' '.join(map(str, widths))}")
    yield from (f"   :header: {', '.join(columns)}", "")


def line(*cells: str) -> str:
    """One row of a table."""
    return f"   {' | '.join(cells)}"


def known_names() -> Iterator[str]:
    """The names by which the table knows each op, those without a case too."""
    yield from head(("Op", "Family", "Modules", "Functions", "Tensor methods"), (15, 15, 25, 25, 20))
    functional = {id(value): name for name, value in vars(F).items() if name[0] != "_"}  # some are all named "fn"
    for op in OPS:
        functions = sorted({functional.get(id(f), getattr(f, "__name__", "")) for f in op.functions})
        columns = ([kind.__name__ for kind in op.modules], functions, op.methods)
        words = [", ".join(f"``{name}``" for name in names) or "none" for names in columns]
        yield line(f"``{op.name}``", op.family, *words)
    yield ""


def page() -> str:
    """The whole page."""
    results, reasons = run_all(), Reasons()
    here = f"torch {torch.__version__.partition('+')[0]}, ONNX Runtime {onnxruntime.__version__}."
    parts = [INTRODUCTION + f"Written with {here}", "", "The 62 rows", "-----------", ""]
    parts += table(TABLE, results[: len(TABLE)], reasons)
    parts += ["Beyond the 62 rows", "------------------", ""]
    parts += table(BEYOND, results[len(TABLE) :], reasons)
    parts += ["Reasons", "-------", ""]
    parts += [f"{number}. {text}" for number, text in enumerate(reasons.texts, start=1)]
    parts += [
        "",
        "Every known name",
        "----------------",
        "",
        "The names of the ops above and of some more.",
        "",
    ]
    parts += known_names()
    return "\n".join(parts)


def main() -> None:
    """Run everything and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="the page to write")
    output = parser.parse_args().output
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    output.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
