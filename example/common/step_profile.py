"""Where the time of a training step goes: waiting for data, the float model's work, fake-quant."""

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from training import Precision

from fxqat import disable_all
from fxqat.errors import CalibrationError

ROUNDS = 5


@dataclass
class StepProfile:
    """The times of the steps of an epoch, and of a forward and backward pass with and without fake-quant.

    Args:
        device: the device of the model.
        precision: of the forward passes.
        waits: seconds that each step waited for its batch.
        steps: seconds of each step with that.
        inputs: the inputs of the last step.
    """

    device: torch.device
    precision: Precision
    waits: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    inputs: Tensor | None = None

    def add(self, wait: float, start: float, inputs: Tensor) -> None:
        """Add a step that waited so long and began at a time of ``perf_counter``."""
        self.synchronize()
        self.waits.append(wait)
        self.steps.append(time.perf_counter() - start)
        self.inputs = inputs

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def report(self, model: nn.Module) -> str:
        """The medians of all steps; fake-quant is switched off in a copy of the model to see what it costs."""
        wait, step = statistics.median(self.waits), statistics.median(self.steps)
        parts = {"waiting for data": wait}
        if (extra := self.fake_quant_seconds(model)) is not None:
            parts["fake-quant"] = extra
        parts["the rest (the float model, loss, optimizer)"] = step - sum(parts.values())
        shares = ", ".join(f"{name} {1e3 * value:.1f} ms ({value / step:.0%})" for name, value in parts.items())
        return f"a step takes {1e3 * step:.1f} ms (median of {len(self.steps)}): {shares}"

    def fake_quant_seconds(self, model: nn.Module) -> float | None:
        """What fake-quant adds to a forward and backward pass on the last inputs; None for a model without it."""
        on, off = copy.deepcopy(model).train(), copy.deepcopy(model).train()
        try:
            disable_all(off)
        except CalibrationError:  # a float model
            return None
        found: list[list[float]] = [[], []]
        with torch.random.fork_rng():  # the training goes on with the numbers that it would have drawn
            for _ in range(ROUNDS):
                for each, values in zip((on, off), found, strict=True):
                    values.append(self.seconds(lambda each=each: self.passes(each)))
        return statistics.median(a - b for a, b in zip(*found, strict=True))

    def passes(self, model: nn.Module) -> None:
        """A forward and a backward pass."""
        with self.precision.autocast():
            output = model(self.inputs)
        output.float().sum().backward()

    def seconds(self, work: Callable[[], None]) -> float:
        """Seconds of a piece of work on the device."""
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start
