"""Refuses schemes that a backend cannot run, and names the backends that can."""

from __future__ import annotations

from fxqat.custom_quantizer.backend_type import TABLES
from fxqat.custom_quantizer.spec import BackendSpec
from fxqat.errors import ConfigError
from fxqat.scheme import QuantizeScheme


def check_dynamic(spec: BackendSpec, op: str, where: str, node: str) -> None:
    """Check that a backend can quantize what an op reads at run time.

    Raises:
        ConfigError: it cannot; the message says which ops can, or which backends.
    """
    if op in spec.dynamic:
        return
    able = [table.name for table in TABLES if op in table.dynamic]
    if spec.dynamic:
        why = f"only {', '.join(sorted(spec.dynamic))} can"
    else:
        why = "it needs their scales in the file" + (f". These backends can: {', '.join(able)}" if able else "")
    raise ConfigError(
        f"{where}: dynamic: {spec.name} cannot quantize the values that {node!r} ({op}) reads at run time: {why}."
    )


def check_legal(spec: BackendSpec, tensor: str, scheme: QuantizeScheme, where: str, node: str = "") -> None:
    """Check that a backend can run a scheme that the user asks for.

    Args:
        spec: the backend.
        tensor: ``"weight"``, or any other tensor, which is an activation.
        scheme: what is asked for.
        where: the configuration entry that asks for it.
        node: the node whose tensor it is, if it is only one.

    Raises:
        ConfigError: it cannot; the message says what it takes, and which backends take the scheme.
    """
    if spec.takes(tensor, scheme):
        return
    others = [table.name for table in TABLES if table.takes(tensor, scheme)]
    kind = "weights" if tensor == "weight" else "activations"
    odd = "" if scheme.fixed_zero_point is not None or scheme.even_zero_point else " with any zero point"
    raise ConfigError(
        f"{where}: {spec.name} cannot run {scheme}{odd}{f' (of {node!r})' if node else ''}. For {kind} it takes "
        f"{' or '.join(map(str, spec.legal(tensor)))}. Choose one of these, or one of the backends that can run it: "
        f"{', '.join(others)}."
    )
