"""The report: one row a node, found by name, printed as a table and as plain text."""

from pathlib import Path

import pytest

from fxqat import prepare_by_platform
from fxqat.quantization.report import QuantReport, ReportRow
from tests.models import BACKENDS, build, prepared

FIELDS = ["node", "op", "status", "output", "weight", "group", "reason"]


def row(node, status="quantized", **changes):
    values = {"op": "conv2d", "target": node, "output": "int8", "weight": "", "group": 0, "reason": "why", "source": ""}
    return ReportRow(node=node, status=status, **(values | changes))


@pytest.mark.parametrize("backend", BACKENDS)
def test_there_is_one_row_for_every_node(backend):
    report = prepared("residual", backend).quant_report
    assert report.backend == backend
    assert [r.node for r in report][:3] == ["x", "stem", "layer1_0_conv1"]
    assert len(report) == len(list(report)) == 13
    assert report.num_quantized == sum(r.status in ("quantized", "shares") for r in report)


def test_rows_are_found_by_node_and_by_module_path():
    report = prepared("residual").quant_report
    assert report.row("layer1_0_conv1") is report.row("layer1.0.conv1")
    assert report.row("layer1.0.conv1").weight == "int8 sym per-channel narrow"
    with pytest.raises(KeyError, match="layer9"):
        report.row("layer9")


def test_rows_point_to_the_line_of_the_model():
    report = prepare_by_platform(build("residual")).quant_report
    file, _, line = report.row("layer1.0.conv1").source.rpartition(":")
    assert file.endswith("models.py")
    assert "self.conv1(x)" in Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    assert report.row("x").source == ""


def test_plain_text_is_one_line_a_row_without_lines_of_the_users_files():
    report = prepared("tuple_output").quant_report
    lines = report.to_text().splitlines()
    assert len(lines) == len(report)
    assert all(len(line.split(" | ")) == len(FIELDS) for line in lines)
    assert "models.py" not in report.to_text()
    assert lines[1].split(" | ")[:6] == [
        "conv",
        "conv2d",
        "quantized",
        "int8 sym per-tensor",
        "int8 sym per-channel narrow",
        "g1",
    ]


def test_the_table_has_a_headline_and_all_columns():
    report = prepared("conv_bn_relu", "TensorRT").quant_report
    headline, _, header = str(report).splitlines()[:3]
    assert headline == f"TensorRT: {report.num_quantized} of {len(report)} nodes quantized"
    assert [cell.strip() for cell in header.strip("|").split("|")] == FIELDS
    assert len(str(report).splitlines()) == len(report) + 7
    assert "not compared with the model yet" in str(report).splitlines()


def test_empty_cells_are_dashes_in_text():
    report = QuantReport("Mine", (row("a"), row("b", "float", output="", group=None, reason="none")))
    assert report.to_text() == "a | conv2d | quantized | int8 | - | g0 | why\nb | conv2d | float | - | - | - | none\n"
    assert report.num_quantized == 1
    assert report == QuantReport("Mine", tuple(report))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_reason_promises_a_rounding_that_is_not_there(backend):
    """Where a row says "quantized after r", the value of r is rounded."""
    for name in ("residual", "shared_module", "functional_weights", "pre_activation", "multi_input"):
        report = prepared(name, backend).quant_report
        promises = [r.reason.partition("quantized after ")[2] for r in report]
        promised = [promise.split(";")[0] for promise in promises if promise]
        kept = [report.row(reader).status for reader in promised]
        assert "float" not in kept, (name, report.to_text())
        assert all(report.row(reader).output for reader in promised)
