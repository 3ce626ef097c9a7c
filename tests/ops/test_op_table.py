"""The op table: every spelling of every row is found, trained and exported, on every backend.

Several rows share a model, a branch for each spelling. Only when such a group fails does each spelling run alone, and
the failure names those that fail.
"""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fxqat import prepare_by_platform
from fxqat.custom_quantizer.backend_type import backend_spec
from fxqat.errors import ExportError
from tests.export_models import BACKENDS
from tests.models import FURTHER_BACKENDS
from tests.ops.cases import BEYOND, CASES, TABLE, build, by_decomposition, grouped
from tests.ops.run_cases import (
    alone,
    calibrate_and_train,
    export,
    placement,
    prepare,
    spellings_of,
    without_gradient,
)

ROWS = 62
EVERY_SPELLING = grouped(CASES)
FIRST_SPELLINGS = grouped([case.only_first() for case in CASES])
OTHER_PLACEMENTS = [backend for backend in BACKENDS if backend not in ("TSQAT", "Experimental")]  # these two are alike
EXPORTED = [("TSQAT", cases) for cases in grouped(by_decomposition(CASES))]
EXPORTED += [
    (backend, cases)
    for backend in OTHER_PLACEMENTS
    for cases in grouped(by_decomposition([case.only_first() for case in CASES]))
    if not cases[0].fails
]
HEADER = (
    "case | spelling | status | output | weight | reason | "
    "ops of the branch (op:number of the scale, - if float, * if the weight is quantized)"
)


class MaskedScores(nn.Module):
    """Attention scores to which a mask is added."""

    def __init__(self, as_buffer):
        super().__init__()
        self.query, self.key, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(6, 2)
        mask = torch.full((6, 6), float("-inf")).triu(1)
        self.register_buffer("mask", mask if as_buffer else None)

    def forward(self, x):
        scores = self.query(x) @ self.key(x).mT
        mask = x.new_zeros((6, 6)).masked_fill(torch.ones(6, 6).triu(1) > 0, -1e9) if self.mask is None else self.mask
        return self.out((scores + mask).softmax(-1))


def assert_covered(cases, backend, folder):
    """What *covered* means: placed as expected, trained, exported, and equal to ONNX Runtime."""
    gm, inputs = prepare(cases, backend)
    gradients = calibrate_and_train(gm, inputs)
    for name, gradient in gradients.items():
        assert gradient is None or gradient.isfinite().all(), name
    for spelled in spellings_of(cases, gm):
        assert [row.status for row in spelled.rows] == [spelled.case.status_on(backend)], spelled.text
        assert all(row.reason for row in spelled.nodes), spelled.text
        assert without_gradient(spelled, gradients) == [], spelled.text
    if cases[0].fails:
        with pytest.raises(ExportError) as caught:
            export(gm, inputs, folder)
        assert cases[0].failure in str(caught.value)
        assert list(folder.iterdir()) == []
        return
    certificate = export(gm, inputs, folder)
    assert certificate.passed
    worst = {t.name: max(t.free.off_by_2_plus, t.step.off_by_2_plus) for t in certificate.tensors}
    assert {name: share for name, share in worst.items() if share} == {}


def failures_alone(cases, backend, folder):
    """The spellings of a group that fail by themselves, with the reason."""
    for case in alone(cases):
        try:
            assert_covered((case,), backend, folder)
        except Exception as error:  # noqa: BLE001  whatever it is, it is reported
            reason = str(error).partition("\n")[0]
            yield f"{case.name} on {backend}: {case.spellings[0]}: {type(error).__name__}: {reason}"


def names(value):
    if isinstance(value, str):
        return value
    return value[0].name if len(value) == 1 else f"{value[0].name}..{value[-1].name}"


@pytest.mark.parametrize(("backend", "cases"), EXPORTED, ids=names)
def test_every_spelling_is_covered(backend, cases, tmp_path):
    """Every spelling on TSQAT, the first one of every row on the other placements."""
    try:
        assert_covered(cases, backend, tmp_path)
    except Exception as error:
        if len(alone(cases)) == 1:
            raise
        found = list(failures_alone(cases, backend, tmp_path))
        raise AssertionError("\n".join(found) or "every spelling passes alone, the group does not") from error


def test_a_failure_names_its_spelling(tmp_path):
    """Rounding has no gradient: a row that claims one fails, the other row of its group does not."""
    good = next(case for case in CASES if case.op == "abs").only_first()
    bad = replace(next(case for case in CASES if case.op == "round"), gradient=True)
    with pytest.raises(AssertionError) as caught:
        test_every_spelling_is_covered("TSQAT", (good, bad), tmp_path)
    lines = [line for line in str(caught.value).splitlines() if " on TSQAT: " in line]
    assert [line.split(": ")[1] for line in lines] == list(bad.spellings)


def placements(backend):
    """A line for every spelling on TSQAT, for the first one of every row on the others."""
    groups = EVERY_SPELLING if backend == "TSQAT" else FIRST_SPELLINGS
    split = backend_spec(backend).split  # ops that are not in its graphs
    kept = [tuple(case for case in cases if case.op not in split) for cases in groups]
    return [line for cases in kept if cases for line in placement(cases, backend)]


@pytest.mark.parametrize(
    "backend", [backend for backend in (*BACKENDS, *FURTHER_BACKENDS) if backend != "Experimental"]
)
def test_placement_is_the_reviewed_one(backend, golden):
    lines = [HEADER, *placements(backend)]
    assert lines == golden(f"op_table-{backend}", "\n".join([*lines, ""])).splitlines()
    kept = [case for case in CASES if case.op not in backend_spec(backend).split]
    assert len(lines) == 1 + (len(alone(CASES)) if backend == "TSQAT" else len(kept))


def test_experimental_places_as_tsqat():
    found = placements("Experimental")
    first = {(case.name, case.spellings[0]) for case in CASES}
    golden = Path(__file__).parents[1] / "golden" / "op_table-TSQAT.txt"
    reviewed = golden.read_text(encoding="utf-8").splitlines()
    tsqat = [line for line in reviewed if tuple(line.split(" | ")[:2]) in first]
    as_tsqat = [line.replace("uint8 asym", "int8 sym").replace("Experimental", "TSQAT") for line in found]
    assert sorted(as_tsqat) == sorted(tsqat)
    assert sum("uint8 asym" in line for line in found) > len(CASES) // 2


def test_all_rows_of_the_table_have_a_case():
    assert {case.row for case in TABLE} == set(range(1, ROWS + 1))
    assert {case.row for case in BEYOND} == {"beyond"}
    written = [(case.op, case.kind, text) for case in CASES for text in case.spellings]
    assert len(set(written)) == len(written)


@pytest.mark.parametrize("row", [19, 20, 21])
def test_recurrent_layers_stay_float_between_quantized_neighbours(row, caplog):
    case = next(case for case in TABLE if case.row == row)
    model, inputs = build(case)
    with caplog.at_level(logging.INFO, logger="fxqat"):
        report = prepare_by_platform(model, "LiteRT", example_inputs=inputs).quant_report
    assert report.row("branches.0.m").status == "float"
    assert [report.row(f"branches.0.{layer}").status for layer in ("before", "after")] == ["quantized"] * 2
    assert [record.getMessage() for record in caplog.records if record.name == "fxqat"] == [
        "branches.0.m stays float: recurrent layers stay float: LiteRT's 8-bit specification has no such operator; "
        "its neighbours are quantized"
    ]


@pytest.mark.parametrize("op", ["max_dim", "topk", "sort"])
def test_indices_are_no_values_without_example_inputs(op):
    case = next(case for case in CASES if case.op == op and case.kind == "image").only_first()
    model, _ = build(replace(case, last="r + x[:, :1] * 0"))
    report = prepare_by_platform(model.eval(), "TSQAT").quant_report
    assert [row.status for row in report if row.op == op] == ["shares"]
    assert [row.status for row in report if row.op == "getitem"] == ["shares", "shares"]


@pytest.mark.parametrize("kind", ["added", "buffer"])
def test_a_mask_of_infinities_stays_float_and_is_not_calibrated(kind, tmp_path):
    model = MaskedScores(kind == "buffer")
    inputs = (torch.randn(2, 6, 8),)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=inputs)
    calibrate_and_train(gm, inputs)
    reasons = {row.op: row.reason for row in gm.quant_report if row.status == "float"}
    assert "stand for infinity" in reasons["add"]
    assert next(row.status for row in gm.quant_report if row.op == "softmax") == "quantized"
    assert export(gm, inputs, tmp_path).passed
