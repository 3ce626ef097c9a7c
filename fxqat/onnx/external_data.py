"""Keep the large tensors of a model in a file, so that copies of the model take no memory for them.

1. While a model is checked and compared, its large tensors are in a temporary file beside the file to write. ONNX
   Runtime reads them from there; ``ModelProto`` holds references and small tensors only.
2. A model of at most ``MAX_BYTES`` is written as one file, with its tensors in it.
3. A larger one is written as two: ``model.onnx``, and its large tensors in ``model.onnx.data``. Move them together, and
   do not rename them: the first one names the second.

Source: ONNX, "External Data" (``docs/ExternalData.md``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper
from onnx_ir import external_data

from fxqat.errors import ExportError
from fxqat.utils.files import temporary_path

MAX_BYTES = 2**31 - 1
"""Protobuf, in which ONNX is written, has no larger messages."""

LARGE = 2**16
"""Tensors of more bytes are kept in the file."""

ROOT = Path(os.path.abspath(os.sep)).anchor
"""The folder to which the paths of the temporary file are relative: ONNX Runtime takes no absolute ones."""


def data_path(path: Path) -> Path:
    """The file of the large tensors of a model that does not fit into one file."""
    return path.with_name(f"{path.name}.data")


@dataclass(frozen=True)
class TemporaryModel:
    """A model in temporary files.

    Args:
        proto: the model, with references to its large tensors.
        path: its file; the large tensors are in ``data_path(path)``.
    """

    proto: onnx.ModelProto
    path: Path

    def write(self, data_name: str) -> bool:
        """Write the file; whether its large tensors are in it, and not in a file of the given name."""
        result, data = onnx.ModelProto(), data_path(self.path)
        result.CopyFrom(self.proto)
        is_one = result.ByteSize() + data.stat().st_size <= MAX_BYTES
        with data.open("rb") as file:
            for tensor in result.graph.initializer:
                entries = {entry.key: entry for entry in tensor.external_data}
                if entries and is_one:
                    file.seek(int(entries["offset"].value))
                    tensor.raw_data = file.read(int(entries["length"].value))
                    tensor.ClearField("external_data")
                    tensor.ClearField("data_location")
                elif entries:
                    entries["location"].value = data_name
        self.path.write_bytes(result.SerializeToString())
        return bool(is_one)

    def files(self, target: Path) -> dict[Path, Path]:
        """The temporary files to move, by the path to move them to."""
        is_one = self.write(data_path(target).name)
        return {target: self.path} | ({} if is_one else {data_path(target): data_path(self.path)})


@contextmanager
def in_temporary_files(model: ir.Model, target: Path) -> Iterator[TemporaryModel]:
    """Write a model to temporary files (case 1), which are deleted after the block unless they were moved.

    Args:
        model: the model; its large tensors are replaced by references.
        target: the file to write in the end.

    Raises:
        ExportError: the files cannot be written.
    """
    with temporary_path(target, ExportError) as path:
        data = data_path(Path(os.path.realpath(path)))
        try:
            data.touch()
            external_data.unload_from_model(model, ROOT, str(data.relative_to(ROOT)), size_threshold_bytes=LARGE)
            result = TemporaryModel(ir.to_proto(model), path)
            result.write(data.name)
            yield result
        finally:
            data.unlink(missing_ok=True)


def values_of(tensor: onnx.TensorProto) -> np.ndarray:
    """The values of a tensor, also of one in the file."""
    return numpy_helper.to_array(tensor, ROOT)
