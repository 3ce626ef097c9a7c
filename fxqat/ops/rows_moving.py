"""Rows of the op table: ops that move or select values, do nothing when deployed, or return no float values."""

from __future__ import annotations

import builtins
import operator

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.ops import RoIPool, StochasticDepth, roi_pool

from fxqat.nn.recurrent import StepDropout
from fxqat.ops.assign_item import assign_item
from fxqat.ops.families import (
    CONCAT,
    CONSTRUCTOR,
    IDENTITY,
    NOT_FLOAT,
    PASS_THROUGH,
    Op,
    methods,
    named,
)
from fxqat.utils.train_eval_graph import eval_or_train

JOINING: tuple[Op, ...] = (
    Op("cat", CONCAT, (), named(torch, "cat concat concatenate hstack vstack dstack row_stack column_stack")),
    Op("stack", CONCAT, (), (torch.stack,)),
    Op("where", CONCAT, (), (torch.where,), ("where",), inputs=3),
    Op("assign_item", CONCAT, (), (assign_item,), inputs=3),
)


def _move(name: str, *modules: type, functions: str = "", tensor: str = "", gives_tuple: bool = False) -> Op:
    return Op(name, PASS_THROUGH, modules, named(torch, functions), methods(tensor), gives_tuple=gives_tuple)


SHAPING: tuple[Op, ...] = (
    _move("flatten", nn.Flatten, functions="flatten ravel", tensor="flatten ravel"),
    _move("unflatten", nn.Unflatten, functions="unflatten", tensor="unflatten"),
    _move("reshape", functions="reshape", tensor="reshape view view_as reshape_as"),
    _move(
        "permute",
        functions="permute transpose t swapaxes swapdims movedim moveaxis adjoint",
        tensor="permute transpose transpose_ t t_ swapaxes swapaxes_ swapdims swapdims_ movedim moveaxis adjoint",
    ),
    _move("squeeze", functions="squeeze", tensor="squeeze squeeze_"),
    _move("unsqueeze", functions="unsqueeze", tensor="unsqueeze unsqueeze_"),
    _move("expand", functions="broadcast_to", tensor="expand expand_as broadcast_to"),
    _move("repeat", functions="tile repeat_interleave", tensor="repeat tile repeat_interleave"),
    _move("roll", functions="roll", tensor="roll"),
    _move("flip", functions="flip fliplr flipud rot90", tensor="flip fliplr flipud rot90"),
    Op("pixel_shuffle", PASS_THROUGH, (nn.PixelShuffle,), (F.pixel_shuffle,)),
    Op("pixel_unshuffle", PASS_THROUGH, (nn.PixelUnshuffle,), (F.pixel_unshuffle,)),
    Op("channel_shuffle", PASS_THROUGH, (nn.ChannelShuffle,), (F.channel_shuffle,)),
    Op("zero_pad", PASS_THROUGH, (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)),
    Op(
        "pad",
        PASS_THROUGH,
        tuple(
            getattr(nn, f"{kind}Pad{n}d")
            for kind in ("Constant", "Reflection", "Replication", "Circular")
            for n in (1, 2, 3)
        ),
        (F.pad, torch.constant_pad_nd),
    ),
    Op("unfold", PASS_THROUGH, (nn.Unfold,), (F.unfold,), ("unfold",)),
)

SELECTING: tuple[Op, ...] = (
    Op("max_pool1d", PASS_THROUGH, (nn.MaxPool1d,), (F.max_pool1d, torch.max_pool1d)),
    Op("max_pool2d", PASS_THROUGH, (nn.MaxPool2d,), (F.max_pool2d, torch.max_pool2d)),
    Op("max_pool3d", PASS_THROUGH, (nn.MaxPool3d,), (F.max_pool3d, torch.max_pool3d)),
    Op("adaptive_max_pool1d", PASS_THROUGH, (nn.AdaptiveMaxPool1d,), (F.adaptive_max_pool1d,)),
    Op("adaptive_max_pool2d", PASS_THROUGH, (nn.AdaptiveMaxPool2d,), (F.adaptive_max_pool2d,)),
    Op("adaptive_max_pool3d", PASS_THROUGH, (nn.AdaptiveMaxPool3d,), (F.adaptive_max_pool3d,)),
    Op("roi_pool", PASS_THROUGH, (RoIPool,), (roi_pool, torch.ops.torchvision.roi_pool)),
    _move("max", functions="max amax", tensor="max amax"),
    _move("min", functions="min amin", tensor="min amin"),
    _move("max_dim", gives_tuple=True),
    _move("min_dim", gives_tuple=True),
    _move("topk", functions="topk", tensor="topk", gives_tuple=True),
    _move("sort", functions="sort", tensor="sort", gives_tuple=True),
    _move("kthvalue", functions="kthvalue", tensor="kthvalue", gives_tuple=True),
    _move("median", functions="median", tensor="median"),
    _move("cummax", functions="cummax cummin", tensor="cummax cummin", gives_tuple=True),
    Op("getitem", PASS_THROUGH, (), (operator.getitem,), ("__getitem__",)),
    _move("select", functions="select narrow", tensor="select narrow"),
    _move("index_select", functions="index_select", tensor="index_select"),
    _move("gather", functions="gather take_along_dim take", tensor="gather take_along_dim take"),
    Op("up_to_longest", PASS_THROUGH, (), (torch.ops.fxqat.up_to_longest,)),
    _move("masked_select", functions="masked_select", tensor="masked_select"),
    _move(
        "split",
        functions="split chunk unbind tensor_split hsplit vsplit dsplit",
        tensor="split chunk unbind tensor_split hsplit vsplit dsplit",
        gives_tuple=True,
    ),
    _move("triangle", functions="triu tril", tensor="triu triu_ tril tril_"),
    _move("diagonal", functions="diagonal diag diag_embed", tensor="diagonal diag diag_embed"),
)

NOTHING: tuple[Op, ...] = (
    Op(
        "contiguous",
        IDENTITY,
        (),
        (*named(torch, "clone detach positive"), operator.pos),
        methods("contiguous clone detach positive __pos__ cpu cuda"),
    ),
    Op("to", IDENTITY, (), (), methods("to float type_as")),
    Op("identity", IDENTITY, (nn.Identity,)),
    Op("eval_or_train", IDENTITY, (), (eval_or_train,)),
    Op("dropout", IDENTITY, (nn.Dropout, StepDropout), (F.dropout,)),
    Op("dropout1d", IDENTITY, (nn.Dropout1d,), (F.dropout1d,)),
    Op("dropout2d", IDENTITY, (nn.Dropout2d,), (F.dropout2d,)),
    Op("dropout3d", IDENTITY, (nn.Dropout3d,), (F.dropout3d,)),
    Op("alpha_dropout", IDENTITY, (nn.AlphaDropout,), (F.alpha_dropout,)),
    Op("feature_alpha_dropout", IDENTITY, (nn.FeatureAlphaDropout,), (F.feature_alpha_dropout,)),
    Op("stochastic_depth", IDENTITY, (StochasticDepth,)),
)

LIKE = "zeros_like ones_like full_like empty_like rand_like randn_like"
COMPARISONS = "eq ne lt le gt ge not_equal less less_equal greater greater_equal"
LOGIC = "logical_and logical_or logical_not logical_xor isnan isinf isfinite isclose"

VALUELESS: tuple[Op, ...] = (
    Op(
        "constructor",
        CONSTRUCTOR,
        (),
        named(torch, f"zeros ones full fill empty rand randn eye linspace tensor as_tensor asarray {LIKE}"),
        methods("new_zeros new_ones new_full new_empty new_tensor"),
    ),
    Op("argmax", NOT_FLOAT, (), named(torch, "argmax argmin argsort"), methods("argmax argmin argsort")),
    Op("indices", NOT_FLOAT, (), (torch.nonzero, F.one_hot), ("nonzero",)),
    Op("size", NOT_FLOAT, (), (builtins.getattr, builtins.len), methods("size dim numel __len__ item")),
    Op("integer", NOT_FLOAT, (), (operator.floordiv, operator.mod, builtins.int, torch.arange)),
    Op(
        "compare",
        NOT_FLOAT,
        (),
        (
            *named(operator, "eq ne lt le gt ge and_ or_ xor invert not_"),
            *named(torch, f"{COMPARISONS} {LOGIC} any all"),
        ),
        methods(f"{COMPARISONS} {LOGIC} any all bool __eq__ __ne__ __lt__ __le__ __gt__ __ge__"),
    ),
)

MOVING: tuple[Op, ...] = (*JOINING, *SHAPING, *SELECTING, *NOTHING, *VALUELESS)
