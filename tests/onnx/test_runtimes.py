"""The table of runtimes: every pass is one that changes no integer, and a name that is not in it is refused."""

import onnx_ir as ir
import pytest

from fxqat.errors import ExportError
from fxqat.onnx.runtimes import RUNTIMES, check_runtime, passes_for


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_runtime_has_passes_of_its_own(runtime: str) -> None:
    first, second = passes_for(runtime), passes_for(runtime)
    assert first
    assert all(isinstance(each, ir.passes.InPlacePass) for each in first)
    assert not set(map(id, first)) & set(map(id, second))


@pytest.mark.parametrize("runtime", ["", "tensorrt"])
def test_a_file_for_a_chip_is_not_rewritten(runtime: str) -> None:
    assert passes_for(runtime) == []


@pytest.mark.parametrize("runtime", ["tensorrt", "ONNXRuntime", "", 1, ["openvino"]])
def test_an_unknown_runtime_names_the_known_ones(runtime: object) -> None:
    with pytest.raises(ExportError, match="None or one of 'onnxruntime', 'openvino'") as caught:
        check_runtime(runtime)
    assert repr(runtime) in str(caught.value)
