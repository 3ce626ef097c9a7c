"""What a backend is: one frozen value that can be printed and compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from fxqat.scheme import TensorQConfig


@dataclass(frozen=True)
class Rule:
    """What a backend does with one op or one family of ops.

    Args:
        inputs: which operands are read quantized: ``"all"``, ``"none"``, or ``"residual"``: of a binary op all but the
            one that a weighted layer computes for it alone (the accelerator adds that one before it rounds).
        output: whether the value the op produces is quantized; False leaves that to the ops that read it.
        share: ``"all"``: operands and result have one scale; ``"inputs"``: the operands have one scale;
            ``"none"``. Pass-through ops only share with an operand that is quantized.
        reason: why the op computes in integers, for the report.
        why_float_output: with ``output=False``, why a value that no quantized op reads stays float, for the report.
    """

    inputs: Literal["all", "none", "residual"] = "all"
    output: bool = True
    share: Literal["none", "inputs", "all"] = "none"
    reason: str = ""
    why_float_output: str = ""


@dataclass(frozen=True)
class BackendSpec:
    """A deployment target as a table.

    Args:
        name: its name, as users write it.
        weight: scheme, observer and fake-quant of weights.
        activation: scheme, observer and fake-quant of activations.
        weights: the same as ``weight`` for ops whose weight differs, by op name.
        rules: by op name or family (see ``fxqat.ops.table``); the name wins. An op without a rule stays float.
        fused_activations: ops that run inside the op before them, so that the value between them is not rounded.
        fuses_into: families of the ops that can run such an activation.
        split: names of the ops that are computed by several others (``fxqat.quantization.split_ops`` knows which).
        fixed_ranges: real range of the ops whose range is known, by op name.
        left_float: why ops without a rule stay float, by op name or family; the name wins.
        least_work: a layer beside a float op stays float too, unless it has this many multiply-accumulates for each
            value that is converted between them (see ``fxqat.custom_quantizer.conversion_cost``).
        source: the public documents that the table is taken from.
    """

    name: str
    weight: TensorQConfig
    activation: TensorQConfig
    rules: Mapping[str, Rule]
    fused_activations: frozenset[str] = frozenset({"relu", "relu6"})
    fuses_into: frozenset[str] = frozenset({"weighted", "binary", "norm"})
    split: frozenset[str] = frozenset()
    fixed_ranges: Mapping[str, tuple[float, float]] = field(default_factory=lambda: MappingProxyType({}))
    weights: Mapping[str, TensorQConfig] = field(default_factory=lambda: MappingProxyType({}))
    left_float: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    least_work: int = 0
    source: str = ""

    def rule(self, name: str, family: str) -> Rule | None:
        """The rule for an op, None if the backend leaves it float."""
        return self.rules.get(name) or self.rules.get(family)

    def why_float(self, name: str, family: str) -> str:
        """Why an op without a rule stays float; empty if the table does not say."""
        return self.left_float.get(name) or self.left_float.get(family) or ""

    def weight_of(self, name: str) -> TensorQConfig:
        """Scheme, observer and fake-quant of the weight of an op."""
        return self.weights.get(name, self.weight)

    def with_configs(
        self,
        weight: Callable[[TensorQConfig], TensorQConfig],
        activation: Callable[[TensorQConfig], TensorQConfig],
    ) -> BackendSpec:
        """The same placement, with the configurations of weights and of activations changed by a function each."""
        weights = MappingProxyType({name: weight(config) for name, config in self.weights.items()})
        return replace(self, weight=weight(self.weight), activation=activation(self.activation), weights=weights)
