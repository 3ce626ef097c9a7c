"""Every decision about every toy model, by every backend, against the reviewed text in ``tests/golden``."""

from dataclasses import replace

import pytest

from fxqat.custom_quantizer.backend_type import BACKENDS, BackendType
from fxqat.errors import ConfigError
from tests.custom_quantizer.prepared_once import prepared_once
from tests.models import FURTHER_BACKENDS, TOYS, VARIANTS, prepared

PLACEMENTS = ("TSQAT", "ONNXRuntime", "TensorRT", *FURTHER_BACKENDS)
NOTHING = [(name, backend) for name in ("conv1d", "conv3d", "transpose_convs") for backend in ("ArmCPU", "X86")]
NOTHING.append(("conv3d", "LiteRT"))
SAME_PLACEMENT = {"Experimental": "TSQAT", **VARIANTS}


@pytest.mark.parametrize("name", TOYS)
def test_placement_is_the_reviewed_one(name, golden):
    for backend in PLACEMENTS:
        if (name, backend) in NOTHING:
            continue
        report = prepared_once(name, backend).quant_report
        text = report.to_text()
        assert text.splitlines() == golden(f"{name}-{backend}", text).splitlines(), backend
        assert len(report) == len(text.splitlines())


def schemes_of(spec):
    """The schemes that a backend gives, without a known range."""
    configs = (spec.weight, *spec.weights.values()), [spec.activation_of(rule) for rule in spec.rules.values()]
    return [{str(replace(config.scheme, fixed_range=None)) for config in kind} for kind in configs]


@pytest.mark.parametrize("name", TOYS)
def test_the_same_placement_with_other_schemes(name):
    """Experimental for every model, the variants for some: nodes, status, groups and readers are those of the base."""
    names = SAME_PLACEMENT if name in ("attention", "concat", "residual", "squeeze_excite") else ["Experimental"]
    for backend in names:
        kinds = (SAME_PLACEMENT[backend], backend)
        reports = [prepared_once(name, kind).quant_report for kind in kinds]
        base, other = (
            [(r.node, r.op, r.target, r.status, r.group, r.reason.replace(f"{kind} has", "It has")) for r in report]
            for kind, report in zip(kinds, reports, strict=True)
        )
        assert base == other, backend
        expected_schemes, (weights, activations) = (schemes_of(BACKENDS[BackendType(kind)]) for kind in kinds)
        assert expected_schemes != [weights, activations]
        for expected, row in zip(*reports, strict=True):
            assert bool(expected.output) == bool(row.output)
            assert bool(expected.weight) == bool(row.weight)
            assert row.weight in {"", *weights}
            assert row.output.partition(" fixed")[0] in {"", *activations}
            assert row.output.partition(" fixed")[2] == expected.output.partition(" fixed")[2]


@pytest.mark.parametrize(("name", "backend"), NOTHING)
def test_a_model_without_a_layer_of_the_list_is_refused_with_the_reasons(name, backend):
    with pytest.raises(ConfigError, match=f"nothing to quantize for {backend}") as caught:
        prepared(name, backend)
    assert f"{backend} has no rule for conv" in str(caught.value)
