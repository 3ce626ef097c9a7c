"""Which torch spelling is which op: the vocabulary that fusions and backends are written in.

One row per op: its name, its family, and every way to write it. A row says nothing about quantization; that is the
backends' business.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torchvision.ops import StochasticDepth

from fxqat.nn.fused import FusedLayer
from fxqat.nn.qat import QATLayer
from fxqat.utils.fx_graph import called_module

# Families: what the value of an op is, as far as placement is concerned.
WEIGHTED = "weighted"  # a layer with a weight of its own
MATMUL = "matmul"  # a product of two activations
BINARY = "binary"  # element by element on two operands
CONCAT = "concat"  # puts tensors together without changing a value
PASS_THROUGH = "pass_through"  # moves or selects values without changing one
IDENTITY = "identity"  # is no operation in the deployed graph
POOL = "pool"  # averages
ACTIVATION = "activation"
NORM = "norm"
MATH = "math"
RESIZE = "resize"
LOOKUP = "lookup"
NOT_FLOAT = "not_float"  # gives sizes, indices, booleans
RECURRENT = "recurrent"
OPAQUE = "opaque"  # not in the table


@dataclass(frozen=True)
class Op:
    """One op and its spellings.

    Args:
        name: the op's name in fusions, backends and reports.
        family: one of the families above.
        modules: ``nn.Module`` types.
        functions: ``torch``, functional and operator functions.
        methods: ``Tensor`` method names, in-place ones included.
        inputs: how many leading arguments can be quantized values (a list of tensors counts as one).
    """

    name: str
    family: str
    modules: tuple[type, ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()
    methods: tuple[str, ...] = ()
    inputs: int = 1


def _math(name: str) -> Op:
    return Op(name, MATH, (), (getattr(torch, name),), (name, f"{name}_"))


OPS: tuple[Op, ...] = (
    Op("conv1d", WEIGHTED, (nn.Conv1d,), (F.conv1d,)),
    Op("conv2d", WEIGHTED, (nn.Conv2d,), (F.conv2d,)),
    Op("conv3d", WEIGHTED, (nn.Conv3d,), (F.conv3d,)),
    Op("conv_transpose1d", WEIGHTED, (nn.ConvTranspose1d,), (F.conv_transpose1d,)),
    Op("conv_transpose2d", WEIGHTED, (nn.ConvTranspose2d,), (F.conv_transpose2d,)),
    Op("conv_transpose3d", WEIGHTED, (nn.ConvTranspose3d,), (F.conv_transpose3d,)),
    Op("linear", WEIGHTED, (nn.Linear,), (F.linear,)),
    Op(
        "matmul",
        MATMUL,
        (),
        (torch.matmul, operator.matmul, torch.bmm),
        ("matmul", "__matmul__", "bmm"),
        inputs=2,
    ),
    Op(
        "add",
        BINARY,
        (),
        (torch.add, operator.add, operator.iadd),
        ("add", "add_", "__add__", "__radd__", "__iadd__"),
        inputs=2,
    ),
    Op(
        "sub",
        BINARY,
        (),
        (torch.sub, torch.subtract, operator.sub, operator.isub, torch.rsub),
        ("sub", "sub_", "__sub__", "__rsub__"),
        inputs=2,
    ),
    Op(
        "mul",
        BINARY,
        (),
        (torch.mul, torch.multiply, operator.mul, operator.imul),
        ("mul", "mul_", "__mul__", "__rmul__", "__imul__"),
        inputs=2,
    ),
    Op("div", BINARY, (), (torch.div, operator.truediv, operator.itruediv), ("div", "div_", "__truediv__"), inputs=2),
    Op("cat", CONCAT, (), (torch.cat, torch.concat)),
    Op("stack", CONCAT, (), (torch.stack,)),
    Op("max_pool1d", PASS_THROUGH, (nn.MaxPool1d,), (F.max_pool1d, torch.max_pool1d)),
    Op("max_pool2d", PASS_THROUGH, (nn.MaxPool2d,), (F.max_pool2d, torch.max_pool2d)),
    Op("max_pool3d", PASS_THROUGH, (nn.MaxPool3d,), (F.max_pool3d, torch.max_pool3d)),
    Op("adaptive_max_pool2d", PASS_THROUGH, (nn.AdaptiveMaxPool2d,), (F.adaptive_max_pool2d,)),
    Op("flatten", PASS_THROUGH, (nn.Flatten,), (torch.flatten,), ("flatten",)),
    Op("unflatten", PASS_THROUGH, (nn.Unflatten,), (torch.unflatten,), ("unflatten",)),
    Op("reshape", PASS_THROUGH, (), (torch.reshape,), ("reshape", "view", "view_as", "reshape_as")),
    Op(
        "permute",
        PASS_THROUGH,
        (),
        (torch.permute, torch.transpose, torch.t, torch.swapaxes, torch.movedim),
        ("permute", "transpose", "t", "swapaxes", "movedim"),
    ),
    Op("squeeze", PASS_THROUGH, (), (torch.squeeze,), ("squeeze", "squeeze_")),
    Op("unsqueeze", PASS_THROUGH, (), (torch.unsqueeze,), ("unsqueeze", "unsqueeze_")),
    Op("getitem", PASS_THROUGH, (), (operator.getitem,), ("__getitem__",)),
    Op("select", PASS_THROUGH, (), (torch.select, torch.narrow), ("select", "narrow")),
    Op(
        "split",
        PASS_THROUGH,
        (),
        (torch.split, torch.chunk, torch.unbind, torch.tensor_split),
        ("split", "chunk", "unbind", "tensor_split"),
    ),
    Op("expand", PASS_THROUGH, (), (torch.broadcast_to,), ("expand", "expand_as", "broadcast_to")),
    Op("repeat", PASS_THROUGH, (), (torch.tile, torch.repeat_interleave), ("repeat", "tile", "repeat_interleave")),
    Op("roll", PASS_THROUGH, (), (torch.roll,), ("roll",)),
    Op("flip", PASS_THROUGH, (), (torch.flip,), ("flip",)),
    Op("pixel_shuffle", PASS_THROUGH, (nn.PixelShuffle,), (F.pixel_shuffle,)),
    Op("pixel_unshuffle", PASS_THROUGH, (nn.PixelUnshuffle,), (F.pixel_unshuffle,)),
    Op("channel_shuffle", PASS_THROUGH, (nn.ChannelShuffle,), (F.channel_shuffle,)),
    Op("zero_pad", PASS_THROUGH, (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)),
    Op("pad", PASS_THROUGH, (), (F.pad,)),
    Op("contiguous", IDENTITY, (), (), ("contiguous", "clone", "detach")),
    Op("to", IDENTITY, (), (), ("to", "float", "type_as")),
    Op("identity", IDENTITY, (nn.Identity,)),
    Op("dropout", IDENTITY, (nn.Dropout,), (F.dropout,)),
    Op("dropout1d", IDENTITY, (nn.Dropout1d,), (F.dropout1d,)),
    Op("dropout2d", IDENTITY, (nn.Dropout2d,), (F.dropout2d,)),
    Op("dropout3d", IDENTITY, (nn.Dropout3d,), (F.dropout3d,)),
    Op("alpha_dropout", IDENTITY, (nn.AlphaDropout,), (F.alpha_dropout,)),
    Op("feature_alpha_dropout", IDENTITY, (nn.FeatureAlphaDropout,), (F.feature_alpha_dropout,)),
    Op("stochastic_depth", IDENTITY, (StochasticDepth,)),
    Op("adaptive_avg_pool1d", POOL, (nn.AdaptiveAvgPool1d,), (F.adaptive_avg_pool1d, torch.adaptive_avg_pool1d)),
    Op("adaptive_avg_pool2d", POOL, (nn.AdaptiveAvgPool2d,), (F.adaptive_avg_pool2d,)),
    Op("adaptive_avg_pool3d", POOL, (nn.AdaptiveAvgPool3d,), (F.adaptive_avg_pool3d,)),
    Op("avg_pool1d", POOL, (nn.AvgPool1d,), (F.avg_pool1d, torch.avg_pool1d)),
    Op("avg_pool2d", POOL, (nn.AvgPool2d,), (F.avg_pool2d,)),
    Op("avg_pool3d", POOL, (nn.AvgPool3d,), (F.avg_pool3d,)),
    Op("mean", POOL, (), (torch.mean,), ("mean",)),
    Op("relu", ACTIVATION, (nn.ReLU,), (F.relu, torch.relu, torch.relu_, F.relu_), ("relu", "relu_")),
    Op("relu6", ACTIVATION, (nn.ReLU6,), (F.relu6,)),
    Op("prelu", ACTIVATION, (nn.PReLU,), (F.prelu, torch.prelu), ("prelu",)),
    Op("leaky_relu", ACTIVATION, (nn.LeakyReLU,), (F.leaky_relu,)),
    Op("elu", ACTIVATION, (nn.ELU,), (F.elu,)),
    Op("selu", ACTIVATION, (nn.SELU,), (F.selu, torch.selu)),
    Op("gelu", ACTIVATION, (nn.GELU,), (F.gelu,)),
    Op("silu", ACTIVATION, (nn.SiLU,), (F.silu,)),
    Op("hardswish", ACTIVATION, (nn.Hardswish,), (F.hardswish,)),
    Op("hardsigmoid", ACTIVATION, (nn.Hardsigmoid,), (F.hardsigmoid,)),
    Op("hardtanh", ACTIVATION, (nn.Hardtanh,), (F.hardtanh,)),
    Op("tanh", ACTIVATION, (nn.Tanh,), (torch.tanh, F.tanh), ("tanh", "tanh_")),
    Op("sigmoid", ACTIVATION, (nn.Sigmoid,), (torch.sigmoid, F.sigmoid), ("sigmoid", "sigmoid_")),
    Op("softmax", ACTIVATION, (nn.Softmax,), (F.softmax, torch.softmax), ("softmax",)),
    Op("glu", ACTIVATION, (nn.GLU,), (F.glu,)),
    Op("clamp", ACTIVATION, (), (torch.clamp, torch.clip), ("clamp", "clamp_", "clip")),
    Op("batch_norm1d", NORM, (nn.BatchNorm1d,)),
    Op("batch_norm2d", NORM, (nn.BatchNorm2d,)),
    Op("batch_norm3d", NORM, (nn.BatchNorm3d,)),
    Op("layer_norm", NORM, (nn.LayerNorm,), (F.layer_norm,)),
    Op("local_response_norm", NORM, (nn.LocalResponseNorm,), (F.local_response_norm,)),
    *(_math(name) for name in ("abs", "sqrt", "exp", "log", "sin", "cos", "neg", "rsqrt")),
    Op("pow", MATH, (), (torch.pow, operator.pow), ("pow", "pow_", "__pow__")),
    Op("interpolate", RESIZE, (nn.Upsample,), (F.interpolate,)),
    Op("embedding", LOOKUP, (nn.Embedding,), (F.embedding,), inputs=0),
    Op("argmax", NOT_FLOAT, (), (torch.argmax, torch.argmin), ("argmax", "argmin")),
    Op("size", NOT_FLOAT, (), (builtins.getattr, builtins.len), ("size", "dim", "numel", "__len__")),
    Op("integer", NOT_FLOAT, (), (operator.floordiv, operator.mod, builtins.int, torch.arange)),
    Op(
        "compare",
        NOT_FLOAT,
        (),
        (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
        ("eq", "ne", "lt", "le", "gt", "ge"),
    ),
    Op("recurrent", RECURRENT, (nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)),
)

UNKNOWN = Op("opaque", OPAQUE)

OUT_OF_PLACE: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    torch.relu_: torch.relu,
    F.relu_: F.relu,
}
"""Functions that overwrite their first operand, and what computes the same without."""

SPELLING = "fxqat_spelling"
"""Key in ``node.meta`` of the function or method that a node was before it was standardized."""

OPERAND_NAMES = ("input", "tensors", "tensor", "self", "other", "mat2")
TRANSPOSES = ("T", "mT", "H", "mH")

_BY_NAME = {op.name: op for op in OPS}
_BY_MODULE = {kind: op for op in OPS for kind in op.modules}
_BY_FUNCTION = {function: op for op in OPS for function in op.functions}
_BY_METHOD = {method: op for op in OPS for method in op.methods}


def op_named(name: str) -> Op | None:
    """The row of a name, None if there is none."""
    return _BY_NAME.get(name)


def identify(node: fx.Node) -> Op:
    """The op of a node; ``UNKNOWN`` if no row has its spelling.

    A fused or QAT layer is the op of its layer; some ops change family with their arguments:

    1. ``F.pad`` with a constant other than 0 creates new values: not a pass-through;
    2. ``interpolate`` in mode nearest only repeats values: a pass-through;
    3. ``max_pool`` that also returns indices is opaque;
    4. the attributes ``T``, ``mT``, ``H`` and ``mH`` permute, any other is a size.
    """
    if node.op == "call_module":
        module = called_module(node)
        return _argument_cases(node, identify_module(module), module)
    if node.op == "call_function":
        if node.target is builtins.getattr and node.args[1] in TRANSPOSES:
            return _BY_NAME["permute"]
        found = _BY_FUNCTION.get(node.target) if callable(node.target) else None
        return _argument_cases(node, found or UNKNOWN, None)
    if node.op == "call_method":
        return _BY_METHOD.get(str(node.target), UNKNOWN)
    return UNKNOWN


def identify_module(module: nn.Module | None) -> Op:
    """The op of a module object."""
    if isinstance(module, FusedLayer):
        return identify_module(module.layer)
    if isinstance(module, QATLayer):
        name = module.layer_type
        return next(op for op in OPS if any(kind.__name__ == name for kind in op.modules))
    return _BY_MODULE.get(type(module), UNKNOWN)


def _argument_cases(node: fx.Node, op: Op, module: nn.Module | None) -> Op:
    if op.name == "pad" and _argument(node, 3, "value", 0) not in (0, 0.0, None):
        return UNKNOWN
    if op.name == "interpolate":
        mode = module.mode if isinstance(module, nn.Upsample) else _argument(node, 3, "mode", "nearest")
        if str(mode).startswith("nearest"):
            return Op(op.name, PASS_THROUGH, op.modules, op.functions, op.methods)
    returns_indices = getattr(module, "return_indices", False) or node.kwargs.get("return_indices")
    if op.name.startswith("max_pool") and returns_indices:
        return UNKNOWN
    return op


def _argument(node: fx.Node, position: int, keyword: str, default: Any) -> Any:
    if keyword in node.kwargs:
        return node.kwargs[keyword]
    return node.args[position] if len(node.args) > position else default


def operands(node: fx.Node, op: Op) -> list[Any]:
    """The arguments of a call that can be quantized values, by position or by keyword, in the op's order."""
    found = list(node.args[: op.inputs])
    by_keyword = [node.kwargs[name] for name in OPERAND_NAMES if name in node.kwargs]
    return found + by_keyword[: op.inputs - len(found)]


def works_in_place(node: fx.Node) -> bool:
    """Whether a call overwrites its first operand."""
    if node.op == "call_module":
        return getattr(called_module(node), "inplace", False) is True
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__") and name in _BY_METHOD
    if node.op != "call_function":
        return False
    flagged = node.kwargs.get("inplace") is True
    if identify(node).family == ACTIVATION and node.target not in (F.softmax, torch.softmax):
        flagged = flagged or any(value is True for value in node.args[1:])
    return flagged or node.target in OUT_OF_PLACE
