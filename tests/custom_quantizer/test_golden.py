"""Every decision about every toy model, by every backend, against the reviewed text in ``tests/golden``."""

import pytest

from fxqat.errors import ConfigError
from tests.models import BACKENDS, FURTHER_BACKENDS, TOYS, VARIANTS, prepared

NOTHING = [(name, backend) for name in ("conv1d", "conv3d", "transpose_convs") for backend in ("ArmCPU", "X86")]
PAIRS = [(name, backend) for name in TOYS for backend in (*BACKENDS, *FURTHER_BACKENDS)]


@pytest.mark.parametrize(("name", "backend"), [pair for pair in PAIRS if pair not in NOTHING])
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


@pytest.mark.parametrize(("name", "backend"), NOTHING)
def test_a_model_without_a_layer_of_the_list_is_refused_with_the_reasons(name, backend):
    with pytest.raises(ConfigError, match=f"nothing to quantize for {backend}") as caught:
        prepared(name, backend)
    assert f"{backend} has no rule for conv" in str(caught.value)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["attention", "concat", "residual", "squeeze_excite"])
def test_a_variant_places_as_its_backend(name, variant):
    reports = [prepared(name, backend).quant_report for backend in (VARIANTS[variant], variant)]
    placements = [[(r.node, r.status, r.group, bool(r.output), bool(r.weight)) for r in report] for report in reports]
    assert placements[0] == placements[1]
    schemes = [
        {(r.output.split("-")[0], r.weight.split()[0] if r.weight else "") for r in report} for report in reports
    ]
    assert schemes[0] != schemes[1]
