"""An LSTM that quantizes at run time: the simulation equals ONNX Runtime's operator."""

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import fxqat
from fxqat.errors import ConfigError
from tests.export_models import constants, needs_exact_sums, node_types, run_file


class Steps(nn.Module):
    """An LSTM with or without states as inputs, and a layer that reads its steps."""

    def __init__(self, layers, bidirectional):
        super().__init__()
        self.lstm = nn.LSTM(5, 8, layers, batch_first=True, bidirectional=bidirectional)
        self.fc = nn.Linear(8 * (1 + bidirectional), 3)

    def forward(self, x, *states):
        y, (h, c) = self.lstm(x, *([states] if states else []))
        return self.fc(y), h, c


@pytest.mark.parametrize(("runtime", "dtype"), [("onnxruntime", np.int8), ("onnxruntime_avx2", np.uint8)])
@pytest.mark.parametrize(("layers", "bidirectional", "with_states"), [(2, False, False), (1, True, True)])
def test_the_file_computes_what_training_simulates(layers, bidirectional, with_states, runtime, dtype, tmp_path):
    needs_exact_sums(runtime)
    torch.manual_seed(0)
    inputs = (torch.randn(2, 4, 5),)
    if with_states:
        inputs += tuple(torch.randn(layers * (1 + bidirectional), 2, 8) for _ in range(2))
    config = {"activation": "dynamic"}
    gm = fxqat.prepare_by_platform(Steps(layers, bidirectional), "ONNXRuntime", config, example_inputs=inputs)
    fxqat.enable_quantization(gm)
    report = fxqat.convert_export(gm, inputs, tmp_path / "m.onnx", tmp_path / "m.json", runtime=runtime)
    assert max(output.step_error for output in report.certificate.outputs) < 1e-5
    proto = onnx.load(tmp_path / "m.onnx")
    assert node_types(proto).count("DynamicQuantizeLSTM") == layers
    assert "LSTM" not in node_types(proto)
    stored = [value for name, value in constants(proto).items() if name.endswith("_columns")]
    assert len(stored) == 2 * layers
    assert {value.dtype for value in stored} == {np.dtype(dtype)}

    one = tuple(tensor[:1] if number == 0 else tensor[:, :1].contiguous() for number, tensor in enumerate(inputs))
    fxqat.convert_export(gm, one, tmp_path / "one.onnx", runtime=runtime)
    for found, wanted in zip(run_file(tmp_path / "one.onnx", one), gm(*one), strict=True):
        assert np.allclose(found, wanted.detach().numpy(), atol=1e-5)

    gm.train()
    gm(*inputs)[0].square().sum().backward()
    gradients = [p.grad for name, p in gm.named_parameters() if "lstm" in name]
    assert len(gradients) == layers * (4 * (1 + bidirectional) + 2)
    assert all(gradient.isfinite().all() and gradient.abs().sum() > 0 for gradient in gradients)
    fxqat.disable_all(gm)
    assert torch.allclose(gm(*one)[0], Steps.forward(gm_as_float(gm, layers, bidirectional), *one)[0], atol=1e-6)


def gm_as_float(gm, layers, bidirectional):
    model = Steps(layers, bidirectional)
    for name, parameter in model.lstm.named_parameters():
        values = dict(gm.named_parameters())
        parameter.data = next(p for key, p in values.items() if key.endswith(f".{name}"))
    model.fc.load_state_dict({key: dict(gm.named_parameters())[f"fc.{key}"].detach() for key in ("weight", "bias")})
    return model


def test_one_lstm_of_a_model_by_an_override():
    x = torch.randn(1, 4, 5)
    change = {"match": {"type": "LSTM"}, "activation": "dynamic"}
    model = Steps(1, False)
    gm = fxqat.prepare_by_platform(model, "ONNXRuntime", {"overrides": [change]}, example_inputs=(x,))
    rows = {row.op: row.reason for row in gm.quant_report if row.weight}
    assert rows["lstm"] == "quantizes the values that it reads at run time; changed by overrides[0]"
    assert "linear" in rows
    with pytest.raises(ConfigError, match="TSQAT cannot quantize the values that 'lstm_1' .* at run time"):
        fxqat.prepare_by_platform(model, "TSQAT", {"overrides": [change]}, example_inputs=(x,))
