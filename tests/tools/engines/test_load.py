"""Engines are found by name; a missing package, an unknown name or setting is an error that says what to do."""

import sys

import pytest

from fxqat.errors import ExportError
from fxqat.tools.engines import load_engine


def test_onnxruntime_needs_no_extra() -> None:
    engine = load_engine("onnxruntime", threads=2)
    assert (engine.name, engine.threads) == ("onnxruntime", 2)
    assert engine.version.count(".") == 2


@pytest.mark.parametrize(
    ("name", "module", "remedy"),
    [
        ("openvino", "openvino", r"openvino: pip install \"fxqat\[engines\]\""),
        ("litert", "ai_edge_litert", r"ai-edge-litert: pip install \"fxqat\[litert\]\""),
        ("qnn", "onnxruntime_qnn", "onnxruntime-qnn: pip install onnxruntime-qnn, after reading"),
    ],
)
def test_a_missing_package_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ExportError, match=f"the engine {name} needs the package {remedy}") as raised:
        load_engine(name)
    assert isinstance(raised.value.__cause__, ImportError)


def test_unknown_names_and_settings_are_refused() -> None:
    with pytest.raises(ExportError, match="unknown engine 'open-vino': did you mean 'openvino'"):
        load_engine("open-vino")
    with pytest.raises(ExportError, match="the engine onnxruntime has no setting 'thread': did you mean 'threads'"):
        load_engine("onnxruntime", thread=1)
