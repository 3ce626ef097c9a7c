"""Multi-head attention: the same numbers as torch's with every option, and quantized inside."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxqat
from fxqat import convert_export, prepare_by_platform
from fxqat.nn.qat import QATLayer
from fxqat.tracing.attention import multi_head_attention
from fxqat.utils.contexts import without_fast_path

HEADS, WIDTH = 2, 8
UNKNOWN_SIZE = "its forward depends on the value of a tensor or on a size that is not known while tracing"


class Encoder(nn.Module):
    """An encoder of torch's between two layers."""

    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(WIDTH, 4)


class Padded(Encoder):
    """The padding is an input."""

    def forward(self, x, padding):
        return self.head(self.encoder(x, src_key_padding_mask=padding))


class Causal(Encoder):
    """The mask is made from the size of the input."""

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        return self.head(self.encoder(x, mask=mask, is_causal=True))


class Masked(Encoder):
    """The mask is an input, with infinities in it."""

    def forward(self, x, mask):
        return self.head(self.encoder(x, mask))


class Cross(nn.Module):
    """Queries of one input, keys and values of another."""

    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x, y):
        return self.head(self.attention(x, y, y)[0])


def padding():
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[1, 4:] = True
    return mask


def causal(length=6):
    return nn.Transformer.generate_square_subsequent_mask(length)


ENCODERS = {
    "padded": (Padded, lambda: (torch.randn(2, 6, WIDTH), padding())),
    "causal": (Causal, lambda: (torch.randn(2, 6, WIDTH),)),
    "masked": (Masked, lambda: (torch.randn(2, 6, WIDTH), causal())),
    "cross": (Cross, lambda: (torch.randn(2, 5, WIDTH), torch.randn(2, 6, WIDTH))),
}


@pytest.fixture(params=list(ENCODERS), scope="module")
def prepared(request):
    torch.manual_seed(0)
    kind, inputs = ENCODERS[request.param]
    model, given = kind(), inputs()
    return model, prepare_by_platform(model, "TSQAT", example_inputs=given), given


def forward_and_ours(module, *args, **kwargs):
    """The same call of a module with torch's function and with ours."""
    theirs = module(*args, **kwargs)
    called = []

    def ours(*args, **kwargs):
        called.append(True)
        return multi_head_attention(*args, **kwargs)

    original, F.multi_head_attention_forward = F.multi_head_attention_forward, ours
    try:
        return theirs, module(*args, **kwargs), called
    finally:
        F.multi_head_attention_forward = original


def assert_equal(theirs, ours):
    torch.testing.assert_close(ours[0], theirs[0])
    assert (ours[1] is None) == (theirs[1] is None)
    if theirs[1] is not None:
        torch.testing.assert_close(ours[1], theirs[1])


OPTIONS = [{}, {"bias": False}, {"kdim": 6, "vdim": 4}, {"add_bias_kv": True}, {"add_zero_attn": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("has_batch", [True, False])
def test_equal_to_torchs_function(options, need_weights, has_batch):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, **options)  # in training: no fast path
    batch = (3,) if has_batch else ()
    query, key, value = (
        torch.randn(length, *batch, width)
        for length, width in ((5, WIDTH), (7, options.get("kdim", WIDTH)), (7, options.get("vdim", WIDTH)))
    )
    keys_unread = torch.zeros(*batch, 7, dtype=torch.bool)
    keys_unread[..., -2:] = True
    scores = torch.randn(5, 7)
    per_head = torch.rand((3 if has_batch else 1) * HEADS, 5, 7) > 0.7
    for attn_mask, key_padding_mask in itertools.product((None, scores, scores > 1, per_head), (None, keys_unread)):
        theirs, ours, called = forward_and_ours(
            module, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights=has_batch
        )
        assert called == [True]
        assert_equal(theirs, ours)


@pytest.mark.parametrize("options", [{}, {"bias": False}], ids=str)
def test_self_attention_is_one_projection(options):
    module = nn.MultiheadAttention(WIDTH, HEADS, **options)
    x = torch.randn(5, 3, WIDTH)
    theirs, ours, _ = forward_and_ours(module, x, x, x)
    assert_equal(theirs, ours)
    gm = prepare_by_platform(SelfAttention(module), "TSQAT", example_inputs=(x,))
    assert [row.op for row in gm.quant_report].count("linear") == 2


class SelfAttention(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x, x, x, need_weights=False)[0]


def test_static_keys_and_values_are_taken_as_they_are():
    module = nn.MultiheadAttention(WIDTH, HEADS)
    x, static = torch.randn(5, 3, WIDTH), torch.randn(3 * HEADS, 7, WIDTH // HEADS)
    call = (x, x, x, WIDTH, HEADS, module.in_proj_weight, module.in_proj_bias, None, None, False, 0.0)
    call += (module.out_proj.weight, module.out_proj.bias)
    options = {"static_k": static, "static_v": static * 2}
    assert_equal(F.multi_head_attention_forward(*call, **options), multi_head_attention(*call, **options))


def test_dropout_follows_the_mode():
    torch.manual_seed(0)
    x = torch.randn(2, 6, WIDTH)
    model = SelfAttention(nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5))
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    torch.testing.assert_close(gm.eval()(x), model.eval()(x))
    torch.manual_seed(1)
    assert not torch.allclose(gm.train()(x), gm.eval()(x))


def test_every_product_and_projection_is_quantized(prepared):
    _, gm, _ = prepared
    report = gm.quant_report
    assert report.leaves == ()
    assert report.unread == ()
    assert report.forced == ()
    layers = [row for row in report if row.op == "linear"]
    assert layers
    assert {row.status for row in layers} <= {"quantized", "shares"}
    assert all("per-channel" in row.weight for row in layers)
    attention = [row for row in report if row.op == "scaled_dot_product_attention" or row.op == "softmax"]
    assert attention
    assert {row.status for row in attention} <= {"quantized", "shares"}


def test_computes_what_the_model_does_at_another_batch(prepared):
    model, gm, given = prepared
    others = tuple(torch.cat([x, x]) if len(x) == 2 else x for x in given)
    with torch.no_grad(), without_fast_path():
        torch.testing.assert_close(gm.eval()(*others), model.eval()(*others))


def test_trained_and_exported(prepared, tmp_path):
    _, gm, given = prepared
    gm = copy.deepcopy(gm)
    fxqat.enable_calibration(gm)
    with torch.no_grad():
        gm(*given)
    fxqat.enable_quantization(gm)
    gm.train()(*given).square().mean().backward()
    for name, parameter in gm.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
    weights = [layer.weight for layer in gm.modules() if isinstance(layer, QATLayer)]
    assert all(weight.grad.abs().sum() > 0 for weight in weights)
    certificate = convert_export(gm.eval(), given, tmp_path / "model.onnx").certificate
    assert certificate.passed


def test_the_fast_path_is_as_it_was():
    given = (torch.randn(2, 6, WIDTH),)
    prepare_by_platform(Causal(), "TSQAT", example_inputs=given)
    assert torch.backends.mha.get_fastpath_enabled() is True
    with without_fast_path():
        prepare_by_platform(Causal(), "TSQAT", example_inputs=given)
        assert torch.backends.mha.get_fastpath_enabled() is False
    assert torch.backends.mha.get_fastpath_enabled() is True


def test_kept_whole_as_a_leaf():
    config = {"leaf_module": [nn.MultiheadAttention]}
    given = (torch.randn(2, 5, WIDTH), torch.randn(2, 6, WIDTH))
    report = prepare_by_platform(Cross(), "TSQAT", config, example_inputs=given).quant_report
    assert [row.status for row in report if row.target == "attention"] == ["float"]


def test_without_example_inputs_it_is_a_leaf_with_a_reason():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.TransformerEncoderLayer(WIDTH, HEADS, 16), nn.Linear(WIDTH, 2))
    report = prepare_by_platform(model, "TSQAT").quant_report
    assert [(leaf.path, leaf.reason) for leaf in report.leaves] == [("1.self_attn", UNKNOWN_SIZE)]
    assert {row.target: row.status for row in report}["1.self_attn"] == "float"
    assert {row.target: row.status for row in report}["1.linear1"] == "shares"
