"""Measure a profile: the float model, the quantized one, and the float model with one tensor quantized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from tqdm import tqdm

from fxqat.fake_quantize.base import WEIGHT, FakeQuantizeBase
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.nn.qat import QATLayer
from fxqat.nn.quantized_layer import QuantizedLayer
from fxqat.numerics import covered_range
from fxqat.quantization.find_overrides import overrides_of_value
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools.profiling.profiled_tensor import Histogram, ProfiledTensor
from fxqat.utils.compare import Comparison
from fxqat.utils.contexts import equal_random_numbers, hooked
from fxqat.utils.fx_graph import called_module
from fxqat.utils.tensors import copied, flatten_tensors
from fxqat.utils.train_eval_graph import graph_of_mode

BINS = 120


@dataclass(frozen=True)
class QuantizedTensor:
    """A layer's weight or an activation, with the layer that computes it.

    Args:
        name: the name in the exported file.
        node: the call that quantizes it: of its fake-quant, or the first one of its layer.
        quant: its fake-quant.
        layer: the layer that has the weight or computes the activation; None if no layer with weights does.
    """

    name: str
    node: fx.Node
    quant: FakeQuantizeBase
    layer: QuantizedLayer | None

    @property
    def is_weight(self) -> bool:
        """Whether it is a layer's weight."""
        return self.quant.kind == WEIGHT

    def weight(self) -> Tensor:
        """The values of the weight that are rounded."""
        assert self.layer is not None
        return next(weight.values for weight in self.layer.quantized_weights() if weight.quant is self.quant)

    def channel_axis(self, x: Tensor) -> int | None:
        """The layer's channel axis; without a layer the second, or the last of ``(batch, tokens, channels)``."""
        if x.dim() < 2:
            return None
        if self.layer is None:
            return -1 if x.dim() == 3 else 1
        if self.is_weight:
            return self.quant.channel_axis
        [[weight]] = self.layer.weight_tensors()
        return -1 if weight.dim() == 2 else 1

    def overrides(self, overridable: Mapping[str, tuple[str, ...]]) -> Iterator[dict[str, Any]]:
        """The overrides that leave it float; none if the model has no place where one can.

        Args:
            overridable: what can be left float, by node, see ``ReportRow``.
        """
        if self.is_weight:
            yield {"match": {"module": str(self.node.target)}, "weight": None}
        else:
            yield from overrides_of_value(self.node, overridable)


class Measurements:
    """The comparisons of all quantized tensors, added up over batches."""

    def __init__(self, gm: QuantGraphModule) -> None:
        self.gm = gm
        self.graph = graph_of_mode(gm.graph, training=False)
        self.quantized = find_quantized(self.graph)
        self.own: dict[str, Comparison] = {}
        self.output = {name: Comparison() for name in self.quantized}
        self.cumulative = {name: Comparison() for name in self.quantized}
        self.all_quantized = Comparison()

    def add(self, batch: Sequence[Any], bar: tqdm[Any]) -> None:
        """Measure one batch; the fake-quants are off before and afterwards."""
        with equal_random_numbers(self.gm) as numbers:
            expected = self.gm(*batch)
        bar.update()
        with equal_random_numbers(self.gm) if numbers.drawn else nullcontext():  # it slows down every operation
            _, found = _SideBySide(self, expected, bar).run(*batch)
        bar.update()
        _add_all(self.all_quantized, expected, found)

    def tensors(self) -> list[ProfiledTensor]:
        """The results in the order of execution."""
        result = []
        overridable = {row.node: row.overridable for row in self.gm.quant_report}
        for order, (name, tensor) in enumerate(self.quantized.items()):
            if name in self.own:
                own = self.own[name].difference()
                result.append(
                    ProfiledTensor(
                        name=name,
                        kind="weight" if tensor.quant.kind == WEIGHT else "activation",
                        order=order,
                        scheme=str(tensor.quant.scheme),
                        own=own,
                        output=self.output[name].difference(),
                        cumulative=own if tensor.is_weight else self.cumulative[name].difference(),
                        channels=self.own[name].channels(),
                        per_channel=tensor.quant.scheme.per_channel,
                        overrides=tuple(tensor.overrides(overridable)),
                    )
                )
        return result


def find_quantized(graph: fx.Graph) -> dict[str, QuantizedTensor]:
    """Every tensor that is quantized in a graph of one mode, by name, in the order of execution."""
    found: dict[str, QuantizedTensor] = {}
    for node in graph.nodes:
        module = called_module(node)
        if isinstance(module, QuantizedLayer):
            for part, quant in zip(module.weight_names, module.weight_fake_quants(), strict=True):
                found.setdefault(f"{node.target}.{part}", QuantizedTensor(f"{node.target}.{part}", node, quant, module))
        elif isinstance(module, FakeQuantizeBase) and not node.kwargs.get("on_grid"):
            source = called_module(node.args[0])
            name = str(node.kwargs["tensor_name"])
            found[name] = QuantizedTensor(name, node, module, source if isinstance(source, QATLayer) else None)
    return found


class _SideBySide(fx.Interpreter):
    """Runs the float and the quantized model node by node; each node has two values.

    Where a quantized tensor is known, the rest of the float model runs on its rounded value. So only the values that
    later nodes read are in memory, and a tensor costs what comes after it.

    Args:
        measurements: where the comparisons are added.
        expected: the float outputs.
        bar: counts the tensors.
    """

    def __init__(self, measurements: Measurements, expected: Any, bar: tqdm[Any]) -> None:
        super().__init__(measurements.gm, graph=measurements.graph)
        self.rest = fx.Interpreter(measurements.gm, graph=measurements.graph)
        self.extra_traceback = self.rest.extra_traceback = False
        self.measurements, self.expected, self.bar = measurements, expected, bar
        self.quants = [quant for _, quant in named_fake_quants(measurements.gm)]
        self.tensors: dict[fx.Node, list[QuantizedTensor]] = {}
        for tensor in measurements.quantized.values():
            self.tensors.setdefault(tensor.node, []).append(tensor)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node on the float and on the quantized values, and measure the tensor that it quantizes."""
        if n.op in ("placeholder", "get_attr"):
            value = {} if str(n.target).startswith("**") else super().run_node(n)
            return value, copied(value) if n.op == "placeholder" else value
        exact = self._call(n, 0)
        for quant in self.quants:
            quant.fake_quant_enabled = True
        rounded = self._call(n, 1)
        for quant in self.quants:
            quant.fake_quant_enabled = False
        for tensor in self.tensors.get(n, ()):
            self._measure(tensor, exact, rounded)
            self.bar.update()
        return exact, rounded

    def _measure(self, tensor: QuantizedTensor, exact: Any, rounded: Any) -> None:
        if tensor.is_weight:
            x = tensor.weight()
        elif isinstance(exact, Tensor):
            x = exact
            self.measurements.cumulative[tensor.name].add(tensor.quant.as_read(x), tensor.quant.as_read(rounded))
        else:
            return  # an optional input that was not given
        own = self.measurements.own.setdefault(tensor.name, Comparison(tensor.channel_axis(x)))
        alone = tensor.quant.quantize(x)
        own.add(tensor.quant.as_read(x), tensor.quant.as_read(alone))
        tensor.quant.fake_quant_enabled = tensor.is_weight  # a layer that is called again has this weight there, too
        outputs = self._outputs(tensor.node, self._call(tensor.node, 0) if tensor.is_weight else alone)
        tensor.quant.fake_quant_enabled = False
        _add_all(self.measurements.output[tensor.name], self.expected, outputs)

    def _outputs(self, node: fx.Node, value: Any) -> Any:
        """The outputs of the float model if a node has another value."""
        nodes = list(self.graph.nodes)
        known = dict.fromkeys(nodes[: nodes.index(node)])
        known |= {other: x if other.op == "get_attr" else copied(x) for other, (x, _) in self.env.items()}
        return self.rest.run(initial_env=known | {node: value})

    def _call(self, n: fx.Node, which: int) -> Any:
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), lambda node: self.env[node][which])
        return getattr(self, n.op)(n.target, args, kwargs)


def _add_all(comparison: Comparison, expected: Any, found: Any) -> None:
    for one, other in zip(flatten_tensors(expected), flatten_tensors(found), strict=True):
        if one.is_floating_point():
            comparison.add(one, other)


def histograms_of(
    gm: QuantGraphModule,
    batches: Sequence[Any],
    quantized: Mapping[str, QuantizedTensor],
    tensors: Sequence[ProfiledTensor],
) -> dict[str, Histogram]:
    """Histograms of the float values of some tensors, over all batches."""
    limits = {tensor.name: max(tensor.channels.ranges) or 1.0 for tensor in tensors}
    counts = {name: torch.zeros(BINS, dtype=torch.int64) for name in limits}

    def count(name: str, x: Tensor) -> None:
        found = torch.histc(x.float(), BINS, -limits[name], limits[name])
        counts[name] += found.to("cpu", torch.int64)

    def hook(quant: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if kwargs["tensor_name"] in counts and isinstance(output, Tensor) and not kwargs.get("on_grid"):
            count(kwargs["tensor_name"], output)

    watched = [quantized[name].quant for name in counts if not quantized[name].is_weight]
    with equal_random_numbers(gm), hooked(watched, hook, with_kwargs=True):
        for batch in batches if watched else ():
            gm(*batch)
    for name in counts:
        if quantized[name].is_weight:
            count(name, quantized[name].weight())
    result = {}
    for name, limit in limits.items():
        quant = quantized[name].quant
        low, high = covered_range(*quant.qparams(), quant.scheme)
        grid = float(low.min()), float(high.max())
        result[name] = Histogram(-limit, limit, tuple(counts[name].tolist()), grid)
    return result
