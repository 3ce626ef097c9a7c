"""The kernels for GPUs against those for CPUs: on a GPU, or else in Triton's interpreter, which takes CPU tensors."""

from __future__ import annotations

import functools
import importlib
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fxqat.fake_quantize import kernels
from tests.fake_quantize.test_kernels import (
    PLACES,
    SCHEMES,
    Case,
    case,
    hard_values,
    needs_kernels,
    same_bits,
    smooth_case,
)

triton = pytest.importorskip("triton")
INTERPRETS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
"""Whether the interpreter works with NumPy 2: that of Triton 3.6 does not."""

INTERPRETER = "TRITON_INTERPRET"
"""The environment variable of the interpreter; Triton reads it when it is imported."""

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
FEW = {
    name: SCHEMES[name]
    for name in ("symmetric", "unsigned", "16 bits", "even zero point", "power of two", "everything")
}
PLACES_HERE = PLACES if ON_GPU else [((700,), None), ((3, 250), 0), ((5, 4, 40), 1), ((2, 3, 8, 5, 6), 2)]

ALONE = "runs in a process of its own, with the interpreter"
of_kernels = pytest.mark.skipif(not ON_GPU and os.environ.get(INTERPRETER) != "1", reason=ALONE)
pytestmark = [needs_kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy, of NaN and infinity


@pytest.mark.skipif(ON_GPU or os.environ.get(INTERPRETER) == "1", reason="the other tests run in this process")
@pytest.mark.skipif(not INTERPRETS, reason=f"the interpreter of Triton {triton.__version__} fails")
def test_the_kernels_in_the_interpreter() -> None:
    files = [str(Path(__file__).with_name(f"test_triton_{name}.py")) for name in ("kernels", "scales")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, env={**environment, INTERPRETER: "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
    assert ALONE not in done.stdout  # the reason for which they would have been skipped there, too


@pytest.fixture(scope="module")
def triton_kernels() -> ModuleType:
    module = kernels.gpu_kernels(torch.device("cuda", 0)) if ON_GPU else None
    return module or importlib.import_module("fxqat.fake_quantize.triton_kernels")


def there(values: Any) -> Any:
    return values.to(DEVICE) if isinstance(values, torch.Tensor) else values


def forward(module: ModuleType, problem: Case, with_codes: bool) -> list[torch.Tensor]:
    """x_hat, table and, if asked for, codes, on the CPU."""
    tensors = problem[:6] if module is kernels else map(there, problem[:6])
    settings = (problem.layout(), *problem.limits, problem.step, problem.scale_bits, with_codes)
    return [found.cpu() for found in module.forward(*tensors, *settings) if found is not None]


def backward(
    module: ModuleType, problem: Case, saved: torch.Tensor, grad: torch.Tensor, table: torch.Tensor
) -> list[torch.Tensor]:
    """The gradients, on the CPU."""
    tensors = (saved, grad, table) if module is kernels else map(there, (saved, grad, table))
    settings = (problem.layout(), *problem.limits, 0.37, True, problem.zero_point is not None)
    return [found.cpu() for found in module.backward(*tensors, *settings) if found is not None]


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], size: float) -> None:
    assert same_bits(found[0], expected[0])
    for a, b in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6 * size, equal_nan=True)


def test_kernels_that_do_not_work_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(importlib.import_module("fxqat.fake_quantize.triton_kernels"), "forward", fail)
    monkeypatch.setattr(kernels, "gpu_kernels", functools.cache(kernels.gpu_kernels.__wrapped__))
    assert kernels.gpu_kernels(torch.device(DEVICE)) is None
    assert f"Fake-quant on {DEVICE} runs on torch's operators, which is slower" in caplog.text
    assert "Failed to find C compiler" in caplog.text
    assert kernels.usable(torch.ones(2, device=DEVICE)) != ON_GPU


def test_the_switch_is_for_gpus_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(kernels.SWITCH, "0")
    assert kernels.gpu_kernels.__wrapped__(torch.device(DEVICE)) is None
    assert not caplog.text


FORWARD_NUMBERS = [*["i32"] * 4, *["fp32"] * 2, *["i32"] * 2, *["fp32"] * 3, *["i32"] * 5]
BACKWARD_NUMBERS = [*["i32"] * 5, *["fp32"] * 3]
COMPILED = {
    "forward": ("_forward", ["*bf16", "*bf16", "*i8", *["*fp32"] * 6, *FORWARD_NUMBERS, False]),
    "forward, scale only": ("_forward", ["*fp32", "*fp32", None, *["*fp32"] * 2, *[None] * 4, *FORWARD_NUMBERS, True]),
    "forward again": ("_forward_again", [*["*fp32"] * 3, *["i32"] * 4, *["fp32"] * 2, False]),
    "backward": ("_backward", ["*i8", *["*bf16"] * 2, *["*fp32"] * 4, *BACKWARD_NUMBERS, True, False]),
    "backward of x": ("_backward", [*["*fp32"] * 3, None, "*fp32", None, "*fp32", *BACKWARD_NUMBERS, False, True]),
    "total": ("_total", [*["*fp32"] * 4, *["i32"] * 3, "fp32"]),
    "growth": ("_growth", [*["*bf16"] * 2, *["*fp32"] * 3, "i32", "fp32", True, True]),
    "growth, one magnitude": ("_growth", [*["*fp32"] * 2, None, *["*fp32"] * 2, "i32", "fp32", False, False]),
    "bias": ("_round_bias", [*["*fp32"] * 7, *["i32"] * 7, *["fp32"] * 2, True]),
    "bias, one scale": (
        "_round_bias",
        [*["*fp32"] * 3, None, None, *["*fp32"] * 2, *["i32"] * 7, *["fp32"] * 2, False],
    ),
}
"""Kernels, and the types of their arguments; None and flags are constants."""


@pytest.mark.skipif(os.environ.get(INTERPRETER) == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize(("name", "types"), COMPILED.values(), ids=COMPILED)
def test_products_and_sums_are_rounded_one_by_one(name: str, types: list[Any]) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    files = [importlib.import_module(f"fxqat.fake_quantize.triton_{file}") for file in ("kernels", "scales")]
    module = next(file for file in files if hasattr(file, name))
    options = {"_backward": files[0].BACKWARD}.get(name, files[0].FORWARD if module is files[0] else files[1].CHANNELS)
    given = dict(zip(getattr(module, name).arg_names, [*types, options["BLOCK"]], strict=True))
    constants = {key: value for key, value in given.items() if not isinstance(value, str)}
    signature = {key: "constexpr" if key in constants else value for key, value in given.items()}
    others = {key: value for key, value in options.items() if key != "BLOCK"}
    source = ASTSource(getattr(module, name), signature, constants)
    code = compile(source, target=GPUTarget("cuda", 90, 32), options=others).asm["ptx"]
    assert "st.global" in code
    assert "fma." not in code
    assert "div.full" not in code


@of_kernels
@pytest.mark.parametrize("scheme", (SCHEMES if ON_GPU else FEW).values(), ids=SCHEMES if ON_GPU else FEW)
@pytest.mark.parametrize(("shape", "axis"), PLACES_HERE, ids=str)
def test_forward_has_the_numbers_of_the_kernels_for_cpus(
    shape: tuple[int, ...], axis: int | None, scheme: dict[str, Any], triton_kernels: ModuleType
) -> None:
    problem = case(scheme, shape, axis)
    found, expected = (forward(module, problem, True) for module in (triton_kernels, kernels))
    assert same_bits(found[0] + 0.0, expected[0] + 0.0)  # zeros have no sign
    assert same_bits(found[1], expected[1])
    assert torch.equal(found[2], expected[2])
    again = triton_kernels.forward_again(*map(there, (problem.x, found[1])), problem.layout(), *problem.limits)
    assert same_bits(again.cpu(), found[0])


@of_kernels
@pytest.mark.parametrize("limits", [(-128, 127), (0, 255), (-32768, 32767)], ids=str)
@pytest.mark.parametrize("of_codes", [True, False])
@pytest.mark.parametrize(("shape", "axis"), [*PLACES_HERE, ((40000,), None)], ids=str)
def test_gradients_are_those_of_the_kernels_for_cpus(
    shape: tuple[int, ...], axis: int | None, of_codes: bool, limits: tuple[int, int], triton_kernels: ModuleType
) -> None:
    problem = smooth_case(shape, axis, limits, seed=0)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    _, table, codes = forward(kernels, problem, True)
    saved = codes if of_codes else problem.x
    found, expected = (backward(module, problem, saved, grad, table) for module in (triton_kernels, kernels))
    assert_near(found, expected, float(grad.abs().sum()) * (limits[1] - limits[0]))


@of_kernels
def test_one_scale_of_values_that_are_divided_per_channel(triton_kernels: ModuleType) -> None:
    problem = case(SCHEMES["factor"], (6, 50), 0, torch.randn(6, 50, generator=torch.Generator().manual_seed(1)))
    problem = problem._replace(scale=problem.scale[0])
    grad = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    _, table = forward(kernels, problem, False)
    found, expected = (backward(module, problem, problem.x, grad, table) for module in (triton_kernels, kernels))
    assert found[1].shape == ()
    assert_near(found, expected, 10.0)


@of_kernels
@pytest.mark.parametrize("dtype", [torch.float16, *[torch.bfloat16] * ON_GPU])  # the interpreter truncates bfloat16
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, triton_kernels: ModuleType) -> None:
    x = hard_values((7, 300), 0.1).to(dtype)
    x = x.nan_to_num(0.0, 0.0, 0.0) if DEVICE == "cpu" else x  # the interpreter makes numbers of NaN
    grad = torch.randn(7, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    narrow = case(SCHEMES["zero point"], (7, 300), 0, x)
    wide = narrow._replace(x=x.float())
    settings = (wide.layout(), *wide.limits, wide.step, wide.scale_bits, False)
    x_hat, table, _ = triton_kernels.forward(*map(there, narrow[:6]), *settings)
    expected = forward(kernels, wide, False)
    assert x_hat.dtype == dtype
    assert torch.equal(x_hat.cpu().nan_to_num(7.0), expected[0].to(dtype).nan_to_num(7.0))
    found = backward(triton_kernels, wide, x, grad, table)
    wanted = backward(kernels, wide, x.float(), grad.float(), expected[1])
    assert found[0].dtype == dtype
    assert torch.equal(found[0], wanted[0].to(dtype))
    for a, b in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-2)


@of_kernels
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["x", "grad inside", "grad outside"])
def test_a_bad_batch_moves_no_parameter(where: str, bad: float, triton_kernels: ModuleType) -> None:
    x = torch.linspace(-9.0, 9.0, 400).add(0.01).repeat(3, 1)
    grad = torch.ones(3, 400)
    (x if where == "x" else grad)[1, 0 if where == "grad outside" else 200] = bad
    problem = Case(x, torch.ones(3), torch.zeros(3), limits=(-8, 7), axis=0)
    _, table = forward(kernels, problem, False)
    found, expected = (backward(module, problem, x, grad, table) for module in (triton_kernels, kernels))
    assert_near(found, expected, 400.0)
    if where != "x":
        assert found[1][1] == 0.0


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("input_kept", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("axis", [None, 1])
def test_autograd_takes_them(axis: int | None, dtype: torch.dtype, input_kept: bool) -> None:
    problem = smooth_case((40, 6, 300), axis, (-128, 127), seed=3)
    problem = problem._replace(x=problem.x.to(dtype))
    grad = torch.randn(40, 6, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    wide = problem._replace(x=problem.x.float())
    expected = [wide.result(input_kept), *wide.gradients(grad.float(), input_kept)]
    moved = Case(*map(there, problem[:6]), *problem[6:])
    assert moved.layout() is not None
    found = [moved.result(input_kept), *moved.gradients(there(grad), input_kept)]
    assert [value.dtype for value in found] == [dtype, dtype, torch.float32, torch.float32]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b.to(a.dtype), rtol=1e-3, atol=1e-2)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_the_step_does_not_wait_for_the_gpu() -> None:
    problem = smooth_case((40, 6, 300), 1, (-128, 127), seed=3)
    problem = Case(*(None if v is None else v.cuda() for v in problem[:6]), *problem[6:])
    grad = torch.randn(40, 6, 300, device="cuda")
    expected = problem.gradients(grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = problem.gradients(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
