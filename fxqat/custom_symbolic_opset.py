"""From torch to ONNX: torch's exporter runs, with the translations of operators that it lacks.

Nothing is registered with torch's exporter: the table of translations is built for each export and passed to it.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import onnx
import onnx_ir as ir
import onnxscript
import torch
import torchvision  # noqa: F401  defines torch.ops.torchvision
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops.core import aten_mean_dim
from torch import fx, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from fxqat.errors import ExportError
from fxqat.fake_quantize import torch_ops  # noqa: F401  defines torch.ops.fxqat
from fxqat.nn import recurrent  # noqa: F401  defines torch.ops.fxqat.recurrent
from fxqat.onnx import orders, pieces, recurrent_layers, scatters, stacks
from fxqat.onnx.adaptive_pools import OpenWindowsError, adaptive_avg_pool, adaptive_max_pool
from fxqat.onnx.closed_queries import attention
from fxqat.quantization.dynamic_sizes import OpenSizes
from fxqat.quantization.exported_parts import ExportedParts
from fxqat.quantization.grouped_children import grouped_children, without_groups
from fxqat.quantization.leaf_sizes import fix_leaf_sizes, leaf_calls
from fxqat.utils.contexts import collector_paused, writes_to_data_seen
from fxqat.utils.fx_graph import called_module, nodes_in
from fxqat.utils.torch_compat import (
    ADAPTIVE_AVG_POOL2D,
    ADAPTIVE_AVG_POOL3D,
    CDIST,
    named_as_in_schema,
    operator_of,
    shorter_export,
)

WARNINGS = "fxqat.warnings"
"""Key of the exporter's warnings in the model's ``meta``, which onnx_ir keeps in memory and does not write to files."""

SCOPES = "pkg.torch.onnx.name_scopes"
"""The key at which torch's exporter notes the paths of the modules that a node comes from."""

COLORS = re.compile(r"\x1b\[[0-9;]*m")
"""What torch's exporter writes into its messages for a terminal."""

CLASS = re.compile(r"^<class '[\w.]+'>: ", re.MULTILINE)
"""How it names the type of an error."""

NO_TRANSLATION = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)', overload='(\w+)'\)>")
"""What it says of an operator that it cannot write."""

NO_TENSOR = re.compile(r"'(\w+)' object has no attribute 'name'\n.*\n?Error when translating node return")
"""What it says of an output that is no tensor."""

GROUPED_PRODUCT = re.compile("grouped_mm|Expected mat_a to be BFloat16")
"""What it says of ``torch.nn.functional.grouped_mm``, which it computes in half precision only."""

PACKED = re.compile(r"packed_sequence|PackedSequence")
"""What its messages name where a model packs sequences."""

NATIVE_OPSET = 18
"""The opset that the translations are written in, and the oldest that torch's exporter writes."""


@collector_paused()
def run_exporter(
    module: nn.Module,
    inputs: tuple[Any, ...],
    sizes: OpenSizes | None = None,
    translations: Mapping[Any, Callable[..., Any]] | None = None,
) -> ir.Model:
    """Run torch's exporter.

    Args:
        module: the lowered graph.
        inputs: example inputs.
        sizes: the sizes to leave open, None for none.
        translations: of the user's operators, see :func:`user_translations`.

    If it fails and the graph calls leaves, the graph is captured in the mode of ``torch.export`` that reads their code,
    and with the sizes that they return for the example inputs.

    Returns:
        The model, in ``NATIVE_OPSET``, in which a DynamicQuantizeLinear has the path of its module as its name;
        :func:`exporter_warnings` gives the warnings of torch's exporter.

    Raises:
        ExportError: the exporter fails, or the model's code fixes an open size.
    """
    opened = () if sizes is None else sizes.first
    if sizes is not None and any(1 in axes.values() for axes in opened):  # torch.export treats 1 as a constant
        inputs = sizes.second_inputs(inputs)
    export = partial(_export, inputs=inputs, dynamic_shapes=None if sizes is None else sizes.shapes)
    parts = ExportedParts(module)
    table = translation_table() | parts.translations() | user_translations(translations)
    table = {operator: named_as_in_schema(operator, function) for operator, function in table.items()}
    export = partial(export, custom_translation_table=table)
    told: list[str] = []
    with warnings.catch_warnings(record=True) as heard, writes_to_data_seen():
        warnings.simplefilter("always")
        try:
            with grouped_children(module):
                model = export(module)
        except Exception as cause:  # the exporter wraps every kind of failure
            leaves, why = leaf_calls(module), without_groups(_reason(cause))
            remedy = _remedy(why, module)
            called = ", ".join(dict.fromkeys(str(leaf.target) for leaf in leaves))
            pool = next((error for error in _chain(cause) if isinstance(error, OpenWindowsError)), None)
            if pool is not None:
                raise ExportError(f"{' or '.join(_pools(module, pool.kind)) or 'a pool'}: {pool}") from cause
            if sizes is not None:
                raise ExportError(
                    f"torch.onnx.export failed with open sizes: {why}\n{remedy or sizes.cause}"
                ) from cause
            if not leaves:
                raise ExportError(f"torch.onnx.export failed: {why}\n{remedy}".rstrip()) from cause
            try:
                model = export(torch.export.export(fix_leaf_sizes(module, inputs), inputs, strict=True))
            except Exception:  # noqa: BLE001  the first failure says more
                raise ExportError(f"torch.onnx.export failed with {called}, not traced: {why}") from cause
            told = [f"the file takes the sizes of what {called} returns from the example inputs: run it on such inputs"]
    parts.add_constants(model)
    fixed = [
        f"{value.name}[{axis}]"
        for value, axes in zip(model.graph.inputs, opened, strict=False)
        for axis in axes
        if value.shape is not None and isinstance(value.shape[axis], int)
    ]
    if sizes is not None and fixed:
        raise ExportError(f"the model fixes {', '.join(fixed)}, which was to be open. {sizes.cause}")
    for parameter in list(model.graph.initializers.values()):
        parameter.name = without_groups(str(parameter.name))
    for node in model.graph:
        if SCOPES in node.metadata_props:
            node.metadata_props[SCOPES] = without_groups(node.metadata_props[SCOPES])
        if node.op_type == "DynamicQuantizeLinear":
            node.name = ast.literal_eval(node.metadata_props[SCOPES])[-2]  # the module that calls the operator
    model.meta[WARNINGS] = tuple(dict.fromkeys([*told, *(str(w.message) for w in heard if not _is_noise(w))]))
    return model


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _pools(module: nn.Module, kind: str) -> list[str]:
    """The calls of adaptive pools in a lowered graph, by path or name."""
    graph: fx.Graph = module.graph  # type: ignore[assignment]
    found = []
    for node in graph.nodes:
        called = called_module(node)
        name = type(called).__name__ if called is not None else str(getattr(node.target, "__name__", node.target))
        if name.lower().replace("_", "").startswith(f"adaptive{kind}pool"):
            found.append(node.name if called is None else str(node.target))
    return found


def _reason(cause: Exception) -> str:
    """What torch's exporter says of a failure, without its advice to those who develop it."""
    message = COLORS.sub("", str(cause))
    _, title, summary = message.partition("## Exception summary")
    lines = [line for line in summary.splitlines() if line.strip() and not line.startswith("(Refer to the full stack")]
    return CLASS.sub("", "\n".join(lines)) if title else message


def _remedy(why: str, module: nn.Module) -> str:
    """What helps against the known failures to write a module; empty for any other."""
    if missing := NO_TRANSLATION.search(why):
        name = f"torch.ops.{'.'.join(missing.groups())}"
        return (
            f"Torch's exporter cannot write {missing[1]} in ONNX. Compute it in another way, or tell how to write it: "
            f"custom_translation_table={{{name}: a function of ONNX operators}}."
        )
    if given := NO_TENSOR.search(why):
        return f"The model returns a value of the type {given[1]}, a file returns tensors only: leave out that value."
    packs = any(node.target in (PackedSequence, pack_padded_sequence) for node in nodes_in(module))
    if packs or PACKED.search(why):
        return (
            "ONNX has no packed sequences: let only nn.LSTM, nn.GRU, nn.RNN and pad_packed_sequence read what "
            "pack_padded_sequence returns, or pad the sequences and mask what follows their ends."
        )
    if GROUPED_PRODUCT.search(why):
        return (
            "Torch's exporter cannot write the grouped products of a mixture of experts. Prepare the model without "
            "them, if it is one of transformers after model.set_experts_implementation('batched_mm')."
        )
    return ""


def _export(module: nn.Module | torch.export.ExportedProgram, inputs: tuple[Any, ...], **options: Any) -> ir.Model:
    with shorter_export():
        program = torch.onnx.export(
            module,
            (*inputs, {}) if isinstance(inputs[-1], Mapping) else inputs,  # torch takes a last dict for keywords
            dynamo=True,
            optimize=False,
            verbose=False,
            opset_version=NATIVE_OPSET,
            **options,
        )
    if program is None:
        raise ExportError("torch.onnx.export returned no program")
    return program.model


def exporter_warnings(model: ir.Model) -> tuple[str, ...]:
    """What torch's exporter warned of while it made a model."""
    found: tuple[str, ...] = model.meta.get(WARNINGS, ())
    return found


def _is_noise(warning: warnings.WarningMessage) -> bool:
    """Whether a warning tells the user nothing: about torch's own code, names of axes, or torch's recurrent layers.

    A recurrent layer lists its parameters in ``_flat_weights``, too, which ``torch.export`` takes for a new state.
    """
    text = str(warning.message)
    about_torch = issubclass(warning.category, (DeprecationWarning, PendingDeprecationWarning, FutureWarning))
    changed = re.findall(r"\bself\.[\w.\[\]]+", text) if "assigned during export" in text else []
    about_lists = bool(changed) and all("._flat_weights[" in name for name in changed)
    return about_torch or about_lists or "axis name" in text


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """A fresh table for ``torch.onnx.export(custom_translation_table=...)``.

    Source: ONNX DequantizeLinear, opset 13; DynamicQuantizeLinear, opset 11; MaxRoiPool,
    opset 1; ReduceMax, ReduceMin, ReduceMean, ReduceProd, ReduceL1 and ReduceL2, opset 18; LeakyRelu, opset 16;
    BatchNormalization, opset 15; Cast, opset 13; AveragePool, Conv, ConvTranspose and TopK, opset 11; Concat and
    Unsqueeze, opset 13; and those of ``fxqat.onnx``.
    """
    return {
        torch.ops.fxqat.dynamic_quantize_dequantize.default: _dynamic_quantize_dequantize,
        torch.ops.fxqat.recurrent.default: recurrent_layers.recurrent,
        torch.ops.fxqat.up_to_longest.default: recurrent_layers.up_to_longest,
        torch.ops.torchvision.roi_pool.default: _roi_pool,
        torch.ops.aten.chunk.default: pieces.chunk,
        torch.ops.aten.im2col.default: pieces.unfold,
        torch.ops.aten.col2im.default: pieces.fold,
        # torch's own fail for an empty list of dimensions, which means all of them
        torch.ops.aten.amax.default: _amax,
        torch.ops.aten.amin.default: _amin,
        torch.ops.aten.aminmax.default: _aminmax,
        # torch's own writes an empty name for dim=None
        torch.ops.aten.mean.dim: _mean,
        torch.ops.aten.scatter.src: scatters.scatter,
        torch.ops.aten.scatter.reduce: scatters.scatter_with,
        torch.ops.aten.scatter.value_reduce: scatters.scatter_number_with,
        torch.ops.aten.scatter_reduce.two: scatters.scatter_reduce,
        torch.ops.aten.index_reduce.default: scatters.index_reduce,
        torch.ops.aten.sort.stable: _sort,
        torch.ops.aten.kthvalue.default: orders.kthvalue,
        torch.ops.aten.median.default: orders.median,
        torch.ops.aten.median.dim: orders.median_along,
        torch.ops.aten.cummax.default: orders.cummax,
        torch.ops.aten.cummin.default: orders.cummin,
        torch.ops.prims.fmax.default: orders.fmax,
        torch.ops.prims.fmin.default: orders.fmin,
        torch.ops.aten.masked_select.default: orders.masked_select,
        torch.ops.aten.hypot.default: _hypot,
        torch.ops.aten.rrelu_with_noise_functional.default: _rrelu,
        torch.ops.prims.prod.default: _prod,  # what the exporter makes of cumprod
        CDIST: _cdist,
        # torch's own averages over closed keys, or gives NaN, where a mask leaves no key
        torch.ops.aten.scaled_dot_product_attention.default: attention,
        ADAPTIVE_AVG_POOL2D: adaptive_avg_pool,
        ADAPTIVE_AVG_POOL3D: adaptive_avg_pool,
        torch.ops.aten.adaptive_max_pool2d.default: adaptive_max_pool,
        torch.ops.aten.adaptive_max_pool3d.default: adaptive_max_pool,
        # torch's own give a layer without a bias one of zeros (onnxscript 0.7.2), conv3d's of a wrong shape
        torch.ops.aten.conv1d.default: _conv,
        torch.ops.aten.conv2d.default: _conv,
        torch.ops.aten.conv3d.default: _conv,
        torch.ops.aten.conv_transpose1d.default: _conv_transpose,
        torch.ops.aten.conv_transpose2d.input: _conv_transpose,
        torch.ops.aten.conv_transpose3d.input: _conv_transpose,
        # torch has none, and would trace the whole graph once more to decompose these
        torch.ops.aten.batch_norm.default: _batch_norm,
        torch.ops.aten.to.dtype: _to,
        torch.ops.aten.concat.default: stacks.concat,
        torch.ops.aten.concatenate.default: stacks.concat,
        torch.ops.aten.stack.default: stacks.stack,
        torch.ops.aten.hstack.default: stacks.hstack,
        torch.ops.aten.vstack.default: stacks.vstack,
        torch.ops.aten.row_stack.default: stacks.vstack,
        torch.ops.aten.dstack.default: stacks.dstack,
        torch.ops.aten.column_stack.default: stacks.column_stack,
    }


def user_translations(given: Mapping[Any, Callable[..., Any]] | None) -> dict[Callable[..., Any], Callable[..., Any]]:
    """The translations of the user's operators, by the overloads that torch's exporter looks for.

    Args:
        given: what torch calls ``custom_translation_table``: for an operator (``torch.ops.mylib.wavy``, one of its
            overloads, or the function that ``torch.library.custom_op`` returns) a function of ONNX operators.

    Raises:
        ExportError: an entry is none of these, or is for an operator of fxqat's own.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ExportError(f"custom_translation_table must be a dict of functions by operator, got {given!r}")
    found: dict[Callable[..., Any], Callable[..., Any]] = {}
    for target, function in (given or {}).items():
        overload = operator_of(target)
        if overload is None or overload.namespace == "fxqat" or not callable(function):
            raise ExportError(
                "custom_translation_table: expected an operator such as torch.ops.mylib.wavy.default, not of fxqat, "
                f"with a function of ONNX operators, got {target!r}: {function!r}"
            )
        found[overload] = function
    return found


def _dynamic_quantize_dequantize(x: onnxscript.onnx_types.FLOAT) -> Any:
    q, scale, zero_point = op.DynamicQuantizeLinear(x)
    return op.DequantizeLinear(q, scale, zero_point)


def _roi_pool(
    x: onnxscript.onnx_types.FLOAT,
    boxes: onnxscript.onnx_types.FLOAT,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
) -> tuple[Any, Any]:
    pooled = op.MaxRoiPool(x, boxes, pooled_shape=(pooled_height, pooled_width), spatial_scale=spatial_scale)
    # only the gradient needs the places of the maxima, and ONNX has none: unread they are dropped, read they fail
    nothing: Any = op.SequenceEmpty(dtype=onnx.TensorProto.INT32)
    first: Any = op.Constant(value_int=0)
    return pooled, op.SequenceAt(nothing, first)


def _amax(x: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    return op.ReduceMax(x, *_axes(dim), keepdims=keepdim)


def _amin(x: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    return op.ReduceMin(x, *_axes(dim), keepdims=keepdim)


def _mean(x: Any, dim: Sequence[int] | None = None, keepdim: bool = False, dtype: int | None = None) -> Any:
    if dtype is not None:  # torch's own converts the mean of integers, which is one, too
        shape = x.shape
        x = op.Cast(x, to=dtype)
        x.shape, x.dtype = shape, ir.DataType(dtype)
    return aten_mean_dim(x, dim, keepdim) if dim else op.ReduceMean(x, keepdims=keepdim)


def _prod(x: Any, dims: Sequence[int] = (), output_dtype: int | None = None) -> Any:
    return op.ReduceProd(x, *_axes(dims), keepdims=False)


def _aminmax(x: Any, dim: int | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    dims = () if dim is None else (dim,)
    return _amin(x, dims, keepdim), _amax(x, dims, keepdim)


def _axes(dims: Sequence[int]) -> tuple[Any, ...]:
    return (op.Constant(value_ints=list(dims)),) if dims else ()


def _sort(x: Any, dim: int = -1, descending: bool = False, stable: bool | None = None) -> tuple[Any, Any]:
    if not x.shape:
        return op.Identity(x), op.Constant(value_int=0)
    axis: Any = op.Constant(value_ints=[dim])
    count: Any = op.Gather(op.Shape(x), axis)
    return op.TopK(x, count, axis=dim, largest=descending, sorted=True)  # of equal values the first comes first


def _hypot(x: Any, y: Any) -> Any:
    return op.Sqrt(op.Add(op.Mul(x, x), op.Mul(y, y)))


def _rrelu(
    x: Any, noise: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> tuple[Any, Any]:
    return op.LeakyRelu(x, alpha=(lower + upper) / 2), noise


def _cdist(x: Any, y: Any, p: float, compute_mode: int | None = None) -> Any:
    last: Any = op.Constant(value_ints=[-1])
    second: Any = op.Constant(value_ints=[-2])
    third: Any = op.Constant(value_ints=[-3])
    rows: Any = op.Unsqueeze(x, second)
    columns: Any = op.Unsqueeze(y, third)
    difference: Any = op.Sub(rows, columns)
    if p == 1:
        return op.ReduceL1(difference, last, keepdims=False)
    if p == 2:
        return op.ReduceL2(difference, last, keepdims=False)
    if p == float("inf"):
        return op.ReduceMax(op.Abs(difference), last, keepdims=False)
    if p == 0:
        return op.ReduceSum(op.Abs(op.Sign(difference)), last, keepdims=False)
    exponent: Any = op.Constant(value_float=p)
    inverse: Any = op.Constant(value_float=1 / p)
    powers: Any = op.Pow(op.Abs(difference), exponent)
    total: Any = op.ReduceSum(powers, last, keepdims=False)
    return op.Pow(total, inverse)


def _conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Any:
    return _convolution(op.Conv, x, weight, bias, stride, padding, dilation, group=groups)


def _conv_transpose(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> Any:
    added = list(output_padding) * ((len(weight.shape) - 2) // len(output_padding))
    options = {"group": groups, "output_padding": added}
    return _convolution(op.ConvTranspose, x, weight, bias, stride, padding, dilation, **options)


def _convolution(
    operator: Callable[..., Any],
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    **options: Any,
) -> Any:
    kernel = list(weight.shape[2:])
    strides, pads, dilations = (list(given) * (len(kernel) // len(given)) for given in (stride, padding, dilation))
    is_batched = len(x.shape) == len(weight.shape)
    batch: Any = None if is_batched else op.Constant(value_ints=[0])
    result: Any = operator(
        x if is_batched else op.Unsqueeze(x, batch),
        weight,
        *(() if bias is None else (bias,)),
        strides=strides,
        pads=[*pads, *pads],
        dilations=dilations,
        kernel_shape=kernel if all(isinstance(size, int) for size in kernel) else None,
        **options,
    )
    return result if is_batched else op.Squeeze(result, batch)


def _batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    channels = x.shape[1]
    ones: Any = op.Constant(value_floats=[1.0] * channels)
    zeros: Any = op.Constant(value_floats=[0.0] * channels)
    if training:  # without running statistics, also in eval mode: those of the batch
        axes: Any = op.Constant(value_ints=[axis for axis in range(len(x.shape)) if axis != 1])
        mean = op.ReduceMean(x, axes, keepdims=False)
        centered: Any = op.Sub(x, op.ReduceMean(x, axes, keepdims=True))
        var = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=False)
    scale, offset = ones if weight is None else weight, zeros if bias is None else bias
    return op.BatchNormalization(x, scale, offset, mean, var, epsilon=eps)


def _to(x: Any, dtype: int, non_blocking: bool = False, copy: bool = False, memory_format: str = "") -> Any:
    return op.Cast(x, to=dtype)
