"""Modules in place of those of onnx2torch, whose constants are tensors of the graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Constants(nn.Module):
    """A module with some of its arguments, in place of buffers.

    Args:
        module: the module.
        arguments: its arguments, None for those that are given.
        keywords: its constant keyword arguments.
    """

    def __init__(self, module: nn.Module, arguments: tuple[Tensor | None, ...], keywords: dict[str, Tensor]) -> None:
        super().__init__()
        self.module, self.arguments, self.keywords = module, arguments, keywords

    def forward(self, *values: Tensor, **keywords: Tensor) -> Any:
        """Call the module with all arguments."""
        given = iter(values)
        arguments = (next(given) if constant is None else constant for constant in self.arguments)
        return self.module(*arguments, **keywords, **self.keywords)


class Pad(nn.Module):
    """Pad by mirrored or repeated values along any axes.

    Args:
        pads: numbers of values before the first one of each axis, then of those after its last one.
        mode: of ``torch.nn.functional.pad``.
    """

    def __init__(self, pads: list[int], mode: str) -> None:
        super().__init__()
        self.pads, self.mode = pads, mode

    def forward(self, x: Tensor) -> Tensor:
        """Pad one axis after the other: each in turn is the last one of a matrix."""
        middle = len(self.pads) // 2
        for axis, pair in enumerate(zip(self.pads[:middle], self.pads[middle:], strict=True)):
            if any(pair):
                rows = x.movedim(axis, -1)
                matrix = nn.functional.pad(rows.reshape(-1, rows.shape[-1]), pair, self.mode)
                x = matrix.reshape(*rows.shape[:-1], -1).movedim(-1, axis)
        return x


class Slice(nn.Module):
    """Take a part of a value along some axes.

    Args:
        starts: the first number along each axis.
        ends: the end along each, which is not taken.
        axes: the axes; None for the first ones.
        steps: from one number to the next; None for 1.
    """

    def __init__(self, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None) -> None:
        super().__init__()
        count = len(starts)
        self.axes: list[int] = list(range(count)) if axes is None else axes.tolist()
        self.steps: list[int] = [1] * count if steps is None else steps.tolist()
        self.ranges: list[tuple[int, int]] = list(zip(starts.tolist(), ends.tolist(), strict=True))

    def forward(self, x: Tensor) -> Tensor:
        """A negative step: the axis is reversed, and numbers are counted from its other end."""
        back = [axis for axis, step in zip(self.axes, self.steps, strict=True) if step < 0]
        parts = [slice(None)] * x.dim()
        for axis, step, (start, end) in zip(self.axes, self.steps, self.ranges, strict=True):
            parts[axis] = slice(start, end, step) if step > 0 else slice(-start - 1, -end - 1, -step)
        return (x.flip(back) if back else x)[tuple(parts)]
