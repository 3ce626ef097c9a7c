"""Backends by enum, by name, or as a table of one's own."""

import dataclasses

import pytest

from fxqat.custom_quantizer.backend_type import BACKENDS, BackendType, backend_spec
from fxqat.custom_quantizer.backends.tensorrt import TENSORRT
from fxqat.custom_quantizer.backends.tsqat import TSQAT
from fxqat.errors import ConfigError
from tests.models import BACKENDS as NAMES
from tests.models import FURTHER_BACKENDS, VARIANTS, prepared


def test_every_member_has_a_table():
    assert set(BACKENDS) == set(BackendType)
    assert {*NAMES, *FURTHER_BACKENDS, *VARIANTS} == {member.value for member in BackendType}
    assert tuple(member.name for member in BackendType) == tuple(member.value for member in BackendType)


@pytest.mark.parametrize("name", [*NAMES, "QNN", "OpenVINO_AVX2"])
def test_member_and_name_mean_the_same(name):
    assert backend_spec(name) is backend_spec(BackendType(name))
    assert prepared("residual", name).quant_report == prepared("residual", BackendType(name)).quant_report


def test_a_table_of_ones_own_is_taken_as_it_is():
    mine = dataclasses.replace(TSQAT, name="Mine", rules={"conv2d": TSQAT.rules["weighted"]})
    assert backend_spec(mine) is mine
    report = prepared("residual", mine).quant_report
    assert report.backend == "Mine"
    assert {row.op for row in report if row.weight} == {"conv2d"}
    assert report.row("fc").reason == "Mine has no rule for linear"


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("TSQUAT", "TSQAT"),
        ("ONNX", "ONNXRuntime"),
        ("onnxruntime", "ONNXRuntime"),
        ("tsqat", "TSQAT"),
        ("TRT", "TensorRT"),
        ("open_vino", "OpenVINO"),
        ("OpenVINO-AVX2", "OpenVINO_AVX2"),
        ("onnxruntime avx2", "ONNXRuntime_AVX2"),
        ("qnn-a16", "QNN_A16"),
        ("vitisai", "Vitis"),
        ("arm", "ArmCPU"),
        ("x86_64", "X86"),
        ("tflite", "LiteRT"),
    ],
)
def test_an_unknown_name_names_the_nearest(wrong, nearest):
    with pytest.raises(ConfigError, match=f"unknown backend '{wrong}'") as caught:
        backend_spec(wrong)
    assert f"did you mean {nearest!r}" in str(caught.value)
    assert "TSQAT, Experimental, ONNXRuntime, TensorRT" in str(caught.value)


@pytest.mark.parametrize("wrong", [None, 3, TENSORRT.name.encode(), {"name": "TSQAT"}])
def test_what_is_no_backend_is_an_error(wrong):
    with pytest.raises(ConfigError, match="unknown backend") as caught:
        backend_spec(wrong)
    assert repr(wrong) in str(caught.value)
