"""The example of "Add a backend" runs as it is on the page and does what the page says."""

import re
import runpy
import warnings
from dataclasses import fields
from pathlib import Path

import onnx
import pytest
from torch import nn

from fxqat import prepare_by_platform
from fxqat.custom_quantizer.spec import BackendSpec, LegalSchemes, Rule
from fxqat.errors import ConfigError

pytestmark = pytest.mark.xdist_group("own_backend")  # the example runs once
DOCS = Path(__file__).parents[1] / "docs" / "howto"
EXAMPLE = DOCS / "own_backend.py"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The variables of the example after it ran, and the folder where it ran."""
    folder = tmp_path_factory.mktemp("own_backend")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.chdir(folder)
        warnings.simplefilter("ignore")
        return runpy.run_path(str(EXAMPLE)), folder


def test_it_is_short_and_on_the_page():
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 60
    page = (DOCS / "add_a_backend.rst").read_text(encoding="utf-8")
    assert ".. literalinclude:: own_backend.py" in page
    start = next(line for line in page.splitlines() if ":start-at:" in line).partition(":start-at: ")[2]
    assert start in lines


@pytest.mark.parametrize("table", [BackendSpec, Rule, LegalSchemes])
def test_the_page_has_every_field_of_a_table(table):
    page = (DOCS / "add_a_backend.rst").read_text(encoding="utf-8").partition("Add it to fxqat")[0]
    named = set(re.findall(r"``(\w+)``", " ".join(re.findall(r"^   \* - (.*)$", page, re.MULTILINE))))
    assert {field.name for field in fields(table)} <= named
    assert "least_work" in named


def test_no_reason_of_another_engine_is_given_as_one_of_the_chip(ran):
    names, _ = ran
    chip, report = names["MY_CHIP"], names["gm"].quant_report
    assert (chip.least_work, chip.runtime) == (0, "")
    taken = [row.reason for row in report if "QLinear" in row.reason]
    assert taken
    assert all(reason.startswith("as on ONNXRuntime: ") for reason in taken)
    assert not any("ONNX Runtime" in row.reason for row in report)
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Hardswish(), nn.Conv2d(8, 8, 1), nn.Hardswish())
    rows = {row.op: row for row in prepare_by_platform(model, chip).quant_report}
    assert rows["conv2d"].weight == "int8 sym per-tensor narrow"
    assert rows["hardswish"].reason == "MyChip has no rule for hardswish: data sheet, table 7: no kernel"
    with pytest.raises(ConfigError, match="MyChip cannot run int4"):
        prepare_by_platform(model, chip, {"overrides": [{"match": {"module": "0"}, "weight": {"bit_width": 4}}]})


def test_the_report_says_at_its_top_what_stays_float_by_least_work():
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Hardswish(), nn.Conv2d(8, 8, 1), nn.Hardswish(), nn.Linear(4, 256))
    head = str(prepare_by_platform(model, "ONNXRuntime").quant_report).splitlines()[0]
    assert "2 stay float because converting their values costs more than integers save (least_work)" in head


def test_the_report_shows_what_the_table_says(ran):
    names, _ = ran
    report = names["gm"].quant_report
    assert report.backend == "MyChip"
    rows = {row.op: row for row in report}
    assert {rows[op].weight for op in ("conv2d", "linear")} == {"int8 sym per-tensor narrow"}
    integers = names["INTEGERS"].reason
    assert {op for op, row in rows.items() if integers in row.reason} == {"linear", "hardsigmoid", "mul"}
    assert rows["hardsigmoid"].output.endswith("fixed[0,1]") or rows["hardsigmoid"].status == "shares"


def test_the_file_is_written_and_holds_integers(ran):
    _, folder = ran
    model = onnx.load(folder / "own_backend.onnx")
    stored = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert stored["conv.weight_quantized"] == stored["fc.weight_quantized"] == onnx.TensorProto.INT8
    quantized = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert {node.op_type for node in model.graph.node} >= {"Conv", "HardSigmoid", "Mul"}
    assert len(quantized) >= 5
