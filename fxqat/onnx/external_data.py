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

    def write_references(self, data_name: str) -> None:
        """Write the file, with its large tensors in a file of the given name."""
        result = onnx.ModelProto()
        result.CopyFrom(self.proto)
        for tensor in result.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = data_name
        self.path.write_bytes(result.SerializeToString())

    def write_whole(self) -> None:
        """Write the file with its tensors in it, each read only when it is written: protobuf would hold three copies.

        Source: protobuf, "Encoding": a message is its fields in any order, each a tag and a value; bytes and messages
        have their length before them.
        """
        model, graph, heads, places = onnx.ModelProto(), onnx.GraphProto(), [], []
        model.CopyFrom(self.proto)
        model.ClearField("graph")
        graph.CopyFrom(self.proto.graph)
        graph.ClearField("initializer")
        for tensor in self.proto.graph.initializer:
            entries = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
            head, offset, length = onnx.TensorProto(), entries.get("offset", 0), entries.get("length", 0)
            head.CopyFrom(tensor)
            if entries:
                head.ClearField("external_data")
                head.ClearField("data_location")
            content = head.SerializeToString()
            if entries:
                content += _before_bytes(onnx.TensorProto.RAW_DATA_FIELD_NUMBER, length)
            heads.append(_before_bytes(onnx.GraphProto.INITIALIZER_FIELD_NUMBER, len(content) + length) + content)
            places.append((offset, length))
        rest = graph.SerializeToString()
        size = len(rest) + sum(len(head) + length for head, (_, length) in zip(heads, places, strict=True))
        with self.path.open("wb") as file, data_path(self.path).open("rb") as data:
            file.write(model.SerializeToString() + _before_bytes(onnx.ModelProto.GRAPH_FIELD_NUMBER, size) + rest)
            for head, (offset, length) in zip(heads, places, strict=True):
                data.seek(offset)
                content = data.read(length)
                if len(content) != length:
                    raise ExportError(f"{data_path(self.path)} ends before byte {offset + length}: is the disk full?")
                file.write(head + content)

    def files(self, target: Path) -> dict[Path, Path]:
        """The temporary files to move, by the path to move them to."""
        is_one = self.proto.ByteSize() + data_path(self.path).stat().st_size <= MAX_BYTES
        if is_one:
            self.write_whole()
        else:
            self.write_references(data_path(target).name)
        return {target: self.path} | ({} if is_one else {data_path(target): data_path(self.path)})


def _before_bytes(field: int, length: int) -> bytes:
    """What stands before bytes or a message in a protobuf message: the field, and the length in groups of 7 bits."""
    result = bytearray()
    for number in (field << 3 | 2, length):
        while number > 0x7F:
            result.append(number & 0x7F | 0x80)
            number >>= 7
        result.append(number)
    return bytes(result)


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
            result.write_references(data.name)
            yield result
        finally:
            data.unlink(missing_ok=True)


def values_of(tensor: onnx.TensorProto) -> np.ndarray:
    """The values of a tensor, also of one in the file."""
    return numpy_helper.to_array(tensor, ROOT)
