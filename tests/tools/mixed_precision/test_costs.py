"""Costs against values computed by hand."""

import pytest

from fxqat import convert_export
from fxqat.tools.mixed_precision.costs import average_weight_bits, file_bytes, weight_bytes

A, B, C, HEAD = 8 * 3 * 9, 8 * 8 * 9, 8 * 8, 5 * 16


@pytest.fixture(scope="module")
def cost(bank, batches):
    return file_bytes(bank, batches[0])


def test_memory_of_weights(bank):
    widths = dict.fromkeys(bank.units, 8) | {"a.weight": 4, "c.weight": 2}
    assert weight_bytes(bank).of(widths) == A / 2 + B + C / 4 + HEAD
    elements = A + B + C + HEAD
    assert average_weight_bits(bank).of(widths) == pytest.approx((4 * A + 8 * B + 2 * C + 8 * HEAD) / elements)


@pytest.mark.parametrize("narrow", [(), ("b.weight",), ("b.weight", "head.weight", "a.weight", "c.weight")])
def test_the_size_of_the_file(bank, batches, cost, narrow, tmp_path):
    widths = {name: choice[-1] for name, choice in bank.widths.items()} | dict.fromkeys(narrow, 4)
    report = convert_export(bank.mix(widths), (batches[0],), tmp_path / "a.onnx", opset_version=21, verify=False)
    assert cost.of(widths) == pytest.approx(report.onnx_path.stat().st_size, abs=32)  # numbers vary in length
    assert cost.of(widths | dict.fromkeys(narrow, 2)) == cost.of(widths)  # 2 bits are stored in 4
