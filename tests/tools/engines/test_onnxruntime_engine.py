"""Which runtime a file is written for on a processor."""

import pytest

from fxqat.onnx.runtimes import rewriting_for
from fxqat.onnx.unsigned_weights import UnsignedWeights
from fxqat.tools.engines import runtime_here


@pytest.mark.parametrize("saturates", [True, False])
def test_the_runtime_here_keeps_the_sums_of_the_processor_exact(
    saturates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxqat.tools.engines.onnxruntime_engine.sums_saturate", lambda: saturates)
    assert runtime_here() == ("onnxruntime_avx2" if saturates else "onnxruntime")
    assert any(isinstance(each, UnsignedWeights) for each in rewriting_for(runtime_here()).types) == saturates
