"""Ctrl-C and SIGTERM in a training: the step that runs is finished, a checkpoint is written, and the run ends."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from distributed import Process, add_up

AGREE_EVERY = 10  # steps; the processes ask each other whether one of them was interrupted


class Interrupt:
    """Remembers a signal until the training asks for it; a second one ends the process at once."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.number = 0

    def note(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler."""
        self.number = number
        signal.signal(number, signal.SIG_DFL)

    def arrived(self, step: int) -> int:
        """The number of the signal that one of the processes got, 0 if none; all have to ask at the same steps."""
        if self.process.world == 1:
            return self.number
        if step % AGREE_EVERY:
            return 0
        numbers = torch.zeros(self.process.world, dtype=torch.int64, device=self.process.device)
        numbers[self.process.rank] = self.number
        return int(add_up(numbers).max())


@contextmanager
def catching(process: Process) -> Iterator[Interrupt]:
    """Catch both signals in the block."""
    interrupt = Interrupt(process)
    before = {number: signal.signal(number, interrupt.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
