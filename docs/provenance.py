"""Says on every measured page from which commit it comes, and whether the code it depends on has changed since.

A Sphinx extension, and the command that records a page after its script has written it::

    python docs/provenance.py evidence/parity --commit COMMIT_THAT_WAS_MEASURED

``docs/provenance.json`` keeps for each page the commit, its date, a hash of the page, and a hash of each folder or file
of ``PAGES``. Comments, docstrings and blank lines do not count. ``tests/test_docs_site.py`` fails if a page was written
and not recorded; a page whose code has changed is not an error, but says so.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import subprocess
import tokenize
from collections.abc import Callable
from functools import cache
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
MANIFEST = DOCS / "provenance.json"

TRACING = ("fxqat/tracing", "fxqat/prepare_by_platform.py")
PLACEMENT = ("fxqat/custom_quantizer", "fxqat/ops", "fxqat/quantization", "fxqat/fuser_method_mappings.py")
NUMBERS = ("fxqat/fake_quantize", "fxqat/observer", "fxqat/numerics.py", "fxqat/nn")
EXPORT = ("fxqat/convert_export.py", "fxqat/custom_symbolic_opset.py", "fxqat/onnx")
ALL = TRACING + PLACEMENT + NUMBERS + EXPORT
TRAINED = PLACEMENT + NUMBERS
ACCURACY = "tests/benchmarks/accuracy"
SPEED = "tests/benchmarks/performance"
ZOO = "tests/benchmarks/zoo"

PAGES: dict[str, tuple[str, ...]] = {
    "evidence/parity": (f"{ZOO}/parity.py", *ALL),
    "evidence/zoo": (f"{ZOO}/zoo.py", *TRACING, *PLACEMENT),
    "evidence/zoo_yolov5": (f"{ZOO}/yolov5_sizes.py", "example/yolov5_example", *ALL),
    "evidence/random_nets": (f"{ZOO}/random_nets.py", "tests/random_net.py", *ALL),
    "evidence/random_recurrent_nets": (f"{ZOO}/random_nets.py", "tests/random_net.py", *ALL),
    "evidence/third_party": ("tests/benchmarks/third_party.py", "tests/benchmarks/third_party_models.py", *ALL),
    "evidence/clients": ("tests/benchmarks/clients.py", "tests/benchmarks/client_programs", *ALL),
    "evidence/accuracy_resnet20": (f"{ACCURACY}/resnet20_cifar10.py", *TRAINED),
    "evidence/accuracy_mobilenet_v2": (f"{ACCURACY}/mobilenet_v2_imagenet.py", *TRAINED, *EXPORT),
    "evidence/accuracy_ptq": (f"{ACCURACY}/ptq.py", "fxqat/tools/post_training", *TRAINED),
    "evidence/accuracy_peers": (f"{ACCURACY}/peers.py", "fxqat/tools/post_training", *TRAINED, *EXPORT),
    "evidence/accuracy_transformers": (
        f"{ACCURACY}/trained_transformers.py",
        "fxqat/tools/post_training",
        *TRAINED,
        *EXPORT,
    ),
    "evidence/accuracy_qat": (f"{ACCURACY}/qat.py", "fxqat/tools/training", *TRAINED),
    "evidence/accuracy_imagenet_example": (f"{ACCURACY}/imagenet_example.py", "example/imagenet_example", *TRAINED),
    "evidence/accuracy_yolov5": (f"{ACCURACY}/yolov5_coco.py", "example/yolov5_example", *TRAINED),
    "evidence/accuracy_mixed_precision": (f"{ACCURACY}/mixed_precision.py", "fxqat/tools/mixed_precision", *TRAINED),
    "evidence/accuracy_recurrent": (f"{ACCURACY}/recurrent.py", *TRAINED),
    "evidence/accuracy_speaker": (f"{ACCURACY}/speaker_encoder.py", "fxqat/tools/post_training", *TRAINED, *EXPORT),
    "evidence/accuracy_skip_until": (f"{ACCURACY}/skip_until.py", "fxqat/tools/mixed_precision", *TRAINED),
    "evidence/accuracy_ladder": (f"{ACCURACY}/ladder.py", "fxqat/tools", *TRAINED),
    "evidence/onnx_in": ("tests/benchmarks/onnx_in.py", "fxqat/cli", *ALL),
    "evidence/step_time": (f"{SPEED}/step_time.py", *TRAINED),
    "evidence/step_time_gpu": (f"{SPEED}/step_time.py", *TRAINED),
    "evidence/step_account": (f"{SPEED}/step_account.py", f"{SPEED}/step_time.py", *TRAINED),
    "evidence/step_compiled": (f"{SPEED}/compiled_step.py", f"{SPEED}/step_time.py", *TRAINED),
    "evidence/export_memory": (f"{SPEED}/export_memory.py", *EXPORT, "fxqat/quantization"),
    "evidence/cost_against_size": (f"{SPEED}/cost_against_size.py", *ALL),
    "evidence/ort_latency": (f"{SPEED}/ort_latency.py", *PLACEMENT, *EXPORT),
    "evidence/runtime_latency": (f"{SPEED}/runtime_latency.py", *PLACEMENT, *EXPORT),
    "evidence/without_vnni": (
        f"{SPEED}/without_vnni.py",
        f"{SPEED}/runtime_latency.py",
        *PLACEMENT,
        *EXPORT,
    ),
    "evidence/dynamic_latency": (f"{SPEED}/dynamic_latency.py", *PLACEMENT, *EXPORT),
    "evidence/prepare_time": (f"{SPEED}/prepare_time.py", *TRACING, *PLACEMENT),
    "evidence/engines_measured": ("tests/benchmarks/engines.py", "fxqat/tools/engines", *PLACEMENT, *EXPORT),
    "evidence/bit_widths": ("tests/benchmarks/bit_widths/matrix.py", *NUMBERS, *EXPORT),
    "reference/op_table": ("tests/ops/generate.py", *ALL),
}
"""What each measured page depends on: its script and the code that decides its figures."""

Read = Callable[[str], dict[str, str]]
"""The Python files of a folder, or a file, by name: of this folder, or of a commit."""


def on_disk(path: str) -> dict[str, str]:
    """The Python files as they are."""
    files = [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).rglob("*.py"))
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files if file.exists()}


def git(*arguments: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def at_commit(commit: str) -> Read:
    """The Python files as they were."""

    def read(path: str) -> dict[str, str]:
        names = git("ls-tree", "-r", "--name-only", commit, "--", path).split()
        return {name: git("show", f"{commit}:{name}") for name in sorted(names) if name.endswith(".py")}

    return read


@cache
def code_of(source: str) -> str:
    """The source without comments, docstrings and blank lines; equal for every version of Python."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def short_hash(text: str) -> str:
    """Twelve digits of its SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def hashes(paths: tuple[str, ...], read: Read) -> dict[str, str]:
    """The hash of each folder or file."""
    return {path: short_hash(json.dumps({n: code_of(text) for n, text in read(path).items()})) for path in paths}


def page_hash(page: str) -> str:
    """The hash of a page."""
    return short_hash((DOCS / f"{page}.rst").read_text(encoding="utf-8"))


def manifest() -> dict[str, dict]:
    """What was recorded."""
    return json.loads(MANIFEST.read_text(encoding="utf-8")) if MANIFEST.exists() else {}


def record(page: str, commit: str, note: str) -> None:
    """Record that a page holds what was measured with a commit; the note says what is known to differ since."""
    entry = {
        "commit": git("rev-parse", "--short=9", commit).strip(),
        "date": git("show", "-s", "--format=%cs", commit).strip(),
        "page": page_hash(page),
        "note": note,
        "code": hashes(PAGES[page], at_commit(commit)),
    }
    MANIFEST.write_text(
        json.dumps(dict(sorted({**manifest(), page: entry}.items())), indent=1) + "\n", encoding="utf-8"
    )


def changed(page: str, entry: dict) -> list[str]:
    """The folders and files that a page depends on and that have changed since."""
    now = hashes(PAGES[page], on_disk)
    return [path for path in now if entry["code"].get(path) != now[path]]


def sentences(page: str) -> str:
    """The note that a page begins with."""
    entry = manifest()[page]
    script, *_ = PAGES[page]
    text = f"Measured on {entry['date']} at commit ``{entry['commit']}`` by ``{script}``. {entry['note']}".rstrip()
    paths = changed(page, entry)
    if not paths:
        return f".. note::\n\n   {text} The code that decides these figures is the same today.\n\n"
    names = ", ".join(f"``{path}``" for path in paths)
    words = f"{text}\n\n   Changed since, and may change the figures: {names}."
    return f".. admonition:: Older than the code\n   :class: warning\n\n   {words}\n\n"


def _add_note(app: object, page: str, source: list[str]) -> None:
    """Put the note below the heading of a measured page, and the table of all where ``|measured pages|`` stands."""
    if page in PAGES:
        heading, underline, rest = source[0].split("\n", 2)
        source[0] = f"{heading}\n{underline}\n\n{sentences(page)}{rest}"
    elif "|measured pages|" in source[0]:
        rows = [".. list-table::", "   :header-rows: 1", "   :widths: 40 20 40", "", "   * - Page", "     - Measured"]
        rows.append("     - Changed since")
        entries = manifest()
        for name in PAGES:
            count = len(changed(name, entries[name]))
            paths = f"{count} of {len(PAGES[name])} folders and files" if count else "nothing"
            rows += [f"   * - :doc:`/{name}`", f"     - {entries[name]['date']}, ``{entries[name]['commit']}``"]
            rows.append(f"     - {paths}")
        source[0] = source[0].replace("|measured pages|", "\n".join(rows))


def setup(app: object) -> dict[str, bool]:
    """Connect the extension."""
    app.connect("env-get-outdated", lambda *_: [*PAGES, "evidence/index"])  # code may have changed where a page has not
    app.connect("source-read", _add_note)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", choices=PAGES, help="the page that a script has written")
    parser.add_argument("--commit", default="HEAD", help="the commit that was measured (default: HEAD)")
    parser.add_argument("--note", default="", help="what is known to differ today, for the reader")
    arguments = parser.parse_args()
    record(arguments.page, arguments.commit, arguments.note)
