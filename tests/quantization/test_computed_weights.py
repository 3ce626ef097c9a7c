"""Weights that are computed from parameters: integers with a scale per channel, equal to those of a stored weight."""

import copy
import pickle
import warnings

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import fxqat
from fxqat import prepare_by_platform
from fxqat.nn.parametrized import ParametrizedQATLayer
from fxqat.nn.qat import QATLayer
from fxqat.quantization.deployed_copy import deployed_copy
from fxqat.tools import correct_bias, equalize, to_float
from tests.export_models import run_file

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


class Computes(nn.Module):
    """A convolution with a computed weight between two layers."""

    def __init__(self, weight, *shapes, call=F.conv2d):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(6, 2, 1)
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.register_buffer("mask", (torch.rand(6, 4, 3, 3) > 0.3).float())
        self.bias = nn.Parameter(torch.randn(6))
        self.weight, self.call = weight, call

    def forward(self, x):
        return self.last(torch.relu(self.call(self.first(x), self.weight(self, *self.parts), self.bias)))


def standardized(w):
    return (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)


def overwritten(m, w):
    v = w.clone().mul_(0.5)
    v[:, 0].zero_()
    return v


SHAPE = (6, 4, 3, 3)
CASES = {
    "scaled": lambda: Computes(lambda m, w: w * 0.3, SHAPE),
    "standardized": lambda: Computes(lambda m, w: standardized(w), SHAPE),
    "masked": lambda: Computes(lambda m, w: w * m.mask, SHAPE),
    "gain": lambda: Computes(lambda m, w, g: g * F.normalize(w, dim=(1, 2, 3)), SHAPE, (6, 1, 1, 1)),
    "low rank": lambda: Computes(lambda m, a, b: (a @ b).view(SHAPE), (6, 2), (2, 36)),
    "inverse": lambda: Computes(lambda m, a: torch.linalg.inv(a)[:, :4, None, None], (6, 6)),
    "buffer": lambda: Computes(lambda m: m.mask),
    "part of a buffer": lambda: Computes(lambda m: m.mask[:, :1].repeat(1, 4, 1, 1) / 9),
    "overwritten": lambda: Computes(overwritten, SHAPE),
    "transposed": lambda: Computes(lambda m, w: w.transpose(0, 1) * 2, SHAPE, call=F.conv_transpose2d),
}


def calibrated(model, backend="TSQAT"):
    gm = prepare_by_platform(model.eval(), backend, example_inputs=(X,))
    fxqat.calibrate(gm, [X])
    fxqat.enable_quantization(gm)
    return gm.eval()


def stored(model):
    """The same model with the computed weight as a parameter."""
    plain = copy.deepcopy(model)
    with torch.no_grad():
        value = model.weight(model, *model.parts)
    plain.parts = nn.ParameterList([nn.Parameter(value)])
    plain.weight = lambda m, w: w
    return plain


@pytest.mark.parametrize("backend", ["TSQAT", "ONNXRuntime"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_quantized_and_exported_as_a_stored_weight(case, backend, tmp_path):
    model = CASES[case]().eval()
    gm, other = calibrated(model, backend), calibrated(stored(model), backend)
    kinds = {isinstance(module, ParametrizedQATLayer) for module in gm.modules() if isinstance(module, QATLayer)}
    assert (True in kinds) == (len(kinds) == 2) == ((case, backend) != ("transposed", "ONNXRuntime"))
    assert [row.op for row in gm.quant_report] == [row.op for row in other.quant_report]
    torch.testing.assert_close(gm(X), other(X))
    fxqat.convert_export(gm, (X,), tmp_path / "model.onnx")
    fxqat.convert_export(other, (X,), tmp_path / "other.onnx")
    (found,) = run_file(tmp_path / "model.onnx", [X])
    torch.testing.assert_close(torch.from_numpy(found), gm(X).detach(), rtol=1e-4, atol=1e-4)
    files = [onnx.load(tmp_path / f"{name}.onnx").graph for name in ("model", "other")]
    kinds = [sorted(node.op_type for node in graph.node) for graph in files]
    sizes = [sorted((tensor.data_type, *tensor.dims) for tensor in graph.initializer) for graph in files]
    assert kinds[0] == kinds[1]
    assert sizes[0] == sizes[1]


def test_what_it_is_computed_from_is_trained():
    gm = calibrated(CASES["gain"]()).train()
    gm(X).square().sum().backward()
    trained = {name: p for name, p in gm.named_parameters() if "parametrizations" in name}
    assert len(trained) == 2
    assert all(p.grad.abs().max() > 0 for p in trained.values())


def test_two_calls_with_one_computed_weight_share_a_layer():
    def twice(x, weight, bias):
        return F.conv2d(x, weight, bias) + F.conv2d(x.flip(1), weight, bias)

    gm = calibrated(Computes(lambda m, w: w * 2, SHAPE, call=twice))
    layers = [gm.get_submodule(str(node.target)) for node in gm.graph.nodes if node.op == "call_module"]
    first, second = (layer for layer in layers if isinstance(layer, ParametrizedQATLayer))
    assert first is second


def by_mode(m, w):
    return w * 2 if m.training else w * 3


def counted(m, w):
    m.mask.mul_(0.9)
    return w * m.mask


def counted_in_part(m, w):
    m.mask[0].mul_(0.9)
    return w * m.mask


@pytest.mark.parametrize("weight", [by_mode, counted, counted_in_part])
def test_a_weight_that_a_parametrization_would_not_compute_alike_is_a_value(weight):
    model = Computes(weight, SHAPE).eval()
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(X,), check="off").eval()
    torch.testing.assert_close(gm(X), model(X))
    assert not any(isinstance(module, ParametrizedQATLayer) for module in gm.modules())
    assert sum(isinstance(module, QATLayer) for module in gm.modules()) == 2


def test_a_weight_that_depends_on_the_input_is_a_value():
    gm = calibrated(Computes(lambda m, w: w, SHAPE, call=lambda x, w, b: F.conv2d(x, w * x.mean(), b)))
    assert not any(isinstance(module, ParametrizedQATLayer) for module in gm.modules())
    assert sum(isinstance(module, QATLayer) for module in gm.modules()) == 2


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 8))


class Symmetric(nn.Module):
    """A parametrization of a user."""

    def __init__(self):
        super().__init__()
        self.strength = nn.Parameter(torch.tensor(0.5))

    def forward(self, w):
        return w + self.strength * w.flip(-1)


NORMS = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "of a user": lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
    "two": lambda layer: parametrize.register_parametrization(NORMS["of a user"](layer), "weight", Symmetric()),
}


def old_weight_norm(layer, dim=0):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, and still in many models
        return weight_norm(layer, dim=dim)


HOOKS = {
    "weight norm": old_weight_norm,
    "one norm": lambda layer: old_weight_norm(layer, None),
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "pruned twice": lambda layer: prune.random_structured(HOOKS["pruned"](layer), "weight", 2, dim=0),
    "pruned bias": lambda layer: prune.l1_unstructured(layer, "bias", 0.5),
    "both": lambda layer: prune.l1_unstructured(old_weight_norm(layer), "bias", 0.5),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_what_a_hook_of_torch_computes_is_quantized(hook):
    model, plain = layers(), layers()
    for place in (0, 4):
        HOOKS[hook](model[place])
        plain[place].load_state_dict({"weight": model[place].weight, "bias": model[place].bias})
    gm, other = calibrated(model), calibrated(plain)
    assert all(isinstance(gm.get_submodule(path), ParametrizedQATLayer) for path in ("0", "4"))
    torch.testing.assert_close(gm(X), other(X))
    found = to_float(gm)
    assert found.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(found.eval()(X), model.eval()(X))


def test_what_is_pruned_stays_zero_in_training_and_in_the_file(tmp_path):
    model = layers()
    prune.l1_unstructured(model[0], "weight", 0.5)
    mask = model[0].weight_mask.bool()
    gm = calibrated(model).train()
    optimizer = torch.optim.SGD(gm.parameters(), 0.1)
    before = gm.get_submodule("0").weight.detach()
    for _ in range(3):
        optimizer.zero_grad()
        gm(X).square().sum().backward()
        optimizer.step()
    assert not torch.equal(gm.get_submodule("0").weight, before)
    fxqat.convert_export(gm.eval(), (X,), tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    (integers,) = (onnx.numpy_helper.to_array(t) for t in graph.initializer if tuple(t.dims) == (6, 4, 3, 3))
    assert not integers[~mask.numpy()].any()
    assert integers[mask.numpy()].any()


def test_other_hooks_leave_a_layer_float():
    model = layers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        prune.l1_unstructured(spectral_norm(model[0]), "bias", 0.5)
    old_weight_norm(model[4]).register_forward_hook(lambda module, args, output: print(end=""))
    gm = prepare_by_platform(model.eval(), "TSQAT", example_inputs=(X,))
    assert not any(isinstance(module, QATLayer) for module in gm.modules())
    torch.testing.assert_close(gm(X), model(X))


@pytest.mark.parametrize("norm", NORMS)
def test_a_parametrized_layer_of_torch_keeps_its_names(norm, tmp_path):
    model, plain = layers(), layers()
    for layer in (model[0], model[4]):
        NORMS[norm](layer)
    with torch.no_grad():
        plain.load_state_dict(model.state_dict() | {"0.weight": model[0].weight, "4.weight": model[4].weight}, False)
    gm, other = calibrated(model), calibrated(plain)
    assert all(isinstance(gm.get_submodule(path), ParametrizedQATLayer) for path in ("0", "4"))
    torch.testing.assert_close(gm(X), other(X))
    names = {name for name, _ in model.named_parameters() if not name.startswith("1.")}
    assert names <= {name for name, _ in gm.named_parameters()}
    fxqat.convert_export(gm, (X,), tmp_path / "model.onnx")
    integers = [t for t in onnx.load(tmp_path / "model.onnx").graph.initializer if t.data_type == onnx.TensorProto.INT8]
    assert {tuple(t.dims) for t in integers} >= {(6, 4, 3, 3), (8, 216)}


def test_a_layer_with_two_names_stays_one():
    torch.manual_seed(0)
    layer = parametrizations.weight_norm(nn.Conv2d(4, 4, 1))
    gm = calibrated(nn.Sequential(layer, nn.ReLU(), nn.Sequential(layer)))
    found = [module for module in gm.modules() if isinstance(module, ParametrizedQATLayer)]
    assert len(found) == 1
    assert [node.target for node in gm.graph.nodes if node.op == "call_module"].count("0") == 2


def test_what_runs_without_gradients_has_none():
    def centred(m, w):
        with torch.no_grad():
            mean = w.mean()
        return w - mean

    gm = calibrated(Computes(centred, SHAPE)).train()
    (parameter,) = (p for name, p in gm.named_parameters() if "parametrizations" in name)
    fxqat.disable_all(gm)
    model = Computes(centred, SHAPE)
    gm(X).square().sum().backward()
    model(X).square().sum().backward()
    torch.testing.assert_close(parameter.grad, model.parts[0].grad)
    assert abs(float(parameter.grad.sum())) > 1e-3


@pytest.mark.parametrize("case", ["gain", "low rank", "buffer", "part of a buffer"])
def test_the_float_model_computes_the_weight_again(case):
    model = CASES[case]().eval()
    found = to_float(prepare_by_platform(model, "TSQAT", example_inputs=(X,)))
    assert found.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(found.eval()(X), model(X))


class OwnConv(nn.Conv2d):
    """A convolution with a forward of its own, whose parametrizations are traced."""

    def forward(self, x):
        return F.conv2d(x, self.weight * 0.5, self.bias)


@pytest.mark.parametrize("norm", NORMS)
def test_the_parametrization_of_a_subclass_is_traced(norm):
    torch.manual_seed(0)
    model = nn.Sequential(NORMS[norm](OwnConv(4, 6, 3)), nn.ReLU(), NORMS[norm](OwnConv(6, 4, 3))).eval()
    gm = calibrated(model)
    assert sum(isinstance(module, ParametrizedQATLayer) for module in gm.modules()) == 2
    found = to_float(gm)
    assert found.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(found.eval()(X), model(X))
    fxqat.disable_all(gm)
    torch.testing.assert_close(gm(X), model(X))


def test_preparing_a_model_in_training_does_not_iterate_its_spectral_norm():
    model = nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(4, 6, 3)), nn.ReLU()).train()
    before = copy.deepcopy(model.state_dict())
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(X,))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in gm.state_dict().items() if name in before)


class Upsampling(nn.Module):
    """A convolution, and a transposed one with a computed weight, which ONNXRuntime leaves float."""

    def __init__(self, compute):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.compute = nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 6, 3), compute

    def forward(self, x):
        return self.compute(self, self.first(x))


UPSAMPLINGS = {
    "weight norm": (parametrizations.weight_norm, lambda m, y: m.last(y)),
    "hook": (old_weight_norm, lambda m, y: m.last(y)),
    "forward": (lambda layer: layer, lambda m, y: F.conv_transpose2d(y, m.last.weight * 2, m.last.bias)),
}


@pytest.mark.parametrize("case", UPSAMPLINGS)
def test_a_computed_weight_that_stays_float_is_a_constant_of_the_file(case, tmp_path):
    norm, compute = UPSAMPLINGS[case]
    model = Upsampling(compute)
    norm(model.last)
    gm = calibrated(model, "ONNXRuntime")
    assert not any(isinstance(module, ParametrizedQATLayer) for module in gm.modules())
    assert torch.equal(pickle.loads(pickle.dumps(gm))(X), gm(X))
    (kept,) = (module for module in deployed_copy(gm).modules() if isinstance(module, nn.ConvTranspose2d))
    assert type(kept) is nn.ConvTranspose2d
    names = set(gm.state_dict())
    fxqat.convert_export(gm, (X,), tmp_path / "model.onnx")
    (found,) = run_file(tmp_path / "model.onnx", [X])
    torch.testing.assert_close(torch.from_numpy(found), gm(X).detach(), rtol=1e-4, atol=1e-4)
    graph = onnx.load(tmp_path / "model.onnx").graph
    (layer,) = (node for node in graph.node if node.op_type == "ConvTranspose")
    assert layer.input[1] in {tensor.name for tensor in graph.initializer}
    assert [tuple(t.dims) for t in graph.initializer].count((4, 6, 3, 3)) == 1
    assert set(gm.state_dict()) == names


def test_nothing_inside_a_computation_of_parameters_is_rounded():
    model = Computes(lambda m, w, g: w * g.sigmoid(), SHAPE, (6, 1, 1, 1), call=lambda x, w, b: x * w.mean() + b.mean())
    model.last = nn.Conv2d(4, 2, 1)
    gm = prepare_by_platform(model.eval(), "TSQAT", example_inputs=(X,))
    rows = {row.op: row for row in reversed(gm.quant_report.rows)}  # the first of each op
    constant = "computed from parameters alone: a constant, quantized where a quantized operation reads it"
    assert [rows[op].reason for op in ("sigmoid", "mul")] == [constant] * 2
    assert [bool(rows[op].output) for op in ("sigmoid", "mul", "mean")] == [False, False, True]


def product(spelling):
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(8, 8), nn.Linear(6, 4)
            self.weight, self.bias = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(6))

        def forward(self, x):
            return self.last(torch.relu(spelling(self, self.first(x))))

    return Product()


PRODUCTS = {
    "linear": lambda m, y: F.linear(y, F.normalize(m.weight)),
    "type of another": lambda m, y: F.linear(y, m.weight.type_as(y), m.bias.to(y)),
    "device of another": lambda m, y: F.linear(y, m.weight.to(y.device), m.bias.to(device=y.device)),
    "dtype of another": lambda m, y: F.linear(y, m.weight.to(y.dtype), m.bias.to(y.dtype)),
    "transposed": lambda m, y: F.linear(y, (m.weight * 2).t().contiguous().t()),
    "matmul": lambda m, y: y @ F.normalize(m.weight).T,
    "product": lambda m, y: torch.matmul(y, (m.weight * 0.3).t().contiguous()),
    "bias": lambda m, y: torch.mm(y, (m.weight - m.weight.mean(0)).t()) + m.bias,
    "addmm": lambda m, y: torch.addmm(m.bias, y, m.weight.exp().t()),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_a_product_with_a_computed_weight_is_a_layer(case):
    model, x = product(PRODUCTS[case]).eval(), torch.randn(5, 8)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    called = [isinstance(module, ParametrizedQATLayer) for module in gm.modules() if isinstance(module, QATLayer)]
    assert called == [False, "another" not in case, False]
    assert [row.op for row in gm.quant_report if row.status == "quantized"][1:4] == ["linear", "linear", "linear"]
    torch.testing.assert_close(gm(x), model(x))


def test_a_product_of_two_computed_weights_is_part_of_the_weight():
    model = product(lambda m, y: F.linear(y, F.normalize(m.weight) @ m.weight.T @ m.weight)).eval()
    x = torch.randn(5, 8)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert sum(isinstance(module, ParametrizedQATLayer) for module in gm.modules()) == 1
    torch.testing.assert_close(gm(x), model(x))


@pytest.mark.parametrize("case", [case for case in PRODUCTS if "another" in case])
def test_the_type_of_another_is_that_of_the_model(case):
    x = torch.randn(5, 8)
    gm = prepare_by_platform(product(PRODUCTS[case]), "TSQAT", example_inputs=(x,)).bfloat16()
    assert gm(x.bfloat16()).dtype is torch.bfloat16
    assert gm.quant_report.remarks == []


def overwritten_bias(b):
    bias = b.clone()
    bias[2:4].zero_()
    return bias


BIASES = {
    "scaled": lambda b: b * 0.1,
    "joined": lambda b: torch.cat([b[:2], torch.zeros(2), b[4:]]),
    "overwritten": overwritten_bias,
    "of a product": lambda b: F.linear(b, torch.outer(b, b)),
}


@pytest.mark.parametrize("backend", ["TSQAT", "ONNXRuntime"])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("weight", [lambda m, w: w, lambda m, w: w * 0.3], ids=["stored weight", "computed weight"])
def test_a_computed_bias_is_the_bias_of_its_layer(weight, bias, backend, tmp_path):
    model = Computes(weight, SHAPE, call=lambda x, w, b: F.conv2d(x, w, BIASES[bias](b))).eval()
    plain = stored(model)
    plain.call, plain.bias.data = F.conv2d, BIASES[bias](model.bias).detach()
    gm, other = calibrated(model, backend), calibrated(plain, backend)
    assert [row.op for row in gm.quant_report if row.op != "get_attr"] == [row.op for row in other.quant_report]
    assert sum(isinstance(module, ParametrizedQATLayer) for module in gm.modules()) == 1
    torch.testing.assert_close(gm(X), other(X))
    for quantized in (gm, other):
        quantized(X).square().sum().backward()
    gradient = next(p.grad for name, p in other.named_parameters() if name.endswith("conv2d.bias"))
    (expected,) = torch.autograd.grad(BIASES[bias](model.bias), model.bias, gradient)
    found = next(p.grad for name, p in gm.named_parameters() if "bias.original" in name)
    torch.testing.assert_close(found, expected)
    report = fxqat.convert_export(gm, (X,), tmp_path / "model.onnx")
    fxqat.convert_export(other, (X,), tmp_path / "other.onnx")
    assert report.certificate.passed
    kinds = [sorted(n.op_type for n in onnx.load(tmp_path / f"{name}.onnx").graph.node) for name in ("model", "other")]
    assert kinds[0] == kinds[1]
    torch.testing.assert_close(to_float(gm).eval()(X), model(X))


def test_two_calls_with_two_computed_biases_are_two_layers():
    model = product(lambda m, y: F.linear(y, m.weight, m.bias * 2) * F.linear(y, m.weight, m.bias * 3)).eval()
    x = torch.randn(5, 8)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert sum(isinstance(module, ParametrizedQATLayer) for module in gm.modules()) == 2
    torch.testing.assert_close(gm(x), model(x))


def test_what_is_no_bias_of_a_layer_is_added():
    model = product(lambda m, y: F.linear(y, m.weight, m.bias.sum(0, keepdim=True) + m.bias)).eval()
    one = product(lambda m, y: F.linear(y, m.weight, m.bias.sum(0, keepdim=True))).eval()
    x = torch.randn(5, 8)
    for each, count in ((model, 1), (one, 0)):
        gm = prepare_by_platform(each, "TSQAT", example_inputs=(x,))
        assert sum(isinstance(module, ParametrizedQATLayer) for module in gm.modules()) == count
        assert [row.op for row in gm.quant_report].count("add") == 1 - count
        torch.testing.assert_close(gm(x), each(x))


def test_post_training_tools_leave_a_computed_bias():
    model = Computes(lambda m, w: w, SHAPE, call=lambda x, w, b: F.conv2d(x, w, b * 0.1)).eval()
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(X,))
    before = gm.get_submodule("parts.conv2d").bias.detach().clone()
    equalize(gm, [X])
    torch.testing.assert_close(gm(X), model(X))
    fxqat.calibrate(gm, [X])
    assert correct_bias(gm, [X]).keys() == {"first", "last"}
    assert torch.equal(gm.get_submodule("parts.conv2d").bias, before)


def test_preparing_leaves_the_state_of_what_computes_a_weight():
    model = product(lambda m, y: F.linear(y, m.inner.weight * 2, m.bias * 2)).train()
    model.inner = parametrizations.spectral_norm(nn.Linear(8, 6, bias=False))
    before = copy.deepcopy(model.state_dict())
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(torch.randn(5, 8),))
    assert sum(isinstance(module, ParametrizedQATLayer) for module in gm.modules()) == 1
    found = [value for name, value in gm.state_dict().items() if name.endswith("._u")]
    assert any(torch.equal(value, before["inner.parametrizations.weight.0._u"]) for value in found)
