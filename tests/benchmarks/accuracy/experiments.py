"""Shared by the long experiments: results in a file of JSON lines, and a command line with ``run`` and ``report``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

Command = Callable[[argparse.Namespace], None]
EVIDENCE = Path(__file__).resolve().parents[3] / "docs" / "evidence"


def read(path: Path) -> list[dict[str, Any]]:
    """The results so far."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def add(path: Path, result: dict[str, Any]) -> None:
    """Print a result and append it to the file, with the version of torch."""
    line = json.dumps(result | {"torch": torch.__version__})
    tqdm.write(line)
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def torch_versions(results: list[dict[str, Any]]) -> str:
    """The versions of torch that the results were measured with."""
    return ", ".join(sorted({result["torch"] for result in results}))


def command_line(
    script: str,
    description: str,
    page: str,
    run: Command,
    report: Command,
    choices: dict[str, list[Any]],
    needs_data: bool = True,
) -> None:
    """Parse the arguments and call ``run`` or ``report`` with them.

    Args:
        script: path of the experiment; its results are in ``results/<name of the script>.jsonl`` beside it.
        description: printed by ``--help``.
        page: the file in ``docs/evidence/`` that ``report`` writes.
        run: reads ``data`` (a folder), ``results`` (a file), ``threads`` and one list for each of the choices.
        report: reads ``results`` and ``output`` (a file).
        choices: for each option all its values; the user can select some.
        needs_data: whether ``run`` has the option ``--data``.
    """
    path = Path(script)
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="measure the rows that have no result yet")
    if needs_data:
        runs.add_argument("--data", type=Path, required=True, help="folder with the weights and images")
    runs.add_argument("--threads", type=int, default=2, help="CPU threads of torch")
    for name, values in choices.items():
        runs.add_argument(f"--{name}", nargs="*", type=type(values[0]), choices=values, default=values)
    runs.set_defaults(function=run)
    reports = commands.add_parser("report", help="write the page from the results")
    reports.add_argument("--output", type=Path, default=EVIDENCE / page, help=f"default: docs/evidence/{page}")
    reports.set_defaults(function=report)
    results = path.parent / "results" / f"{path.stem}.jsonl"
    for command in (runs, reports):
        command.add_argument("--results", type=Path, default=results, help="file of JSON lines")
    arguments = parser.parse_args()
    arguments.function(arguments)
