"""What long experiments share: results in a file of JSON lines, and a command line of ``run`` and ``report``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

Command = Callable[[argparse.Namespace], None]


def read(path: Path) -> list[dict[str, Any]]:
    """The results so far."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def add(path: Path, result: dict[str, Any]) -> None:
    """Print a result and add it to the file, with the version of torch."""
    line = json.dumps(result | {"torch": torch.__version__})
    tqdm.write(line)
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def command_line(
    description: str, run: Command, report: Command, choices: dict[str, list[Any]], needs_data: bool = True
) -> None:
    """Parse the arguments and call one of the two functions with them.

    Args:
        description: for ``--help``.
        run: gets ``data`` (a folder), ``results`` (a file), ``threads`` and a list for each of the choices.
        report: gets ``results`` and ``output`` (a file).
        choices: for each option all values, of which the user can name some.
        needs_data: whether there is a ``--data``.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="run what has no result yet")
    if needs_data:
        runs.add_argument("--data", type=Path, required=True)
    runs.add_argument("--threads", type=int, default=2)
    for name, values in choices.items():
        runs.add_argument(f"--{name}", nargs="*", type=type(values[0]), choices=values, default=values)
    runs.set_defaults(function=run)
    reports = commands.add_parser("report", help="write the page")
    reports.add_argument("--output", type=Path, required=True)
    reports.set_defaults(function=report)
    for command in (runs, reports):
        command.add_argument("--results", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.function(arguments)
