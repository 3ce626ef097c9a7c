"""Split ops: what a backend computes by several ops computes the same, and has quantizers between them."""

import onnxruntime
import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from fxqat import calibrate, convert_export, disable_all, enable_quantization, prepare_by_platform
from fxqat.config.effective import effective_config
from fxqat.errors import ConfigError
from fxqat.quantization.split_ops import SPLITS, split_ops
from fxqat.quantization.standardize import standardize

CALLS = {
    "silu": (nn.SiLU(inplace=True), lambda x: F.silu(x), lambda x: F.silu(x, inplace=True)),
    "leaky_relu": (
        *(nn.LeakyReLU(), nn.LeakyReLU(0.3, inplace=True), lambda x: F.leaky_relu(x), lambda x: F.leaky_relu(x, 0.0)),
        *(lambda x: F.leaky_relu(x, 0.2, True), lambda x: F.leaky_relu(input=x, negative_slope=1)),
    ),
    "adaptive_avg_pool2d": (
        *(nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d((1, 1)), lambda x: F.adaptive_avg_pool2d(x, 1)),
        lambda x: F.adaptive_avg_pool2d(x, output_size=[1, 1]),
    ),
}


class Wrapped(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x * 2)


PARTS = {
    "silu": [torch.sigmoid, torch.mul],
    "leaky_relu": [torch.mul, torch.maximum],
    "adaptive_avg_pool2d": [torch.mean],
}


def split(call):
    return split_ops(standardize(fx.symbolic_trace(Wrapped(call))), lambda node: True)


def targets(gm):
    return [node.target for node in gm.graph.nodes if node.op == "call_function"][1:]


@pytest.mark.parametrize("name", CALLS)
def test_the_split_op_computes_the_same(name):
    x = torch.randn(2, 4, 6, 6)
    for call in CALLS[name]:
        gm = split(call)
        gm.recompile()
        torch.testing.assert_close(gm(x), call(x * 2))
        assert targets(gm) == PARTS[name]
    assert {*CALLS, "scaled_dot_product_attention"} == set(SPLITS)


def test_what_cannot_be_split_stays():
    hooked = nn.SiLU()
    hooked.register_forward_hook(lambda *_: None)
    steep, falling = nn.LeakyReLU(1.5), nn.LeakyReLU(-0.1)
    for module in (nn.AdaptiveAvgPool2d(2), nn.AdaptiveAvgPool2d((1, 2)), hooked, steep, falling):
        assert [node.op for node in split(module).graph.nodes] == [
            "placeholder",
            "call_function",
            "call_module",
            "output",
        ]


def test_only_the_backend_that_asks_for_it_splits():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 2, 1)).eval()
    reports = {name: prepare_by_platform(model, name, check="off").quant_report for name in ("LiteRT", "TSQAT")}
    assert [row.op for row in reports["LiteRT"]][2:5] == ["sigmoid", "mul", "mean"]
    assert [row.op for row in reports["TSQAT"]][2:4] == ["silu", "adaptive_avg_pool2d"]
    sigmoid = reports["LiteRT"].row(next(row.node for row in reports["LiteRT"] if row.op == "sigmoid"))
    assert "fixed[0,0.996094]" in sigmoid.output


SPLIT_ATTENTION = {"overrides": [{"match": {"function": "scaled_dot_product_attention"}, "split": True}]}
OPEN = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
OPEN[0, 0, 3] = False  # a query without a key


class Attention(nn.Module):
    """Attention of two heads with other arguments of the function; ``p`` is its dropout in training."""

    def __init__(self, p=0.0, key_heads=2, **arguments):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (
            nn.Linear(32, 32),
            nn.Linear(32, 16 * key_heads),
            nn.Linear(32, 16 * key_heads),
        )
        self.bias = nn.Parameter(torch.randn(2, 5, 5))
        self.p, self.arguments = p, arguments

    def forward(self, x, mask=None):
        query, key, value = (f(x).unflatten(-1, (-1, 16)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mask = self.bias if self.arguments.get("scale") else mask
        p = self.p if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, mask, p, **self.arguments).transpose(1, 2).flatten(2)


ATTENTIONS = {
    "plain": (Attention(), []),
    "causal": (Attention(is_causal=True), []),
    "a boolean mask": (Attention(), [OPEN]),
    "a mask of infinities": (Attention(), [torch.zeros(5, 5).masked_fill(OPEN[0, 0].logical_not(), float("-inf"))]),
    "a mask to add": (Attention(), [torch.zeros(5, 5).masked_fill(OPEN[1, 0].logical_not(), -1e9)]),
    "a learned bias, another scale": (Attention(scale=0.3), []),
    "shared keys": (Attention(key_heads=1, enable_gqa=True), []),
    "dropout": (Attention(p=0.5), []),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "TSQAT") for name in ATTENTIONS), ("a boolean mask", "OpenVINO"), ("dropout", "Vitis")],
)
def test_attention_is_split_on_request(name, backend, tmp_path):
    model, masks = ATTENTIONS[name]
    generator = torch.Generator().manual_seed(1)
    inputs = (torch.randn(2, 5, 32, generator=generator), *masks)
    gm = prepare_by_platform(model, backend, SPLIT_ATTENTION, example_inputs=inputs).eval()
    ops = [row.op for row in gm.quant_report]
    assert ops.count("matmul") == 2
    assert "softmax" in ops
    assert "scaled_dot_product_attention" not in ops
    other = (torch.randn(2, 5, 32, generator=generator), *masks)
    disable_all(gm)
    torch.testing.assert_close(gm(*other), model.eval()(*other))
    gradients = [torch.autograd.grad(each(*other).square().sum(), each.key.weight)[0] for each in (gm, model)]
    torch.testing.assert_close(*gradients)
    calibrate(gm, [inputs, other], progress=False)
    enable_quantization(gm)
    noise = gm(*other) - model(*other)
    assert noise.norm() < 0.04 * model(*other).norm()
    assert convert_export(gm, inputs, tmp_path / "model.onnx").certificate.passed
    gm.train()(*other).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in gm.parameters() if parameter.grad is not None)
    assert not torch.equal(gm(*other), gm(*other)) or name != "dropout"


def test_the_products_of_split_attention_read_integers():
    inputs = (torch.randn(2, 5, 32),)
    gm = prepare_by_platform(Attention(), "TSQAT", SPLIT_ATTENTION, example_inputs=inputs)
    quantized = [row.op for row in gm.quant_report if row.status != "float"]
    assert [quantized.count(op) for op in ("matmul", "softmax", "mul")] == [2, 1, 1]
    again = prepare_by_platform(Attention(), "TSQAT", effective_config(gm), example_inputs=inputs)
    reports = [[(row.node, row.status, row.output, row.group) for row in each.quant_report] for each in (again, gm)]
    assert reports[0] == reports[1]


def test_a_split_module_is_still_meant_by_its_path_and_type():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU(), nn.Conv2d(4, 2, 1)).eval()
    for match in ({"module": "1"}, {"type": "SiLU"}, {"node": "_1"}):
        config = {"overrides": [{"match": match, "split": True, "output": {"bit": 16}}]}
        report = prepare_by_platform(model, "TSQAT", config, check="off").quant_report
        assert [(row.op, row.output[:5]) for row in report][2:4] == [("sigmoid", "int16"), ("mul", "int16")], match


@pytest.mark.parametrize(
    ("model", "match", "why"),
    [
        (nn.GELU(), {"type": "GELU"}, f"only {', '.join(SPLITS)} can be"),
        (nn.AdaptiveAvgPool2d(2), {"type": "AdaptiveAvgPool2d"}, "its output size is 2"),
    ],
)
def test_a_split_without_effect_is_refused(model, match, why):
    config = {"overrides": [{"match": match, "split": True}]}
    with pytest.raises(ConfigError, match=rf"overrides\[0\]: '_1' is not split: .*{why}"):
        prepare_by_platform(nn.Sequential(nn.Conv2d(3, 4, 1), model), "TSQAT", config, check="off")


def test_a_module_that_the_backend_splits_can_be_left_float_by_its_path():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU(), nn.Conv2d(4, 2, 1)).eval()
    config = {"extra_quantizer_dict": {"exclude_module_name": ["1"]}}
    report = prepare_by_platform(model, "LiteRT", config, check="off").quant_report
    assert [(row.op, row.reason.partition(";")[0]) for row in report][2:4] == [
        ("sigmoid", "left float by exclude_module_name"),
        ("mul", "left float by exclude_module_name"),
    ]


def test_what_cannot_be_asked_for_is_refused():
    with pytest.raises(ConfigError, match=r"overrides\[0\].split must be true, got False"):
        prepare_by_platform(Masked(), "TSQAT", {"overrides": [SPLIT_ATTENTION["overrides"][0] | {"split": False}]})
    with pytest.raises(ConfigError, match="whether its mask is boolean is not known: prepare with example_inputs"):
        prepare_by_platform(Masked(), "TSQAT", SPLIT_ATTENTION, check="off")


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, mask):
        y = self.layer(x)
        return F.scaled_dot_product_attention(y, y, y, attn_mask=mask)


class ChannelAttention(nn.Module):
    """Attention between channels: what the scale divides by is the number of pixels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(3, 8, 1)

    def forward(self, x):
        y = self.layer(x).flatten(2)
        return F.scaled_dot_product_attention(y, y, y)


def test_the_scale_of_split_attention_follows_the_size(tmp_path):
    inputs, larger = (torch.randn(1, 3, 4, 6),), torch.randn(1, 3, 12, 6)
    model = ChannelAttention().eval()
    gm = prepare_by_platform(model, "TSQAT", SPLIT_ATTENTION, example_inputs=inputs).eval()
    torch.testing.assert_close(gm(larger), model(larger))
    calibrate(gm, [inputs, (larger,)], progress=False)
    enable_quantization(gm)
    convert_export(gm, inputs, tmp_path / "model.onnx", dynamic_shapes={"x": {2: "height"}})
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": larger.numpy()})
    step = max(row.scale.item() for row in gm.modules() if hasattr(row, "scale") and row.scale.numel() == 1)
    torch.testing.assert_close(torch.from_numpy(found), gm(larger), rtol=0, atol=step)
