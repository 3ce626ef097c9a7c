"""Products with a parameter are linear layers: one scale per output channel, int32 bias, the user's names."""

import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn import functional as F

import fxqat
from fxqat.nn.product_layer import ProductLayer
from fxqat.nn.qat import QATLayer
from fxqat.quantization.standardize import standardize
from fxqat.tools.post_training.equalize import equalize
from fxqat.tools.post_training.ptq import ptq
from fxqat.tools.to_float import to_float
from fxqat.tracing.trace import trace
from tests.builders import product_layer


class Product(nn.Module):
    """A product with a weight, in one of its spellings."""

    def __init__(self, call, transposed=False):
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(torch.randn(5, 6) if transposed else torch.randn(6, 5))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return self.call(x, self.weight, self.bias)


def in_place(x, w, b):
    y = x @ w
    y += b
    return y


SPELLINGS = {
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), False, True),
    "keywords": (lambda x, w, b: torch.addmm(mat2=w, mat1=x, input=b), False, True),
    "method addmm": (lambda x, w, b: b.addmm(x, w), False, True),
    "matmul": (lambda x, w, b: torch.matmul(x, w) + b, False, True),
    "mm": (lambda x, w, b: b + x.mm(w), False, True),
    "operator": (lambda x, w, b: x @ w, False, False),
    "in place": (in_place, False, True),
    "linear": (lambda x, w, b: F.linear(x, w.T, b), False, True),
    "t": (lambda x, w, b: x @ w.t() + b, True, True),
    "T": (lambda x, w, b: torch.addmm(b, x, w.T), True, True),
    "transpose": (lambda x, w, b: torch.matmul(x, w.transpose(0, 1)), True, False),
    "permute": (lambda x, w, b: x.matmul(w.permute(1, 0)) + b, True, True),
}


@pytest.mark.parametrize("with_values", [True, False])
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_becomes_one_layer(name, with_values):
    call, transposed, has_bias = SPELLINGS[name]
    model, x = Product(call, transposed), torch.randn(3, 6)
    gm = standardize(trace(model, example_inputs=(x,) if with_values else None).gm)
    gm.recompile()
    (layer,) = [gm.get_submodule(str(node.target)) for node in gm.graph.nodes if node.op == "call_module"]
    assert type(layer) is (nn.Linear if transposed else ProductLayer)
    assert (layer.bias is not None) is has_bias
    assert [node.op for node in gm.graph.nodes] == ["placeholder", "call_module", "output"]
    torch.testing.assert_close(gm(x), model(x))


@pytest.mark.parametrize(
    ("call", "kept"),
    [
        (lambda x, w, b: torch.addmm(b, x, w, beta=0.5), "addmm"),  # not a layer
        (lambda x, w, b: w.t() @ x.t(), "matmul"),  # the weight comes first
        (lambda x, w, b: x @ (w * 2), "matmul"),  # a computed weight
        (lambda x, w, b: torch.addmm(x[:, :5], x, w), "add"),  # a computed value is added
        (lambda x, w, b: (x @ w).add(b, alpha=2), "add"),
        (lambda x, w, b: x @ w + b[:, None].expand(5, 5)[:1], "add"),
    ],
)
def test_other_products_compute_the_same(call, kept):
    model, x = Product(call), torch.randn(3, 6)
    gm = standardize(trace(model).gm)
    gm.recompile()
    assert any(kept in node.name for node in gm.graph.nodes)
    torch.testing.assert_close(gm(x), model(x))


class Conv1D(nn.Module):
    """As GPT-2 of transformers has it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * torch.logspace(-2, 0, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.outputs)


class Block(nn.Module):
    """Two of them, and a tied head that is a product with a transpose."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.fc, self.proj = Conv1D(16, 256), Conv1D(256, 16)

    def forward(self, tokens):
        x = self.proj(F.relu(self.fc(self.embedding(tokens))))
        return x @ self.embedding.weight.t()


def prepared(backend):
    torch.manual_seed(0)
    model, tokens = Block(), torch.randint(0, 11, (2, 5))
    gm = fxqat.prepare_by_platform(model, backend, example_inputs=(tokens,))
    fxqat.calibrate(gm, [tokens], progress=False)
    fxqat.enable_quantization(gm)
    return model, gm, tokens


@pytest.mark.parametrize("backend", ["TSQAT", "ONNXRuntime"])
def test_the_layer_is_trained_and_exported_per_output_channel(backend, tmp_path):
    model, gm, tokens = prepared(backend)
    layer = gm.get_submodule("fc.linear")
    assert isinstance(layer, QATLayer)
    assert layer.weight_fake_quant.scale.shape == (256,)

    def loss(m):
        output = m(tokens)
        output.backward(torch.cos(torch.arange(output.numel())).reshape(output.shape))

    loss(gm.train())
    loss(model.train())
    grad, expected = layer.weight.grad, model.fc.weight.grad
    assert torch.cosine_similarity(grad.flatten(), expected.flatten(), dim=0) > 0.9
    assert torch.cosine_similarity(layer.bias.grad, model.fc.bias.grad, dim=0) > 0.9
    report = fxqat.convert_export(gm.eval(), (tokens,), tmp_path / "model.onnx")
    assert report.certificate.passed
    file = onnx.load(tmp_path / "model.onnx")
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in file.graph.initializer}
    assert arrays["fc.linear.weight_quantized"].shape == (16, 256)
    assert arrays["fc.linear.weight_scale"].shape == arrays["fc.linear.bias_quantized"].shape == (256,)
    assert arrays["fc.linear.bias_quantized"].dtype == "int32"
    (reads,) = [node for node in file.graph.node if node.input[0] == "fc.linear.weight_quantized"]
    assert {a.name: a.i for a in reads.attribute}["axis"] == 1
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(tmp_path / "model.onnx", options)
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("QGemm") == (2 if backend == "TSQAT" else 1)  # the second one would not pay on ONNXRuntime


def test_the_float_model_keeps_its_names(tmp_path):
    model, gm, tokens = prepared("TSQAT")
    fxqat.save_checkpoint(gm, tmp_path / "model.pth")
    saved = torch.load(tmp_path / "model.pth")["state_dict"]
    assert list(saved) == list(model.state_dict())
    Block().load_state_dict(saved, strict=True)
    back = to_float(gm)
    Block().load_state_dict(back.state_dict(), strict=True)
    torch.testing.assert_close(back(tokens), model(tokens))
    again = fxqat.prepare_by_platform(back, "TSQAT", example_inputs=(tokens,))
    assert isinstance(again.get_submodule("fc.linear"), QATLayer)


def test_tools_on_layer_matrices_take_it():
    model, _, tokens = prepared("TSQAT")
    config = {"overrides": [{"match": {"module": "proj.linear"}, "weight": {"bit": 3}}]}
    errors = []
    for method in (None, "GPTQ", "AdaRound"):
        gm = ptq(model, [tokens], "TSQAT", config, reconstruct=method)
        errors.append(float((gm(tokens) - model(tokens)).square().mean()))
    assert errors[1] < 0.8 * errors[0]
    assert errors[2] < 0.8 * errors[0]


def test_equalization_takes_it():
    model = nn.Sequential(product_layer(4, 8), nn.ReLU(), product_layer(8, 3))
    x = torch.randn(5, 4)
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    before = gm.get_submodule("0.linear").weight.detach().clone()
    (pair,) = equalize(gm)
    assert (pair.first, pair.second) == ("0.linear", "2.linear")
    assert not torch.allclose(gm.get_submodule("0.linear").weight, before)
    torch.testing.assert_close(gm(x), model(x), rtol=1e-4, atol=1e-4)
