"""Gradients also hold what the backward of a Function adds to ``.grad`` by itself."""

import torch
from torch import nn

from fxqat.utils.gradients import gradients_of
from tests.builders import Again


def test_gradients_that_a_backward_adds_are_part_of_the_result():
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    unread = torch.ones(1, requires_grad=True)
    leaves = [x, layer.weight, layer.bias, unread]
    expected = gradients_of((layer(x) + layer(2 * x)).square().sum(), leaves)
    layer.weight.grad = torch.full_like(layer.weight, 7.0)
    found = gradients_of((Again.apply(x, layer) + layer(2 * x)).square().sum(), leaves)
    assert found[-1] is None
    assert expected[-1] is None
    for gradient, exact in zip(found[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(gradient, exact)
    assert x.grad is None
    assert layer.bias.grad is None
    assert torch.equal(layer.weight.grad, torch.full_like(layer.weight, 7.0))


def test_gradients_of_an_embedding_are_dense():
    table = nn.Embedding(5, 2, sparse=True)
    (gradient,) = gradients_of(table(torch.tensor([1, 1, 3])).sum(), [table.weight])
    assert not gradient.is_sparse
    assert gradient[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0, 0.0]
