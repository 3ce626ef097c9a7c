"""The op table: every spelling of every row is found, trained and exported, on every backend."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from fxqat import prepare_by_platform
from fxqat.errors import ExportError
from tests.export_models import BACKENDS
from tests.models import FURTHER_BACKENDS
from tests.ops.cases import BEYOND, CASES, TABLE, build, grouped
from tests.ops.run_cases import calibrate_and_train, export, prepare, spellings_of

ROWS = 62
OTHER_PLACEMENTS = [backend for backend in BACKENDS if backend not in ("TSQAT", "Experimental")]  # these two are alike
EVERY_SPELLING = [(case,) for case in TABLE] + grouped(BEYOND)
ONE_SPELLING = grouped([case.only_first() for case in CASES if not case.fails])


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


def names(cases):
    return cases[0].name if len(cases) == 1 else f"{cases[0].name}..{cases[-1].name}"


def assert_covered(cases, backend, folder):
    """What *covered* means: placed as expected, trained, exported, and equal to ONNX Runtime."""
    gm, inputs = prepare(cases, backend)
    gradients = calibrate_and_train(gm, inputs)
    for name, gradient in gradients.items():
        assert gradient is None or gradient.isfinite().all(), name
    for spelled in spellings_of(cases, gm, gradients):
        assert [row.status for row in spelled.rows] == [spelled.case.status_on(backend)], spelled.text
        assert all(row.reason for row in spelled.rows)
        if spelled.case.gradient and spelled.case.kind != "ids":
            assert spelled.gradient is not None, spelled.text
            assert spelled.gradient.abs().sum() > 0, spelled.text
    if cases[0].fails:
        with pytest.raises(ExportError) as caught:
            export(gm, inputs, folder)
        assert cases[0].failure in str(caught.value)
        assert list(folder.iterdir()) == []
        return
    certificate = export(gm, inputs, folder)
    assert certificate.passed
    assert max(max(tensor.free.off_by_2_plus, tensor.step.off_by_2_plus) for tensor in certificate.tensors) == 0


@pytest.mark.parametrize("cases", EVERY_SPELLING, ids=names)
def test_every_spelling_is_covered_on_tsqat(cases, tmp_path):
    assert_covered(cases, "TSQAT", tmp_path)


@pytest.mark.parametrize("backend", OTHER_PLACEMENTS)
@pytest.mark.parametrize("cases", ONE_SPELLING, ids=names)
def test_every_row_is_covered_on_every_placement(cases, backend, tmp_path):
    assert_covered(cases, backend, tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_placement_is_the_reviewed_one(backend, golden):
    parts = []
    for case in CASES:
        gm, _ = prepare([case if backend == "TSQAT" else case.only_first()], backend)
        parts.append(f"# {case.name}\n{gm.quant_report.to_text()}")
    text = "\n".join(parts)
    assert len(parts) == len(CASES)
    assert text.splitlines() == golden(f"op_table-{backend}", text).splitlines()


@pytest.mark.parametrize("backend", FURTHER_BACKENDS)
def test_placement_on_further_backends_is_the_reviewed_one(backend, golden):
    """A line for the first spelling of every row; without the names of its readers, which hold a running number."""
    lines = []
    for cases in ONE_SPELLING:
        gm, _ = prepare(cases, backend)
        for spelled in spellings_of(cases, gm):
            (row,) = spelled.rows
            reason = "; ".join(part for part in row.reason.split("; ") if not part.startswith("read quantized by"))
            name = spelled.case.name
            lines.append(f"{name} | {row.status} | {row.output or '-'} | {row.weight or '-'} | {reason}")
    assert len(lines) == sum(len(cases) for cases in ONE_SPELLING)
    assert lines == golden(f"op_table-{backend}", "\n".join([*lines, ""])).splitlines()


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
        report = prepare_by_platform(model, "TSQAT", example_inputs=inputs).quant_report
    assert report.row("branches.0.m").status == "float"
    assert [report.row(f"branches.0.{layer}").status for layer in ("before", "after")] == ["quantized"] * 2
    assert [record.getMessage() for record in caplog.records if record.name == "fxqat"] == [
        "branches.0.m stays float: recurrent layers stay float; its neighbours are quantized"
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
