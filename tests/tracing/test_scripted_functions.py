"""Scripted functions are traced as Python."""

import warnings

import pytest
import torch
from torch import nn

import fxqat
from fxqat.tracing.scripted_functions import scripted_as_python

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit is deprecated; models in use have such functions

    @torch.jit.script
    def snake(x, factor):
        """The activation of audio decoders."""
        shape = x.shape
        x = x.reshape(shape[0], shape[1], -1)
        return (x + (factor + 1e-9).reciprocal() * torch.sin(factor * x).pow(2)).reshape(shape)

    @torch.jit.script
    def gate(x, slope: float = 2.0):
        return torch.sigmoid(slope * x)

    def twice(x):
        return 2 * x

    double = torch.jit.trace(twice, torch.ones(2, 3, 8))


class Audio(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv1d(3, 4, 3), nn.Conv1d(4, 2, 1)
        self.factor = nn.Parameter(torch.rand(1, 4, 1) + 0.5)

    def forward(self, x):
        x = snake(self.first(double(x)), self.factor)
        return self.last(x * gate(x, slope=1.5))


@pytest.mark.parametrize("with_inputs", [True, False])
def test_scripted_functions_are_traced_into(with_inputs, tmp_path):
    model, x = Audio(), torch.randn(2, 3, 8)
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,) if with_inputs else None)
    assert not gm.quant_report.leaves
    assert {"sin", "sigmoid"} <= {row.op for row in gm.quant_report if row.status == "quantized"}
    other = torch.randn(3, 3, 11)
    torch.testing.assert_close(gm(other), model(other))
    fxqat.calibrate(gm, [x])
    fxqat.enable_quantization(gm)
    assert fxqat.convert_export(gm, (x,), tmp_path / "model.onnx").certificate.passed


def test_scripted_functions_run_as_always_with_tensors():
    before = torch.jit.ScriptFunction.__call__
    x = torch.randn(2, 3)
    expected = gate(x)
    with scripted_as_python():
        assert torch.equal(gate(x), expected)
        with pytest.raises(RuntimeError, match="expected at most 2 argument"):
            gate(x, 1.0, 2.0)  # which comes from the compiled function
    assert torch.jit.ScriptFunction.__call__ is before
