"""Ctrl-C and SIGTERM in training: finish the current step, write a checkpoint, end the run."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from distributed import Process, add_up

AGREE_EVERY = 10  # steps after which the processes ask each other for signals


class Interrupt:
    """Keeps a signal until the training asks for it; a second signal ends the process at once."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.number = 0

    def note(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        self.number = number
        signal.signal(number, signal.SIG_DFL)

    def arrived(self, step: int) -> int:
        """The number of a signal that any process received, or 0; all processes must ask at the same steps."""
        if self.process.world == 1:
            return self.number
        if step % AGREE_EVERY:
            return 0
        numbers = torch.zeros(self.process.world, dtype=torch.int64, device=self.process.device)
        numbers[self.process.rank] = self.number
        return int(add_up(numbers).max())


@contextmanager
def catching(process: Process) -> Iterator[Interrupt]:
    """Catch SIGINT and SIGTERM in the block."""
    interrupt = Interrupt(process)
    before = {number: signal.signal(number, interrupt.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
