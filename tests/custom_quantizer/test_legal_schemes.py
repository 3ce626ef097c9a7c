"""A configuration outside of a backend's legal schemes is refused; the message says what is possible, and where."""

import pytest

from fxqat.custom_quantizer.backend_type import TABLES, backend_spec
from fxqat.custom_quantizer.legal_schemes import check_legal
from fxqat.errors import ConfigError
from fxqat.scheme import QuantizeScheme
from tests.models import prepared, unlimited

ALL_BUT_TENSORRT = "TSQAT, Experimental, ONNXRuntime, ONNXRuntime_AVX2"


def qconfig(**entries):
    return {"extra_qconfig_dict": entries}


def rule(match, **changes):
    return {"overrides": [{"match": match, **changes}]}


REFUSED = {
    # name: (backend, configuration, words of the message)
    "3 bits": (
        "TensorRT",
        qconfig(w_qscheme={"bit": 3}),
        "extra_qconfig_dict: w_qscheme: TensorRT cannot run int3 sym",
    ),
    "the alternatives": (
        "TensorRT",
        qconfig(w_qscheme={"bit": 3}),
        f"the backends that can run it: {ALL_BUT_TENSORRT}.",
    ),
    "what it takes": ("TensorRT", rule({"module": "fc"}, output={"symmetric": False}), "takes int8 sym. Choose"),
    "16 bits": ("ONNXRuntime", qconfig(a_qscheme={"bit": 16}), "a_qscheme: ONNXRuntime cannot run uint16 asym"),
    "one layer": (
        "OpenVINO",
        rule({"module": "layer1.*.conv1"}, weight={"bit": 4}),
        r"overrides\[0\]: weight: OpenVINO cannot run int4 .* \(of 'layer1_0_conv1'\)",
    ),
    "an odd zero point": (
        "OpenVINO",
        rule({"module": "stem"}, output={"even_zero_point": False}),
        r"overrides\[0\]: output: .* uint8 asym per-tensor with any zero point .* takes int8/uint8 with an even zero",
    ),
    "a value": ("QNN", rule({"node": "stem"}, value={"signed": True}), r"overrides\[0\]: value: QNN cannot run int8"),
    "per channel": ("Vitis", qconfig(w_qscheme={"per_channel": True}), "takes int8 sym per-tensor pot"),
    "float32 scales": ("Vitis", qconfig(a_qscheme={"pot_scale": False}), "Vitis cannot run int8 sym per-tensor"),
    "the first layers": ("ArmCPU", {"first": {"weight": {"bit": 6}}}, "first: weight: ArmCPU cannot run int6"),
    "a function": ("X86", {"overrides": [lambda path, now: {"activation": {"bit": 4}}]}, r"overrides\[0\]: activation"),
    "saturating sums": ("ONNXRuntime_AVX2", qconfig(w_qscheme={"bit": 8}), "takes int2-7/uint2-7"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_what_is_possible(case):
    backend, config, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        prepared("residual", backend, config)


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        ("TSQAT", qconfig(w_qscheme={"bit": 3, "symmetry": False}, a_qscheme={"bit": 16, "signed": False})),
        ("Experimental", qconfig(w_qscheme={"bit": 2}, a_qscheme={"bit": 4, "symmetry": False})),
        ("ONNXRuntime", qconfig(w_qscheme={"bit": 4}, a_qscheme={"signed": True})),
        ("TensorRT", qconfig(w_qscheme={"per_channel": False}, w_observer="MSE")),
        ("QNN", qconfig(w_qscheme={"bit": 4}, a_qscheme={"bit": 16})),
    ],
)
def test_what_is_legal_is_taken(backend, config):
    report = prepared("residual", backend, config).quant_report
    assert report.backend == backend
    assert report.num_quantized > 0


def test_a_table_takes_its_own_schemes():
    for spec in TABLES:
        weights = [spec.weight, *spec.weights.values()]
        assert all(spec.takes("weight", config.scheme) for config in weights), spec.name
        assert spec.takes("activation", spec.activation.scheme), spec.name


def test_a_table_without_limits_takes_everything():
    check_legal(unlimited("TensorRT"), "weight", QuantizeScheme(3), "here")
    with pytest.raises(ConfigError, match="here: TensorRT cannot run int3 sym per-tensor. For weights"):
        check_legal(backend_spec("TensorRT"), "weight", QuantizeScheme(3), "here")
