"""From torch to .tflite: LiteRT's converter runs on the lowered graph.

The converter makes an operator of integers of each float operator between ``quantized_decomposed`` operators, the form
of torch's PT2E quantization:

1. each Q/DQ pair becomes such a pair;
2. a stored weight becomes its real values and such a pair, because the converter takes no integers as weights;
3. a stored bias becomes its real values: the converter rounds them at the scale of the products, as fxqat does;
4. barriers stand around what LiteRT computes in float where it reads or gives quantized values: the converter would
   make operators of integers of parts of it, with roundings of its own, and would round the weights of a layer. One
   follows a sum, because LiteRT 2.3's reference kernel gives wrong sums of integers;
5. ``x ** 2`` becomes ``x * x``: the converter refuses some float powers;
6. each reader of a quantized value gets a dequantizing operator of its own, as PT2E has it: the converter's layout pass
   forgets the layout of one with several readers;
7. an input in the layout ``(N, ..., C)`` is first permuted to torch's;
8. the layout pass is the greedy one where a value is expanded: the other one takes sizes in the wrong order;
9. attention gives 0 where its mask leaves a query no key, as in torch: the converter averages over closed keys;
10. recurrent layers are unrolled: the converter does not know fxqat's operator for them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxqat.errors import ExportError
from fxqat.nn.deployed import QuantizeDequantize, RoundedTensor, StoredTensor, attention, attention_or_zero
from fxqat.nn.unrolled import unrolled_layer
from fxqat.ops.families import (
    ACTIVATION,
    BINARY,
    IDENTITY,
    MATH,
    MATMUL,
    NORM,
    PASS_THROUGH,
    POOL,
    RESIZE,
    WEIGHTED,
    Op,
)
from fxqat.ops.identify import identify
from fxqat.quantization.lower import Lowered
from fxqat.scheme import QuantizedTensor
from fxqat.tflite.flatbuffer import missing
from fxqat.utils.contexts import writes_to_data_seen
from fxqat.utils.fx_graph import unique_name


def run_converter(
    lowered: Lowered, inputs: tuple[Any, ...], channels_last: Sequence[bool], on_integers: Container[str]
) -> bytes:
    """Convert a lowered model.

    Args:
        lowered: the graph, lowered with ``weights="float"``; changed by this.
        inputs: example inputs in the file's layout.
        channels_last: for each input, whether its layout is ``(N, ..., C)``.
        on_integers: names and families of the ops that LiteRT computes on integers.

    Returns:
        The file. Inputs and outputs that are quantized are int8.

    Raises:
        ExportError: the packages are missing, a tensor has a scheme that LiteRT lacks, or the converter fails.
    """
    try:
        import litert_torch
        from litert_torch.quantize.pt2e_quantizer import PT2EQuantizer, get_symmetric_quantization_config
        from litert_torch.quantize.quant_config import QuantConfig
    except ImportError as cause:
        raise missing(cause) from cause
    graph = _to_pt2e(lowered, on_integers)
    module = _ChannelsLast(graph, channels_last).eval()
    static = PT2EQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    with _settings(litert_torch.config, graph), writes_to_data_seen():
        try:
            model = litert_torch.convert(module, inputs, quant_config=QuantConfig(pt2e_quantizer=static))
            return bytes(model.model_content())
        except Exception as cause:  # the converter raises errors of every kind
            raise ExportError(f"LiteRT's converter failed: {type(cause).__name__}: {cause}") from cause


def litert_versions() -> dict[str, str]:
    """The versions of LiteRT's converter and runtime.

    Raises:
        ExportError: a package is missing.
    """
    try:
        import ai_edge_litert  # noqa: F401
        import litert_torch  # noqa: F401

        return {name: version(name) for name in ("litert-torch", "ai-edge-litert")}
    except ImportError as cause:  # a missing distribution, too
        raise missing(cause) from cause


def check_schemes(tensors: Iterable[QuantizedTensor]) -> None:
    """Check that LiteRT has the scheme of every tensor.

    Raises:
        ExportError: an activation is not int8, or a weight is unsigned, asymmetric or has more than 8 bits.
    """
    for tensor in tensors:
        scheme = tensor.scheme
        if scheme is None:
            continue
        is_weight = tensor.kind == "weight"
        bits_fit = scheme.bit_width <= 8 if is_weight else scheme.bit_width == 8 and not scheme.narrow_range
        in_blocks = scheme.block_size is not None
        if not bits_fit or not scheme.signed or in_blocks or (is_weight and not scheme.symmetric):
            raise ExportError(
                f"{tensor.name}: LiteRT has no {tensor.kind} of the scheme {scheme}. It has int8 activations and "
                "symmetric signed weights of up to 8 bits without blocks. Prepare the model for the backend "
                "'LiteRT', or change the override that gives this scheme."
            )


class _Pair(nn.Module):
    """A Q/DQ pair of ``quantized_decomposed`` operators on signed integers."""

    def __init__(self, pair: QuantizeDequantize) -> None:
        super().__init__()
        self.limits = pair.range
        self.axis = pair.axis
        self.constants = (float(pair.scale), int(pair.zero_point)) if pair.axis is None else None
        self.register_buffer("scale", pair.scale)
        self.register_buffer("zero_point", pair.zero_point.to(torch.int64))

    def forward(self, x: Tensor, readers: int = 1) -> Any:
        """Round ``x`` to the grid; for several readers, a list with a result for each."""
        ops, limits = torch.ops.quantized_decomposed, (*self.limits, torch.int8)
        per = "per_channel"
        parameters: tuple[Any, ...] = (self.scale, self.zero_point, self.axis)
        if self.constants is not None:
            per, parameters = "per_tensor", self.constants
        q = getattr(ops, f"quantize_{per}")(x, *parameters, *limits)
        values = [getattr(ops, f"dequantize_{per}")(q, *parameters, *limits) for _ in range(readers)]
        return values[0] if readers == 1 else values


class _Weight(nn.Module):
    """The real values of a stored weight, and a Q/DQ pair that rounds none of them."""

    values: Tensor

    def __init__(self, weight: RoundedTensor) -> None:
        super().__init__()
        self.register_buffer("values", weight())
        self.pair = _Pair(weight.pair)

    def forward(self) -> Tensor:
        """The values."""
        values: Tensor = self.pair(self.values)
        return values


class _Bias(nn.Module):
    """The real values of a stored bias."""

    values: Tensor

    def __init__(self, bias: StoredTensor) -> None:
        super().__init__()
        self.register_buffer("values", bias())

    def forward(self) -> Tensor:
        """The values."""
        return self.values


class _Barrier(nn.Module):
    """Keeps the converter from making one operator of integers of the operator before it and the rounding behind."""

    def forward(self, x: Tensor) -> Tensor:
        """``x``."""
        kept: Tensor = torch.ops.litert_torch.optimization_barrier([x, x])[0]  # of a single one it makes no list
        return kept


FORMS: Mapping[type, Callable[[Any], nn.Module]] = {
    QuantizeDequantize: _Pair,  # case 1
    RoundedTensor: _Weight,  # case 2
    StoredTensor: _Bias,  # case 3
}


OTHER_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    attention: attention_or_zero,  # case 9
    torch.ops.fxqat.recurrent.default: unrolled_layer,  # case 10
}


CALLS = ("call_module", "call_function", "call_method")
COMPUTING = (MATMUL, BINARY, POOL, ACTIVATION, NORM, MATH, RESIZE)
"""Families of operators that compute new values."""


@torch.no_grad()
def _to_pt2e(lowered: Lowered, on_integers: Container[str]) -> fx.GraphModule:
    """Cases 1 to 6, 9 and 10."""
    check_schemes(lowered.tensors.values())
    for path in lowered.tensors:
        module = lowered.module.get_submodule(path)
        lowered.module.set_submodule(path, FORMS[type(module)](module))
    barrier = unique_name(lowered.module, "barrier")
    lowered.module.add_submodule(barrier, _Barrier())
    for node in list(lowered.module.graph.nodes):
        op = identify(node)
        read = [each for each in node.all_input_nodes if _is_on_grid(each, lowered.tensors)]
        in_float = _computes_in_float(node, op, on_integers)
        if op.name == "sum" or (in_float and (read or any(str(user.target) in lowered.tensors for user in node.users))):
            with lowered.module.graph.inserting_after(node):
                kept = lowered.module.graph.call_module(barrier, (node,))  # case 4
            node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)
        for each in read if in_float and op.family != WEIGHTED else ():
            with lowered.module.graph.inserting_before(node):
                node.replace_input_with(each, lowered.module.graph.call_module(barrier, (each,)))
        if op.name == "pow" and tuple(node.args[1:]) == (2,):
            node.op, node.target, node.args = "call_function", torch.mul, (node.args[0], node.args[0])  # case 5
    for node in list(lowered.module.graph.nodes):
        if node.target is torch.ops.fxqat.up_to_longest:
            raise ExportError(
                f"{node.name}: LiteRT needs sizes that are fixed, and pad_packed_sequence gives as many steps as the "
                "longest sample has. Give it total_length, such as x.size(1)."
            )
        node.target = OTHER_FUNCTIONS.get(node.target, node.target)
        if node.op == "call_module" and node.target in lowered.tensors and len(node.users) > 1:
            _split_readers(node)  # case 6
    lowered.module.recompile()
    return lowered.module


def _computes_in_float(node: fx.Node, op: Op, on_integers: Container[str]) -> bool:
    """Whether LiteRT computes a node in float."""
    if op.family == WEIGHTED:
        return node.op == "call_module"  # a quantized layer is a function of its stored weight here
    dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 1)
    has_kernel = op.name in on_integers or op.family in on_integers
    return op.family in COMPUTING and not (has_kernel and (op.name != "normalize" or dim == -1))


def _is_on_grid(node: fx.Node, tensors: Mapping[str, QuantizedTensor]) -> bool:
    """Whether a value is a rounded one, or is moved from one."""
    while node.op in CALLS and node.all_input_nodes and identify(node).family in (PASS_THROUGH, IDENTITY):
        node = node.all_input_nodes[0]
    return node.op == "call_module" and str(node.target) in tensors


def _split_readers(pair: fx.Node) -> None:
    readers = list(pair.users)
    pair.args = (*pair.args, len(readers))
    with pair.graph.inserting_after(pair):
        for index, reader in enumerate(readers):
            value = pair.graph.call_function(operator.getitem, (pair, index))
            reader.replace_input_with(pair, value)


class _ChannelsLast(nn.Module):
    """Case 7: a model whose inputs have the layout ``(N, ..., C)``."""

    def __init__(self, model: nn.Module, channels_last: Sequence[bool]) -> None:
        super().__init__()
        self.model = model
        self.channels_last = tuple(channels_last)

    def forward(self, *inputs: Any) -> Any:
        """The model's outputs."""
        pairs = zip(inputs, self.channels_last, strict=True)
        return self.model(*(x.movedim(-1, 1) if is_last else x for x, is_last in pairs))


@contextmanager
def _settings(config: Any, module: fx.GraphModule) -> Iterator[None]:
    """Keep the converter from printing what it does; case 8."""
    before = config.show_progress, config.layout_optimize_partitioner
    config.show_progress = False
    if any(identify(node).name == "expand" for node in module.graph.nodes):
        config.layout_optimize_partitioner = "GREEDY"
    try:
        yield
    finally:
        config.show_progress, config.layout_optimize_partitioner = before
