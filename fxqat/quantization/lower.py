"""Lower: the prepared model becomes the graph that is exported.

On the deployed copy of the model (``fxqat.quantization.deployed_copy``):

1. each call of a fake-quant becomes a Q/DQ pair, so that every quantized value has its own name; a raw input is
   normalized in integers before it (``fxqat.quantization.raw_inputs``); an input that a layer quantizes at run time
   becomes a pair without constants;
2. BatchNorm is folded; weights and tables become stored integers, biases int32 at the scale of the products;
3. fused layers that stayed float are folded;
4. attention becomes the four-dimensional one, which torch's exporter can translate;
5. dataclasses in the output become dicts;
6. what reads a buffer after the model has updated it reads the new value, because the file has no buffers;
7. recurrent layers become ONNX's operators, with stored weights and biases;
8. what is computed from parameters and buffers alone is folded (``fxqat.quantization.fold_constants``);
9. activations of layers write to new memory, and averages over whole images become means: torch's exporter translates
   these without decomposing the graph first, which is half of its work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument
from torch.nn import functional as F

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.bias import quantize_bias
from fxqat.nn.deployed import (
    DynamicQuantizeDequantize,
    Normalize,
    QuantizeDequantize,
    ReadBytes,
    RoundedTensor,
    attention,
    stored_bias,
    stored_weight,
)
from fxqat.nn.embedding import AXIS, QATEmbedding, embedding_bag
from fxqat.nn.fused import FusedLayer
from fxqat.nn.qat import QATLayer
from fxqat.nn.recurrent import QATRecurrentLayer, RecurrentLayer
from fxqat.numerics import per_axis
from fxqat.ops.identify import identify
from fxqat.quantization.deployed_copy import deployed_copy
from fxqat.quantization.fold_constants import fold_constants
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.quantization.raw_inputs import normalize_integers, reads_bytes
from fxqat.quantization.split_ops import split_ops
from fxqat.scheme import QuantizedTensor, QuantizeScheme
from fxqat.utils.fx_graph import called_module, set_module
from fxqat.utils.unused_names import unused_name


@dataclass(frozen=True)
class Lowered:
    """A graph ready for the exporter.

    Args:
        module: the graph module.
        tensors: the record of each Q/DQ pair and stored tensor, by its path in the module.
        weights_only: the paths of the stored weights that only layers read which compute in float.
        warnings: the raw inputs that are normalized in float, and why.
    """

    module: fx.GraphModule
    tensors: dict[str, QuantizedTensor]
    weights_only: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()


@torch.no_grad()
def lower(
    gm: QuantGraphModule,
    weights: str = "integer",
    opset_version: int = 18,
    normalizers: Sequence[Normalize | None] = (),
    inputs: tuple[Any, ...] | None = None,
) -> Lowered:
    """Lower a calibrated model.

    Args:
        gm: the prepared model; not changed.
        weights: ``"integer"`` stores weights as integers, ``"float"`` as floats before a Q/DQ pair.
        opset_version: opset of the file, which decides on the integer types.
        normalizers: see :func:`~fxqat.quantization.deployed_copy.deployed_copy`.
        inputs: inputs whose sizes the file takes; None if a size is open.
    """
    work = deployed_copy(gm, normalizers)
    _read_new_values(work.graph)  # case 6
    fold_constants(work, inputs)  # case 8
    split_ops(work, lambda node: identify(node).name == "adaptive_avg_pool2d")  # case 9
    state = _Lowering(work, weights, opset_version)
    for node in list(work.graph.nodes):
        module = called_module(node)
        if isinstance(module, FakeQuantizeBase):
            state.lower_activation(node, module)  # case 1
        elif isinstance(module, QATLayer):
            state.lower_layer(node, module)  # case 2
        elif isinstance(module, QATEmbedding):
            state.lower_table(node, module)  # case 2
        elif isinstance(module, RecurrentLayer):
            state.lower_recurrent(node, module)  # case 7
        elif isinstance(module, FusedLayer):
            state.lower_float_layer(node, module)  # case 3
        elif node.target is F.scaled_dot_product_attention:
            node.target = attention  # case 4
    output = next(node for node in work.graph.nodes if node.op == "output")
    output.args = (_without_dataclasses(output.args[0]),)  # case 5
    work.graph.eliminate_dead_code()
    _drop_inner(work, state.replaced)
    work.graph.lint()
    called = {str(node.target) for node in work.graph.nodes if node.op == "call_module"}
    tensors = {path: tensor for path, tensor in state.tensors.items() if path in called}
    module = fx.GraphModule(work, work.graph, type(gm).__name__).eval()
    weights_only = frozenset(path for path, only in state.weights_only.items() if only)
    return Lowered(module, tensors, weights_only, tuple(_normalized_in_float(work)))


def _normalized_in_float(gm: fx.GraphModule) -> Iterator[str]:
    """What to tell of the raw inputs that are normalized in float."""
    for node in gm.graph.nodes:
        normalizer = called_module(node)
        if isinstance(normalizer, Normalize):
            why = "no weights and biases give the integers of the model for every byte"
            if not all(isinstance(called_module(user), QuantizeDequantize) for user in node.users):
                why = "it is read in float"
            elif not 3 <= len(normalizer.shape) <= 5:
                why = f"it has {len(normalizer.shape)} dimensions, and convolutions take 3 to 5"
            yield f"input {node.args[0].target} is normalized in float (Cast, Sub, Div): {why}"


def _read_new_values(graph: fx.Graph) -> None:
    """Let the readers of a buffer that come after ``buffer.copy_(value)`` read ``value``, in the buffer's type."""
    new: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        buffer, value = _update(node)
        for read in node.all_input_nodes:
            if read.op == "get_attr" and str(read.target) in new and buffer is None:
                node.replace_input_with(read, new[str(read.target)])
        if buffer is not None and value is not None:
            with graph.inserting_after(node):
                new[str(buffer.target)] = graph.call_method("type_as", (value, buffer))


def _update(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The buffer and the value of ``buffer.copy_(value)``, None for any other node."""
    if node.op == "call_method" and node.target == "copy_" and len(node.args) == 2:
        buffer, value = node.args
        if isinstance(buffer, fx.Node) and isinstance(value, fx.Node) and buffer.op == "get_attr":
            return buffer, value
    return None, None


def _drop_inner(gm: fx.GraphModule, replaced: set[str]) -> None:
    """Drop replaced layers inside called modules, whose names their shared weights would get (``emb.linear``)."""
    read = [str(node.target) for node in gm.graph.nodes if node.op == "get_attr"]
    for path in replaced:
        if not any(target.startswith(f"{path}.") for target in read):
            gm.delete_submodule(path)


def _without_dataclasses(value: Any) -> Any:
    """The model's output, with dicts in place of dataclasses and ordered dicts."""
    if isinstance(value, fx.Node):
        if value.target is OrderedDict:
            return _without_dataclasses(value.args[0])
        is_made = value.op == "call_function" and is_dataclass(value.target)
        return {name: _without_dataclasses(item) for name, item in value.kwargs.items()} if is_made else value
    if isinstance(value, Mapping):
        return {key: _without_dataclasses(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_without_dataclasses(item) for item in value)
    return value


class _Lowering:
    """The graph being lowered, and the records of its tensors."""

    def __init__(self, gm: fx.GraphModule, weights: str, opset_version: int) -> None:
        self.gm = gm
        self.weights = weights
        self.opset_version = opset_version
        self.tensors: dict[str, QuantizedTensor] = {}
        self.replaced: set[str] = set()
        self.weights_only: dict[str, bool] = {}
        self._count = 0
        self._weight_paths: dict[int, list[tuple[Tensor, str]]] = {}

    def lower_activation(self, node: fx.Node, quant: FakeQuantizeBase) -> None:
        """Replace a fake-quant call by a Q/DQ pair."""
        name = str(node.kwargs["tensor_name"])
        scale, zero_point = quant.qparams()
        value = self._normalize_in_integers(node.args[0], quant.scheme, scale, zero_point)
        bytes_in = value is not node.args[0]
        pair = QuantizeDequantize(quant.scheme, scale, zero_point, self.opset_version)
        path = self._add(ReadBytes(scale, zero_point) if bytes_in else pair)
        dtype = quant.scheme.storage(self.opset_version)
        self.tensors[path] = _record(name, "activation", str(node.target), dtype, quant.scheme, None, scale, zero_point)
        with self.gm.graph.inserting_after(node):
            self._replace(node, self.gm.graph.call_module(path, (value,)))

    def _normalize_in_integers(
        self, value: Argument, scheme: QuantizeScheme, scale: Tensor, zero_point: Tensor
    ) -> Argument:
        """Normalize a raw input in integers, if it can be; the raw input itself if its bytes are the integers."""
        normalizer = called_module(value) if isinstance(value, fx.Node) else None
        if not isinstance(value, fx.Node) or not isinstance(normalizer, Normalize) or len(value.users) != 1:
            return value
        if reads_bytes(normalizer, scheme, scale, zero_point):
            return value.args[0]
        integers = normalize_integers(normalizer, scheme, scale, zero_point)
        if integers is not None:
            set_module(self.gm, str(value.target), integers)
        return value

    def lower_layer(self, node: fx.Node, layer: QATLayer) -> None:
        """Replace a QAT layer by its function of stored tensors, followed by its activation."""
        quantizer = self._input_quantizer(node)
        weight, bias = layer.folded()
        weight_scale, bias_scale = layer.deployed_scales(bias, quantizer)
        graph, path = self.gm.graph, str(node.target)
        with graph.inserting_before(node):
            arguments: list[fx.Node | None] = [node.args[0]]  # type: ignore[list-item]
            if node.kwargs.get("dynamic_input") is not None:
                arguments[0] = graph.call_module(self._dynamic_input(node), (node.args[0],))
            if layer.op.padding is not None:
                pads, mode = layer.op.padding
                arguments[0] = graph.call_function(F.pad, (arguments[0], pads, mode))
            quant = layer.weight_fake_quant
            stored = self._weight(path, f"{path}.weight", quant, weight, weight_scale, layer.op.axis)
            self.weights_only[stored] = self.weights_only.get(stored, True) and quantizer is None
            arguments.append(graph.call_module(stored))
            arguments.append(None if bias is None else graph.call_module(self._bias(path, bias, bias_scale)))
            result = graph.call_function(layer.op.function, tuple(arguments), dict(layer.op.arguments))
            if layer.activation is not None:
                result = graph.call_module(self._activation(layer.activation), (result,))
        self._replace(node, result)
        self.replaced.add(path)

    def lower_table(self, node: fx.Node, table: QATEmbedding) -> None:
        """Replace a table by its function of stored integers, which ``fxqat.onnx.gather_integers`` moves behind it."""
        quant, path = table.weight_fake_quant, str(node.target)
        stored = self._weight(path, f"{path}.weight", quant, table.folded()[0], quant.used_scale(), AXIS)
        is_bag = table.layer is nn.EmbeddingBag
        options = table.call_options(node.args[1:], node.kwargs) if is_bag else {}
        options.pop("scale_grad_by_freq", None)
        with self.gm.graph.inserting_before(node):
            arguments = (node.args[0], self.gm.graph.call_module(stored))
            function = embedding_bag if is_bag else F.embedding
            self._replace(node, self.gm.graph.call_function(function, arguments, options))
        self.replaced.add(str(node.target))

    def _input_quantizer(self, node: fx.Node) -> FakeQuantizeBase | None:
        """The fake-quant of the input of a layer, None if that is float."""
        source = node.kwargs.get("input_fake_quant")
        quantizer = self.gm.get_submodule(str(source.target)) if isinstance(source, fx.Node) else None
        assert quantizer is None or isinstance(quantizer, FakeQuantizeBase)
        return quantizer

    def lower_recurrent(self, node: fx.Node, layer: RecurrentLayer) -> None:
        """Replace a recurrent layer by ONNX's operator of stored tensors."""
        path, (w, r, b) = str(node.target), layer.stacked()
        directions = len(layer.names)
        x, h, c = (*node.args, None, None)[:3]
        if node.kwargs.get("dynamic_input") is not None:
            with self.gm.graph.inserting_before(node):
                x = self.gm.graph.call_module(self._dynamic_input(node), (x,))
        stored, b_scale = [], None
        if isinstance(layer, QATRecurrentLayer):
            quantizer = self._input_quantizer(node)
            w_scale, b_scale = layer.deployed_scales(b, quantizer)
            scales = (w_scale, layer.weight_hh_fake_quant.used_scale())
            for (name, quant, weight), scale in zip(layer.quantized_weights(), scales, strict=True):
                of_quant = f"{path}.{name}_fake_quant"
                stored.append(self._weight(of_quant, f"{path}.{name}", quant, weight, scale, 0, directions))
                self.weights_only[stored[-1]] = self.weights_only.get(stored[-1], True) and quantizer is None
        else:
            stored += [self._add(_Constant(_with_directions(weight, None, directions)[0])) for weight in (w, r)]
        if b is not None:
            bias, axis = _with_directions(b, b_scale, directions)
            stored.append(self._bias(path, bias, b_scale, axis))
        with self.gm.graph.inserting_before(node):
            tensors = [*map(self.gm.graph.call_module, stored), None][:3]
            arguments = (x, *tensors, node.kwargs.get("lengths"), h, c, layer.mode, directions)
            result = self.gm.graph.call_function(torch.ops.fxqat.recurrent.default, arguments)
        self._replace(node, result)
        self.replaced.add(path)

    def lower_float_layer(self, node: fx.Node, layer: FusedLayer) -> None:
        """Replace a fused layer that stayed float by the folded layer, followed by its activation."""
        folded, path = layer.folded(), str(node.target)
        set_module(self.gm, path, folded.layer)
        with self.gm.graph.inserting_before(node):
            result = self.gm.graph.call_module(path, node.args, node.kwargs)
            if folded.activation is not None:
                result = self.gm.graph.call_module(self._activation(folded.activation), (result,))
        self._replace(node, result)

    def _dynamic_input(self, node: fx.Node) -> str:
        """The path of the module that quantizes the input of a layer at run time."""
        path, scheme = self._add(DynamicQuantizeDequantize()), QuantizeScheme(signed=False, symmetric=False)
        name = str(node.kwargs["dynamic_input"])
        self.tensors[path] = QuantizedTensor(name, "dynamic", str(node.target), "uint8", scheme, None, (), ())
        return path

    def _weight(
        self,
        path: str,
        name: str,
        quant: FakeQuantizeBase,
        weight: Tensor,
        scale: Tensor,
        channel_axis: int,
        directions: int | None = None,
    ) -> str:
        """The path of a layer's stored weight; layers and calls that share it store it once for each scale.

        Args:
            path: of the layer, or of its fake-quant if it has several.
            name: of the weight.
            quant: its fake-quant.
            weight: what the fake-quant rounds.
            scale: in use.
            channel_axis: of the weight.
            directions: of a recurrent layer, None of another.
        """
        _, zero_point = quant.qparams()
        known = self._weight_paths.setdefault(id(quant), [])
        for known_scale, known_path in known:
            if torch.equal(known_scale, scale):
                return known_path
        target = quant.target(quant.in_blocks(weight), used_scale=scale)
        scheme, known_scale, axis = quant.scheme, scale, channel_axis
        if scheme.block_size is not None:
            target, scale, zero_point = (quant.from_blocks(it, weight.shape) for it in (target, scale, zero_point))
            axis = 1 - channel_axis
            if directions is not None:
                target, scale, zero_point = (it.unflatten(0, (directions, -1)) for it in (target, scale, zero_point))
                axis = 2
        elif directions is not None:
            target, axis = _with_directions(target, scale, directions)
        module: nn.Module = stored_weight(target, scheme, scale, zero_point, axis)
        of_scale = axis if scale.dim() else None
        if self.weights == "float":
            parameters = (scheme, scale, zero_point, self.opset_version, of_scale, scheme.block_size)
            module = RoundedTensor(target, QuantizeDequantize(*parameters))
        found = self._add(module)
        name += f"_{len(known)}" if known else ""
        dtype = scheme.storage(self.opset_version)
        self.tensors[found] = _record(name, "weight", path, dtype, scheme, of_scale, scale, zero_point)
        known.append((known_scale, found))
        return found

    def _bias(self, path: str, bias: Tensor, scale: Tensor | None, channel_axis: int = 0) -> str:
        if scale is None:
            return self._add(_Constant(bias))
        wide = per_axis(scale, bias.dim(), channel_axis)
        found = self._add(stored_bias(quantize_bias(bias, wide), scale, channel_axis))
        axis = channel_axis if scale.dim() else None
        name = unused_name(f"{path}.bias", {record.name for record in self.tensors.values()})
        self.tensors[found] = _record(name, "bias", path, "int32", None, axis, scale, torch.zeros_like(scale))
        return found

    def _activation(self, activation: nn.Module) -> str:
        """The path of the activation of a layer, which may be one of those that write to the memory of their input."""
        activation.inplace = False  # type: ignore[assignment]  # of the deployed copy
        return self._add(activation)

    def _add(self, module: nn.Module) -> str:
        self._count += 1
        path = f"lowered_{self._count}"
        self.gm.add_submodule(path, module)
        return path

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        old.replace_all_uses_with(new)
        self.gm.graph.erase_node(old)


def _with_directions(tensor: Tensor, scale: Tensor | None, directions: int) -> tuple[Tensor, int]:
    """A tensor of a recurrent layer with a dimension of directions, and the axis of its scale.

    A tensor of two directions with a scale for each row has none: ONNX has no scales of two dimensions.
    """
    if scale is not None and scale.dim() and directions > 1:
        return tensor, 0
    return tensor.unflatten(0, (directions, -1)), 1


class _Constant(nn.Module):
    """A module that returns a float tensor."""

    values: Tensor

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("values", values.detach())

    def forward(self) -> Tensor:
        """The tensor."""
        return self.values


def _record(
    name: str,
    kind: str,
    module: str,
    dtype: str,
    scheme: QuantizeScheme | None,
    axis: int | None,
    scale: Tensor,
    zero_point: Tensor,
) -> QuantizedTensor:
    scales = tuple(scale.reshape(-1).tolist())
    return QuantizedTensor(name, kind, module, dtype, scheme, axis, scales, tuple(map(int, zero_point.reshape(-1))))
