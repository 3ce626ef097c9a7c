"""Multiply-accumulates of what torch's counter leaves out where one kernel computes it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from fxqat.utils.count_macs import FLOPS, count_macs
from fxqat.utils.torch_compat import FUSED_RECURRENT

STEPS, SAMPLES = 7, 3


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_each_step_multiplies_with_all_weights(kind, bidirectional):
    layer = kind(4, 5, 2, bidirectional=bidirectional).eval()
    x = torch.randn(STEPS, SAMPLES, 4)
    weights = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            (y, _), macs = count_macs(lambda: layer(x))
        assert macs == STEPS * SAMPLES * weights
        torch.testing.assert_close(y, layer(x)[0])


def test_padding_of_packed_sequences_does_not_count():
    layer, lengths = nn.LSTM(4, 5).eval(), torch.tensor([7, 5, 2])
    packed = pack_padded_sequence(torch.randn(STEPS, SAMPLES, 4), lengths)
    (y, _), macs = count_macs(lambda: layer(packed))
    assert macs == lengths.sum() * (20 * 4 + 20 * 5)
    assert len(y.data) == lengths.sum()


QUERIES, KEYS, BATCH = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 5, 16), torch.randn(2, 8, 16)
PROJECTIONS, PRODUCTS = 4 * 16 * 16 * 16, 2 * 2 * 8 * 8 * 16
CASES = {
    "linear": (lambda: nn.Linear(4, 5)(torch.randn(3, 4)), 3 * 4 * 5),
    "convolution": (lambda: nn.Conv2d(3, 4, 3)(torch.randn(1, 3, 8, 8)), 4 * 3 * 9 * 36),
    "attention": (lambda: F.scaled_dot_product_attention(QUERIES, KEYS, KEYS), 2 * 4 * 8 * 5 * 32),
    "masked": (lambda: F.scaled_dot_product_attention(QUERIES, KEYS, KEYS, torch.zeros(8, 5)), 2 * 4 * 8 * 5 * 32),
    "module": (lambda: nn.MultiheadAttention(16, 4, batch_first=True).eval()(BATCH, BATCH, BATCH),
               PROJECTIONS + PRODUCTS),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()(BATCH),
                PROJECTIONS + PRODUCTS + 2 * 16 * 16 * 32),
    "vector": (lambda: torch.randn(5, 6) @ torch.randn(6), 30),
    "bilinear": (lambda: nn.Bilinear(3, 4, 5)(torch.randn(2, 3), torch.randn(2, 4)), 2 * 3 * 4 * 5),
    "sum of products": (lambda: torch.addbmm(torch.randn(3, 5), torch.randn(2, 3, 4), torch.randn(2, 4, 5)), 120),
    "sum": (lambda: torch.randn(3) + 1, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_products_count_whatever_kernel_computes_them(case):
    function, expected = CASES[case]
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            result, macs = count_macs(function)
        assert macs == expected
        assert result is not None


def test_the_fast_path_is_as_before():
    for enabled in (False, True):
        torch.backends.mha.set_fastpath_enabled(enabled)
        with pytest.raises(ZeroDivisionError):
            count_macs(lambda: 1 / 0)
        assert torch.backends.mha.get_fastpath_enabled() == enabled


def test_the_kernel_of_a_gpu_has_its_weights_in_a_list():
    """From the shapes that it gets there: this test needs no GPU."""
    x, weights = (STEPS, SAMPLES, 4), [(20, 4), (20, 5), (20,), (20,)]
    of_cpu, of_gpu = (FLOPS[operator] for operator in FUSED_RECURRENT)
    assert of_gpu(x, weights, 4) == 2 * STEPS * SAMPLES * (20 * 4 + 20 * 5)
    assert of_gpu(x, weights, 4) == of_cpu(x, *weights)
