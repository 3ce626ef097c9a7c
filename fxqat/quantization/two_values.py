"""Run a graph on float values and on rounded ones at once, and find where rounding does damage."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.qat import QATLayer
from fxqat.ops.families import CONSTRUCTOR, IDENTITY, PASS_THROUGH, WEIGHTED
from fxqat.ops.identify import identify
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.quantization.quantization_noise import OPERATION, VALUE, NodeNoise
from fxqat.utils.compare import Comparison
from fxqat.utils.contexts import equal_random_numbers
from fxqat.utils.fx_graph import called_module
from fxqat.utils.source import line_of_node
from fxqat.utils.tensors import copied, flatten_tensors

MAX_ERROR = 0.5
"""A value, weight or result may be off by this fraction of its mean size."""

AMPLIFIED = 0.2
"""An operation may be off by no more than this if that is AMPLIFICATION times what its operands are off by."""

AMPLIFICATION = 5.0

MAX_CHANGED = 0.25
"""The share of the integers or booleans of a result that may change."""

CANCELLED = 1e-6
"""A result this much smaller than its operands is the rounding error of float32, such as the mean of a LayerNorm."""

ALWAYS_ZERO = (
    "was 0 in all calibration data: any other value is clipped to almost 0. Calibrate on data in which it is not 0"
)

EXACT, ROUNDED, UNROUNDED = 0, 1, 2
"""The values of a node: of float operands, of rounded ones, and the second as a fake-quant reads it."""


class MeanError:
    """Mean error of a result relative to its mean size, or the share of its integers that change, over batches."""

    def __init__(self) -> None:
        self.size = self.error = 0.0
        self.count = 0
        self.is_count = False

    def add(self, x: Tensor, found: Tensor) -> None:
        """Add a pair of tensors."""
        if x.shape != found.shape or x.dtype != found.dtype:
            self.error = math.inf
        elif not x.is_floating_point() and not x.is_complex():
            self.is_count = True
            self.size += x.numel()
            self.error += int((x != found).sum())
        elif x.numel():
            size, error = float(x.abs().sum(dtype=torch.float64)), float((x - found).abs().sum(dtype=torch.float64))
            if not math.isfinite(size + error):
                finite = x.isfinite()
                x, found = x[finite], found[finite]
                size, error = float(x.abs().sum(dtype=torch.float64)), float((x - found).abs().sum(dtype=torch.float64))
            self.count += x.numel()
            self.size += size
            self.error += error if math.isfinite(error) else math.inf

    def share(self) -> float:
        """The error."""
        return self.error / self.size if self.size else (math.inf if self.error else 0.0)

    def mean_size(self) -> float:
        """Mean ``|x|`` of the floats; 0 if there are none."""
        return self.size / self.count if self.count else 0.0

    def is_above(self, limit: float) -> bool:
        """Whether a float is off by more than a limit, or more integers change than may."""
        return self.share() > (MAX_CHANGED if self.is_count else limit)


class TwoValues(fx.Interpreter):
    """Runs a graph on float values and on rounded ones, and adds up their differences at every node.

    Args:
        gm: the model; its fake-quants are off.
        graph: its graph in eval mode.
        read_float: the nodes that read the operands of a fake-quant, not its rounded values.

    Attributes:
        errors: of each tensor in the result of an operation, by name of the node; at the node of a fake-quant, of the
            value that it rounds.
        rounding: of values, by name of the fake-quant's node.
        failed: the nodes that fail on rounded operands.
        zeros: the nodes whose results were all 0, because the data are.
        constant_zeros: the same, because a parameter or a new tensor is.
    """

    def __init__(self, gm: QuantGraphModule, graph: fx.Graph, read_float: Collection[str] = ()) -> None:
        super().__init__(gm, graph=graph)
        self.gm = gm
        self.extra_traceback = False
        self.read_float = read_float
        self.errors: dict[str, list[MeanError]] = {}
        self.rounding: dict[str, Comparison] = {}
        self.failed: set[str] = set()
        self.zeros: set[str] = set()
        self.constant_zeros: set[str] = set()

    def on(self, inputs: tuple[Any, ...]) -> Any:
        """The float outputs for one batch, whose differences are added."""
        with equal_random_numbers(self.gm):
            return self.run(*copied(inputs))

    def run_node(self, n: fx.Node) -> Any:
        """Run one node on both values; the third value is the second before a fake-quant rounds it."""
        if n.op == "output":
            return self._arguments(n, EXACT)[0][0]
        if n.op in ("placeholder", "get_attr"):
            value = {} if str(n.target).startswith("**") else super().run_node(n)
            self._note_zeros(n, value)
            other = copied(value) if n.op == "placeholder" else value
            return value, other, other
        quant = called_module(n)
        if isinstance(quant, FakeQuantizeBase):
            return self._round(n, quant)
        exact = self._call(n, EXACT)
        try:
            rounded = self._call(n, UNROUNDED if n.name in self.read_float else ROUNDED)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001  rounded values may lead the user's code anywhere, an index out of range
            rounded = copied(exact)
            self.failed.add(n.name)
        self._add(n, exact, rounded)
        self._note_zeros(n, exact)
        if is_layer(n):
            rounded = copied(exact)
        return exact, rounded, rounded

    def _round(self, n: fx.Node, quant: FakeQuantizeBase) -> tuple[Any, Any, Any]:
        exact, before = (self._arguments(n, which)[0][0] for which in (EXACT, ROUNDED))
        if not isinstance(exact, Tensor):
            return exact, exact, exact
        self._note_zeros(n, exact)
        rounded = quant.quantize(exact)
        self._add(n, exact, rounded)
        if exact.numel() and not n.kwargs.get("on_grid"):
            self.rounding.setdefault(n.name, Comparison()).add(exact, rounded)
        return exact, rounded, before

    def _add(self, n: fx.Node, exact: Any, rounded: Any) -> None:
        tensors, others = flatten_tensors(exact), flatten_tensors(rounded)
        errors = self.errors.setdefault(n.name, [])
        errors += [MeanError() for _ in tensors[len(errors) :]]
        for error, x, found in zip_longest(errors, tensors, others[: len(errors)]):
            if x is not None and is_dense(x):
                error.add(x, x.new_empty(0) if found is None else found)

    def _note_zeros(self, n: fx.Node, value: Any) -> None:
        """Note whether a tensor is all 0, and whether it would be so for any data."""
        if not isinstance(value, Tensor) or not is_dense(value) or value.any():
            self.zeros.discard(n.name)
            return
        of_constants = any(operand.name in self.constant_zeros for operand in n.all_input_nodes)
        made_here = n.op == "get_attr" or identify(n).family == CONSTRUCTOR or _weight_is_zero(called_module(n))
        (self.constant_zeros if of_constants or made_here else self.zeros).add(n.name)

    def _arguments(self, n: fx.Node, which: int) -> tuple[Any, Any]:
        values: Any = fx.node.map_arg((n.args, n.kwargs), lambda node: self.env[node][which])
        return values  # type: ignore[no-any-return]

    def _call(self, n: fx.Node, which: int) -> Any:
        args, kwargs = self._arguments(n, which)
        return getattr(self, n.op)(n.target, args, kwargs)

    def nodes(self) -> Iterator[NodeNoise]:
        """The values and operations that were compared."""
        causes = {node.name: problem for node, problem in self.problems().items()}
        for node in self.graph.nodes:
            errors = self.errors.get(node.name)
            if not errors:
                continue
            share = self._error(node)
            problem = causes.get(node.name, "")
            if node.name in self.rounding:
                source = node.args[0]
                sqnr = self.rounding[node.name].difference().sqnr
                yield NodeNoise(source.name, VALUE, share, sqnr, problem, line_of_node(source))
            elif share and not isinstance(called_module(node), FakeQuantizeBase):
                yield NodeNoise(node.name, OPERATION, share, None, problem, line_of_node(node))

    def problems(self) -> dict[fx.Node, str]:
        """What is wrong at which node; for a value, at the node of its fake-quant.

        1. Rounded operands change the result of an operation by more than they may, and no operand has changed as much:
           the first of a chain is the cause. Less is enough where the operation amplifies the error; one that moves
           values does not, it may select small ones.
        2. Rounding changes a value by more than it may, and an operation that reads it is damaged, too, or it is an
           output. Other values do not matter: small ones that are added to large ones.
        3. A value was 0 in all calibration data, and no parameter is the reason.
        """
        found: dict[fx.Node, str] = {}
        for node in self.graph.nodes:
            quant = called_module(node)
            if isinstance(quant, FakeQuantizeBase):
                if node.name in self.rounding and self._is_above(node, MAX_ERROR) and self._matters(node):
                    found[node] = _problem_of_value(quant, self._error(node))
                elif node.name in self.rounding and node.name in self.zeros and _saw_only_zeros(quant):
                    found[node] = ALWAYS_ZERO
                continue
            is_damaged = self._is_above(node, MAX_ERROR) or self._is_amplified(node)
            if (
                is_damaged
                and not self._is_cancelled(node)
                and not any(self._is_above(operand, MAX_ERROR) for operand in node.all_input_nodes)
            ):
                is_count = any(error.is_count for error in self.errors[node.name])
                found[node] = _problem_of_operation(self._error(node), is_count)
        return found

    def _error(self, n: fx.Node) -> float:
        if n.name in self.failed:
            return math.inf
        return max((error.share() for error in self.errors.get(n.name, ())), default=0.0)

    def _is_above(self, n: fx.Node, limit: float) -> bool:
        return n.name in self.failed or any(error.is_above(limit) for error in self.errors.get(n.name, ()))

    def _is_cancelled(self, n: fx.Node) -> bool:
        size, *sizes = (
            max((error.mean_size() for error in self.errors.get(each.name, ())), default=0.0)
            for each in (n, *n.all_input_nodes)
        )
        return n.name not in self.failed and 0 < size < CANCELLED * max(sizes, default=0.0)

    def _matters(self, quant: fx.Node) -> bool:
        """Whether the error of a value shows in what is computed with it."""
        return any(reader.op == "output" or self._is_above(reader, AMPLIFIED) for reader, _ in readers_of(quant))

    def _is_amplified(self, n: fx.Node) -> bool:
        operands = max((self._error(operand) for operand in n.all_input_nodes), default=0.0)
        return self._is_above(n, AMPLIFIED) and self._error(n) > AMPLIFICATION * operands and not moves_values(n)


def _saw_only_zeros(quant: FakeQuantizeBase) -> bool:
    """Whether an observed value was 0 in all calibration data."""
    observer = quant.observer
    return quant.scheme.fixed_range is None and not observer.min_val.any() and not observer.max_val.any()


def _weight_is_zero(module: nn.Module | None) -> bool:
    weight = module.folded()[0] if isinstance(module, QATLayer) else getattr(module, "weight", None)
    return isinstance(weight, Tensor) and not weight.any()


def _problem_of_value(quant: FakeQuantizeBase, share: float) -> str:
    low, high = (float(limit) for limit in (quant.observer.min_val.min(), quant.observer.max_val.max()))
    return f"rounding its values (range {low:.3g} to {high:.3g}) costs {share:.0%} of their mean size"


def _problem_of_operation(share: float, is_count: bool) -> str:
    if share == math.inf:
        return "rounded operands lead to an error, infinity, NaN or another shape"
    if is_count:
        return f"rounded operands change {share:.0%} of its result"
    return f"rounded operands change its result by {share:.0%} of its mean size"


def readers_of(node: fx.Node, moved: bool = False) -> Iterator[tuple[fx.Node, bool]]:
    """The nodes that compute with a value, and whether it was moved on the way."""
    for reader in node.users:
        if isinstance(called_module(reader), FakeQuantizeBase):
            yield from readers_of(reader, moved)
        elif moves_values(reader):
            yield from readers_of(reader, moved=True)
        else:
            yield reader, moved


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has values that can be compared one by one."""
    return tensor.layout == torch.strided and not tensor.is_meta


def is_layer(node: fx.Node) -> bool:
    """Whether a node calls a layer with a weight."""
    return isinstance(called_module(node), QATLayer) or identify(node).family == WEIGHTED


def moves_values(node: fx.Node) -> bool:
    """Whether a node only moves or selects values, or is none when it is deployed."""
    return identify(node).family in (PASS_THROUGH, IDENTITY)
