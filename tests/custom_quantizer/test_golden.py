"""Every decision about every toy model, by every backend, against the reviewed text in ``tests/golden``."""

import pytest

from tests.models import BACKENDS, TOYS, prepared


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TOYS)
def test_placement_is_the_reviewed_one(name, backend, golden):
    gm = prepared(name, backend)
    text = gm.quant_report.to_text()
    assert text.splitlines() == golden(f"{name}-{backend}", text).splitlines()
    assert len(gm.quant_report) == len(text.splitlines())


@pytest.mark.parametrize("name", TOYS)
def test_experimental_places_as_tsqat(name):
    reports = [prepared(name, backend).quant_report for backend in ("TSQAT", "Experimental")]
    placements = [[(r.node, r.op, r.status, r.group, bool(r.weight), r.reason) for r in report] for report in reports]
    assert placements[0] == placements[1]
    outputs = {r.output.split()[0] for r in reports[1] if r.output}
    assert outputs == {"uint8"}
