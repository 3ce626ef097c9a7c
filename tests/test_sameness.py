"""Random programs: a prepared model computes what the model computes, or it was refused or reported."""

import pytest
import torch

import fxqat
from fxqat.errors import TraceError
from fxqat.quantization.report import ANOTHER_BATCH
from tests.random_programs import (
    CALLS,
    CRASHES,
    DIFFERENT,
    FAILURES,
    REFUSED,
    REPORTED,
    SAME,
    STEPS,
    Program,
    Step,
    copy_state,
    float_failure,
    judge,
    observe,
    program_of_step,
    random_program,
    table,
)

SEEDS = range(60)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program_is_not_silently_different(seed):
    verdict = judge(random_program(seed), with_inputs=seed % 4 < 2)
    assert verdict.verdict not in FAILURES, f"{verdict.program.source}\n{verdict}"


def test_a_seed_gives_the_same_program():
    first, second, other = random_program(3), random_program(3), random_program(4)
    assert first.source == second.source != other.source
    a, b = first.load("first"), second.load("second")
    for (name, x), (_, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert torch.equal(x, y), name
    call = CALLS[1]
    seen = [observe(model, first, call, 0) for model in (a, b)]
    assert [path for path, _ in seen[0].values] == [path for path, _ in seen[1].values]


def test_the_programs_are_varied():
    programs = [random_program(seed) for seed in SEEDS]
    assert {step.kind for program in programs for step in program.steps} == set(STEPS)
    assert {calls for program in programs for calls in program.calls} == {0, 1, 2}
    assert {len(program.steps) for program in programs} >= {4, 5, 6, 7}


def program_of(lines: str) -> Program:
    return program_of_step(Step("views", "a test", {"forward": lines}), 1, 0)


@pytest.mark.parametrize(
    ("prepared", "verdict", "reason"),
    [
        ("y = y / y.shape[0]", SAME, ""),
        ("y = y / (y.shape[0] + 0.1)", DIFFERENT, "eval, other values: outputs: off by"),
        ("y = (y / y.shape[0]).detach()", DIFFERENT, "eval, other values: gradient of stem.weight: off by"),
        ("y = y / 2", DIFFERENT, "eval, batch of 3: outputs: off by"),
        ("y = y / float(y.shape[0])", REPORTED, "eval, batch of 3: outputs: off by"),
        ("y = (y / y.shape[0]).view(2, 4, 8, 8)", CRASHES, "eval, batch of 3: crashes: RuntimeError: shape"),
    ],
)
def test_the_judge_sees_what_differs(prepared, verdict, reason, monkeypatch):
    another, prepare = program_of(prepared).load("another"), fxqat.prepare_by_platform
    monkeypatch.setattr(fxqat, "prepare_by_platform", lambda model, *rest, **named: prepare(another, *rest, **named))
    found = judge(program_of("y = y / y.shape[0]"), with_inputs=True)
    assert (found.verdict, found.reason[: len(reason)]) == (verdict, reason)


@pytest.mark.parametrize(("error", "verdict"), [(TraceError("a reason"), REFUSED), (KeyError("raw"), CRASHES)])
def test_only_an_error_of_fxqat_is_a_refusal(error, verdict, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(fxqat, "prepare_by_platform", fail)
    found = judge(program_of("y = y * 0.5"), with_inputs=False)
    assert found.verdict == verdict
    assert type(error).__name__ in found.reason
    assert table([found]).rows[-1][1:] == [1, 0, 0, int(verdict == REFUSED), 0, int(verdict == CRASHES), 0]


def test_a_program_that_fails_as_a_float_model_is_not_used():
    assert "ZeroDivisionError" in float_failure(program_of("y = y / (1 // 0)"))
    assert "not finite" in float_failure(program_of("y = y / 0.0"))
    assert "not deterministic" in float_failure(program_of("y = y + np.random.default_rng().random()"))
    assert float_failure(program_of("y = y * 0.5")) == ""


def test_the_judge_counts_what_the_comparison_reports():
    found = judge(program_of("y = torch.cat([v * 0.5 for v in y.chunk(y.shape[0])])"), with_inputs=True)
    assert (found.verdict, found.reason[:18]) == (REPORTED, "eval, batch of 3: ")
    differs = f"computes something else than the model {ANOTHER_BATCH}"
    assert any(line.startswith(differs) for line in found.reported)
    step = STEPS["inputs"][[step.name for step in STEPS["inputs"]].index("written in place")]
    found = judge(program_of_step(step, 1, 0), with_inputs=False)
    assert (found.verdict, found.reason[:27]) == (REPORTED, "eval, other values: inputs[")


def test_numbers_that_a_leaf_keeps_do_not_differ_after_a_call_that_was_reported():
    reference, gm = (torch.nn.Sequential(torch.nn.Dropout()) for _ in range(2))
    reference[0].calls, gm[0].calls, gm.provenance = 3, 1, type("Provenance", (), {"tensor_names": {}})
    copy_state(reference, gm)
    assert gm[0].calls == 3
