"""Capture: the integers of every quantized value, by a formula written here once more."""

import numpy as np
import pytest
import torch

from fxqat import disable_all
from fxqat.errors import ExportError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.quantization.capture import capture
from fxqat.utils.fx_graph import called_module
from fxqat.utils.tensors import flatten_tensors
from tests.models import BACKENDS, TOYS, calibrated, inputs


def quantizers(gm):
    """Tensor name -> quantizer."""
    calls = [node for node in gm.graph.nodes if isinstance(called_module(node), FakeQuantizeBase)]
    return {node.kwargs["tensor_name"]: called_module(node) for node in calls}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TOYS)
def test_every_value_is_captured_within_its_range(name, backend):
    gm = calibrated(name, backend)
    captured = capture(gm, inputs(name))
    integers, outputs = captured.integers, captured.outputs
    quants = quantizers(gm)
    assert set(integers) == set(quants)
    for key, values in integers.items():
        scheme = quants[key].scheme
        assert values.dtype == np.int32
        assert scheme.quant_min <= values.min() <= values.max() <= scheme.quant_max
    with torch.no_grad():
        expected = flatten_tensors(gm(*inputs(name)))
    assert all(np.array_equal(a.numpy(), b) for a, b in zip(expected, outputs, strict=True))


def test_the_integers_are_those_of_the_formula():
    gm = calibrated("conv_bn_relu", "Experimental")
    (x,) = inputs("conv_bn_relu")
    captured = capture(gm, (x,))
    integers, outputs = captured.integers, captured.outputs
    for name, tensor in (("x", x), ("fc", torch.from_numpy(outputs[0]))):
        scale, zero_point = (value.numpy() for value in quantizers(gm)[name].qparams())
        expected = np.clip(np.rint(tensor.numpy() / scale) + zero_point, 0, 255)
        assert np.array_equal(integers[name], expected)
    assert integers["x"].std() > 10


def test_values_on_the_grid_are_copies():
    gm = calibrated("slices")
    integers = capture(gm, inputs("slices")).integers
    assert np.array_equal(integers["getitem"], integers["conv1"][:, :4])
    assert np.array_equal(integers["cat"][:, :2], integers["conv2"][:, :2])
    assert np.array_equal(integers["getitem_6"], integers["getitem_5"].reshape(4, 8, 64).transpose(0, 2, 1)[:, ::2])


def test_the_model_is_not_changed():
    gm = calibrated("residual").train()
    disable_all(gm)
    state = {key: value for key, value in gm.state_dict().items() if torch.is_tensor(value)}
    before = {key: value.clone() for key, value in state.items()}
    capture(gm, inputs("residual"))
    assert all(module.training for module in gm.modules())
    assert not any(quant.fake_quant_enabled for _, quant in named_fake_quants(gm))
    assert all(torch.equal(value, before[key]) for key, value in state.items())
    assert not any(module._forward_hooks for module in gm.modules())


def test_inputs_that_do_not_fit_are_an_export_error():
    gm = calibrated("residual")
    with pytest.raises(ExportError, match="does not run on example_inputs: .*channels") as caught:
        capture(gm, (inputs("residual")[0][:, :1],))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not any(module._forward_hooks for module in gm.modules())
