"""Where the time of a QAT training step goes, beyond that of the float model, and what could be had at best.

Run nothing else meanwhile: other programs on the same cores make the figures useless::

    python tests/benchmarks/performance/step_account.py --output docs/evidence/step_account.rst    # about 2 minutes
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from prettytable import PrettyTable
from torch import nn
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from fxqat.fake_quantize import FakeQuantizeBase, kernels, straight_through
from fxqat.nn.qat import QATLayer

sys.path.insert(0, str(Path(__file__).parent))
from machine import processor
from step_time import LIMITS, build, quantized

FLOAT, OFF, ON, TIMED = "float", "off", "on", "timed"

KERNELS = {
    "kernel, activations forward": "the kernel that rounds activations, with what the backward pass needs of them",
    "kernel, activations backward": "the kernel of their gradients",
    "kernel, weights forward": "the kernel that rounds weights; once more in the backward pass",
    "kernel, weights backward": "the kernel of their gradients and of their scales",
}
CALLS = {
    "fake-quant calls, forward": "modules, autograd functions, allocation: around the kernels, in Python",
    "fake-quant calls, backward": "the same in the backward pass",
    "BatchNorm's factor": "by which the grid of a weight is divided (layers with BatchNorm)",
    "scale floors, bias": "the raised weight scale and the rounded bias (layers without BatchNorm)",
}
MEASURED = {
    "optimizer": "zero_grad and step: the float step's, and more parameters: the learned scales",
    "graph": "the traced graph with fake-quant off against the float model: lost in-place operators, fused layers",
}
SMALL, LARGE = 8, 2**23
"""Values in a row of a small call, and values that are passed over before it."""

OTHER = "other"
OTHER_MEANING = (
    "the rest of the difference: autograd's engine, accumulation of the scales' gradients, float operators that find "
    "fewer of their inputs in the caches, new pages of memory"
)


class Account:
    """Seconds by row, and bytes that the kernels move, of the steps made while it watches."""

    def __init__(self) -> None:
        self.added = (0.0, 0.0)
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.bytes = 0
        self.sizes: list[int] = []
        self.inner = [0.0]

    def timed(self, row: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function; its time without that of timed functions inside it is added to a row."""

        def call(*args: Any, **options: Any) -> Any:
            self.inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                taken = time.perf_counter() - start
                self.seconds[row] += taken - self.inner.pop() - self.added[0]
                self.inner[-1] += taken + self.added[1]

        return call

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the kernels and what is around them."""
        patched: list[tuple[Any, str, Any]] = [
            (kernels, "LIBRARY", TimedLibrary(self)),
            (FakeQuantizeBase, "forward", self.timed("fake-quant calls, forward", FakeQuantizeBase.forward)),
            (FakeQuantizeBase, "quantize", self.timed("fake-quant calls, forward", FakeQuantizeBase.quantize)),
            (straight_through, "_gradients", self.timed("fake-quant calls, backward", straight_through._gradients)),
            (QATLayer, "_unfolded_weight", self.timed("BatchNorm's factor", QATLayer._unfolded_weight)),
            (QATLayer, "_deployed_tensors", self.timed("scale floors, bias", QATLayer._deployed_tensors)),
        ]
        with ExitStack() as stack:
            for owner, name, function in patched:
                stack.enter_context(mock.patch.object(owner, name, function))
            yield


class TimedLibrary:
    """The kernels, timed; a tensor with more than one channel is a weight, activations have one scale."""

    def __init__(self, account: Account) -> None:
        self.library: Any = kernels.LIBRARY
        self.account = account
        self.fxqat_round_bias = self.library.fxqat_round_bias
        self.fxqat_bn_factor = self.library.fxqat_bn_factor
        self.fxqat_growth = self.library.fxqat_growth

    def _run(self, name: str, direction: str, sizes: tuple[int, ...], moved: int, args: tuple[Any, ...]) -> Any:
        count = sizes[0] * sizes[1] * sizes[2]
        self.account.bytes += moved * count
        self.account.sizes.append(count)
        kind = "weights" if sizes[1] > 1 else "activations"
        return self.account.timed(f"kernel, {kind} {direction}", getattr(self.library, name))(*args)

    def fxqat_forward(self, *args: Any) -> None:
        """Reads x, writes the result and, perhaps, codes."""
        self._run("fxqat_forward", "forward", args[9:12], 8 + (args[2] is not None), args)

    def fxqat_forward_again(self, *args: Any) -> None:
        """Reads x, writes the result."""
        self._run("fxqat_forward_again", "forward", args[3:6], 8, args)

    def fxqat_backward(self, *args: Any) -> Any:
        """Reads the gradient and x or codes, writes the gradient of x."""
        return self._run("fxqat_backward", "backward", args[7:10], 12 if args[1] is None else 9, args)


class Trainer:
    """A model with its optimizer; seconds of a step and of the optimizer in it."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        self.model, self.x = model, x
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True)
        self.target = torch.arange(len(x))

    def step(self) -> tuple[float, float]:
        """One step: ``(seconds, seconds of the optimizer)``."""
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        cleared = time.perf_counter()
        nn.functional.cross_entropy(self.model(self.x), self.target).backward()
        computed = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        return end - start, end - computed + cleared - start

    def operators(self) -> int:
        """Operators that a step dispatches, each with those that it calls."""
        with profile(activities=[ProfilerActivity.CPU]) as record:
            self.step()
        return sum(event.count for event in record.key_averages() if event.key.startswith("aten::"))

    def new_pages(self) -> int:
        """Pages of memory that a step asks of the system."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self.step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def bandwidth(elements: int) -> float:
    """Bytes per second of a copy of that many float32, read and written, again and again; the best of 200."""
    source = torch.ones(elements)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(200):
        start = time.perf_counter()
        target.copy_(source)
        best = max(best, 2 * source.nbytes / (time.perf_counter() - start))
    return best


def cost_of_small_calls() -> str:
    """Microseconds of calls on a few values: in a loop of their own, and after a pass over many other values."""
    x, others = torch.randn(4, SMALL, requires_grad=True), torch.ones(LARGE)
    gm = quantized(nn.Linear(SMALL, 1), x.detach(), "TSQAT", "train")
    quant = next(module for module in gm.modules() if isinstance(module, FakeQuantizeBase))
    found = []
    for call in (lambda: torch.relu(x), lambda: quant(x)):
        for before in (lambda: None, lambda: others.mul_(1.0)):
            taken = []
            for _ in range(300):
                before()
                start = time.perf_counter()
                call()
                taken.append(time.perf_counter() - start)
            found.append(f"{1e6 * statistics.median(taken):.1f} us")
    relu, relu_after, quantizer, quantizer_after = found
    count, passed = 4 * SMALL, LARGE * 4 // 2**20
    return (
        f"* ``torch.relu`` of {count} values takes {relu} in a loop of its own, and a fake-quant of them {quantizer};\n"
        f"  after a pass over {passed} MiB of other values, {relu_after} and {quantizer_after}: a large operation\n"
        "  evicts the code of Python and torch from the caches, which slows down the calls around the kernels."
    )


def cost_of_watching() -> tuple[float, float]:
    """Seconds that a timed call adds: to its own row, and to that of the function that calls it."""
    account = Account()
    call = account.timed("inside", lambda: None)
    start = time.perf_counter()
    for _ in range(10000):
        call()
    return account.seconds["inside"] / 1e4, (time.perf_counter() - start - account.inner[0]) / 1e4


def account_of(name: str, arguments: argparse.Namespace) -> tuple[PrettyTable, str]:
    """The table of a model, and what it says."""
    torch.manual_seed(0)
    x = torch.randn(arguments.batch, 3, arguments.image, arguments.image)
    model = build(name, "cpu", arguments.image)
    gm = quantized(model, x, "TSQAT", "train")
    quants = [module for module in gm.modules() if isinstance(module, FakeQuantizeBase)]
    trainers = {FLOAT: Trainer(model, x), ON: Trainer(gm, x)}
    steps: dict[str, list[tuple[float, float]]] = defaultdict(list)
    rows: dict[str, list[float]] = defaultdict(list)
    account = Account()
    account.added = cost_of_watching()
    for number in tqdm(range(arguments.rounds + 3), leave=False):
        for state in (ON, FLOAT, OFF, TIMED):
            for quant in quants:
                quant.fake_quant_enabled = state != OFF
            trainer = trainers[FLOAT if state == FLOAT else ON]
            if state == TIMED:
                account.clear()
                with account.watching():
                    taken = trainer.step()
            else:
                taken = trainer.step()
            if number >= 3:
                steps[state].append(taken)
                for row in (KERNELS | CALLS) if state == TIMED else ():
                    rows[row].append(account.seconds[row])
    base = statistics.median(step for step, _ in steps[FLOAT])
    total = statistics.median(step for step, _ in steps[ON])
    spent = {row: statistics.median(values) for row, values in rows.items()}
    optimizers = {state: statistics.median(optimizer for _, optimizer in steps[state]) for state in (FLOAT, ON)}
    spent["optimizer"] = optimizers[ON] - optimizers[FLOAT]
    spent["graph"] = statistics.median(step for step, _ in steps[OFF]) - base
    spent[OTHER] = total - base - sum(spent.values())
    table = PrettyTable(["part", "ms", "of the float step", "what it is"], align="l", hrules=1)
    meanings = KERNELS | CALLS | MEASURED | {OTHER: OTHER_MEANING}
    table.add_row(["float step", f"{1e3 * base:.1f}", "100.0 %", "the same step of the float model"])
    for row, meaning in meanings.items():
        table.add_row([row, f"{1e3 * spent[row]:+.1f}", f"{100 * spent[row] / base:+.1f} %", meaning])
    table.add_row(["TSQAT step", f"{1e3 * total:.1f}", f"{100 * total / base:.1f} %", "the sum"])
    table.max_width["what it is"] = 60
    return table, words(name, base, total, spent, account, trainers)


def words(
    name: str, base: float, total: float, spent: dict[str, float], account: Account, trainers: dict[str, Trainer]
) -> str:
    """What the table says, in sentences."""
    limit, ratio = LIMITS[name][0], total / base
    mean = sum(account.sizes) // len(account.sizes)
    speed = bandwidth(mean)
    pages = {state: statistics.median(trainer.new_pages() for _ in range(5)) for state, trainer in trainers.items()}
    operators = {state: trainer.operators() for state, trainer in trainers.items()}
    calls = sum(spent[row] for row in CALLS)
    passes = sum(spent[row] for row in KERNELS)
    bound = account.bytes / speed
    largest = sorted(spent, key=lambda row: -spent[row])[:3]
    verdict = (
        f"{ratio:.2f} times float; the limit of {limit:.2f} is met."
        if ratio <= limit
        else f"{ratio:.2f} times float; the limit of {limit:.2f} is missed by {1e3 * (total - limit * base):.1f} ms. "
        f"The largest parts: {', '.join(f'{row} {1e3 * spent[row]:.1f} ms' for row in largest)}."
    )
    return (
        f"{verdict} Kernels take {passes / base:.2f} of the float step, calls around them {calls / base:.2f}, the rest "
        f"{(total - base - passes - calls) / base:.2f}.\n\n"
        f"A step rounds {sum(account.sizes) / 1e6:.1f} million elements in {len(account.sizes)} calls, forward, "
        f"backward and again, and moves {account.bytes / 2**20:.0f} MiB for that: {1e3 * bound:.1f} ms at "
        f"{speed / 1e9:.1f} GB/s, the speed of repeated copies of {mean} elements, a call's mean. At that speed, and "
        f"with nothing else, the step would take {1 + bound / base:.2f} times float. Operators: {operators[FLOAT]} in "
        f"the float step, {operators[ON]} here. New pages of memory: {pages[FLOAT]:.0f} and {pages[ON]:.0f}."
    )


def page(found: dict[str, tuple[PrettyTable, str]], arguments: argparse.Namespace) -> str:
    """The documentation page."""
    parts = [f"{name}\n{'-' * len(name)}\n\n{text}\n\n{table.get_string()}\n" for name, (table, text) in found.items()]
    return f"""Where the time of a training step goes
======================================

The training step of :doc:`step_time` on TSQAT, eager, against the float model's: batch {arguments.batch},
{arguments.image} px, {torch.get_num_threads()} threads of {processor()},
medians of {arguments.rounds} rounds in which the variants take turns.

* The kernels and the calls around them are timed in steps of their own, and the time that the clock takes there is
  subtracted.
* *graph* is the prepared model with fake-quant off, less the float step.
* *other* makes the sum exact.
* What is moved is counted at every call of a kernel: the bytes that it reads and writes.
{cost_of_small_calls()}

Written by ``tests/benchmarks/performance/step_account.py`` with torch {torch.__version__} on {date.today()}; do not
edit.

{chr(10).join(parts)}"""


def main() -> None:
    """Measure, print the page, write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if kernels.LIBRARY is None:
        sys.exit(f"the account is of the compiled kernels: {kernels.STATE}")
    torch.set_num_threads(arguments.threads)
    text = page({name: account_of(name, arguments) for name in arguments.models}, arguments)
    print(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
