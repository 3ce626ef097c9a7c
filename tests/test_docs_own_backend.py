"""The example of "Add a backend" runs as it is on the page and does what the page says."""

import runpy
import warnings
from pathlib import Path

import onnx
import pytest

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
