"""The pages of docs/: their programs and snippets run, their links lead somewhere, their figures are accounted for."""

from __future__ import annotations

import copy
import functools
import http.server
import json
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
import threading
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
NOT_RUN = re.compile(r"^\.\. not run: (.+)\n\n\Z", re.MULTILINE)
PYTHON = re.compile(r"^( *)\.\. code-block:: python\n\n((?:\1   .*\n|\n)+)", re.MULTILINE)
pytestmark = pytest.mark.xdist_group("docs_site")  # one process makes the prepared model of the snippets once


def snippets(page: Path) -> tuple[list[str], list[str]]:
    """The Python blocks of a page, and the reasons for which others are not run."""
    text, blocks, reasons = page.read_text(encoding="utf-8"), [], []
    for found in PYTHON.finditer(text):
        if excluded := NOT_RUN.search(text[: found.start()]):
            reasons.append(excluded[1])
        else:
            blocks.append(textwrap.dedent(found[2]))
    return blocks, reasons


@pytest.fixture(scope="module")
def names():
    """What the snippets may use: a model, its data, and a prepared and calibrated copy."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)),
    )
    samples = torch.utils.data.TensorDataset(torch.randn(16, 3, 8, 8), torch.randint(0, 4, (16,)))
    data = torch.utils.data.DataLoader(samples, batch_size=8)
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
    """In order, each with what the ones above it have made, and with a calibrated ``gm``."""
    blocks, reasons = snippets(page)
    assert len(blocks) + len(reasons) == page.read_text(encoding="utf-8").count(".. code-block:: python\n")
    assert all(len(reason.split()) >= 3 for reason in reasons)
    monkeypatch.chdir(tmp_path)
    here = dict(names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks:
            here["gm"] = copy.deepcopy(names["gm"])
            here["optimizer"] = torch.optim.SGD(here["gm"].parameters(), lr=1e-3)
            try:
                exec(compile(block, str(page), "exec"), here)
            except fxqat.errors.FxqatError as error:
                if "pip install" not in str(error):
                    raise
                pytest.skip(f"a snippet needs an extra: {error}")


@pytest.fixture(scope="module")
def loops():
    """The training loops of the page."""
    return runpy.run_path(str(DOCS / "howto" / "training_loops.py"))


@pytest.mark.parametrize(
    ("loop", "package"),
    [
        ("plain", "torch"),
        ("mixed_precision", "torch"),
        ("data_parallel", "torch"),
        ("distilled", "torch"),
        ("learned_rounding", "torch"),
        ("resumed", "torch"),
        ("with_timm", "timm"),
        ("with_lightning", "lightning"),
        ("with_transformers", "accelerate"),
    ],
)
def test_a_training_loop_trains(loop, package, loops, names, tmp_path, monkeypatch):
    """The loss is finite, and the weights move."""
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    gm = copy.deepcopy(names["gm"])
    before = gm.get_parameter("7.weight").detach().clone()
    loops["one_process"]()
    given = (names["model"], gm) if loop == "resumed" else (gm,)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = loops[loop](*given, names["loader"])
    assert 0 <= loss < 10
    assert not torch.equal(gm.get_parameter("7.weight"), before)


def test_every_loop_is_on_the_page():
    code = (DOCS / "howto" / "training_loops.py").read_text(encoding="utf-8")
    page = (DOCS / "howto" / "training_loops.rst").read_text(encoding="utf-8")
    marks = re.findall(r"^# (\[\w+\])$", code, re.MULTILINE)
    assert [mark for mark in marks[:-1] if f":start-after: # {mark}" not in page] == []
    assert len(marks) == 10


def test_five_minutes_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    """The same words and tables; figures of accuracy within two points."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(DOCS / "start" / "five_minutes.py"))
    printed = capsys.readouterr().out
    shown = (DOCS / "start" / "five_minutes.txt").read_text(encoding="utf-8")
    number = re.compile(r"\d+\.\d+|\d+(?= of float| of file)")
    assert number.sub("#", printed) == number.sub("#", shown)
    percent = [[float(found) for found in re.findall(r"(\d+\.\d)%$", text, re.MULTILINE)] for text in (printed, shown)]
    assert percent[0] == pytest.approx(percent[1], abs=2)
    assert len(percent[0]) == 4


def test_the_first_qat_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ran = runpy.run_path(str(DOCS / "start" / "quick_start.py"))
    assert ran["report"].certificate.passed
    page = (DOCS / "start" / "quick_start.rst").read_text(encoding="utf-8")
    promised = re.findall(r"^   \* - ``([\w.]+)``$", page, re.MULTILINE)
    assert sorted(promised) == sorted(path.name for path in tmp_path.iterdir())


# what is measured


def test_every_measured_page_is_recorded():
    """A page that a script wrote is recorded with the commit that was measured: ``docs/provenance.py`` says how."""
    manifest = provenance.manifest()
    generated = {f"evidence/{path.stem}" for path in (DOCS / "evidence").glob("*.rst")} - {"evidence/index"}
    assert sorted(manifest) == sorted(provenance.PAGES)
    assert generated <= set(provenance.PAGES)
    stale = [page for page, entry in manifest.items() if entry["page"] != provenance.page_hash(page)]
    assert stale == [], "written and not recorded: python docs/provenance.py PAGE --commit COMMIT"
    assert [
        page for page, paths in provenance.PAGES.items() if any(not provenance.on_disk(path) for path in paths)
    ] == []


def test_a_change_of_code_marks_a_page():
    page, entry = "evidence/parity", provenance.manifest()["evidence/parity"]
    now = {**entry, "code": provenance.hashes(provenance.PAGES[page], provenance.on_disk)}
    assert provenance.changed(page, now) == []
    now["code"]["fxqat/onnx"] = "another"
    assert provenance.changed(page, now) == ["fxqat/onnx"]
    source = 'x = 1  # one\n\n\ndef f():\n    """F."""\n    return "# no comment"\n'
    assert provenance.code_of(source) == 'x = 1\ndef f():\n    return "# no comment"'


# links


def test_links_of_pages_for_a_git_host_lead_somewhere():
    """Links and images of README, and paths that the other files name; a measured page may be still to come."""
    text = (ROOT / "README.rst").read_text(encoding="utf-8")
    linked = [*re.findall(r"<([\w./-]+)>`__", text), *re.findall(r"^\.\. image:: (\S+)", text, re.MULTILINE)]
    named = [
        path
        for file in ("README.rst", "CONTRIBUTING.rst", "tests/benchmarks/README.rst")
        for path in re.findall(
            r"``((?:docs|tests|example|media)/[\w/.-]+)``", (ROOT / file).read_text(encoding="utf-8")
        )
    ]
    missing = [path for path in linked + named if not (ROOT / path).exists()]
    assert [path for path in missing if not path.startswith("docs/evidence/")] == []
    assert len(linked) > 10
    assert len(named) > 20


def test_every_page_is_in_a_list():
    """Sphinx finds broken references while it builds; this finds pages that nothing lists, without building."""
    pages = {path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.rst") if "_build" not in path.parts}
    listed = {Path("index")}
    for page in pages:
        for block in re.findall(
            r"\.\. toctree::\n((?:   .*\n|\n)+)", (DOCS / f"{page}.rst").read_text(encoding="utf-8")
        ):
            entries = [line.strip() for line in block.splitlines() if line.strip() and ":" not in line]
            listed |= {page.parent / entry for entry in entries}
    assert sorted(map(str, pages - listed)) == []
    assert sorted(map(str, listed - pages)) == []


def test_charts_have_a_dot_for_each_figure_of_the_table(tmp_path):
    chart = runpy.run_path(str(DOCS / "charts.py"))["Chart"](
        "Top-1", ("model", "bits"), {"float": "a", "int8": "b"}, line=1
    )
    rows = [
        {"model": "net", "bits": "8", "a": "91.5 ± 0.2", "b": "-1"},
        {"model": "net", "bits": "", "a": "", "b": "2 of 3"},
    ]
    assert chart.figures(rows) == {"float": {"net, 8": 91.5}, "int8": {"net, 8": -1, "net": 2}}
    chart.draw(rows, tmp_path / "charts" / "net.svg")
    assert "<svg" in (tmp_path / "charts" / "net.svg").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="no figures for int8 of the chart 'Top-1'"):
        chart.figures([{**rows[0], "b": "passed"}])
    with pytest.raises(ValueError, match="two rows of the chart 'Top-1' are named 'net, 8'"):
        chart.figures([rows[0], rows[0]])


def test_the_inventories_name_what_there_is():
    """A class that moved has no link any more, and nothing says so."""
    projects = runpy.run_path(str(DOCS / "inventories.py"))["NAMES"]
    assert all(isinstance(pkgutil.resolve_name(name), type) for names in projects.values() for name in names)


def test_the_chart_is_drawn_from_the_pages():
    drawn = runpy.run_path(str(ROOT / "media" / "results.py"))
    assert drawn["draw"]() == drawn["OUTPUT"].read_text(encoding="utf-8"), "run: python media/results.py"


# the look

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# Sphinx keeps nearly all that it makes: looking for garbage less often saves a sixth of the build.
BUILD = "import gc, runpy; gc.set_threshold(20_000, 20, 20); runpy.run_module('sphinx', run_name='__main__')"
MEASURE = """<!doctype html><pre id="result">not finished</pre><script>
const pages = %s, widths = [1280, 400], wide = [];
async function measure() {
  for (const page of pages) {
    const frame = document.createElement("iframe");
    frame.style = "height: 900px; border: 0";
    frame.src = page;
    document.body.append(frame);
    await new Promise(resolve => frame.onload = resolve);
    const root = frame.contentDocument.documentElement;
    for (const width of widths) {
      frame.style.width = `${width}px`;
      if (root.scrollWidth > width) wide.push(`${page} is ${root.scrollWidth} px wide at ${width}`);
    }
    frame.remove();
  }
  document.getElementById("result").textContent = JSON.stringify({measured: pages.length * widths.length, wide});
}
measure();
</script>"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"needs one of {', '.join(BROWSERS)} on the path")
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built pages, and their address."""
    pytest.importorskip("furo")
    folder = tmp_path_factory.mktemp("site")
    options = ["-q", "-W", "-d", str(folder / "doctrees"), str(DOCS), str(folder / "html")]
    subprocess.run([sys.executable, "-c", BUILD, *options], check=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder / "html"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder / "html", f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_no_page_scrolls_sideways(browser, site):
    """In a headless Chromium, at the widths of a desktop and of a phone."""
    folder, address = site
    pages = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.html") if "_static" not in path.parts)
    (folder / "measure.html").write_text(MEASURE % json.dumps(pages))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=600000", "--dump-dom"]
    command = [browser, *options, f"{address}/measure.html"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = re.search(r'<pre id="result">(.*?)</pre>', run.stdout, re.DOTALL)
    assert found, run.stderr
    result = json.loads(found[1])
    assert result["wide"] == []
    assert result["measured"] == 2 * len(pages) > 100
