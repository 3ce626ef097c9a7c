"""Engines by name; the package of each is imported only when the engine is asked for."""

from __future__ import annotations

import inspect
from typing import Any

from fxqat.errors import ExportError
from fxqat.tools.engines.base import Engine
from fxqat.tools.engines.litert_engine import LiteRtEngine
from fxqat.tools.engines.onnxruntime_engine import OnnxRuntimeEngine
from fxqat.tools.engines.openvino_engine import OpenVinoEngine
from fxqat.tools.engines.qnn_engine import QnnEngine
from fxqat.utils.nearest_name import nearest

ENGINES: dict[str, type[Engine]] = {
    kind.name: kind for kind in (OnnxRuntimeEngine, OpenVinoEngine, LiteRtEngine, QnnEngine)
}


def load_engine(name: str, **settings: Any) -> Engine:
    """An engine by its name.

    Args:
        name: ``"onnxruntime"``, ``"openvino"``, ``"litert"`` or ``"qnn"``.
        settings: ``threads``, and the engine's own, see its class.

    Raises:
        ExportError: the name or a setting is unknown, or the engine's package is not installed; the message has the
            command that installs it.

    Example:
        >>> load_engine("onnxruntime", threads=2).threads
        2
    """
    if name not in ENGINES:
        raise ExportError(f"unknown engine {name!r}: {nearest(name, ENGINES)}")
    known = list(inspect.signature(ENGINES[name]).parameters)
    for setting in settings:
        if setting not in known:
            raise ExportError(f"the engine {name} has no setting {setting!r}: {nearest(setting, known)}")
    return ENGINES[name](**settings)
