"""The cases of the op table: every spelling of every row, and a model around it.

A spelling is Python text. In it, ``x`` and ``y`` are computed values, ``w`` and ``b`` are parameters, and ``boxes``
are regions; a module is called on ``x``. The model of some cases has one branch for each spelling::

    input -> before -> [first] -> the spelling -> [last] -> after (linear)

so that the op is between layers that every backend quantizes.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

NAMES: dict[str, Any] = {
    "torch": torch,
    "nn": nn,
    "F": F,
    "operator": operator,
    "ops": torchvision.ops,
    "isinstance": isinstance,
    "slice": slice,
}
ARGUMENTS = ("x", "y", "w", "b", "boxes")

INPUTS: dict[str, Callable[[], Tensor]] = {
    "image": lambda: torch.randn(2, 3, 6, 6),
    "line": lambda: torch.randn(2, 3, 8),
    "volume": lambda: torch.randn(2, 3, 4, 4, 4),
    "tokens": lambda: torch.randn(2, 6, 8),
    "rows": lambda: torch.randn(4, 6),
    "ids": lambda: torch.randint(0, 10, (2, 5)),
}
# Without biases: they are tested elsewhere, and every node of these 1,200 branches costs export time.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "image": lambda: nn.Conv2d(3, 4, 3, padding=1, bias=False),
    "line": lambda: nn.Conv1d(3, 4, 3, padding=1, bias=False),
    "volume": lambda: nn.Conv3d(3, 4, 1, bias=False),
    "tokens": lambda: nn.Linear(8, 8, bias=False),
    "rows": lambda: nn.Linear(6, 6, bias=False),
    "ids": nn.Identity,
}


@dataclass(frozen=True)
class Case:
    """One op and its spellings.

    Args:
        row: the number of the row of the op table, or ``"beyond"``.
        op: the op's name in the report.
        spellings: Python texts.
        kind: the kind of input.
        status: the status of the op in the report of TSQAT and Experimental.
        elsewhere: its status on other backends, where it differs.
        first: the value that replaces ``x`` before the op.
        call: how a module is called.
        last: the value, from the result ``r``, that the last layer reads.
        weight: shape of ``w``.
        bias: shape of ``b``.
        gradient: whether the layer before it gets a gradient other than zero.
        fails: why the case cannot be exported; empty if it can.
        failure: part of the message of the export error in that case.
    """

    row: int | str
    op: str
    spellings: tuple[str, ...]
    kind: str = "image"
    status: str = "quantized"
    elsewhere: dict[str, str] = field(default_factory=dict)
    first: str = "x"
    call: str = "m(x)"
    last: str = "r"
    weight: tuple[int, ...] = ()
    bias: tuple[int, ...] = ()
    gradient: bool = True
    fails: str = ""
    failure: str = ""

    @property
    def name(self) -> str:
        """The name of the case in tests and golden files."""
        return f"{self.row}-{self.op}-{self.kind}" + ("" if self.status == "quantized" else f"-{self.status}")

    def status_on(self, backend: str) -> str:
        """The status that a backend's report gives."""
        return self.elsewhere.get(backend, self.status)

    def only_first(self) -> "Case":
        """The case with its first spelling only."""
        return replace(self, spellings=self.spellings[:1])


class Branch(nn.Module):
    """A spelling between two layers."""

    def __init__(self, case: Case, text: str) -> None:
        super().__init__()
        self.before = LAYERS[case.kind]()
        self.other = LAYERS[case.kind]() if uses(case, text, "y") else None
        self.w = nn.Parameter(torch.randn(case.weight) * 0.3 + 0.5) if uses(case, text, "w") else None
        self.b = nn.Parameter(torch.randn(case.bias) * 0.3) if uses(case, text, "b") else None
        self.register_buffer("boxes", None)
        if uses(case, text, "boxes"):
            self.boxes = torch.tensor([[0.0, 0.0, 0.0, 3.0, 3.0], [1.0, 1.0, 1.0, 5.0, 4.0]])
        self.first = evaluate(f"lambda x: {case.first}")
        self.last = evaluate(f"lambda x, r: {case.last}")
        written = evaluate(text) if text.startswith(("nn.", "ops.R")) else None
        self.m = written
        self.spelled = evaluate(f"lambda {', '.join(ARGUMENTS)}, m: {text if written is None else case.call}")
        with torch.no_grad():
            width = self._value(INPUTS[case.kind]()).shape[-1]
        self.after = nn.Linear(width, 3, bias=False)

    def _value(self, given: Tensor) -> Tensor:
        x = self.first(self.before(given))
        y = None if self.other is None else self.other(given)
        return self.last(x, self.spelled(x, y, self.w, self.b, self.boxes, self.m))

    def forward(self, given: Tensor) -> Tensor:
        return self.after(self._value(given))


class Branches(nn.Module):
    """One branch for each spelling of some cases, all on the same input."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(case, text) for case in cases for text in case.spellings)

    def forward(self, given: Tensor) -> tuple[Tensor, ...]:
        return tuple(branch(given) for branch in self.branches)


def uses(case: Case, text: str, name: str) -> bool:
    """Whether a spelling, or the text before or after it, uses an argument."""
    code = compile(f"({text}, {case.first}, {case.call}, {case.last})", "spelling", "eval")
    return name in code.co_names


def evaluate(text: str) -> Any:
    """The value of a Python text."""
    return eval(text, dict(NAMES))


def build(*cases: Case) -> tuple[Branches, tuple[Tensor, ...]]:
    """The model of some cases of one kind of input, in eval mode, and example inputs."""
    torch.manual_seed(0)
    model = Branches(cases).eval()
    return model, (INPUTS[cases[0].kind](),)


def case(row: int | str, op: str, spellings: str, **settings: Any) -> Case:
    """A case from text with one spelling per line."""
    return Case(row, op, tuple(line.strip() for line in spellings.strip().splitlines()), **settings)


def both(row: int | str, op: str, spellings: str, elsewhere: dict[str, str] | None = None, **settings: Any) -> Case:
    """A case whose op shares the scale of its input.

    TensorRT quantizes the inputs of kernels: the result of the op, not its input.
    """
    elsewhere = {"TensorRT": "quantized"} if elsewhere is None else elsewhere
    return case(row, op, spellings, status="shares", elsewhere=elsewhere, **settings)


DECOMPOSED = (
    *('padding="same"', "Pool1d(", "adaptive_avg_pool1d", "adaptive_max_pool1d", "AdaptiveAvgPool2d(("),
    *("output_size=(", "AdaptiveAvgPool3d", "adaptive_avg_pool3d", "hstack", "vstack", "dstack", "tensor_split"),
    *("hsplit", "absolute"),
    *("swapaxes", "swapdims", "movedim", "moveaxis", "min(x, y", "min(x, o", "x.min(y", "fmax", "max(x, y", "max(x, o"),
    *("x.max(y", "rsub", "1.5 - x", "clip", "linalg.matmul", "linalg.norm", "x.to(x", 'x.to("', "reshape_as"),
    *("rms_norm", "RMSNorm", "rrelu", "RReLU", "oftshrink", "ardshrink", "hreshold", "tensordot", "y.T @ y", "square"),
    *("nan_to_num", "torch.var", "x.var", "torch.std", "x.std", "cosine", "pairwise", "cdist", "setitem", "along_dim"),
    *("index_select", "fliplr", "hannelShuffle", "channel_shuffle", "+x"),
)
"""Parts of the spellings that torch's exporter cannot translate before it has decomposed them.

A part that is missing or too many costs time only: the exporter then decomposes more groups.
"""


def by_decomposition(cases: Sequence[Case]) -> list[Case]:
    """The cases, with those spellings last that have to be decomposed, so that not every group has one of them."""
    parts: tuple[list[Case], list[Case]] = ([], [])
    for one in cases:
        decomposed = [any(part in text for part in DECOMPOSED) for text in one.spellings]
        for which, found in enumerate(parts):
            texts = tuple(text for text, last in zip(one.spellings, decomposed, strict=True) if last == bool(which))
            if texts:
                found.append(replace(one, spellings=texts))
    return parts[0] + parts[1]


def grouped(cases: Sequence[Case], spellings: int = 32) -> list[tuple[Case, ...]]:
    """Cases in groups that share a kind of input and a model; those that cannot be exported are alone."""
    found: list[tuple[Case, ...]] = []
    for kind in INPUTS:
        group: list[Case] = []
        for one in (one for one in cases if one.kind == kind and not one.fails):
            if group and sum(len(member.spellings) for member in [*group, one]) > spellings:
                found.append(tuple(group))
                group = []
            group.append(one)
        found += [tuple(group)] if group else []
    return found + [(one,) for one in cases if one.fails]


TUPLE = {"TensorRT": "float"}  # quantizes the item that a kernel reads
UNREAD = {"TensorRT": "float", "ONNXRuntime": "float"}  # no kernel reads it, only a value computed from it
NO_RULE = UNREAD  # no integer kernel reads it
FLIPPED = "x.flip(-1)"  # keeps the op from being fused into the convolution
POSITIVE = "x.abs() + 1.0"
SMOOTH = ("square", "reciprocal", "rsqrt", "neg", "log2", "log10", "log1p", "erf", "exp2", "expm1", "atan", "sinh")
SMOOTH += ("cosh", "tan", "asinh", "frac")
STEPS = ("sign", "floor", "ceil", "round", "trunc")

TABLE: tuple[Case, ...] = (
    case(1, "conv2d", """
        nn.Conv2d(4, 4, 3, padding=1)
        nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2, bias=False, padding_mode="reflect")
        F.conv2d(x, w, b, padding=1)
        F.conv2d(input=x, weight=w, padding="same")
        torch.conv2d(x, w, b, 1, 1)
    """, weight=(4, 4, 3, 3), bias=(4,)),
    case(1, "conv1d", """
        nn.Conv1d(4, 4, 3, padding=1)
        F.conv1d(x, w, b, padding=1)
        F.conv1d(input=x, weight=w, stride=2)
    """, kind="line", weight=(4, 4, 3), bias=(4,)),
    case(2, "conv_transpose2d", """
        nn.ConvTranspose2d(4, 4, 2, stride=2)
        F.conv_transpose2d(x, w, b, stride=2)
        F.conv_transpose2d(input=x, weight=w, stride=2)
    """, weight=(4, 4, 2, 2), bias=(4,)),
    case(2, "conv_transpose1d", """
        nn.ConvTranspose1d(4, 4, 2, stride=2)
        F.conv_transpose1d(x, w, b, stride=2)
    """, kind="line", weight=(4, 4, 2), bias=(4,)),
    case(3, "linear", """
        nn.Linear(8, 8)
        nn.Linear(8, 8, bias=False)
        F.linear(x, w, b)
        F.linear(input=x, weight=w)
    """, kind="tokens", weight=(8, 8), bias=(8,)),
    both(4, "max_pool2d", """
        nn.MaxPool2d(2)
        nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True)
        F.max_pool2d(x, 2)
        F.max_pool2d(input=x, kernel_size=2, stride=1)
        torch.max_pool2d(x, 2)
    """, elsewhere={}),
    both(4, "max_pool1d", """
        nn.MaxPool1d(2)
        F.max_pool1d(x, 2)
        torch.max_pool1d(x, 2)
    """, kind="line", elsewhere={}),
    case(5, "adaptive_avg_pool2d", """
        nn.AdaptiveAvgPool2d(1)
        nn.AdaptiveAvgPool2d((3, 2))
        F.adaptive_avg_pool2d(x, 1)
        F.adaptive_avg_pool2d(input=x, output_size=(2, 3))
    """),
    case(5, "adaptive_avg_pool1d", """
        nn.AdaptiveAvgPool1d(2)
        F.adaptive_avg_pool1d(x, 1)
        torch.adaptive_avg_pool1d(x, 2)
    """, kind="line"),
    case(6, "batch_norm2d", """
        nn.BatchNorm2d(4)
        nn.SyncBatchNorm(4)
    """, first=FLIPPED),
    case(6, "batch_norm1d", "nn.BatchNorm1d(4)", kind="line", first=FLIPPED),
    case(7, "relu", """
        nn.ReLU()
        nn.ReLU(inplace=True)
        F.relu(x)
        F.relu(x, inplace=True)
        F.relu(x, True)
        F.relu(input=x)
        F.relu_(x)
        torch.relu(x)
        torch.relu_(x)
        x.relu()
        x.relu_()
    """, first=FLIPPED),
    case(8, "prelu", """
        nn.PReLU()
        nn.PReLU(4)
        F.prelu(x, w)
        torch.prelu(x, w)
        x.prelu(w)
    """, weight=(4,)),
    both(9, "interpolate", """
        nn.Upsample(scale_factor=2)
        nn.Upsample(size=(9, 9), mode="nearest")
        nn.UpsamplingNearest2d(scale_factor=2)
        F.interpolate(x, scale_factor=2)
        F.interpolate(input=x, size=(12, 12), mode="nearest")
        F.upsample(x, scale_factor=2)
    """),
    case(9, "interpolate", """
        nn.Upsample(scale_factor=2, mode="bilinear")
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        nn.UpsamplingBilinear2d(scale_factor=2)
        F.interpolate(x, scale_factor=2.0, mode="bilinear")
        F.interpolate(x, size=(12, 12), mode="bicubic")
    """),
    case(10, "avg_pool2d", """
        nn.AvgPool2d(2)
        nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False)
        F.avg_pool2d(x, 2)
        F.avg_pool2d(input=x, kernel_size=2, stride=1)
    """),
    case(10, "avg_pool1d", """
        nn.AvgPool1d(2)
        F.avg_pool1d(x, 2)
        torch.avg_pool1d(x, 2)
    """, kind="line"),
    case(11, "leaky_relu", """
        nn.LeakyReLU(0.1)
        nn.LeakyReLU(0.1, inplace=True)
        F.leaky_relu(x)
        F.leaky_relu(x, 0.1, True)
        F.leaky_relu(input=x, negative_slope=0.2)
        F.leaky_relu_(x, 0.1)
    """),
    case(12, "tanh", """
        nn.Tanh()
        F.tanh(x)
        torch.tanh(x)
        torch.tanh(input=x)
        torch.tanh_(x)
        x.tanh()
        x.tanh_()
    """),
    case(13, "sigmoid", """
        nn.Sigmoid()
        F.sigmoid(x)
        torch.sigmoid(x)
        torch.sigmoid_(x)
        x.sigmoid()
        x.sigmoid_()
    """),
    case(14, "relu6", """
        nn.ReLU6()
        nn.ReLU6(inplace=True)
        F.relu6(x)
        F.relu6(x, inplace=True)
    """, first=FLIPPED),
    case(15, "elu", """
        nn.ELU()
        nn.ELU(0.5, inplace=True)
        F.elu(x)
        F.elu(x, 0.5, True)
        F.elu_(x)
    """),
    case(16, "selu", """
        nn.SELU()
        F.selu(x)
        F.selu(x, inplace=True)
        torch.selu(x)
        torch.selu_(x)
    """),
    both(17, "flatten", """
        torch.flatten(x, 1)
        torch.flatten(x, start_dim=2, end_dim=3)
        torch.flatten(input=x, start_dim=2)
        nn.Flatten(2)
        x.flatten(1, 2)
        x.flatten(start_dim=2)
    """),
    case(18, "softmax", """
        nn.Softmax(-1)
        nn.Softmax(dim=1)
        F.softmax(x, dim=-1)
        F.softmax(x, -1, dtype=torch.float32)
        F.softmax(input=x, dim=1)
        torch.softmax(x, -1)
        torch.softmax(input=x, dim=1)
        x.softmax(-1)
        x.softmax(dim=1)
    """),
    case(19, "rnn", "nn.RNN(8, 8, batch_first=True)", kind="tokens", last="r[0]", elsewhere=NO_RULE),
    case(20, "lstm", "nn.LSTM(8, 8, batch_first=True)", kind="tokens", last="r[0]", elsewhere=NO_RULE),
    case(21, "gru", "nn.GRU(8, 8, batch_first=True)", kind="tokens", last="r[0]", elsewhere=NO_RULE),
    both(22, "cat", """
        torch.cat([x, y], 1)
        torch.cat((x, y), dim=-1)
        torch.cat(tensors=[x, y], dim=1)
        torch.concat([x, y], dim=1)
        torch.concatenate([x, y], 1)
        torch.hstack([x, y])
        torch.vstack([x, y])
        torch.dstack([x, y])
    """),
    both(23, "split", """
        torch.split(x, 2, 1)[0]
        torch.split(x, [1, 3], dim=1)[1]
        torch.split(x, split_size_or_sections=2, dim=1)[1]
        x.split(2, 1)[1]
        x.split([1, 3], dim=1)[0]
        torch.tensor_split(x, 2, 1)[0]
        x.tensor_split(2, dim=1)[1]
        torch.hsplit(x, 2)[0]
    """, elsewhere=TUPLE),
    both(24, "repeat", """
        x.repeat(1, 2, 1, 1)
        x.repeat((1, 1, 1, 2))
        x.repeat(2, 1, 1, 1, 1)
        x.repeat_interleave(2, dim=1)
        torch.repeat_interleave(x, 2, dim=3)
    """),
    case(25, "add", """
        torch.add(x, y)
        torch.add(x, y, alpha=2)
        torch.add(input=x, other=y)
        torch.add(x, 1.5)
        operator.add(x, y)
        operator.iadd(x, y)
        x + y
        x + 1.5
        1.5 + x
        x.add(y)
        x.add(other=y)
        x.add_(y)
        x.add_(1.5)
        x.__radd__(1.5)
        x.__iadd__(y)
    """),
    case(26, "mul", """
        torch.mul(x, y)
        torch.mul(input=x, other=y)
        torch.mul(x, 1.5)
        torch.multiply(x, y)
        operator.mul(x, y)
        operator.imul(x, y)
        x * y
        x * 1.5
        -1.5 * x
        x.mul(y)
        x.mul_(y)
        x.multiply(y)
        x.__rmul__(1.5)
        x.__imul__(y)
    """),
    case(27, "abs", """
        torch.abs(x)
        torch.abs(input=x)
        torch.abs_(x)
        torch.absolute(x)
        operator.abs(x)
        x.abs()
        x.abs_()
        x.absolute()
    """),
    case(28, "sqrt", """
        torch.sqrt(x)
        torch.sqrt_(x)
        x.sqrt()
        x.sqrt_()
    """, first=POSITIVE),
    case(29, "exp", """
        torch.exp(x)
        torch.exp_(x)
        x.exp()
        x.exp_()
    """),
    case(30, "pow", """
        torch.pow(x, 2)
        torch.pow(input=x, exponent=3)
        torch.pow(2.0, x)
        torch.pow(x, y)
        operator.pow(x, 2)
        x**2
        x**0.5
        2.0**x
        x.pow(2)
        x.pow(exponent=2)
        x.pow_(2)
        x.__rpow__(2.0)
        x.__ipow__(2)
    """, first=POSITIVE),
    case(31, "log", """
        torch.log(x)
        torch.log_(x)
        x.log()
        x.log_()
    """, first="x.abs() + 2.0"),
    case(32, "sin", """
        torch.sin(x)
        torch.sin_(x)
        x.sin()
        x.sin_()
    """),
    case(33, "cos", """
        torch.cos(x)
        torch.cos_(x)
        x.cos()
        x.cos_()
    """),
    both(34, "getitem", """
        x[:, 1:3, ::2, :]
        x[:, :, :, :]
        x[:, :, 1, :]
        x[..., 1:]
        x[:, None]
        x[:, -1]
        x[0:1]
        x[:, [0, 2]]
        x.__getitem__((slice(None), 0))
    """),
    both(35, "permute", """
        torch.transpose(x, 2, 3)
        torch.transpose(input=x, dim0=1, dim1=2)
        x.transpose(1, 2)
        x.transpose(dim0=1, dim1=3)
        x.transpose_(2, 3)
        torch.swapaxes(x, 1, 2)
        x.swapdims(1, 2)
        torch.movedim(x, 1, 2)
        x.moveaxis(1, 3)
        x.mT
    """),
    both(36, "reshape", """
        x.view(2, 4, 36)
        x.view((2, -1, 9))
        x.view(-1, 144)
        x.view(x.size(0), -1)
        x.view(x.shape[0], 4, 6, 3, 2)
        x.view_as(x)
    """),
    both(37, "squeeze", """
        torch.squeeze(x, 2)
        torch.squeeze(x, dim=2)
        torch.squeeze(x)
        torch.squeeze(input=x)
        x.squeeze(2)
        x.squeeze()
        x.squeeze_(2)
    """, first="x[:, :, :1]"),
    both(38, "unsqueeze", """
        torch.unsqueeze(x, 1)
        torch.unsqueeze(input=x, dim=-1)
        x.unsqueeze(1)
        x.unsqueeze(dim=2)
        x.unsqueeze_(1)
    """),
    case(39, "glu", """
        nn.GLU(1)
        nn.GLU()
        F.glu(x, 1)
        F.glu(input=x, dim=1)
    """),
    both(40, "stack", """
        torch.stack([x, y])
        torch.stack((x, y), 1)
        torch.stack(tensors=[x, y], dim=-1)
    """),
    both(41, "split", """
        torch.chunk(x, 2, 1)[0]
        torch.chunk(input=x, chunks=2, dim=1)[1]
        x.chunk(2, 1)[1]
        x.chunk(2, dim=1)[0]
        torch.unbind(x, 1)[0]
        x.unbind(1)[2]
    """, kind="line", elsewhere=TUPLE),
    case(42, "mean", """
        torch.mean(x, 1)
        torch.mean(x, dim=(2, 3), keepdim=True)
        torch.mean(input=x, dim=1)
        x.mean((2, 3))
        x.mean(-1, keepdim=True)
        x.mean(dim=1)
    """),
    both(44, "min", """
        torch.amin(x, 1)
        torch.amin(x, dim=(2, 3))
        x.amin(1)
        x.amin(dim=(2, 3), keepdim=True)
    """),
    both(44, "min", """
        torch.min(x)
        x.min()
    """, kind="tokens", last="x + r", elsewhere={}),
    both(44, "min_dim", """
        torch.min(x, 1)[0]
        torch.min(x, dim=1).values
        torch.min(input=x, dim=1, keepdim=True)[0]
        x.min(1)[0]
        x.min(dim=-1, keepdim=True).values
    """, elsewhere=TUPLE),
    case(44, "minimum", """
        torch.min(x, y)
        torch.min(x, other=y)
        x.min(y)
        torch.minimum(x, y)
        x.minimum(y)
    """),
    both(45, "max", """
        torch.amax(x, 1)
        torch.amax(x, dim=(2, 3))
        x.amax(1)
        x.amax(dim=(2, 3), keepdim=True)
    """),
    both(45, "max", """
        torch.max(x)
        x.max()
    """, kind="tokens", last="x + r", elsewhere={}),
    both(45, "max_dim", """
        torch.max(x, 1)[0]
        torch.max(x, dim=1).values
        torch.max(input=x, dim=1, keepdim=True)[0]
        x.max(1)[0]
        x.max(dim=-1, keepdim=True).values
    """, elsewhere=TUPLE),
    # its indices are read: they are those of float values
    case(45, "max_dim", "torch.max(x, 1)", kind="tokens", last="r[0] + r[1].float()", status="float"),
    case(45, "maximum", """
        torch.max(x, y)
        torch.max(x, other=y)
        x.max(y)
        torch.fmax(x, y)
        torch.maximum(x, y)
        x.maximum(y)
    """),
    case(43, "sub", """
        torch.sub(x, y)
        torch.sub(x, y, alpha=2)
        torch.sub(input=x, other=y)
        torch.subtract(x, y)
        torch.rsub(x, y)
        operator.sub(x, y)
        operator.isub(x, y)
        x - y
        x - 1.5
        1.5 - x
        x.sub(y)
        x.sub_(y)
        x.subtract(y)
        x.__rsub__(1.5)
        x.__isub__(y)
    """),
    both(46, "pixel_shuffle", """
        nn.PixelShuffle(2)
        F.pixel_shuffle(x, 2)
        torch.pixel_shuffle(input=x, upscale_factor=2)
    """),
    case(47, "layer_norm", """
        nn.LayerNorm(8)
        nn.LayerNorm((6, 8), elementwise_affine=False)
        F.layer_norm(x, (8,))
        F.layer_norm(x, (8,), w, b)
        F.layer_norm(input=x, normalized_shape=(8,), weight=w)
        torch.layer_norm(x, (8,), w, b)
    """, kind="tokens", weight=(8,), bias=(8,)),
    case(48, "hardswish", """
        nn.Hardswish()
        nn.Hardswish(inplace=True)
        F.hardswish(x)
        F.hardswish(x, inplace=True)
    """),
    case(49, "hardsigmoid", """
        nn.Hardsigmoid()
        nn.Hardsigmoid(inplace=True)
        F.hardsigmoid(x)
        F.hardsigmoid(x, True)
    """),
    case(50, "clamp", """
        torch.clamp(x, -0.5, 0.5)
        torch.clamp(x, min=-0.5, max=0.5)
        torch.clamp(x, max=0.5)
        torch.clamp_(x, -0.5, 0.5)
        torch.clip(x, -0.5, 0.5)
        torch.clamp_min(x, 0.1)
        torch.clamp_max(x, 0.1)
        x.clamp(-0.5, 0.5)
        x.clamp(min=0.0)
        x.clamp_(-0.5, 0.5)
        x.clip(-0.5, 0.5)
        x.clip_(-0.5, 0.5)
        x.clamp_min(0.1)
        x.clamp_max_(0.1)
    """),
    case(51, "argmax", """
        torch.argmax(x, 1, True)
        torch.argmax(x, dim=1, keepdim=True)
        x.argmax(1, keepdim=True)
        x.argmax(dim=-1, keepdim=True)
    """, status="float", last="x + r.float()"),
    case(52, "embedding", """
        nn.Embedding(10, 8)
        F.embedding(x, w)
        F.embedding(input=x, weight=w)
    """, kind="ids", weight=(10, 8)),
    case(53, "silu", """
        nn.SiLU()
        nn.SiLU(inplace=True)
        F.silu(x)
        F.silu(x, inplace=True)
    """),
    both(54, "roi_pool", """
        ops.RoIPool((2, 2), 1.0)
        ops.roi_pool(x, boxes, (2, 2))
    """, call="m(x, boxes)"),
    case(55, "matmul", """
        torch.matmul(x, y.mT)
        torch.matmul(input=x, other=y.mT)
        torch.bmm(x, y.mT)
        torch.bmm(input=x, mat2=y.mT)
        torch.linalg.matmul(x, y.mT)
        operator.matmul(x, y.mT)
        x @ y.mT
        x.matmul(y.mT)
        x.bmm(y.mT)
        x.__matmul__(y.mT)
    """, kind="tokens"),
    case(56, "gelu", """
        nn.GELU()
        nn.GELU("tanh")
        F.gelu(x)
        F.gelu(input=x, approximate="tanh")
    """),
    both(57, "pixel_unshuffle", """
        nn.PixelUnshuffle(2)
        F.pixel_unshuffle(x, 2)
        torch.pixel_unshuffle(input=x, downscale_factor=2)
    """),
    both(58, "repeat", """
        torch.tile(x, (1, 2))
        torch.tile(input=x, dims=(2, 1, 1))
        x.tile(1, 2)
        x.tile((1, 1, 2))
    """, kind="tokens", elsewhere={"ONNXRuntime": "quantized", "TensorRT": "quantized"}),
    both(59, "to", """
        x.to(torch.float32)
        x.to(dtype=torch.float32)
        x.to("cpu")
        x.to(x)
        x.float()
        x.type_as(x)
    """),
    both(60, "permute", """
        torch.permute(x, (0, 2, 1))
        torch.permute(input=x, dims=(1, 0, 2))
        x.permute(0, 2, 1)
        x.permute((2, 0, 1))
        x.permute(dims=(0, 2, 1))
    """, kind="line"),
    both(61, "reshape", """
        torch.reshape(x, (2, 4, 2, 4))
        torch.reshape(input=x, shape=(2, -1))
        x.reshape(2, -1)
        x.reshape((2, 4, 4, 2))
        x.reshape(x.size(0), -1)
        x.reshape_as(x)
    """, kind="line"),
    both(62, "roll", """
        torch.roll(x, 1, 2)
        torch.roll(x, shifts=(1, 2), dims=(2, 3))
        torch.roll(x, 1)
        x.roll(1, 3)
        x.roll(shifts=(-1, 1), dims=(1, 2))
    """),
)  # fmt: skip

BEYOND: tuple[Case, ...] = (
    case("beyond", "conv3d", """
        nn.Conv3d(4, 4, 3, padding=1)
        F.conv3d(x, w, b, padding=1)
    """, kind="volume", weight=(4, 4, 3, 3, 3), bias=(4,)),
    case("beyond", "conv_transpose3d", """
        nn.ConvTranspose3d(4, 4, 2, stride=2)
        F.conv_transpose3d(x, w, b, stride=2)
    """, kind="volume", weight=(4, 4, 2, 2, 2), bias=(4,)),
    both("beyond", "max_pool3d", """
        nn.MaxPool3d(2)
        F.max_pool3d(x, 2)
        torch.max_pool3d(x, 2)
    """, kind="volume", elsewhere={}),
    both("beyond", "adaptive_max_pool3d", """
        nn.AdaptiveMaxPool3d(1)
        F.adaptive_max_pool3d(x, 1)
    """, kind="volume"),
    both("beyond", "adaptive_max_pool2d", """
        nn.AdaptiveMaxPool2d(2)
        F.adaptive_max_pool2d(x, 2)
        F.adaptive_max_pool2d(x, (3, 2))
    """),
    both("beyond", "adaptive_max_pool1d", """
        nn.AdaptiveMaxPool1d(1)
        F.adaptive_max_pool1d(x, 1)
    """, kind="line"),
    case("beyond", "avg_pool3d", """
        nn.AvgPool3d(2)
        F.avg_pool3d(x, 2)
    """, kind="volume"),
    case("beyond", "adaptive_avg_pool3d", """
        nn.AdaptiveAvgPool3d(1)
        F.adaptive_avg_pool3d(x, 1)
        F.adaptive_avg_pool3d(x, (2, 1, 4))
        F.adaptive_avg_pool3d(x, 3)
    """, kind="volume"),
    case("beyond", "lp_pool", """
        nn.LPPool2d(2, 2)
        F.lp_pool2d(x, 2, 2)
    """, first=POSITIVE),
    case("beyond", "batch_norm3d", "nn.BatchNorm3d(4)", kind="volume", first=FLIPPED),
    case("beyond", "batch_norm", """
        F.batch_norm(x, torch.zeros(4), torch.ones(4), w, b)
        torch.batch_norm(x, w, b, torch.zeros(4), torch.ones(4), False, 0.1, 1e-5, False)
    """, weight=(4,), bias=(4,)),
    case("beyond", "group_norm", """
        nn.GroupNorm(2, 4)
        F.group_norm(x, 2)
        F.group_norm(x, num_groups=2, weight=w, bias=b)
        torch.group_norm(x, 2, w, b)
    """, weight=(4,), bias=(4,)),
    case("beyond", "instance_norm", """
        nn.InstanceNorm2d(4)
        nn.InstanceNorm2d(4, affine=True)
        F.instance_norm(x)
        F.instance_norm(x, weight=w, bias=b)
    """, weight=(4,), bias=(4,)),
    case("beyond", "instance_norm", "nn.InstanceNorm1d(4)", kind="line"),
    case("beyond", "instance_norm", "nn.InstanceNorm3d(4)", kind="volume"),
    case("beyond", "rms_norm", """
        nn.RMSNorm(8)
        F.rms_norm(x, (8,))
        F.rms_norm(x, (8,), weight=w)
        torch.rms_norm(x, (8,), w)
    """, kind="tokens", weight=(8,)),
    case("beyond", "local_response_norm", """
        nn.LocalResponseNorm(2)
        F.local_response_norm(x, 2)
    """),
    case("beyond", "normalize", """
        F.normalize(x)
        F.normalize(x, dim=-1)
        F.normalize(input=x, p=1.0, dim=1)
    """),
    case("beyond", "celu", """
        nn.CELU()
        F.celu(x)
        torch.celu(x)
        torch.celu_(x)
    """),
    case("beyond", "rrelu", """
        nn.RReLU()
        F.rrelu(x)
    """),
    case("beyond", "mish", """
        nn.Mish()
        nn.Mish(inplace=True)
        F.mish(x)
    """),
    case("beyond", "softplus", """
        nn.Softplus()
        F.softplus(x)
        F.softplus(x, beta=2)
    """),
    case("beyond", "softsign", """
        nn.Softsign()
        F.softsign(x)
    """),
    case("beyond", "tanhshrink", """
        nn.Tanhshrink()
        F.tanhshrink(x)
    """),
    case("beyond", "softshrink", """
        nn.Softshrink(0.1)
        F.softshrink(x, 0.1)
    """),
    case("beyond", "hardshrink", """
        nn.Hardshrink(0.1)
        F.hardshrink(x, 0.1)
        x.hardshrink(0.1)
    """),
    case("beyond", "threshold", """
        nn.Threshold(0.1, 0.0)
        F.threshold(x, 0.1, 0.0)
        F.threshold_(x, 0.1, 0.0)
        torch.threshold(x, 0.1, 0.0)
    """),
    case("beyond", "hardtanh", """
        nn.Hardtanh()
        nn.Hardtanh(-0.5, 0.5, inplace=True)
        F.hardtanh(x)
        F.hardtanh(x, -0.5, 0.5, True)
        F.hardtanh_(x)
    """),
    case("beyond", "logsigmoid", """
        nn.LogSigmoid()
        F.logsigmoid(x)
    """),
    case("beyond", "log_softmax", """
        nn.LogSoftmax(-1)
        F.log_softmax(x, -1)
        torch.log_softmax(x, dim=-1)
        x.log_softmax(-1)
    """),
    case("beyond", "softmin", """
        nn.Softmin(-1)
        F.softmin(x, -1)
    """),
    case("beyond", "div", """
        torch.div(x, y.exp())
        torch.div(x, other=y.exp())
        torch.div(x, 3.0)
        torch.true_divide(x, y.exp())
        torch.divide(x, y.exp())
        operator.truediv(x, y.exp())
        operator.itruediv(x, y.exp())
        x / y.exp()
        x / 3
        1.0 / x
        x.div(y.exp())
        x.div_(y.exp())
        x.__rtruediv__(2.0)
        x.__itruediv__(2.0)
    """, first=POSITIVE),
    case("beyond", "floor_divide", """
        torch.floor_divide(x, 0.5)
        x // 0.5
        x.floor_divide(0.5)
    """, first="x.detach()", gradient=False),
    case("beyond", "remainder", """
        torch.remainder(x, 2.0)
        torch.fmod(x, 2.0)
        x % 2.0
        x.remainder(2.0)
    """),
    case("beyond", "compare", """
        x > 0
        x <= y
        torch.lt(x, 0.5)
        x.ge(0)
        x.ne(0)
    """, status="float", last="x * r.float()"),
    case("beyond", "tensordot", "torch.tensordot(x, y, dims=([2], [2]))", kind="tokens"),
    case("beyond", "einsum", """
        torch.einsum("bic,bjc->bij", x, y)
        torch.einsum("bic,bic->bi", [x, y])
    """, kind="tokens"),
    case("beyond", "scaled_dot_product_attention", """
        F.scaled_dot_product_attention(x, y, y)
        F.scaled_dot_product_attention(query=x, key=y, value=y, is_causal=True)
        F.scaled_dot_product_attention(x, x, y, scale=0.5)
    """),
    case("beyond", "scaled_dot_product_attention", "F.scaled_dot_product_attention(x, y, y)", kind="tokens"),
    case("beyond", "scaled_dot_product_attention", """
        nn.MultiheadAttention(8, 2, batch_first=True)
        nn.MultiheadAttention(8, 2, bias=False, add_zero_attn=True)
    """, kind="tokens", call="m(x, x, x, need_weights=False)", last="r[0]", status="shares", elsewhere=NO_RULE),
    case("beyond", "softmax", """
        nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        nn.MultiheadAttention(8, 2, dropout=0.1, kdim=8, vdim=8, add_bias_kv=True)
    """, kind="tokens", call="m(query=x, key=y, value=y)", last="r[0]", status="shares", elsewhere=NO_RULE),
    case("beyond", "addmm", """
        torch.addmm(x, x, y.T @ y)
        x.addmm(x, y.T @ y, alpha=0.5)
    """, kind="rows"),
    case("beyond", "baddbmm", """
        torch.baddbmm(x @ y.mT, x, y.mT)
        torch.baddbmm(input=x @ y.mT, batch1=x, batch2=y.mT, beta=0.5)
    """, kind="tokens"),
    case("beyond", "addcmul", """
        torch.addcmul(x, x, y)
        torch.addcmul(x, tensor1=x, tensor2=y, value=0.5)
        x.addcmul(x, y)
        x.addcmul_(x, y)
    """),
    case("beyond", "addcdiv", """
        torch.addcdiv(x, x, y.abs() + 1)
        x.addcdiv(x, y.abs() + 1, value=0.5)
    """),
    case("beyond", "lerp", """
        torch.lerp(x, y, 0.3)
        torch.lerp(input=x, end=y, weight=0.3)
        x.lerp(y, 0.3)
        x.lerp_(y, 0.3)
        torch.lerp(x, y, y)
    """),
    *(
        case("beyond", name, f"torch.{name}(x)\nx.{name}()\nx.{name}_()", first=POSITIVE)
        for name in SMOOTH
    ),
    *(
        case("beyond", name, f"torch.{name}(x)\nx.{name}()\nx.{name}_()", gradient=False)
        for name in STEPS
    ),
    case("beyond", "nan_to_num", """
        torch.nan_to_num(x)
        x.nan_to_num(nan=0.5)
    """),
    case("beyond", "sum", """
        torch.sum(x, 1)
        x.sum((2, 3))
        x.sum(dim=-1, keepdim=True)
    """),
    case("beyond", "prod", """
        torch.prod(x, 1)
        x.prod(dim=-1)
    """, first=POSITIVE),
    case("beyond", "cumsum", """
        torch.cumsum(x, 1)
        x.cumsum(dim=-1)
        x.cumsum_(1)
    """),
    case("beyond", "logsumexp", """
        torch.logsumexp(x, 1)
        x.logsumexp(dim=-1)
    """),
    case("beyond", "var", """
        torch.var(x, 1)
        torch.var(x, dim=(2, 3), unbiased=False)
        x.var(1)
    """),
    case("beyond", "std", """
        torch.std(x, 1)
        x.std(dim=(2, 3), keepdim=True)
    """),
    case("beyond", "norm", """
        torch.norm(x, dim=1)
        torch.norm(x, 2, 1)
        torch.linalg.norm(x, dim=-1)
        torch.linalg.vector_norm(x, dim=-1)
        x.norm(dim=1)
        x.norm(p=1, dim=1)
    """, first=POSITIVE),
    case("beyond", "cosine_similarity", """
        F.cosine_similarity(x, y)
        F.cosine_similarity(x1=x, x2=y, dim=-1)
    """),
    case("beyond", "pairwise_distance", "F.pairwise_distance(x, y)", kind="tokens"),
    case("beyond", "cdist", """
        torch.cdist(x, y)
        torch.cdist(x1=x, x2=y, p=1.0)
    """, kind="tokens"),
    case("beyond", "fold", """
        nn.Fold((6, 6), 2, stride=1)
        F.fold(x, (6, 6), 2, stride=1)
    """, first="F.unfold(x, 2)"),
    both("beyond", "unfold", """
        nn.Unfold(2)
        F.unfold(x, 2)
        F.unfold(input=x, kernel_size=3, padding=1, stride=2)
        x.unfold(2, 3, 1)
    """),
    case("beyond", "grid_sample", """
        F.grid_sample(x, torch.tanh(y)[:, :2].permute(0, 2, 3, 1), align_corners=False)
        F.grid_sample(input=x, grid=torch.tanh(y)[:, :2].permute(0, 2, 3, 1), align_corners=True)
    """),
    case("beyond", "roi_align", """
        ops.RoIAlign((2, 2), 1.0, 2)
        ops.roi_align(x, boxes, (2, 2), sampling_ratio=2)
    """, call="m(x, boxes)"),
    both("beyond", "where", """
        torch.where(x > 0, x, y)
        torch.where(condition=x > 0, input=x, other=y)
        torch.where(x > 0, 0.0, x)
        x.where(x > 0, y)
    """),
    case("beyond", "where", """
        torch.where(x > 0, x, 0.5)
        torch.where(condition=x > 0, input=x, other=0.5)
        torch.where(x > 0, 2, x)
    """, elsewhere={"ONNXRuntime": "shares"}),
    case("beyond", "where", """
        torch.where(x > -9.0, x, float("-inf"))
        torch.where(x > -9.0, x, -1e9)
    """, kind="tokens", status="float", last="r.softmax(-1)"),
    both("beyond", "assign_item", """
        operator.setitem(x, 0, y[1])
        operator.setitem(x, (slice(None), 0), y[:, 1])
        x.__setitem__((..., 0), y[..., 1])
    """, last="x"),
    both("beyond", "masked_fill", """
        x.masked_fill(x > 0.5, 0)
        x.masked_fill(mask=x > 0.5, value=0.0)
        x.masked_fill_(x > 0.5, 0)
        torch.masked_fill(x, x > 0.5, 0.0)
    """),
    case("beyond", "masked_fill", """
        x.masked_fill(x > 0.5, 1.5)
        x.masked_fill_(x > 0.5, -1)
        torch.masked_fill(x, x > 0.5, value=2.0)
    """),
    case("beyond", "masked_fill", """
        x.masked_fill(x > 1.0, float("-inf"))
        x.masked_fill_(x > 1.0, -1e9)
        torch.masked_fill(x, x > 1.0, torch.finfo(torch.float32).min)
    """, kind="tokens", status="float", last="r.softmax(-1)"),
    case("beyond", "mul", """
        (x > 1.0).float() * -1e9
        torch.finfo(torch.float32).min * (x > 1.0).float()
    """, kind="tokens", status="float", last="(x + r).softmax(-1)"),
    both("beyond", "gather", """
        torch.gather(x, 1, x.argmax(1, keepdim=True))
        x.gather(dim=1, index=x.argmax(1, keepdim=True))
        torch.take_along_dim(x, x.argmax(1, keepdim=True), 1)
    """),
    both("beyond", "index_select", """
        torch.index_select(x, 1, torch.tensor([2, 0]))
        x.index_select(dim=1, index=torch.tensor([2, 0]))
    """),
    both("beyond", "select", """
        torch.select(x, 1, 2)
        x.select(1, 0)
        torch.narrow(x, 1, 1, 2)
        x.narrow(1, 0, 2)
    """),
    both("beyond", "topk", """
        torch.topk(x, 2, 1)[0]
        torch.topk(x, k=2).values
        x.topk(2, dim=1).values
        x.topk(2)[0]
    """, elsewhere=TUPLE),
    both("beyond", "sort", """
        torch.sort(x, 1)[0]
        x.sort(dim=-1, descending=True).values
    """, elsewhere=TUPLE),
    both("beyond", "kthvalue", """
        torch.kthvalue(x, 2, 1)[0]
        x.kthvalue(k=3).values
    """, elsewhere=TUPLE),
    both("beyond", "median", """
        torch.median(x, 1)[0]
        x.median(dim=-1).values
        x.median(1, True)[0]
    """, elsewhere=TUPLE),
    both("beyond", "cummax", """
        torch.cummax(x, 1)[0]
        x.cummin(dim=-1).values
    """, elsewhere=TUPLE),
    both("beyond", "triangle", """
        torch.triu(x)
        torch.tril(x, diagonal=1)
        x.triu(1)
        x.tril_()
    """),
    both("beyond", "diagonal", """
        torch.diagonal(x, dim1=2, dim2=3)
        x.diagonal(0, 2, 3)
    """),
    both("beyond", "flip", """
        torch.flip(x, (2, 3))
        x.flip(1)
        torch.fliplr(x)
    """),
    both("beyond", "expand", """
        x.expand(2, 4, 3, 6)
        x.expand(-1, -1, 3, -1)
        torch.broadcast_to(x, (2, 4, 3, 6))
        x.expand_as(torch.zeros(2, 4, 3, 6))
    """, first="x[:, :, :1]"),
    both("beyond", "unflatten", """
        nn.Unflatten(1, (2, 2))
        torch.unflatten(x, 1, (2, 2))
        x.unflatten(1, (2, 2))
        x.unflatten(dim=1, sizes=(2, -1))
    """),
    both("beyond", "pad", """
        F.pad(x, (1, 1, 1, 1))
        F.pad(x, (1, 1), value=0.0)
        F.pad(input=x, pad=(1, 1, 1, 1), mode="reflect")
        nn.ReflectionPad2d(1)
        nn.ReplicationPad2d(1)
        nn.ConstantPad2d(1, 0.0)
    """),
    both("beyond", "zero_pad", "nn.ZeroPad2d(1)"),
    both("beyond", "channel_shuffle", """
        nn.ChannelShuffle(2)
        F.channel_shuffle(x, 2)
    """),
    both("beyond", "dropout", """
        nn.Dropout(0.1)
        F.dropout(x, 0.1, training=False)
    """),
    both("beyond", "contiguous", """
        x.contiguous()
        x.clone()
        torch.clone(x)
        +x
    """),
    case("beyond", "constructor", """
        torch.zeros_like(x)
        torch.full_like(x, 0.5)
        x.new_ones(x.shape)
        torch.ones(x.size(0), 1, 1, 1)
        torch.full((x.size(0), 1, 1, 1), 0.5)
    """, last="x + r"),
    case("beyond", "constructor", "torch.randn_like(x)", kind="tokens", last="x + r",
         fails="each run of the file draws other random values", failure="does not compute what the model"),
    case("beyond", "constructor", """
        torch.full((x.size(1), x.size(1)), float("-inf"))
        x.new_full((6, 6), -1e9)
    """, kind="tokens", status="float", last="(x @ x.mT + r.triu(1)).softmax(-1)"),
)  # fmt: skip
CASES = TABLE + BEYOND
