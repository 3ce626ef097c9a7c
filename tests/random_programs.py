"""Random programs: models whose ``forward`` uses Python and tensors in the ways that people do, and a judge of them.

A program is the source text of an ``nn.Module``. It is composed of layers and of steps of ``random_programs.txt``; a
seed reproduces it. :func:`judge` prepares it, with or without example inputs, and compares the prepared model, with its
fake-quants off, with the float model: other values, other batch sizes, one more element in a list, in eval mode and in
training, with the same random numbers; outputs, what happened to the inputs, and the gradients of all parameters.
Before the calls in training the parameters change, as an optimizer changes them; at the end both models are pickled.

    python -m tests.random_programs --count 500         # a table of verdicts by kind of step, and each failure
    python -m tests.random_programs --each              # each step alone, six ways
    python -m tests.random_programs --seed 17 --show    # one program: source text, verdict, report
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import linecache
import logging
import pickle
import random
import sys
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prettytable import PrettyTable
from torch import Tensor, nn
from tqdm import tqdm

import fxqat
from fxqat.errors import FxqatError, TraceError
from fxqat.tracing.trace import OVERWRITTEN

IMPORTS = """\
import collections, contextlib, copy, dataclasses, enum, functools, io, itertools, logging, math, operator, os, random
import time, types
import numpy as np
import torch
import torch.utils.checkpoint
import torch.nn.utils.prune
from torch import nn
from torch.nn import functional as F
"""
TOLERANCE = 1e-3
"""Relative to the largest value of a tensor."""
ARGUMENTS = ("signature", "inputs")
PARTS = ("inputs", "flatten", "outputs")
"""Kinds of which a program has one (or none), at a fixed place."""

SAME, REFUSED, REPORTED = "same", "refused", "reported"
CRASHES, DIFFERENT = "CRASHES", "SILENTLY DIFFERENT"
VERDICTS = (SAME, REFUSED, REPORTED, CRASHES, DIFFERENT)
FAILURES = (CRASHES, DIFFERENT)


@dataclass(frozen=True)
class Step:
    """A step of a program: the lines that it adds.

    Args:
        kind: for the table.
        name: what it does.
        sections: text by section (see ``random_programs.txt``).
    """

    kind: str
    name: str
    sections: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"

    def text(self, section: str, number: int, channels: int, image: bool) -> str:
        """A section with its numbers."""
        numbers = {"$n": number, "$c": channels, "$rest": "1, 1" if image else "", "$ones": "1, 1, 1" if image else "1"}
        text = self.sections.get(section, "")
        for sign, value in numbers.items():
            text = text.replace(sign, str(value))
        return text

    def fits(self, image: bool) -> bool:
        """Whether the step works on images, or else on vectors."""
        return self.sections.get("layout", "").strip() in ("", "image" if image else "vector")


def read_steps() -> dict[str, list[Step]]:
    """The steps by kind."""
    found: dict[str, list[Step]] = {}
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    for entry in text.split("\n=== ")[1:]:
        head, _, body = entry.partition("\n")
        kind, _, name = head.partition(": ")
        first, *rest = ("forward\n" + body).split("\n--- ")
        sections = dict(part.partition("\n")[::2] for part in [first.strip("\n"), *rest] if "\n" in part)
        step = Step(kind, name, {title: lines.strip("\n") for title, lines in sections.items()})
        found.setdefault(kind, []).append(step)
    return found


STEPS = read_steps()


class Program:
    """The source text of a model, and its inputs.

    Args:
        seed: for its layers.
        channels: number of channels.
        inputs: the step that takes the inputs.
        plan: layers (names of methods of this class) and steps, each with how often it is called as a module of its
            own; 0 for a step in the forward of the model itself.
        outputs: the step that returns the outputs.

    Attributes:
        steps: all steps.
        calls: for each step between inputs and outputs, how often it is called as a module.
        source: the text; the class is called ``Program``.
    """

    def __init__(
        self, seed: int, channels: int, inputs: Step, plan: Iterable[tuple[Step | str, int]], outputs: Step
    ) -> None:
        self.seed, self.channels, self.inputs, self.plan, self.outputs = seed, channels, inputs, list(plan), outputs
        self.steps = [inputs]
        self.calls: list[int] = []
        self._above: list[str] = []
        self._init: list[str] = []
        self._forward: list[str] = []
        self._width, self._image = channels, True
        self._count = 0
        self._add(inputs, 0)
        for step, calls in self.plan:
            if isinstance(step, str):
                getattr(self, step)()
            else:
                self.steps.append(step)
                self.calls.append(calls)
                self._add(step, calls)
        self.steps.append(outputs)
        self._add(outputs, 0)
        signature = inputs.sections["signature"].strip()
        stem = f"self.stem = nn.Conv2d(3, {channels}, 3, padding=1)"
        body = _class("Program", [stem, *self._init], signature, self._forward)
        self.source = "\n\n".join([IMPORTS, *self._above, body]) + "\n"

    def _add(self, step: Step, calls: int) -> None:
        self._count += 1
        texts = {
            s: step.text(s, self._count, self.channels, self._image) for s in ("before", "init", "forward", "width")
        }
        if texts["before"]:
            self._above.append(texts["before"])
        if calls:
            name = f"block{self._count}"
            self._above.append(_class(name.title(), [texts["init"]], "y", [f"# {step}", texts["forward"], "return y"]))
            self._init.append(f"self.{name} = {name.title()}()")
            self._forward += [f"y = self.{name}(y)"] * calls
        else:
            self._init.append(texts["init"])
            self._forward += [f"# {step}", texts["forward"]]
        if texts["width"]:
            self._image, self._width = False, eval(texts["width"])

    def conv(self) -> None:
        """A layer: a convolution or a linear layer."""
        self._layer(f"nn.Conv2d({self._width}, {self.channels}, 3, padding=1)")

    def conv_norm(self) -> None:
        """The same with a norm and an activation."""
        self._layer(
            f"nn.Conv2d({self._width}, {self.channels}, 3, padding=1, bias=False)",
            f"nn.BatchNorm2d({self.channels})" if self._image else f"nn.LayerNorm({self.channels})",
            "nn.ReLU()",
        )

    def relu(self) -> None:
        """An activation."""
        self._forward.append("y = F.relu(y)")

    def _layer(self, layer: str, *more: str) -> None:
        self._count += 1
        if not self._image:
            layer = f"nn.Linear({self._width}, {self.channels})"
        self._width = self.channels
        name = f"layer{self._count}"
        self._init.append(
            f"self.{name} = nn.Sequential({', '.join([layer, *more])})" if more else f"self.{name} = {layer}"
        )
        self._forward.append(f"y = self.{name}(y)")

    @property
    def image(self) -> bool:
        """Whether the value is an image at the end of the plan."""
        return self._image

    def load(self, copy_name: str) -> nn.Module:
        """Run the text as a module of its own, and make a model.

        Args:
            copy_name: for the name of the module; two copies share no globals.
        """
        name = f"random_program_{self.seed}_{copy_name}"
        file = f"{name}.py"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(True), file)
        module = types.ModuleType(name)
        module.__dict__["__file__"] = file
        sys.modules[name] = module
        exec(compile(self.source, file, "exec"), module.__dict__)
        with same_random_numbers(self.seed):
            model: nn.Module = module.Program()
            for part in model.modules():
                if isinstance(part, nn.BatchNorm2d):
                    nn.init.uniform_(part.running_mean, -0.3, 0.3)
                    nn.init.uniform_(part.running_var, 0.5, 1.5)
        return model

    def arguments(self, seed: int, batch: int, count: int, gain: float = 1.0) -> tuple[Any, ...]:
        """Inputs of a batch size, with a number of elements in a list, scaled by a factor."""
        with same_random_numbers(seed):
            known = {"image": lambda n: torch.randn(n, 3, 8, 8) * gain, "n": batch, "k": count, "torch": torch}
            given: tuple[Any, ...] = eval(self.inputs.sections["inputs"], known)
        return given


def _class(name: str, init: list[str], signature: str, forward: list[str]) -> str:
    lines = [f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += [_indented(text) for text in init if text]
    lines += ["", f"    def forward(self, {signature}):", *(_indented(text) for text in forward if text)]
    return "\n".join(lines)


def _indented(text: str) -> str:
    return "\n".join(f"        {line}" if line else line for line in text.splitlines())


def random_program(seed: int) -> Program:
    """The program of a seed: the first draw that runs as a float model."""
    for attempt in itertools.count():
        draw = random.Random(f"{seed}.{attempt}")
        program = _compose(seed, draw)
        if float_failure(program) == "":
            return program
    raise AssertionError


def _compose(seed: int, draw: random.Random) -> Program:
    kinds = [kind for kind in STEPS if kind not in PARTS]
    inputs = STEPS["inputs"][0] if draw.random() < 0.5 else draw.choice(STEPS["inputs"])
    outputs = STEPS["outputs"][0] if draw.random() < 0.4 else draw.choice(STEPS["outputs"])
    plan: list[tuple[Step | str, int]] = []
    image, apart = True, draw.choice((0.2, 0.8, 0.8, 1.0))
    for _ in range(draw.randint(1, 4)):
        if image and draw.random() < 0.2:
            plan += [(draw.choice(STEPS["flatten"]), 0), (draw.choice(("conv", "conv_norm")), 0)]
            image = False
        step = draw.choice([step for step in STEPS[draw.choice(kinds)] if step.fits(image)] or STEPS["views"])
        plan.append((step, draw.choice((1, 1, 2)) if draw.random() < apart else 0))
        if draw.random() < 0.5:
            plan.append((draw.choice(("conv", "conv_norm", "relu")), 0))
    return Program(seed, draw.choice((4, 5, 6)), inputs, plan, outputs)


def program_of_step(step: Step, number: int, calls: int) -> Program:
    """The smallest program with a step.

    Args:
        step: the step.
        number: for the names.
        calls: how often it is called as a module of its own; 0 for a step in the forward of the model itself.
    """
    inputs, outputs = STEPS["inputs"][0], STEPS["outputs"][0]
    plan: list[tuple[Step | str, int]] = [(step, calls), ("conv", 0)]
    if step.kind == "inputs":
        inputs, plan = step, [("conv", 0)]
    elif step.kind == "outputs":
        outputs, plan = step, [("conv", 0)]
    elif step.kind == "flatten":
        plan = [(step, 0), ("conv", 0)]
    elif not step.fits(True):
        plan = [(STEPS["flatten"][0], 0), ("conv", 0), (step, calls), ("conv", 0)]
    return Program(number, 4, inputs, plan, outputs)


def reduced(program: Program, with_inputs: bool) -> Program:
    """The smallest program with the same verdict that is found by leaving out one thing after the other."""
    verdict = judge(program, with_inputs).verdict
    while True:
        plans = [program.plan[:i] + program.plan[i + 1 :] for i in range(len(program.plan))]
        smaller = [(program.inputs, plan, program.outputs) for plan in plans]
        smaller += [(STEPS["inputs"][0], program.plan, program.outputs)] * (program.inputs is not STEPS["inputs"][0])
        smaller += [(program.inputs, program.plan, STEPS["outputs"][0])] * (program.outputs is not STEPS["outputs"][0])
        for inputs, plan, outputs in smaller:
            found = Program(program.seed, program.channels, inputs, plan, outputs)
            if float_failure(found) == "" and judge(found, with_inputs).verdict == verdict:
                program = found
                break
        else:
            return program


@contextmanager
def same_random_numbers(seed: int = 0) -> Iterator[None]:
    """Seed the random generators of torch, numpy and Python, and restore them afterwards."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@dataclass(frozen=True)
class Call:
    """A call of both models.

    Args:
        name: what differs from the inputs that the model was prepared with.
        training: whether in training.
        batch: the batch size.
        count: number of elements of a list.
        gain: factor of the values.
    """

    name: str
    training: bool
    batch: int
    count: int
    gain: float = 1.0

    def __str__(self) -> str:
        return f"{'train' if self.training else 'eval'}, {self.name}"


PREPARED_WITH = Call("prepared with", False, 2, 2)
CALLS = [
    Call(name, training, *sizes)
    for training in (False, True)
    for name, sizes in (("other values", (2, 2)), ("batch of 3", (3, 3)), ("batch of 5", (5, 3, 2.0)))
]


FIRST_IN_TRAINING = CALLS[3]
"""Before this call the parameters are changed, as an optimizer does."""
PICKLED = Call("other values, a pickled copy", False, 2, 2)


@dataclass
class Observation:
    """What a call gave.

    Args:
        crash: the error, or empty.
        values: paths and leaves of the outputs.
        inputs: the same of the inputs after the call.
        gradients: by name of the parameter.
    """

    crash: str = ""
    values: list[tuple[str, Any]] = field(default_factory=list)
    inputs: list[tuple[str, Any]] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Paths and leaves of a structure; the path names the types of the containers."""
    kind = type(value).__name__
    if dataclasses.is_dataclass(value):
        for member in dataclasses.fields(value):
            yield from leaves(getattr(value, member.name), f"{path}.{member.name}<{kind}>")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]<{kind}>")
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from leaves(item, f"{path}[{number}]<{kind}>")
    else:
        yield path, value.detach().clone() if isinstance(value, Tensor) else value


def observe(model: nn.Module, program: Program, call: Call, number: int) -> Observation:
    """Call a model; one backward pass from a random weighting of its outputs."""
    given = program.arguments(100 + number, call.batch, call.count, call.gain)
    model.train(call.training)
    model.zero_grad()
    try:
        with same_random_numbers(number):
            output = model(*given)
        found = Observation(values=list(leaves(output)), inputs=list(leaves(given)))
        tensors = [t for t in _tensors(output) if t.requires_grad]
        with same_random_numbers(number):
            loss = sum(((t * torch.randn_like(t)).sum() for t in tensors), torch.zeros(()))
            if loss.requires_grad:
                loss.backward()
    except Exception as error:  # noqa: BLE001  a model raises anything
        return Observation(crash=reason_of(error))
    found.gradients = {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters(remove_duplicate=False)
    }
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        yield from _tensors([getattr(value, member.name) for member in dataclasses.fields(value)])
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def float_failure(program: Program) -> str:
    """Why a program is no use as a float model: it crashes, is not deterministic, or nothing can be trained."""
    try:
        first, second = program.load("first"), program.load("second")
    except Exception as error:  # noqa: BLE001
        return reason_of(error)
    for number, call in enumerate(CALLS):
        a, b = (observe(model, program, call, number) for model in (first, second))
        if a.crash or b.crash:
            return f"{call}: {a.crash or b.crash}"
        if difference(a, b, a.gradients, b.gradients):
            return f"{call}: not deterministic"
        tensors = [leaf for _, leaf in a.values if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not all(t.isfinite().all() and t.abs().max() < 1e4 for t in tensors if t.numel()):
            return f"{call}: not finite"
        if call.training and not any(g is not None and bool((g.abs() > 1e-6).any()) for g in a.gradients.values()):
            return f"{call}: no gradients"
    return ""


def difference(
    expected: Observation,
    actual: Observation,
    expected_gradients: Mapping[str, Tensor | None],
    actual_gradients: Mapping[str, Tensor | None],
) -> str:
    """The first difference between two observations, or empty."""
    if actual.crash:
        return f"crashes: {actual.crash}"
    for what, a, b in (("outputs", expected.values, actual.values), ("inputs", expected.inputs, actual.inputs)):
        if [path for path, _ in a] != [path for path, _ in b]:
            return f"{what}: structure {[path for path, _ in b][:6]} instead of {[path for path, _ in a][:6]}"
        for (path, x), (_, y) in zip(a, b, strict=True):
            found = leaf_difference(x, y)
            if found:
                return f"{what}{path}: {found}"
    for name, x in expected_gradients.items():
        y = actual_gradients.get(name)
        if x is None and y is None:
            continue
        found = leaf_difference(*(torch.zeros(()) if t is None else t for t in (x, y)), absent=x is None or y is None)
        if found:
            return f"gradient of {name}: {found}"
    return ""


def leaf_difference(x: Any, y: Any, absent: bool = False) -> str:
    """How two leaves differ, or empty."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if not absent and (x.shape != y.shape or x.dtype != y.dtype):
            return f"{y.dtype} {tuple(y.shape)} instead of {x.dtype} {tuple(x.shape)}"
        a, b = (torch.view_as_real(t) if t.is_complex() else t.double() for t in (x, y))
        if not (a.numel() and b.numel()):
            return ""
        largest, off = float(a.nan_to_num().abs().max()), float(torch.where(a == b, 0.0, a - b).abs().max())
        if off != off and torch.equal(a.isnan(), b.isnan()):
            off = float((a - b).nan_to_num().abs().max())
        return "" if off <= TOLERANCE * largest + 2e-6 else f"off by {off:.3g} of {largest:.3g}"
    if type(x) is not type(y):
        return f"{type(y).__name__} instead of {type(x).__name__}"
    if isinstance(x, float):
        return "" if abs(x - y) <= TOLERANCE * abs(x) + 1e-6 else f"{y} instead of {x}"
    return "" if x == y else f"{y!r} instead of {x!r}"


def gradients_of_float(gm: Any, float_names: Iterable[str], found: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Gradients of a prepared model, under the names of the float model."""
    provenance, result = gm.provenance, {}
    for name in float_names:
        if name in provenance.split_tensors:
            split = provenance.split_tensors[name]
            parts = [found[part] for part in split.names]
            result[name] = None if None in parts else torch.cat(parts, split.dim)  # type: ignore[arg-type]
        else:
            result[name] = found.get(provenance.tensor_names.get(name, ""))
    return result


@torch.no_grad()
def change_parameters(reference: nn.Module, gm: Any) -> None:
    """Add the same random numbers to the parameters of a model and of the prepared model."""
    provenance, held = gm.provenance, dict(gm.named_parameters(remove_duplicate=False))
    for number, (name, parameter) in enumerate(reference.named_parameters()):
        with same_random_numbers(number):
            change = torch.randn_like(parameter) * 0.05
        parameter.add_(change)
        if name in provenance.split_tensors:
            split = provenance.split_tensors[name]
            parts = [held[part] for part in split.names]
            for part, by in zip(parts, change.split([p.shape[split.dim] for p in parts], split.dim), strict=True):
                part.add_(by)
        elif name in provenance.tensor_names:
            held[provenance.tensor_names[name]].add_(change)


@torch.no_grad()
def copy_state(reference: nn.Module, gm: Any) -> None:
    """Give the buffers of the prepared model, and the numbers in its leaves, the values that the float model has."""
    leaves = dict(gm.named_modules())
    for path, module in reference.named_modules():
        if type(leaves.get(path)).__name__ == type(module).__name__:
            numbers = {name: value for name, value in vars(module).items() if type(value) in (int, float)}
            vars(leaves[path]).update(numbers)
    held = dict(gm.named_buffers(remove_duplicate=False))
    for name, buffer in reference.named_buffers():
        own = held.get(gm.provenance.tensor_names.get(name, ""))
        if isinstance(own, Tensor) and own.shape == buffer.shape:
            own.copy_(buffer)


@dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Args:
        program: the program.
        with_inputs: whether it was prepared with example inputs.
        verdict: one of ``VERDICTS``.
        reason: the first difference or the error.
        reported: what the report and the log say.
    """

    program: Program
    with_inputs: bool
    verdict: str
    reason: str = ""
    reported: tuple[str, ...] = ()

    def __str__(self) -> str:
        called = ("", " (a module)", " (a module, twice)")
        steps = [f"{s}{called[n]}" for s, n in zip(self.program.steps[1:-1], self.program.calls, strict=True)]
        how = "example inputs" if self.with_inputs else "no example inputs"
        first, last = self.program.steps[0], self.program.steps[-1]
        lines = [
            f"{self.program.seed}: {self.verdict} ({how}): {self.reason}",
            f"    {first} -> {'; '.join(steps) or '-'} -> {last}",
        ]
        return "\n".join([*lines, *(f"    reported: {text}" for text in dict.fromkeys(self.reported))])


class Recorder(logging.Handler):
    """Keeps the messages of a logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.messages.append(record.getMessage())


@contextmanager
def warnings_of_fxqat() -> Iterator[list[str]]:
    """The warnings that fxqat logs inside the block."""
    logger, recorder = logging.getLogger("fxqat"), Recorder()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(recorder)
    try:
        yield recorder.messages
    finally:
        logger.removeHandler(recorder)
        logger.propagate = propagate


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def judge(program: Program, with_inputs: bool) -> Verdict:
    """Prepare a program and compare it with the float model."""
    model, reference = program.load("prepared"), program.load("reference")
    given = program.arguments(0, PREPARED_WITH.batch, PREPARED_WITH.count)
    with warnings_of_fxqat() as logged:
        try:
            gm = _prepare(program, model, copy.deepcopy(given) if with_inputs else None)
        except FxqatError as error:
            wrapped = not isinstance(error, TraceError) and error.__cause__ is not None  # calibrate fails on the batch
            return Verdict(program, with_inputs, CRASHES if wrapped else REFUSED, reason_of(error))
        except Exception as error:  # noqa: BLE001  a raw error is a failure
            return Verdict(program, with_inputs, CRASHES, f"prepare: {reason_of(error)}")
    if not with_inputs:
        with torch.no_grad(), same_random_numbers():
            reference.eval()(*given)
    return _compare(program, gm, reference, with_inputs, logged)


def is_reported(report: Any, logged: Iterable[str], call: Call, found: str) -> bool:
    """Whether the report says that the prepared model may differ in a call, as it was found to.

    A leaf is no excuse: it runs the code of the model. Gradients are compared by prepare in training only, and training
    leaves its state to the call after it.
    """
    in_training = call.training or call is PICKLED or found.startswith("gradient")
    other_size = call.batch != PREPARED_WITH.batch
    differs = [line for line in report.sameness if line.startswith("computes something else")]
    of_gradients = any("grad_enabled" in number.expression for number in report.forced)
    return bool(
        (report.forced and other_size)
        or (of_gradients and found.startswith("gradient"))
        or (report.eval_only and (call.training or call is PICKLED))
        or report.state_changes
        or (other_size and any(where in line for line in differs for where in ("of another size", "with longer lists")))
        or (any(OVERWRITTEN in line for line in report.sameness) and found.startswith("inputs"))
        or any("in training" in line for line in differs) * in_training
        or any("could not be compared" in text for text in logged)
    )


def _compare(program: Program, gm: Any, reference: nn.Module, with_inputs: bool, logged: list[str]) -> Verdict:
    """Call both models with the same inputs."""
    report = gm.quant_report
    names = [name for name, _ in reference.named_parameters(remove_duplicate=False)]
    excused, failed = [], []
    for number, call in enumerate([*CALLS, PICKLED]):
        if call is FIRST_IN_TRAINING:
            change_parameters(reference, gm)
        if call is PICKLED:
            try:
                reference = pickle.loads(pickle.dumps(reference))
            except Exception:  # noqa: BLE001  not every float model can be pickled
                break
            try:
                gm = pickle.loads(pickle.dumps(gm))
            except Exception as error:  # noqa: BLE001
                failed.append(f"a pickled copy: crashes: {reason_of(error)}")
                break
        expected, actual = (observe(m, program, call, number) for m in (reference, gm))
        if expected.crash:
            raise AssertionError(f"the float model crashes: {expected.crash}")
        found = difference(expected, actual, expected.gradients, gradients_of_float(gm, names, actual.gradients))
        known = is_reported(report, logged, call, found)
        if known:  # what was reported does not come back in the next call
            copy_state(reference, gm)
        if found:
            (excused if known else failed).append(f"{call}: {found}")
    told = (*report.remarks, *(line for line in report.sameness if not line.startswith("equal")), *logged)
    if failed:
        crashed = all(" crashes: " in text for text in failed)
        return Verdict(program, with_inputs, CRASHES if crashed else DIFFERENT, failed[0], told)
    if excused:
        return Verdict(program, with_inputs, REPORTED, excused[0], told)
    return Verdict(program, with_inputs, SAME, "", told)


def _prepare(program: Program, model: nn.Module, given: tuple[Any, ...] | None) -> Any:
    """Prepare a model; without example inputs, run one calibration batch in one of the two ways."""
    with same_random_numbers():
        gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=given)
        if given is not None:
            return gm
        batch = program.arguments(0, PREPARED_WITH.batch, PREPARED_WITH.count)
        if program.seed % 2:
            fxqat.calibrate(gm, [batch], progress=False)
            return gm
        fxqat.enable_calibration(gm)
        try:
            with torch.no_grad():
                gm.eval()(*batch)
        except FxqatError:
            raise
        except Exception as error:
            raise fxqat.errors.ConfigError(f"first calibration batch: {reason_of(error)}") from error
        fxqat.disable_all(gm)
        return gm


def table(verdicts: Iterable[Verdict]) -> PrettyTable:
    """Verdicts by kind of step; a program counts for each of its kinds."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in [*STEPS, "all programs"]}
    for verdict in verdicts:
        kinds = {step.kind for step in verdict.program.steps}
        for kind in [*kinds, "all programs"]:
            counts[kind][verdict.verdict] += 1
            counts[kind]["leaf"] += verdict.verdict == SAME and any(
                t.startswith("left float") for t in verdict.reported
            )
    result = PrettyTable(["kind of step", "programs", "same", "(with a float leaf)", *VERDICTS[1:]], align="l")
    for kind, count in counts.items():
        total = sum(count[verdict] for verdict in VERDICTS)
        result.add_row([kind, total, count[SAME], count["leaf"], *(count[verdict] for verdict in VERDICTS[1:])])
    return result


def show(verdict: Verdict) -> None:
    """Print a program and what became of it."""
    source = verdict.program.source.removeprefix(IMPORTS).strip()
    print(f"\n{source}\n\n{verdict}")


def cases(arguments: argparse.Namespace) -> Iterator[tuple[Program, bool]]:
    """The programs that were asked for, and whether each is prepared with example inputs."""
    if arguments.each is None:
        for seed in range(arguments.seed, arguments.seed + arguments.count):
            yield random_program(seed), seed % 4 < 2
        return
    numbers = itertools.count(1)
    for step in (step for steps in STEPS.values() for step in steps if arguments.each in str(step)):
        places = (0,) if step.kind in PARTS else (0, 1, 2)
        for calls, with_inputs in itertools.product(places, (True, False)):
            program = program_of_step(step, next(numbers), calls)
            failure = float_failure(program)
            if failure:
                tqdm.write(f"not a program: {step}, {calls} calls: {failure}")
            else:
                yield program, with_inputs


def main() -> None:
    """Judge programs; print each failure and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1, help="number of programs")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--each", nargs="?", const="", help="each step alone, or those whose name contains this")
    parser.add_argument("--show", action="store_true", help="print the source text of each")
    parser.add_argument("--reduce", action="store_true", help="leave out of each failing program what is not needed")
    parser.add_argument("--all", action="store_true", help="print each verdict, not only the failures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    verdicts = []
    for program, with_inputs in tqdm(cases(arguments), disable=None):
        verdicts.append(judge(program, with_inputs))
        if arguments.reduce and verdicts[-1].verdict in FAILURES:
            verdicts[-1] = judge(reduced(program, with_inputs), with_inputs)
        if arguments.show:
            show(verdicts[-1])
        elif arguments.all or verdicts[-1].verdict in FAILURES:
            print(verdicts[-1], flush=True)
    print(table(verdicts))


if __name__ == "__main__":
    main()
