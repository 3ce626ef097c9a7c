"""The prepared model: a GraphModule that keeps its report and provenance through copy and pickle."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from fxqat.quantization.report import QuantReport
from fxqat.utils.fx_graph import Call, calls_in, graph_of
from fxqat.utils.torch_compat import keep_local_under_ddp
from fxqat.utils.train_eval_graph import TrainEvalGraphModule


@dataclass(frozen=True)
class SplitTensor:
    """A tensor of the float model that the prepared model has in parts.

    Args:
        names: of the parts in the prepared model's state dict, in order.
        dim: the dimension along which they make it up.
    """

    names: tuple[str, ...]
    dim: int


@dataclass
class Provenance:
    """What a prepared model remembers of the float model it came from.

    Args:
        backend: the backend's name.
        report: the decisions.
        tensor_names: name in the float model's state dict -> name in the prepared model's.
        split_tensors: name in the float model's state dict -> its parts (``fxqat.quantization.split_parameters``).
        unread: tensors of the float model that its graph does not read (auxiliary heads), by name.
        preserved: names of attributes of the float model that were carried over.
        config: how every tensor is quantized (``fxqat.config.effective``).
        bias_corrected: whether its biases make up for errors of quantization; without its fake-quants it is not the
            float model then.
    """

    backend: str
    report: QuantReport
    tensor_names: dict[str, str]
    split_tensors: dict[str, SplitTensor]
    unread: dict[str, Tensor]
    preserved: tuple[str, ...] = field(default=())
    config: dict[str, Any] = field(default_factory=dict)
    bias_corrected: bool = False


class QuantGraphModule(TrainEvalGraphModule):
    """A graph module with fake-quant in it, as ``prepare_by_platform`` returns it."""

    provenance: Provenance

    @property
    def quant_report(self) -> QuantReport:
        """For every node, what was decided and why."""
        return self.provenance.report

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantGraphModule:
        result: Any = super().__deepcopy__(memo)
        _carry_over(self.__dict__, result, memo)
        _keep_ranges_local(result)
        return result  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        """The graph is pickled as its list of calls; fx would trace its own code again, which not all code survives."""
        state = {name: value for name, value in self.__dict__.items() if name != "_graph"}
        return _restore, (state, calls_in(self.graph), type(self).__name__)


def make_quant_graph_module(gm: nn.Module, graph: fx.Graph, name: str) -> QuantGraphModule:
    """A prepared model of a module and a graph that calls what is in it (tensors are shared); without provenance."""
    result = QuantGraphModule(gm, graph, name)
    result.training = gm.training
    modes = {name: module.training for name, module in gm.named_modules()}
    for path, module in result.named_modules():
        if module.training != modes.get(path, module.training):
            module.training = not module.training
    _keep_ranges_local(result)
    return result


def _keep_ranges_local(gm: nn.Module) -> None:
    """Each rank observes its own data until the ranks reduce their ranges."""
    keep_local_under_ddp(gm, [name for name, _ in gm.named_buffers() if ".observer." in name])


def _carry_over(source: dict[str, Any], target: nn.Module, memo: dict[int, Any]) -> None:
    target.provenance = copy.deepcopy(source["provenance"], memo)
    for name in source["provenance"].preserved:
        setattr(target, name, copy.deepcopy(source[name], memo))


def _restore(state: dict[str, Any], calls: list[Call], name: str) -> QuantGraphModule:
    holder = nn.Module()
    holder.__dict__.update(state)
    result = make_quant_graph_module(holder, graph_of(calls), name)
    result.provenance = state["provenance"]
    for attribute in result.provenance.preserved:
        setattr(result, attribute, state[attribute])
    return result
