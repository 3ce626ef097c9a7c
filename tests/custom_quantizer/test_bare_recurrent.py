"""A model that is one recurrent layer is refused, and each remedy that the error tells works."""

import ast
import re

import pytest
import torch
from torch import nn

from fxqat import BackendType, prepare_by_platform
from fxqat.errors import ConfigError, TraceError

QUANTIZED = {"TSQAT", "Experimental", "QNN", "QNN_A16"}
"""Backends that quantize an LSTM without being asked."""


class OfUser(nn.LSTM):
    pass


def refusal(model, backend, **inputs):
    with pytest.raises(ConfigError) as caught:
        prepare_by_platform(model, backend, **inputs)
    return str(caught.value)


@pytest.mark.parametrize("inputs", [{}, {"example_inputs": torch.ones(3, 2, 4)}], ids=["without", "with"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("backend", [backend.name for backend in BackendType])
def test_a_bare_layer_is_refused_on_every_backend(backend, kind, inputs):
    message = refusal(kind(4, 4), backend, **inputs)
    assert f"the model is a bare {kind.__name__}" in message
    assert "torch.nn.Sequential(model)" in message
    assert "concrete_args" not in message
    assert "custom_tracer" not in message
    if kind is nn.LSTM:
        assert ("stays float" in message) == (backend not in QUANTIZED)


@pytest.mark.parametrize("backend", sorted({backend.name for backend in BackendType} - QUANTIZED))
def test_the_configurations_that_the_error_names_quantize_the_layer(backend):
    torch.manual_seed(0)
    lstm, x = nn.LSTM(4, 4), torch.randn(3, 2, 4)
    configs = [ast.literal_eval(found) for found in re.findall(r"\{'.*?\}\}|\{'.*?\]\}", refusal(lstm, backend))]
    assert [next(iter(config)) for config in configs] == ["extra_quantizer_dict", "overrides"]
    for config in configs:
        gm = prepare_by_platform(nn.Sequential(lstm), backend, config, example_inputs=x, check="quick")
        assert any(row.weight for row in gm.quant_report)
        torch.testing.assert_close(gm(x)[0], lstm(x)[0])


@pytest.mark.parametrize("backend", sorted(QUANTIZED))
def test_in_a_sequential_the_layer_is_quantized(backend):
    torch.manual_seed(0)
    lstm, x = nn.LSTM(4, 4), torch.randn(3, 2, 4)
    gm = prepare_by_platform(nn.Sequential(lstm), backend)
    assert any(row.weight for row in gm.quant_report)
    torch.testing.assert_close(gm(x)[0], lstm(x)[0])


@pytest.mark.parametrize(("kind", "layer"), [(nn.LSTMCell, "LSTM"), (nn.GRUCell, "GRU"), (nn.RNNCell, "RNN")])
def test_a_bare_cell_is_refused_with_the_layer_to_take(kind, layer):
    for inputs in ({}, {"example_inputs": torch.ones(2, 4)}):
        message = refusal(kind(4, 4), "TSQAT", **inputs)
        assert f"a bare {kind.__name__}, and cells stay float" in message
        assert f"torch.nn.{layer} as a module" in message


@pytest.mark.parametrize("inputs", [{}, {"example_inputs": torch.ones(3, 2, 4)}], ids=["without", "with"])
def test_a_subclass_is_told_to_use_the_layer_itself(inputs):
    with pytest.raises(TraceError, match="Remedy: make a torch.nn.LSTM itself, not a subclass, a module") as caught:
        prepare_by_platform(OfUser(4, 4), **inputs)
    assert "concrete_args" not in str(caught.value)
    assert "custom_tracer" not in str(caught.value)
