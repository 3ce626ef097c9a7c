"""Rows of the op table: ops that compute new values."""

from __future__ import annotations

import builtins
import operator

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.ops import RoIAlign, roi_align

from fxqat.nn.product_layer import ProductLayer, linear_product
from fxqat.ops.families import (
    ACTIVATION,
    BINARY,
    LOOKUP,
    MATH,
    MATMUL,
    NORM,
    POOL,
    RECURRENT,
    RESIZE,
    WEIGHTED,
    Op,
    methods,
    named,
)

LAYERS: tuple[Op, ...] = (
    Op("conv1d", WEIGHTED, (nn.Conv1d,), (F.conv1d,)),
    Op("conv2d", WEIGHTED, (nn.Conv2d,), (F.conv2d,)),
    Op("conv3d", WEIGHTED, (nn.Conv3d,), (F.conv3d,)),
    Op("conv_transpose1d", WEIGHTED, (nn.ConvTranspose1d,), (F.conv_transpose1d,)),
    Op("conv_transpose2d", WEIGHTED, (nn.ConvTranspose2d,), (F.conv_transpose2d,)),
    Op("conv_transpose3d", WEIGHTED, (nn.ConvTranspose3d,), (F.conv_transpose3d,)),
    Op("linear", WEIGHTED, (nn.Linear, ProductLayer), (F.linear, linear_product)),
    Op("embedding", LOOKUP, (nn.Embedding,), (F.embedding, torch.embedding), inputs=0),
    Op("embedding_bag", LOOKUP, (nn.EmbeddingBag,), (F.embedding_bag,), inputs=0),
    Op("rnn", RECURRENT, (nn.RNN,), inputs=2, gives_tuple=True),
    Op("lstm", RECURRENT, (nn.LSTM,), inputs=3, gives_tuple=True),
    Op("gru", RECURRENT, (nn.GRU,), inputs=2, gives_tuple=True),
    Op("recurrent_cell", RECURRENT, (nn.RNNCell, nn.LSTMCell, nn.GRUCell)),
)

PRODUCTS: tuple[Op, ...] = (
    Op(
        "matmul",
        MATMUL,
        (),
        (*named(torch, "matmul bmm mm mv dot inner"), torch.linalg.matmul, operator.matmul, operator.imatmul),
        methods("matmul __matmul__ __rmatmul__ bmm mm mv dot inner"),
        inputs=2,
    ),
    Op("einsum", MATMUL, (), (torch.einsum,), inputs=8),
    Op("tensordot", MATMUL, (), (torch.tensordot,), inputs=2),
    Op("scaled_dot_product_attention", MATH, (), (F.scaled_dot_product_attention,), inputs=3),
    Op("addmm", MATH, (), named(torch, "addmm addmv"), methods("addmm addmm_ addmv addmv_"), inputs=3),
    Op("baddbmm", MATH, (), named(torch, "baddbmm addbmm"), methods("baddbmm baddbmm_ addbmm addbmm_"), inputs=3),
    Op("addcmul", MATH, (), (torch.addcmul,), methods("addcmul addcmul_"), inputs=3),
    Op("addcdiv", MATH, (), (torch.addcdiv,), methods("addcdiv addcdiv_"), inputs=3, poles=(2,)),
    Op("lerp", MATH, (), (torch.lerp,), methods("lerp lerp_"), inputs=3),
)

BINARIES: tuple[Op, ...] = (
    Op(
        "add",
        BINARY,
        (),
        (torch.add, operator.add, operator.iadd),
        methods("add add_ __add__ __radd__ __iadd__"),
        inputs=2,
    ),
    Op(
        "sub",
        BINARY,
        (),
        (*named(torch, "sub subtract rsub"), operator.sub, operator.isub),
        methods("sub sub_ subtract subtract_ __sub__ __rsub__ __isub__"),
        inputs=2,
    ),
    Op(
        "mul",
        BINARY,
        (),
        (*named(torch, "mul multiply"), operator.mul, operator.imul),
        methods("mul mul_ multiply multiply_ __mul__ __rmul__ __imul__"),
        inputs=2,
    ),
    Op(
        "div",
        BINARY,
        (),
        (*named(torch, "div divide true_divide"), operator.truediv, operator.itruediv),
        methods("div div_ divide divide_ true_divide true_divide_ __truediv__ __rtruediv__ __itruediv__"),
        inputs=2,
        poles=(1,),
    ),
    Op(
        "floor_divide",
        BINARY,
        (),
        (torch.floor_divide, operator.ifloordiv),
        methods("floor_divide floor_divide_ __floordiv__ __rfloordiv__ __ifloordiv__"),
        inputs=2,
        poles=(1,),
    ),
    Op(
        "remainder",
        BINARY,
        (),
        (*named(torch, "remainder fmod"), operator.imod),
        methods("remainder remainder_ fmod fmod_ __mod__ __rmod__ __imod__"),
        inputs=2,
        poles=(1,),
    ),
    Op("maximum", BINARY, (), named(torch, "maximum fmax"), methods("maximum fmax"), inputs=2),
    Op("minimum", BINARY, (), named(torch, "minimum fmin"), methods("minimum fmin"), inputs=2),
)

POOLS: tuple[Op, ...] = (
    Op("adaptive_avg_pool1d", POOL, (nn.AdaptiveAvgPool1d,), (F.adaptive_avg_pool1d, torch.adaptive_avg_pool1d)),
    Op("adaptive_avg_pool2d", POOL, (nn.AdaptiveAvgPool2d,), (F.adaptive_avg_pool2d,)),
    Op("adaptive_avg_pool3d", POOL, (nn.AdaptiveAvgPool3d,), (F.adaptive_avg_pool3d,)),
    Op("avg_pool1d", POOL, (nn.AvgPool1d,), (F.avg_pool1d, torch.avg_pool1d)),
    Op("avg_pool2d", POOL, (nn.AvgPool2d,), (F.avg_pool2d,)),
    Op("avg_pool3d", POOL, (nn.AvgPool3d,), (F.avg_pool3d,)),
    Op("mean", POOL, (), (torch.mean,), ("mean",)),
    Op("lp_pool", MATH, (nn.LPPool1d, nn.LPPool2d, nn.LPPool3d), named(F, "lp_pool1d lp_pool2d lp_pool3d")),
)


def _activation(
    name: str, *modules: type, functional: str = "", in_torch: str = "", tensor: str = "", keeps_output: bool = False
) -> Op:
    functions = named(F, functional) + named(torch, in_torch)
    return Op(name, ACTIVATION, modules, functions, methods(tensor), keeps_output=keeps_output)


ACTIVATION_OPS: tuple[Op, ...] = (
    _activation(
        "relu", nn.ReLU, functional="relu relu_", in_torch="relu relu_", tensor="relu relu_", keeps_output=True
    ),
    _activation("relu6", nn.ReLU6, functional="relu6"),
    _activation("prelu", nn.PReLU, functional="prelu", tensor="prelu"),
    _activation("rrelu", nn.RReLU, functional="rrelu rrelu_", in_torch="rrelu rrelu_"),
    _activation("leaky_relu", nn.LeakyReLU, functional="leaky_relu leaky_relu_"),
    _activation("elu", nn.ELU, functional="elu elu_"),
    _activation("selu", nn.SELU, functional="selu selu_", in_torch="selu selu_"),
    _activation("celu", nn.CELU, functional="celu celu_", in_torch="celu celu_"),
    _activation("gelu", nn.GELU, functional="gelu"),
    _activation("silu", nn.SiLU, functional="silu"),
    _activation("mish", nn.Mish, functional="mish"),
    _activation("softplus", nn.Softplus, functional="softplus"),
    _activation("softsign", nn.Softsign, functional="softsign"),
    _activation("tanhshrink", nn.Tanhshrink, functional="tanhshrink"),
    _activation("softshrink", nn.Softshrink, functional="softshrink"),
    _activation("hardshrink", nn.Hardshrink, functional="hardshrink", in_torch="hardshrink", tensor="hardshrink"),
    _activation("threshold", nn.Threshold, functional="threshold threshold_", in_torch="threshold threshold_"),
    _activation("hardswish", nn.Hardswish, functional="hardswish"),
    _activation("hardsigmoid", nn.Hardsigmoid, functional="hardsigmoid"),
    _activation("hardtanh", nn.Hardtanh, functional="hardtanh hardtanh_"),
    _activation(
        "tanh", nn.Tanh, functional="tanh", in_torch="tanh tanh_", tensor="tanh tanh_ __tanh__", keeps_output=True
    ),
    _activation(
        "sigmoid",
        nn.Sigmoid,
        functional="sigmoid",
        in_torch="sigmoid sigmoid_",
        tensor="sigmoid sigmoid_",
        keeps_output=True,
    ),
    _activation("logsigmoid", nn.LogSigmoid, functional="logsigmoid"),
    _activation(
        "softmax",
        nn.Softmax,
        nn.Softmax2d,
        functional="softmax",
        in_torch="softmax",
        tensor="softmax",
        keeps_output=True,
    ),
    _activation("softmin", nn.Softmin, functional="softmin"),
    _activation(
        "log_softmax",
        nn.LogSoftmax,
        functional="log_softmax",
        in_torch="log_softmax",
        tensor="log_softmax",
        keeps_output=True,
    ),
    _activation("glu", nn.GLU, functional="glu"),
    _activation(
        "clamp",
        in_torch="clamp clamp_ clip clip_ clamp_min clamp_min_ clamp_max clamp_max_",
        tensor="clamp clamp_ clip clip_ clamp_min clamp_min_ clamp_max clamp_max_",
    ),
)

NORMS: tuple[Op, ...] = (
    Op("batch_norm1d", NORM, (nn.BatchNorm1d,)),
    Op("batch_norm2d", NORM, (nn.BatchNorm2d, nn.SyncBatchNorm)),  # which is for any number of dimensions
    Op("batch_norm3d", NORM, (nn.BatchNorm3d,)),
    Op("batch_norm", NORM, (), (F.batch_norm, torch.batch_norm)),
    Op("layer_norm", NORM, (nn.LayerNorm,), (F.layer_norm, torch.layer_norm)),
    Op("group_norm", NORM, (nn.GroupNorm,), (F.group_norm, torch.group_norm)),
    Op(
        "instance_norm",
        NORM,
        (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
        (F.instance_norm, torch.instance_norm),
    ),
    Op("rms_norm", NORM, (nn.RMSNorm,), (F.rms_norm, torch.rms_norm)),
    Op("local_response_norm", NORM, (nn.LocalResponseNorm,), (F.local_response_norm,)),
    Op("normalize", MATH, (), (F.normalize,)),
)

ALIASES = {
    "abs": "absolute",
    "neg": "negative",
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
    "asinh": "arcsinh",
    "acosh": "arccosh",
    "atanh": "arctanh",
    "sign": "sgn",
    "trunc": "fix",
}
OPERATORS = {
    "abs": ((operator.abs,), "__abs__"),  # builtins.abs is another object
    "neg": ((operator.neg,), "__neg__"),
    "round": ((builtins.round,), "__round__"),
}
ELEMENTWISE = (
    "abs sqrt exp log sin cos neg rsqrt square reciprocal sign floor ceil round trunc frac erf erfc exp2 expm1 log2 "
    "log10 log1p tan asin acos atan sinh cosh asinh acosh atanh logit nan_to_num"
)
POLE_AT_ZERO = ("sqrt", "rsqrt", "reciprocal", "log", "log2", "log10", "logit")


def _math(name: str) -> Op:
    spelled = [name, ALIASES.get(name, name)]
    spelled += [f"{spelling}_" for spelling in spelled]
    functions = [getattr(torch, spelling) for spelling in spelled if hasattr(torch, spelling)]
    found = [spelling for spelling in spelled if hasattr(torch.Tensor, spelling)]
    operators, magic = OPERATORS.get(name, ((), ""))
    if name == "abs":
        operators = (*operators, builtins.abs)
    functions, found = [*dict.fromkeys(functions), *operators], [*dict.fromkeys(found), *magic.split()]
    return Op(name, MATH, (), tuple(functions), tuple(found), poles=(0,) if name in POLE_AT_ZERO else ())


MATHS: tuple[Op, ...] = (
    *(_math(name) for name in ELEMENTWISE.split()),
    Op("pow", MATH, (), (torch.pow, operator.pow, operator.ipow), methods("pow pow_ __pow__ __rpow__ __ipow__"), 2),
    Op("atan2", MATH, (), (torch.atan2, torch.arctan2), methods("atan2 atan2_ arctan2 arctan2_"), 2, poles=(0, 1)),
    Op("sum", MATH, (), (torch.sum,), ("sum",)),
    Op("prod", MATH, (), (torch.prod,), ("prod",)),
    Op("cumsum", MATH, (), (torch.cumsum,), methods("cumsum cumsum_")),
    Op("cumprod", MATH, (), (torch.cumprod,), methods("cumprod cumprod_")),
    Op("logsumexp", MATH, (), (torch.logsumexp,), ("logsumexp",)),
    Op("var", MATH, (), (torch.var,), ("var",)),
    Op("std", MATH, (), (torch.std,), ("std",)),
    Op("norm", MATH, (), (torch.norm, torch.linalg.norm, torch.linalg.vector_norm), ("norm",)),
    Op("cosine_similarity", MATH, (), (F.cosine_similarity,), inputs=2),
    Op("pairwise_distance", MATH, (nn.PairwiseDistance,), (F.pairwise_distance,), inputs=2),
    Op("cdist", MATH, (), (torch.cdist,), inputs=2),
    Op("fold", MATH, (nn.Fold,), (F.fold,)),
    Op("masked_fill", MATH, (), (torch.masked_fill,), methods("masked_fill masked_fill_")),
    Op(
        "interpolate",
        RESIZE,
        (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d),
        (F.interpolate, F.upsample),
    ),
    Op("grid_sample", RESIZE, (), (F.grid_sample,)),
    Op("roi_align", RESIZE, (RoIAlign,), (roi_align, torch.ops.torchvision.roi_align)),
)

COMPUTING: tuple[Op, ...] = (*LAYERS, *PRODUCTS, *BINARIES, *POOLS, *ACTIVATION_OPS, *NORMS, *MATHS)
