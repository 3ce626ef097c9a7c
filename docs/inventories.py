"""Where other projects document the classes that the reference names, as inventories of intersphinx.

Their own inventories come from the network at every build, and the build must work without one. So these list the names
that our signatures have, by the page of each.
"""

from __future__ import annotations

import tempfile
import zlib
from pathlib import Path

PYTHON = "https://docs.python.org/3/"
TORCH = "https://docs.pytorch.org/docs/stable/"
NUMPY = "https://numpy.org/doc/stable/"
ONNX = "https://onnx.ai/onnx/"
ONNX_IR = "https://onnx.ai/ir-py/"

NAMES: dict[str, dict[str, str]] = {
    PYTHON: {
        **{
            f"collections.abc.{name}": f"library/collections.abc.html#collections.abc.{name}"
            for name in ("Callable", "Collection", "Iterable", "Iterator", "Mapping", "Sequence")
        },
        "os.PathLike": "library/os.html#os.PathLike",
        "pathlib.Path": "library/pathlib.html#pathlib.Path",
    },
    TORCH: {
        "torch.Tensor": "tensors.html#torch.Tensor",
        "torch.nn.modules.module.Module": "generated/torch.nn.Module.html#torch.nn.Module",
        "torch.fx.node.Node": "fx.html#torch.fx.Node",
        "torch.fx.graph.Graph": "fx.html#torch.fx.Graph",
        "torch.fx.graph_module.GraphModule": "fx.html#torch.fx.GraphModule",
        "torch.fx.proxy.Proxy": "fx.html#torch.fx.Proxy",
    },
    NUMPY: {"numpy.ndarray": "reference/generated/numpy.ndarray.html#numpy.ndarray"},
    ONNX: {
        f"onnx.onnx_ml_pb2.{name}": f"api/classes.html#{name.lower()}"
        for name in ("ModelProto", "NodeProto", "TensorProto")
    },
    ONNX_IR: {
        name: f"api/generated/{name}.html#{name}"
        for name in ("onnx_ir.Model", "onnx_ir.Node", "onnx_ir.passes.PassResult")
    },
}
"""By the address of a project's pages: the names, and the page of each."""


FOLDER = tempfile.TemporaryDirectory()
"""Of the inventories; it goes with the process."""


def intersphinx_mapping() -> dict[str, tuple[str, str]]:
    """Write the inventories: the setting of this name (format: Sphinx inventory version 2)."""
    folder = Path(FOLDER.name)
    mapping = {}
    for number, (address, names) in enumerate(NAMES.items()):
        head = (
            "# Sphinx inventory version 2",
            f"# Project: {address}",
            "# Version:",
            "# The rest is compressed: zlib.",
            "",
        )
        lines = "".join(f"{name} py:class 1 {page} -\n" for name, page in names.items())
        file = folder / f"{number}.inv"
        file.write_bytes("\n".join(head).encode() + zlib.compress(lines.encode()))
        mapping[f"other{number}"] = (address, str(file))
    return mapping
