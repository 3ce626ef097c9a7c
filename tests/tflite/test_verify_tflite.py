"""The verdict on a .tflite file, and how its tensors are recognized."""

import json

import numpy as np
import pytest

from fxqat.onnx.verify import Shares
from fxqat.quantization.capture import capture
from fxqat.quantization.lower import lower
from fxqat.tflite.flatbuffer import with_float_interface
from fxqat.tflite.verify_tflite import (
    KernelParity,
    TfliteCertificate,
    TfliteOutputParity,
    TfliteTensorParity,
    verify_tflite,
)
from tests.litert_models import converted, needs_litert, small

EXACT = Shares(0.0, 0.0)


def tensor(size, off_by_1=0.0, off_by_2_plus=0.0, ties=0.0):
    return TfliteTensorParity("value", size, Shares(off_by_1, off_by_2_plus, ties), EXACT)


@pytest.mark.parametrize(
    ("tensors", "passed"),
    [
        ([tensor(1000)], True),
        ([tensor(1000, 0.01)], True),
        ([tensor(1000, 0.02)], False),  # more than 1 % of the file
        ([tensor(1000, 0.5, ties=0.495)], True),
        ([tensor(1000, 0.05), tensor(9000)], True),
        ([tensor(1000, 0.06), tensor(9000)], False),  # more than 5 % of a tensor
        ([tensor(20, 0.2), tensor(9000)], True),  # three values and 5 %
        ([tensor(100000, 0.0, 1e-5)], False),  # a single value is off by 2
    ],
)
def test_the_verdict(tensors, passed):
    parity = KernelParity(tuple(tensors), ())
    assert parity.passed is passed
    certificate = TfliteCertificate({"reference": KernelParity((), ()), "default": parity}, (), {}, {})
    assert certificate.passed is passed
    assert ("FAILED" in str(certificate)) is not passed
    assert json.loads(json.dumps(certificate.as_json()))["passed"] is passed


@pytest.mark.parametrize(("error", "mismatches"), [(0.02, 0), (0.0, 1)])
def test_an_output_that_differs_fails(error, mismatches):
    assert TfliteOutputParity("y", 0.01, 0, 1.0).passed
    assert not KernelParity((), (TfliteOutputParity("y", error, mismatches, 1.0),)).passed


def test_every_tensor_is_found_and_a_wrong_integer_is_seen():
    needs_litert()
    gm, x = small()
    captured, lowered = capture(gm, (x,), with_reals=True), lower(gm, "float")
    tensors = [record for record in lowered.tensors.values() if record.kind == "activation"]

    def verify(integers):
        outputs = {"y": next(iter(captured.outputs.values()))}
        content = with_float_interface(converted())
        return verify_tflite(content, [x.numpy()], tensors, integers, captured.reals, outputs, {})

    certificate = verify(captured.integers)
    judged = {t.name for t in certificate.kernels["default"].tensors}
    assert certificate.joined == ()
    assert certificate.passed
    assert {"x", "stem", "sigmoid", "add", "cat", "max_pool2d", "fc", "softmax"} <= judged
    shifted = captured.integers | {"add": np.clip(captured.integers["add"] + 2, -128, 127)}
    found = {t.name: t for t in verify(shifted).kernels["default"].tensors}
    assert found["add"].step.off_by_2_plus > 0.5
    assert not found["add"].passed
