"""Qualcomm's QNN on its x86 simulator of the Hexagon tensor processor. Its licence: ``docs/howto/engines.rst``."""

from __future__ import annotations

from typing import Any

import onnxruntime as ort

from fxqat.errors import ExportError
from fxqat.onnx.ort_runs import explained
from fxqat.tools.engines.base import CompiledFile, Engine, Operator, known_names, needed, nodes_in
from fxqat.tools.engines.onnxruntime_engine import SUFFIX, OnnxRuntimeFile

INSTALL = "pip install onnxruntime-qnn, after reading Qualcomm's licence in it"
PROVIDER = "QNNExecutionProvider"


class QnnFile(OnnxRuntimeFile):
    """A session whose nodes run on QNN where it takes them, else on the CPU."""

    def operators(self) -> tuple[Operator, ...]:
        """The nodes as they are assigned: those of QNN run on integers."""
        known, found = known_names(self.content), []
        for part in self.session.get_provider_graph_assignment_info():
            for node in part.get_nodes():
                if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
                    nodes = nodes_in([node.name], known, SUFFIX)
                    found.append(Operator(node.name, node.op_type, part.ep_name == PROVIDER, nodes))
        return tuple(found)


class QnnEngine(Engine):
    """ONNX Runtime with Qualcomm's provider, on the simulated Hexagon tensor processor."""

    name = "qnn"

    def __init__(self, threads: int = 1) -> None:
        super().__init__(threads)
        with needed("onnxruntime-qnn", self.name, INSTALL):
            import onnxruntime_qnn
        self.package: Any = onnxruntime_qnn

    @property
    def version(self) -> str:
        """The version of onnxruntime-qnn."""
        return str(self.package.__version__)

    def compile(self, content: bytes) -> CompiledFile:
        """A session on QNN; ``ExportError`` if there is no QNN device, or it cannot load the file."""
        with explained():
            if all(device.ep_name != PROVIDER for device in ort.get_ep_devices()):
                ort.register_execution_provider_library(PROVIDER, self.package.get_library_path())
            devices = [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]
            if not devices:
                raise ExportError("onnxruntime-qnn finds no device on this machine")
            options = ort.SessionOptions()
            options.intra_op_num_threads = self.threads
            options.log_severity_level = 3
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
            options.add_provider_for_devices(devices[:1], {"backend_path": self.package.get_qnn_htp_path()})
            return QnnFile(ort.InferenceSession(content, options), content, self.threads)
