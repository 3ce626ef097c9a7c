"""What a backend is: one frozen value that can be printed and compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from fxqat.scheme import TensorQConfig


@dataclass(frozen=True)
class Rule:
    """What a backend does with one op or one family of ops.

    Args:
        inputs: which operands are read quantized: ``"all"``, ``"none"``, or ``"residual"``: of a binary op all but the
            one that a weighted layer writes for it alone (the accelerator adds that one before it rounds).
        output: whether the value the op produces is quantized.
        share: ``"all"``: operands and result have one scale; ``"inputs"``: the operands have one scale;
            ``"none"``. Pass-through ops only share with an operand that is quantized.
        reason: the words the report gives.
    """

    inputs: Literal["all", "none", "residual"] = "all"
    output: bool = True
    share: Literal["none", "inputs", "all"] = "none"
    reason: str = ""


@dataclass(frozen=True)
class BackendSpec:
    """A deployment target as a table.

    Args:
        name: its name, as users write it.
        weight: scheme and parts for weights.
        activation: scheme and parts for activations.
        rules: by op name or family (see ``fxqat.quantization.op_table``); the name wins. No rule means float.
        fused_activations: ops that run inside the op before them, so that the value between is not rounded.
        fuses_into: families of the ops that such an activation can be part of.
        fixed_ranges: real range of the ops whose range is known, by op name.
        source: where the table comes from.
    """

    name: str
    weight: TensorQConfig
    activation: TensorQConfig
    rules: Mapping[str, Rule]
    fused_activations: frozenset[str] = frozenset({"relu", "relu6"})
    fuses_into: frozenset[str] = frozenset({"weighted", "binary", "norm"})
    fixed_ranges: Mapping[str, tuple[float, float]] = field(default_factory=lambda: MappingProxyType({}))
    source: str = ""

    def rule(self, name: str, family: str) -> Rule | None:
        """The rule for an op, None if the backend leaves it float."""
        return self.rules.get(name) or self.rules.get(family)
