"""What a backend is: one frozen value that can be printed and compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from fxqat.scheme import FLOAT32_BITS, QuantizeScheme, TensorQConfig


@dataclass(frozen=True)
class LegalSchemes:
    """Schemes that a target can run; None allows both.

    Args:
        bit_widths: the bit widths.
        symmetric: whether they are symmetric.
        signed: whether their integers are signed.
        per_channel: whether they have a scale for each channel; activations never have.
        scale_bits: the largest number of significant bits of a scale; 1 for powers of two.
        even_zero_point: whether zero points that depend on the range must be even.
        blocks: whether they may have a scale for each block of a channel.

    Example:
        >>> legal = LegalSchemes(frozenset({8}), symmetric=True, signed=True)
        >>> QuantizeScheme(8) in legal, QuantizeScheme(3) in legal
        (True, False)
        >>> print(legal)
        int8 sym
    """

    bit_widths: frozenset[int]
    symmetric: bool | None = None
    signed: bool | None = None
    per_channel: bool | None = None
    scale_bits: int = FLOAT32_BITS
    even_zero_point: bool = False
    blocks: bool = False

    def __contains__(self, scheme: QuantizeScheme) -> bool:
        """Whether a scheme is one of them."""
        exact = ((getattr(self, name), getattr(scheme, name)) for name in ("symmetric", "signed", "per_channel"))
        zero_point = scheme.fixed_zero_point is not None or scheme.even_zero_point or not self.even_zero_point
        fits = scheme.bit_width in self.bit_widths and scheme.scale_bits <= self.scale_bits and zero_point
        fits = fits and (self.blocks or scheme.block_size is None)
        return fits and all(wanted in (None, found) for wanted, found in exact)

    def __str__(self) -> str:
        types = {None: ("int", "uint"), True: ("int",), False: ("uint",)}[self.signed]
        narrow, wide = min(self.bit_widths), max(self.bit_widths)
        every = wide - narrow > 1 and len(self.bit_widths) == wide - narrow + 1
        widths = [f"{narrow}-{wide}"] if every else sorted(self.bit_widths)
        words = ["/".join(f"{name}{bits}" for name in types for bits in widths)]
        choices = ((self.symmetric, "sym", "asym"), (self.per_channel, "per-channel", "per-tensor"))
        words += [yes if flag else no for flag, yes, no in choices if flag is not None]
        words += ["with an even zero point"] * self.even_zero_point + ["pot"] * (self.scale_bits == 1)
        words += ["with or without blocks"] * self.blocks
        return " ".join(words)


@dataclass(frozen=True)
class Rule:
    """What a backend does with one op or one family of ops.

    Args:
        inputs: which operands are read quantized: ``"all"``, ``"none"``, or ``"residual"``: of a binary op all but the
            one that a weighted layer computes for it alone (the accelerator adds that one before it rounds).
        output: whether the value the op produces is quantized; False leaves that to the ops that read it.
        share: ``"all"``: operands and result have one scale; ``"inputs"``: the operands have one scale;
            ``"none"``. Pass-through ops only share with an operand that is quantized.
        keeps_relu_apart: operands that are never negative (results of a ReLU) do not share with others that can be, so
            that their zero point stays the smallest integer; for engines that convert between scales where they join.
        keeps_fixed_ranges_apart: operands whose range is known (``fixed_ranges``) do not share.
        scale_bits: the scale of the result has at least so many significant bits. An engine that multiplies by a ratio
            of scales, where QuantizeLinear divides, rounds exact halves differently; with many bits there are none.
        symmetric: the op reads signed integers with zero point 0, whatever the backend's activations have. Another op
            that reads the same value gets it so, too.
        reason: why the op computes in integers, for the report.
        why_float_output: with ``output=False``, why a value that no quantized op reads stays float, for the report.
    """

    inputs: Literal["all", "none", "residual"] = "all"
    output: bool = True
    share: Literal["none", "inputs", "all"] = "none"
    keeps_relu_apart: bool = False
    keeps_fixed_ranges_apart: bool = False
    scale_bits: int = 1
    symmetric: bool = False
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
        legal_weights: the schemes that the target can run for weights; empty: all of them.
        legal_activations: the same for activations.
        dynamic: names of the ops that can quantize what they read at run time, by ONNX DynamicQuantizeLinear; empty:
            the target needs the scales in the file.
        least_work: a layer beside a float op stays float too, unless it has this many multiply-accumulates for each
            value that is converted between them (see ``fxqat.custom_quantizer.conversion_cost``).
        runtime: the runtime for which files are written, such as ``"onnxruntime"``; empty for a chip.
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
    legal_weights: tuple[LegalSchemes, ...] = ()
    legal_activations: tuple[LegalSchemes, ...] = ()
    dynamic: frozenset[str] = frozenset()
    least_work: int = 0
    runtime: str = ""
    source: str = ""

    def for_target(
        self, name: str, source: str, rules: Mapping[str, Rule | None] | None = None, **fields: Any
    ) -> BackendSpec:
        """A table for another target, which quantizes the same ops.

        What only holds for this target is not taken over: ``left_float``, ``legal_weights``, ``legal_activations``,
        ``least_work`` and ``runtime`` have their defaults unless they are given. The reasons of rules that are taken
        over say where they come from.

        Args:
            name: name of the other target.
            source: its documents.
            rules: rules that are added to those of this table or replace them; None removes one.
            fields: any other fields of the table.

        Example:
            >>> from fxqat.custom_quantizer.backends.onnxruntime import ONNXRUNTIME
            >>> chip = ONNXRUNTIME.for_target(
            ...     "MyChip", "its data sheet", {"mul": Rule(reason="table 7"), "where": None}
            ... )
            >>> chip.rules["conv2d"].reason
            'as on ONNXRuntime: QLinearConv: integers in and out'
            >>> chip.rules["mul"].reason, "where" in chip.rules, ONNXRUNTIME.least_work, chip.least_work
            ('table 7', False, 64, 0)
        """
        taken = {key: _taken_over(rule, self.name) for key, rule in self.rules.items()} | dict(rules or {})
        return BackendSpec(
            **{key: getattr(self, key) for key in TAKEN_OVER}
            | {"rules": MappingProxyType({key: rule for key, rule in taken.items() if rule is not None})}
            | {"name": name, "source": source, **fields}
        )

    def activation_of(self, rule: Rule) -> TensorQConfig:
        """How an op with a rule reads its operands."""
        if not rule.symmetric:
            return self.activation
        return self.activation.with_scheme(symmetric=True, signed=True, even_zero_point=False)

    def rule(self, name: str, family: str) -> Rule | None:
        """The rule for an op, None if the backend leaves it float."""
        return self.rules.get(name) or self.rules.get(family)

    def why_float(self, name: str, family: str) -> str:
        """Why an op without a rule stays float; empty if the table does not say."""
        return self.left_float.get(name) or self.left_float.get(family) or ""

    def weight_of(self, name: str) -> TensorQConfig:
        """Scheme, observer and fake-quant of the weight of an op."""
        return self.weights.get(name, self.weight)

    def legal(self, tensor: str) -> tuple[LegalSchemes, ...]:
        """The schemes for ``"weight"``, or for any other tensor, which is an activation; empty: all of them."""
        return self.legal_weights if tensor == "weight" else self.legal_activations

    def takes(self, tensor: str, scheme: QuantizeScheme) -> bool:
        """Whether the target can run a tensor with a scheme."""
        legal = self.legal(tensor)
        return not legal or any(scheme in schemes for schemes in legal)

    def with_configs(
        self,
        weight: Callable[[TensorQConfig], TensorQConfig],
        activation: Callable[[TensorQConfig], TensorQConfig],
    ) -> BackendSpec:
        """The same placement, with the configurations of weights and of activations changed by a function each."""
        weights = MappingProxyType({name: weight(config) for name, config in self.weights.items()})
        return replace(self, weight=weight(self.weight), activation=activation(self.activation), weights=weights)


TAKEN_OVER = ("weight", "activation", "weights", "fused_activations", "fuses_into", "split", "fixed_ranges")
"""The fields that :meth:`BackendSpec.for_target` takes over as they are."""


def _taken_over(rule: Rule, name: str) -> Rule:
    """A rule whose reasons name the table that it is from."""
    reason, why_float_output = (why and f"as on {name}: {why}" for why in (rule.reason, rule.why_float_output))
    return replace(rule, reason=reason, why_float_output=why_float_output)
