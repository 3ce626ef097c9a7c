"""The page of the zoo: totals of the results, and every failure."""

from __future__ import annotations

from typing import Any

import timm
import torchvision
from prettytable import PrettyTable

from fxqat.onnx.verify import MAX_OFF_BY_ONE

Result = dict[str, Any]
MIN_COSINE = 0.9999
"""Of the outputs, end to end: where it is less, the network's own cosine is measured too."""

EXPORTS = """Each model is trained one step and exported at opset 18. Then every quantized tensor is computed from the
fake-quant model's own integers by ONNX Runtime without optimizations, and compared.

* *off by 1*, *off by 2+*: the largest share of values of a tensor that are one step off, or two and more. Values within
  1e-4 of a step of a rounding boundary are not counted (:doc:`/concepts/verify`); where there are such values, the
  verdict shows their share.
* *cosine*: similarity of the outputs, end to end. *s*: seconds.
* *the network's own*: a network with random weights may amplify a single value that float32 sums put on the other side
  of a rounding boundary until its outputs differ. For comparison, the fake-quant model runs again, without any export,
  with as many random values of the same tensors moved by one step; this is the cosine between its two outputs.
"""

DETECTORS = """These models run as a whole, from a list of images to boxes. Pre- and post-processing (non-maximum
suppression) are Python code that depends on the values of tensors, and stay float; backbone, pyramid and heads are
quantized. The models are not exported: a device gets the network alone (see :doc:`/troubleshooting/faq`).
"""


def page(results: list[Result], known: dict[str, int]) -> str:
    """The documentation page of these results; ``known``: the number of models of each suite."""
    exported = [r for r in results if ("off_by_2" in r or "export_error" in r) and not r.get("detection")]
    prepared = {(r["suite"], r["name"]): r for r in sorted(results, key=lambda r: "export_seconds" in r, reverse=True)}
    versions = " and ".join(sorted({r["torch"] for r in results if "torch" in r}))
    parts = [
        f"""All models of timm and torchvision
==================================

Whether every architecture of timm and torchvision is traced and quantized, with no change to its code: each model, with
random weights and example inputs of the smallest size it takes, is prepared for TSQAT. Models of more than 60M
parameters are on the meta device, except those in the last table.

* *models*: all of torchvision {torchvision.__version__} and timm {timm.__version__}. *without a leaf*: models without a
  float leaf, that is, without a module or function that could not be traced.
* *quantized share*: share of the multiply-accumulates of convolutions and linear layers whose weight is quantized.

Written by ``tests/benchmarks/zoo/zoo.py`` with torch {versions}; do not edit.
""",
        _totals(list(prepared.values()), known),
        _section("Not prepared", _failures(prepared.values())),
        _section("With float leaves", _leaves(prepared.values())),
        _section("Quantized share below 99 %", _shares(prepared.values())),
        _section("Detection models, trained a step", _detectors(results)),
        _section("Exported and compared with ONNX Runtime", _exports(exported)),
    ]
    return "\n".join(parts)


def verdict(result: Result) -> str:
    """Whether the exported file computes what the fake-quant model computes, with the limits of the parity page.

    If every tensor is equal but the outputs are not, the verdict shows how much the network amplifies single steps.
    """
    if "export_error" in result:
        return str(result["export_error"])
    off_by_1 = max(result["off_by_1"], result["first_off_by_1"])
    off_by_2 = max(result["off_by_2"], result["first_off_by_2"])
    if off_by_2 > 0 or off_by_1 > MAX_OFF_BY_ONE:
        return "beyond the limits"
    if result["cosine"] > MIN_COSINE:
        return f"ok; {result['ties']:.2%} on a boundary" if result.get("ties") else "ok"
    own = result["own_cosine"]
    return f"steps equal; the network's own: {own:.6f}" if own <= MIN_COSINE else "beyond the limits"


def _share(result: Result) -> float:
    return float(result["quantized_macs"] / result["macs"]) if result.get("macs") else 1.0


def _table(header: list[str], rows: list[list[Any]]) -> str:
    table = PrettyTable(header, align="l")
    table.max_width = 90
    table.add_rows(rows)
    table.hrules = 1
    return str(table.get_string())


def _section(title: str, body: str) -> str:
    return f"{title}\n{'-' * len(title)}\n\n{body or 'None.'}\n"


def _totals(results: list[Result], known: dict[str, int]) -> str:
    rows = []
    for suite in sorted({r["suite"] for r in results}):
        of = [r for r in results if r["suite"] == suite]
        done = [r for r in of if "error" not in r]
        clean = sum(not r["leaves"] for r in done)
        full = sum(_share(r) >= 0.99 for r in done)
        seconds = sorted(r["prepare_seconds"] for r in done)
        median = f"{seconds[len(seconds) // 2]:.1f}" if seconds else "-"
        share = f"{full} ({full / max(1, len(done)):.1%})"
        rows.append([suite, known[suite], len(of), len(done), clean, share, median])
    header = ["suite", "models", "run", "prepared", "without a leaf", "quantized share >= 99 %", "prepare, median s"]
    return _table(header, rows) + "\n"


def _failures(results: Any) -> str:
    rows = [[r["suite"], r["name"], r["error"]] for r in results if "error" in r]
    return _table(["suite", "model", "error"], rows) if rows else ""


def _leaves(results: Any) -> str:
    rows = [[r["suite"], r["name"], "; ".join(r["leaves"])[:300]] for r in results if r.get("leaves")]
    return _table(["suite", "model", "leaves"], rows) if rows else ""


def _shares(results: Any) -> str:
    rows = [[r["suite"], r["name"], f"{_share(r):.1%}"] for r in results if "error" not in r and _share(r) < 0.99]
    return _table(["suite", "model", "quantized share"], rows) if rows else ""


def _detectors(results: list[Result]) -> str:
    rows = [
        [r["name"], r.get("export_error", "a step"), str(len(r["leaves"])), f"{_share(r):.1%}", str(r["quantized"])]
        for r in sorted(results, key=lambda r: str(r["name"]))
        if r.get("detection") and "error" not in r
    ]
    header = ["model", "trained", "float leaves", "quantized share", "quantized values"]
    return f"{DETECTORS}\n{_table(header, rows)}" if rows else ""


def _exports(results: list[Result]) -> str:
    rows = []
    for r in sorted(results, key=lambda r: (r["suite"], r["family"], r["name"])):
        figures = ["-"] * 4
        if "export_error" not in r:
            off_by_1, off_by_2 = (max(r[f"off_by_{i}"], r[f"first_off_by_{i}"]) for i in (1, 2))
            figures = [f"{off_by_1:.4%}", f"{off_by_2:.4%}", f"{r['cosine']:.6f}", f"{r['export_seconds']:.0f}"]
        rows.append([r["suite"], r["family"], r["name"], str(r["input"]), *figures, verdict(r)])
    passed = sum(str(row[-1]).startswith("ok") for row in rows)
    header = ["suite", "family", "model", "input", "off by 1", "off by 2+", "cosine", "s", "verdict"]
    return f"The verdict is ok for {passed} of {len(rows)} models.\n\n{EXPORTS}\n{_table(header, rows)}" if rows else ""
