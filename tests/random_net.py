"""Networks of random topology: a seed determines the model and its inputs.

A network runs a plan: a list of steps, each of which computes values from earlier values. A step is tried when it is
drawn, so that it fits the shapes and no value exceeds ``LIMIT``. Values that are not read are dead branches.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LIMIT = 50.0
ACTIVATION_FUNCTIONS = (
    "relu",
    "relu6",
    "hardswish",
    "hardsigmoid",
    "sigmoid",
    "tanh",
    "gelu",
    "silu",
    "leaky_relu",
    "elu",
)
SEVERAL = ("chunk", "split", "recurrent")
"""The steps that give two values."""
MODULES: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "hardswish": nn.Hardswish,
    "hardsigmoid": nn.Hardsigmoid,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.1),
    "elu": nn.ELU,
    "prelu": nn.PReLU,
    "softplus": nn.Softplus,
    "mish": nn.Mish,
}


@dataclass(frozen=True)
class Step:
    """One step of a plan: an op, the values it reads by number, the module it calls if any, and its options."""

    op: str
    reads: tuple[int, ...]
    module: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.reads))}{', ' + self.module if self.module else ''}{self.options})"


def _binary(kind: str, a: Tensor, b: Tensor) -> Tensor:
    if kind == "add":
        return a + b
    if kind == "sub":
        return torch.sub(a, b)
    if kind == "mul":
        return a.mul(b)
    if kind == "max":
        return torch.maximum(a, b)
    return a / (b.abs() + 1.0)


def _scalar(kind: str, a: Tensor) -> Tensor:
    return {"add": lambda: a + 0.5, "mul": lambda: a * 0.7, "rsub": lambda: 1.0 - a, "neg": lambda: -a}[kind]()


def _reduce(kind: str, a: Tensor) -> Tensor:
    last = (2, 3) if a.dim() == 4 else (1,)
    if kind == "keep":
        return a - a.mean(last, keepdim=True)
    return a.sum(last) * 0.1 if kind == "sum" else a.mean(last) if kind == "mean" else a.amax(last)


def _dtype(kind: str, a: Tensor) -> Tensor:
    if kind == "double":
        return (a.double() * 2).float()
    if kind == "int":
        return (a * 4).to(torch.int32).to(torch.float32)
    if kind == "long":
        return (a * 8).long().float() / 8
    return torch.where(a > 0, a, a * 0.2) if kind == "bool" else a.to(torch.float32)


def _move(kind: str, a: Tensor) -> Tensor:
    if kind == "to_sequence":
        return a.flatten(2).transpose(1, 2)
    if kind == "to_image":
        side = int(a.shape[1] ** 0.5)
        return a.permute(0, 2, 1).reshape(a.shape[0], a.shape[2], side, side)
    if kind == "to_vector":
        return a.reshape(a.shape[0], -1)
    if kind == "shuffle":
        b, c, h, w = a.shape
        return a.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
    if kind == "flip":
        return torch.flip(a, (1,))
    if kind == "roll":
        return torch.roll(a, 1, 1)
    if kind == "squeeze":
        return a.unsqueeze(1).squeeze(1)
    if kind == "transpose":
        return a.transpose(-1, -2).contiguous()
    return a[:, 1:] if kind == "narrow" else a[..., ::2]


def _attend(a: Tensor) -> Tensor:
    return torch.softmax(a @ a.transpose(-2, -1) * a.shape[-1] ** -0.5, -1) @ a


OPS: dict[str, Callable[..., Any]] = {
    "activation": lambda a, kind: getattr(F, kind)(a),
    "attend": _attend,
    "binary": lambda a, b, kind: _binary(kind, a, b),
    "cat": lambda *values, dim: torch.cat(values, dim),
    "chunk": lambda a, dim: a.chunk(2, dim),
    "split": lambda a, sizes: torch.split(a, sizes, 1),
    "clamp": lambda a: a.clamp(-1.5, 2.0),
    "dtype": lambda a, kind: _dtype(kind, a),
    "interpolate": lambda a: F.interpolate(a, scale_factor=2.0, mode="nearest"),
    "move": lambda a, kind: _move(kind, a),
    "pad": lambda a, value: F.pad(a, (1, 0, 0, 1), value=value),
    "pool": lambda a, kind: getattr(F, kind)(a, 2),
    "reduce": lambda a, kind: _reduce(kind, a),
    "scalar": lambda a, kind: _scalar(kind, a),
    "softmax": lambda a: torch.softmax(a, -1),
    "stack": lambda *values: torch.stack(values, 1).mean(1),
}


class Attention(nn.Module):
    """Multi-head attention of torch, of a value to itself or to its flipped copy."""

    def __init__(self, width: int, moved: bool, **options: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, **options)
        self.moved = moved

    def forward(self, x: Tensor) -> Tensor:
        y = x.flip(1) if self.moved else x
        result: Tensor = self.attention(x, y, y, need_weights=self.moved)[0]
        return result


class Recurrence(nn.Module):
    """A recurrent module on a sequence, with or without given states; returns its output and a slice of a state."""

    def __init__(self, kind: type[nn.RNNBase], width: int, starts: bool, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(width, 4, batch_first=True, **options)
        self.starts = starts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.rnn.num_layers * (1 + self.rnn.bidirectional)
        h = x.mean(1)[:, :1].expand(rows, -1, 4).clamp(-1, 1) if self.starts else None
        first = h if h is None or not isinstance(self.rnn, nn.LSTM) else (h, h * 0.5)
        y, states = self.rnn(x, first)
        return y, states[1][0] if isinstance(self.rnn, nn.LSTM) else states[-1]


class RandomNet(nn.Module):
    """A network that runs a plan.

    Args:
        seed: number of the network.

    Attributes:
        plan: its steps.
        outputs: numbers of the values it returns.
        as_dict: whether it returns a dict.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.layers = nn.ModuleDict()
        self.plan: list[Step] = []
        values: list[Tensor] = list(self.inputs())
        self.count = len(values)
        self.eval()
        for _ in range(self.random.randint(5, 24)):
            self._grow(values)
        if not any(isinstance(layer, (nn.Conv2d, nn.Linear)) for layer in self.layers.values()):
            while not self._try(values, *self._conv(values)):
                pass
        wanted = self.random.choice((1, 1, 1, 2, 3))
        computed = range(self.count, len(values))
        others = self.random.sample(computed, min(len(computed), wanted - 1))
        self.outputs = list(dict.fromkeys([len(values) - 1, *others]))
        self.as_dict = len(self.outputs) > 1 and self.random.random() < 0.5
        del self.random

    def inputs(self, batch: int = 2, seed: int = 0) -> tuple[Tensor, ...]:
        """Inputs of the network: an image, and for some networks a second input."""
        if not hasattr(self, "sizes"):
            side = self.random.choice((8, 12, 16))
            self.sizes = [(self.random.choice((1, 3, 4)), side, side)]
            if self.random.random() < 0.3:
                self.sizes.append(self.random.choice([(self.sizes[0][0], side, side), (6,), (9, 8)]))
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(batch, *size, generator=generator) for size in self.sizes)

    def forward(self, *values: Tensor) -> Any:
        """Run the plan."""
        known: list[Any] = list(values)
        for step in self.plan:
            known += self._results(step, known)
        if self.as_dict:
            return {f"value{i}": known[i] for i in self.outputs}
        return known[self.outputs[0]] if len(self.outputs) == 1 else tuple(known[i] for i in self.outputs)

    def describe(self) -> str:
        """The plan as text."""
        lines = [f"{self.sizes}"]
        number = self.count
        for step in self.plan:
            count = 2 if step.op in SEVERAL else 1
            lines.append(f"{', '.join(str(number + i) for i in range(count))} = {step}")
            number += count
        return "\n".join([*lines, f"return {self.outputs}"])

    def _results(self, step: Step, values: list[Any]) -> list[Any]:
        given = [values[i] for i in step.reads]
        result = self.layers[step.module](*given) if step.module else OPS[step.op](*given, **step.options)
        return list(result) if step.op in SEVERAL else [result]

    def _try(self, values: list[Tensor], step: Step | None, layer: nn.Module | None = None) -> bool:
        if step is None:
            return False
        if layer is not None:
            self.layers[step.module] = layer.eval()
        try:
            with torch.no_grad():
                found = self._results(step, values)
            fits = all(v.numel() and v.isfinite().all() and v.abs().max() < LIMIT and v.numel() < 20_000 for v in found)
        except (RuntimeError, ValueError, AssertionError):  # attention asserts its shapes
            fits = False
        if not fits:
            if layer is not None:
                del self.layers[step.module]
            return False
        self.plan.append(step)
        values += found
        return True

    def _grow(self, values: list[Tensor]) -> None:
        """Add one step that fits."""
        for _ in range(20):
            if self._try(values, *self.random.choice(self._draws())(values)):
                return

    def _draws(self) -> list[Callable[[list[Tensor]], tuple[Any, ...]]]:
        """What a step can be, as often as it is likely."""
        return (
            [self._conv] * 6
            + [self._linear] * 3
            + [self._attention] * 2
            + [self._shared] * 2
            + [self._norm] * 2
            + [self._module_activation] * 2
            + [self._simple] * 7
            + [self._two] * 4
            + [self._cut] * 2
            + [self._move] * 2
        )

    def _pick(self, values: list[Tensor], *dims: int) -> int | None:
        """A value with one of these numbers of dimensions; newer values are likelier."""
        fitting = [i for i, value in enumerate(values) if not dims or value.dim() in dims]
        return max(self.random.choices(fitting, k=2)) if fitting else None

    def _name(self, kind: str) -> str:
        return f"{kind}{len(self.layers)}"

    def _conv(self, values: list[Tensor]) -> tuple[Any, ...]:
        source = self._pick(values, 4)
        if source is None:
            return self._linear(values)
        width, choice = values[source].shape[1], self.random.choice
        out, kernel = choice((2, 4, 6, 8)), choice((1, 1, 3, 3, 5))
        groups = choice([g for g in (1, 1, 1, 2, width) if width % g == 0 and out % g == 0])
        transposed = self.random.random() < 0.15
        padding = {"padding": choice((0, kernel // 2))}
        if not transposed and self.random.random() < 0.1:
            padding["padding_mode"] = choice(("reflect", "replicate", "circular"))
        kind = nn.ConvTranspose2d if transposed else nn.Conv2d
        bias = choice((True, False))
        layer = kind(width, out, kernel, stride=choice((1, 1, 2)), groups=groups, bias=bias, **padding)
        return self._with_norm_and_activation("conv", source, layer, out)

    def _with_norm_and_activation(self, name: str, source: int, layer: nn.Module, out: int) -> tuple[Any, ...]:
        layers = [layer]
        if self.random.random() < 0.5 and name == "conv":
            layers.append(self._batch_norm(out))
        if self.random.random() < 0.5:
            layers.append(self.random.choice((nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.Hardswish())))
        return Step(name, (source,), self._name(name)), layers[0] if len(layers) == 1 else nn.Sequential(*layers)

    @staticmethod
    def _batch_norm(features: int) -> nn.BatchNorm2d:
        layer = nn.BatchNorm2d(features)
        nn.init.uniform_(layer.running_mean, -0.5, 0.5)
        nn.init.uniform_(layer.running_var, 0.5, 2.0)
        nn.init.uniform_(layer.weight, 0.5, 1.5)
        nn.init.uniform_(layer.bias, -0.5, 0.5)
        return layer

    def _linear(self, values: list[Tensor]) -> tuple[Any, ...]:
        source = self._pick(values, 2, 3, 4)
        assert source is not None
        out = self.random.choice((4, 6, 8))
        layer = nn.Linear(values[source].shape[-1], out, bias=self.random.random() < 0.8)
        return self._with_norm_and_activation("linear", source, layer, out)

    def _attention(self, values: list[Tensor]) -> tuple[Any, ...]:
        source = self._pick(values, 3)
        if source is None or values[source].shape[-1] % 2:
            return (None,)
        bias, moved = self.random.choice((True, False)), self.random.choice((True, False))
        return Step("mha", (source,), self._name("mha")), Attention(values[source].shape[-1], moved, bias=bias)

    def _shared(self, values: list[Tensor]) -> tuple[Any, ...]:
        source = self._pick(values)
        names = [name for name in self.layers if not name.startswith("recurrent")]
        if not names or source is None:
            return (None,)
        name = self.random.choice(names)
        return (Step("shared", (source,), name),)

    def _norm(self, values: list[Tensor]) -> tuple[Any, ...]:
        source = self._pick(values)
        assert source is not None
        shape = values[source].shape
        if values[source].dim() == 4:
            group = nn.GroupNorm(2 if shape[1] % 2 == 0 else 1, shape[1])
            return Step("norm", (source,), self._name("norm")), self.random.choice((self._batch_norm(shape[1]), group))
        return Step("norm", (source,), self._name("norm")), nn.LayerNorm(shape[-1])

    def _module_activation(self, values: list[Tensor]) -> tuple[Any, ...]:
        source = self._pick(values)
        kind = self.random.choice(list(MODULES))
        layer = nn.Dropout(0.1) if self.random.random() < 0.1 else MODULES[kind]()
        return Step("act", (source,), self._name("act")), layer

    def _simple(self, values: list[Tensor]) -> tuple[Any, ...]:
        source, choice = self._pick(values), self.random.choice
        assert source is not None
        image = values[source].dim() == 4
        draws: list[tuple[str, dict[str, Any]]] = [
            ("activation", {"kind": choice(ACTIVATION_FUNCTIONS)}),
            ("scalar", {"kind": choice(("add", "mul", "rsub", "neg"))}),
            ("dtype", {"kind": choice(("double", "int", "long", "bool", "same"))}),
            ("clamp", {}),
            ("softmax", {}),
        ]
        if image:
            draws += [("pool", {"kind": choice(("max_pool2d", "avg_pool2d"))}), ("interpolate", {})]
            draws += [("pad", {"value": choice((0.0, 0.5))})]
        if values[source].dim() > 2:
            draws += [("reduce", {"kind": choice(("mean", "sum", "amax", "keep"))}), ("attend", {})]
        op, options = choice(draws)
        return (Step(op, (source,), "", options),)

    def _two(self, values: list[Tensor]) -> tuple[Any, ...]:
        a = self._pick(values)
        assert a is not None
        shape = values[a].shape
        same = [i for i, value in enumerate(values) if value.shape == shape]
        along = [i for i, v in enumerate(values) if v.dim() == len(shape) and v.shape[2:] == shape[2:]]
        reads = (a, self.random.choice(same))
        draws = [
            Step("binary", reads, "", {"kind": self.random.choice(("add", "add", "sub", "mul", "max", "div"))}),
            Step("stack", reads),
            Step("cat", tuple(self.random.choices(along, k=self.random.choice((2, 3)))), "", {"dim": 1}),
        ]
        return (self.random.choice(draws),)

    def _cut(self, values: list[Tensor]) -> tuple[Any, ...]:
        source = self._pick(values)
        assert source is not None
        width = values[source].shape[1]
        if width < 2:
            return (None,)
        if width % 2 == 0 and self.random.random() < 0.5:
            return (Step("chunk", (source,), "", {"dim": 1}),)
        return (Step("split", (source,), "", {"sizes": [1, width - 1]}),)

    def _move(self, values: list[Tensor]) -> tuple[Any, ...]:
        source, choice = self._pick(values), self.random.choice
        assert source is not None
        value = values[source]
        draws = ["flip", "roll", "squeeze"]
        if value.dim() > 2:
            draws += ["transpose", "every_second"]
        if value.shape[1] > 2:
            draws += ["narrow"]
        if value.dim() == 4:
            draws += ["to_sequence", "to_sequence", "shuffle"] if value.shape[1] % 2 == 0 else ["to_sequence"]
        if value.dim() == 3 and int(value.shape[1] ** 0.5) ** 2 == value.shape[1]:
            draws += ["to_image", "to_image"]
        if value.dim() > 2 and value[0].numel() <= 256:
            draws += ["to_vector"]
        return (Step("move", (source,), "", {"kind": choice(draws)}),)


class RandomRecurrentNet(RandomNet):
    """A network whose first step is a recurrent module, with others among the further steps."""

    def inputs(self, batch: int = 2, seed: int = 0) -> tuple[Tensor, ...]:
        """An image and a sequence."""
        if not hasattr(self, "sizes"):
            side = self.random.choice((8, 12))
            self.sizes = [(self.random.choice((1, 3, 4)), side, side), (self.random.choice((3, 6)), 8)]
        return super().inputs(batch, seed)

    def _draws(self) -> list[Callable[[list[Tensor]], tuple[Any, ...]]]:
        return [self._recurrent] if not self.plan else [*super()._draws(), *[self._recurrent] * 12]

    def _recurrent(self, values: list[Tensor]) -> tuple[Any, ...]:
        source, choice = self._pick(values, 3), self.random.choice
        if source is None or values[source].shape[1] > 16:
            return (None,)
        kind = choice((nn.LSTM, nn.LSTM, nn.GRU, nn.RNN))
        flags = {name: choice((True, False)) for name in ("bidirectional", "bias")}
        layer = Recurrence(kind, values[source].shape[-1], choice((True, False)), num_layers=choice((1, 1, 2)), **flags)
        return Step("recurrent", (source,), self._name("recurrent")), layer
