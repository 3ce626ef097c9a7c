"""What torch's exporter does anew for each export, and which is most of the time that a small model takes: in the tests
it does so once, in each process or at least in each export.
"""

import typing
from unittest import mock

import torch
from torch._export import utils as export_utils
from torch.onnx._internal.exporter import _fx_passes


def build_once() -> None:
    """Make torch's exporter look for composite operators once (its translations: ``translations_read_once``)."""
    _composite_operators_once()
    torch._ops.Callable = typing.Callable  # torch evaluates an annotation thousands of times: this one is cached


def _composite_operators_once() -> None:
    """torch.export looks for new composite operators once per export, not twice for each namespace of operators."""
    decompose, look = _fx_passes.decompose_with_registry, export_utils._materialize_cpp_cia_ops

    def decompose_with_registry(program, registry):
        look()
        with mock.patch.object(export_utils, "_materialize_cpp_cia_ops", return_value=None):
            return decompose(program, registry)

    _fx_passes.decompose_with_registry = decompose_with_registry
