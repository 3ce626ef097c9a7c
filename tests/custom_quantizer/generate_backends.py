"""Writes two pages from the tables of the backends; test_backends_page.py compares the committed pages with them.

python tests/custom_quantizer/generate_backends.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from fxqat.custom_quantizer.backend_type import TABLES
from fxqat.custom_quantizer.spec import BackendSpec, Rule
from fxqat.ops.families import CONSTRUCTOR, NOT_FLOAT, Op
from fxqat.ops.table import OPS
from fxqat.scheme import FLOAT32_BITS, TensorQConfig

COMMAND = "python tests/custom_quantizer/generate_backends.py"
DOCS = Path(__file__).parents[2] / "docs"
INTRODUCTION = f"""Backends
========

A backend is a table (:doc:`/howto/add_a_backend`). This page is generated from the tables by
``{COMMAND}``; a test compares the two.

``backend=`` takes a ``BackendType`` or its name, such as ``"OpenVINO_AVX2"``. A name with an underscore is a variant:
the table of the backend before the underscore with other schemes.

A value that a ReLU ends, or that is computed from such values only, has the smallest integer as its zero point on every
backend with asymmetric activations: engines fuse a ReLU only then.

"""
READS = {"all": "all operands", "none": "what is already quantized", "residual": "all operands except a layer's output"}
APART = "; results of a ReLU only among themselves"
SHARES = {"none": "no", "inputs": "the operands have one scale", "all": "operands and result have one scale"}
FAMILIES_NOTE = """The family of an op depends on its arguments: nearest-neighbour interpolation only moves values, and
padding with anything but zeros is not an op of the table. On every backend ops outside the table,
masks of infinities, sizes, indices and booleans stay float. Where a quantized op reads the value of a float op, that
value is quantized."""

KINDS = ("weight", "activation")
MATRIX_INTRODUCTION = f"""Support matrix
==============

Backends side by side: which schemes a backend takes, and which operations it computes on integers. Written from the
tables by ``{COMMAND}``; :doc:`/reference/backends` has the details and the
reasons. A scheme that a backend does not list is refused with the alternatives. Bits are those of
:doc:`/reference/configuration`; what each width looks like in the file is in :doc:`/reference/export`.

"""
MATRIX_NOTE = """*yes*: all operations of the family have integer operands on this backend. *float*: none. *4/7*: 4 of
7; :doc:`/reference/backends` names them, and lists the families. Variants (``ONNXRuntime_AVX2``, ``OpenVINO_AVX2``,
``QNN_A16``) are as the backend before the underscore."""

PLACED = [op for op in OPS if op.family not in (CONSTRUCTOR, NOT_FLOAT)]


def scheme_of(config: TensorQConfig) -> str:
    """The words for a scheme with its range."""
    scheme = config.scheme
    bits = {1: "powers of two", FLOAT32_BITS: "any float32"}.get(scheme.scale_bits, f"{scheme.scale_bits} bits")
    zero_points = "; zero points: even" if scheme.even_zero_point else ""
    return f"{scheme}: {scheme.quant_min} to {scheme.quant_max}; scales: {bits}{zero_points}"


def modules_of(config: TensorQConfig) -> str:
    """The words for observer and fake-quant."""
    observer, fake_quantize = (
        f"``{name}``" + (f" ({', '.join(f'{key}={value}' for key, value in args.items())})" if args else "")
        for name, args in (
            (config.observer, config.observer_args),
            (config.fake_quantize, config.fake_quantize_args),
        )
    )
    return f"{observer}, {fake_quantize}"


def family_ops(family: str) -> list[Op]:
    """The ops of a family."""
    return [op for op in PLACED if op.family == family]


def names_of(ops: Sequence[Op]) -> str:
    """Whole families by their name, other ops by theirs."""
    words = []
    for family in dict.fromkeys(op.family for op in ops):
        here = [op for op in ops if op.family == family]
        whole = len(here) == len(family_ops(family))
        words += [f"*{family}*"] if whole else [f"``{op.name}``" for op in here]
    return ", ".join(words)


def rows_of_rules(spec: BackendSpec) -> Iterator[tuple[str, ...]]:
    """A row for every different rule."""
    rules: dict[Rule, list[Op]] = {}
    for op in PLACED:
        rule = spec.rule(op.name, op.family)
        if rule is not None:
            rules.setdefault(rule, []).append(op)
    for rule, ops in rules.items():
        moves = rule.inputs == "none" and rule.share == "all"
        output = "as the operand" if moves else "yes" if rule.output else "where a quantized op reads it"
        why = "; ".join(words for words in (rule.reason, rule.why_float_output) if words)
        share = SHARES[rule.share] + APART * rule.keeps_relu_apart
        yield names_of(ops), READS[rule.inputs], output, share, why


def rows_of_float(spec: BackendSpec) -> Iterator[tuple[str, str]]:
    """A row for every reason for which ops stay float."""
    found: dict[str, list[Op]] = {}
    for op in PLACED:
        if spec.rule(op.name, op.family) is None:
            why = spec.why_float(op.name, op.family)
            found.setdefault(why, []).append(op)
    for why, ops in found.items():
        yield names_of(ops), why


def rows_of_schemes(spec: BackendSpec) -> Iterator[tuple[str, str, str]]:
    """A row for every kind of tensor."""
    yield "weights", scheme_of(spec.weight), modules_of(spec.weight)
    for name, config in spec.weights.items():
        yield f"weight of ``{name}``", scheme_of(config), modules_of(config)
    yield "activations", scheme_of(spec.activation), modules_of(spec.activation)
    for name, (low, high) in spec.fixed_ranges.items():
        yield f"output of ``{name}``", f"the range {low:g} to {high:g} is known", "not calibrated"
    for tensor in ("weight", "activation"):
        legal = " or ".join(map(str, spec.legal(tensor))) or "every scheme, 2 to 16 bits"
        yield f"possible for {tensor}s", legal, "other schemes are refused" if spec.legal(tensor) else ""


def list_table(header: Sequence[str], widths: Sequence[int], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a list table."""
    yield from (".. list-table::", "   :header-rows: 1", f"   :widths: {' '.join(map(str, widths))}", "")
    for row in (header, *rows):
        for position, cell in enumerate(row):
            yield f"   {'*' if position == 0 else ' '} - {cell}".rstrip()
    yield ""


def heading(text: str, line: str) -> list[str]:
    """The lines of a heading."""
    return [text, line * len(text), ""]


def section(spec: BackendSpec) -> Iterator[str]:
    """The lines of one backend."""
    yield from heading(spec.name, "-")
    yield from (f"Source: {spec.source}.", "")
    yield from list_table(("Tensor", "Scheme", "Observer, fake-quant"), (22, 50, 28), rows_of_schemes(spec))
    fused = ", ".join(f"``{name}``" for name in sorted(spec.fused_activations))
    families = ", ".join(f"*{name}*" for name in sorted(spec.fuses_into))
    yield from (f"Run inside the op before them, if it is one of {families} and has no other reader: {fused}.", "")
    header = ("Ops", "Reads quantized", "Gives quantized", "Shares a scale", "Why")
    yield from list_table(header, (30, 14, 14, 14, 28), rows_of_rules(spec))
    if spec.least_work:
        yield from (
            f"A layer beside a float op stays float too, unless it has {spec.least_work} multiply-accumulates for each "
            "value that is converted between them; so does any other op whose operands are all float (``least_work`` "
            "in :doc:`/reference/configuration`).",
            "",
        )
    left = list(rows_of_float(spec))
    if left:
        yield from list_table(("Left float", "Why"), (50, 50), left)


def variant(spec: BackendSpec, base: BackendSpec) -> Iterator[str]:
    """The lines of a variant: what differs."""
    yield from heading(spec.name, "-")
    yield from (f"{base.name} with other schemes. Source: {spec.source}.", "")
    known = set(rows_of_schemes(base))
    rows = [row for row in rows_of_schemes(spec) if row not in known]
    yield from list_table(("Tensor", "Scheme", "Observer, fake-quant"), (22, 50, 28), rows)


def page() -> str:
    """The whole page."""
    by_name = {spec.name: spec for spec in TABLES}
    lines = []
    overview = [(f"``{spec.name}``", str(spec.weight.scheme), str(spec.activation.scheme)) for spec in TABLES]
    lines += list_table(("Backend", "Weights", "Activations"), (30, 35, 35), overview)
    for spec in TABLES:
        base = by_name.get(spec.name.rpartition("_")[0])
        lines += section(spec) if base is None else variant(spec, base)
    lines += [*heading("Families of ops", "-"), FAMILIES_NOTE, ""]
    families = dict.fromkeys(op.family for op in PLACED)
    rows = [(f"*{family}*", ", ".join(f"``{op.name}``" for op in family_ops(family))) for family in families]
    lines += list_table(("Family", "Ops"), (20, 80), rows)
    return INTRODUCTION + "\n".join(lines)


def integer_share(spec: BackendSpec, family: str) -> str:
    """How much of a family a backend has on integers."""
    ops = family_ops(family)
    count = sum(spec.rule(op.name, op.family) is not None for op in ops)
    return {0: "float", len(ops): "yes"}.get(count, f"{count}/{len(ops)}")


def matrix() -> str:
    """The page with all backends side by side."""
    schemes = [
        (
            f"``{spec.name}``",
            *(" or ".join(map(str, spec.legal(tensor))) or "2 to 16 bits, every scheme" for tensor in KINDS),
        )
        for spec in TABLES
    ]
    ours = [spec for spec in TABLES if "_" not in spec.name]
    families = dict.fromkeys(op.family for op in PLACED)
    rows = [(f"*{family}*", *(integer_share(spec, family) for spec in ours)) for family in families]
    widths = (16, *(8 for _ in ours))
    lines = [
        *list_table(("Backend", "Weights", "Activations"), (20, 40, 40), schemes),
        *heading("Operations on integers", "-"),
        MATRIX_NOTE,
        "",
        *list_table(("Family", *(spec.name for spec in ours)), widths, rows),
    ]
    return MATRIX_INTRODUCTION + "\n".join(lines)


PAGES = {DOCS / "reference" / "backends.rst": page, DOCS / "choose" / "support_matrix.rst": matrix}


def main() -> None:
    """Write the pages."""
    for path, text in PAGES.items():
        path.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
