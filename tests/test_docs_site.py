"""The pages of docs/: their programs and snippets run, their links lead somewhere, their figures are accounted for."""

from __future__ import annotations

import copy
import re
import runpy
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fxqat

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import provenance  # noqa: E402

RUN = [*sorted((DOCS / "start").glob("*.rst")), *sorted((DOCS / "howto").rglob("*.rst"))]
RUN += sorted((DOCS / "recipes").glob("*.rst"))
NOT_RUN = re.compile(r"\.\. not run: (.+)\n\n$")
PYTHON = re.compile(r"^\.\. code-block:: python\n\n((?:   .*\n|\n)+)", re.MULTILINE)
pytestmark = pytest.mark.xdist_group("docs_site")  # one process makes the prepared model of the snippets once


def snippets(page: Path) -> list[str]:
    """The Python blocks of a page, without those that a comment above excludes with its reason."""
    text = page.read_text(encoding="utf-8")
    return [
        textwrap.dedent(found[1])
        for found in PYTHON.finditer(text)
        if not NOT_RUN.search(text[: found.start()].rsplit("\n\n", 2)[-2] + "\n\n" if found.start() else "")
    ]


@pytest.fixture(scope="module")
def names():
    """What the snippets may use: a model, its data, and a prepared and calibrated copy."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)),
    )
    data = [(torch.randn(8, 3, 8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    batches = [x for x, _ in data]
    gm = fxqat.prepare_by_platform(model, example_inputs=batches[0])
    fxqat.calibrate(gm, batches, progress=False)
    return {
        **{name: getattr(fxqat, name) for name in fxqat.__all__ if not name.startswith("_")},
        "torch": torch, "nn": nn, "Path": Path, "model": model.eval(), "gm": gm, "x": batches[0], "batches": batches,
        "loader": data, "training_data": data, "calibration_data": data, "calibration_batches": batches,
        "example_inputs": (batches[0],), "criterion": nn.functional.cross_entropy,
        "float_top1": 25.0, "top1": lambda gm: 25.0,
    }  # fmt: skip


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_snippets_run(page, names, tmp_path, monkeypatch):
    """In order, each with what the ones above it have made."""
    monkeypatch.chdir(tmp_path)
    here = dict(names)
    if blocks := snippets(page):
        here["gm"] = copy.deepcopy(names["gm"])
        here["optimizer"] = torch.optim.SGD(here["gm"].parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks:
            try:
                exec(compile(block, str(page), "exec"), here)
            except fxqat.errors.FxqatError as error:
                if "pip install" not in str(error):
                    raise
                pytest.skip(f"a snippet needs an extra: {error}")
