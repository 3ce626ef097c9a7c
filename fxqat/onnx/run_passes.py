"""The runner of the passes on the exported ONNX model.

A pass is a class of onnx_ir: ``call`` takes an ``ir.Model`` and returns a ``PassResult``. Our own passes and those of
the library stand in one list.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from fxqat.errors import ExportError


def run_passes(model: ir.Model, passes: Sequence[ir.passes.PassBase]) -> ir.Model:
    """Run passes in order.

    Args:
        model: the model; passes may change it in place.
        passes: the passes.

    Returns:
        The result of the last pass.

    Raises:
        ExportError: a pass failed, of the class that the pass raised. The message names the pass and those before it.
    """
    done: list[str] = []
    for each in passes:
        name = type(each).__name__
        try:
            model = each(model).model
        except Exception as cause:  # passes of the library raise errors of many kinds
            kind = type(cause) if isinstance(cause, ExportError) else ExportError
            before = f"after {', '.join(done)}" if done else "the first"
            raise kind(f"{cause}\n(in the ONNX pass {name}, {before})") from cause
        done.append(name)
    return model
