"""Run an exported file on the engine that it is meant for, and compare it step by step with what it says."""

from fxqat.tools.engines.base import CompiledFile, Engine, Operator
from fxqat.tools.engines.engine_parity import EngineReport, OutputOnEngine, TensorOnEngine, add_to_certificate, verify
from fxqat.tools.engines.load import load_engine
from fxqat.tools.engines.onnxruntime_engine import runtime_here

__all__ = [
    "CompiledFile",
    "Engine",
    "EngineReport",
    "Operator",
    "OutputOnEngine",
    "TensorOnEngine",
    "add_to_certificate",
    "load_engine",
    "runtime_here",
    "verify",
]
