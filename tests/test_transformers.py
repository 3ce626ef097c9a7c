"""Unchanged models of the transformers library: traced without a leaf, same outputs, exported with parity."""

import warnings

import numpy as np
import pytest
import torch
import transformers

from fxqat import convert_export, prepare_by_platform
from fxqat.utils.tensors import flatten_tensors
from tests.export_models import calibrate, run_file

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def images(batch):
    return (torch.randn(batch, 3, 16, 16),)


def tokens(batch):
    return (torch.randint(0, 50, (batch, 7)),)


def masked_tokens(batch):
    lengths = torch.randint(3, 8, (batch, 1))
    return *tokens(batch), (torch.arange(7) < lengths).long()


def vision(kind):
    config = getattr(transformers, f"{kind}Config")(image_size=16, patch_size=8, **TINY)
    return getattr(transformers, f"{kind}Model")(config)


def bert():
    return transformers.BertModel(transformers.BertConfig(vocab_size=50, max_position_embeddings=12, **TINY))


CASES = {
    "ViTModel": (lambda: vision("ViT"), images),
    "DeiTModel": (lambda: vision("DeiT"), images),
    "BertModel": (bert, tokens),
    "BertModel with a mask": (bert, masked_tokens),
}


@pytest.fixture(params=CASES)
def case(request):
    """A model in eval mode, and the function that makes its inputs."""
    torch.manual_seed(0)
    build, inputs = CASES[request.param]
    return build().eval(), inputs


def test_no_leaf_and_the_same_values_at_any_batch(case):
    model, inputs = case
    gm = prepare_by_platform(model, example_inputs=inputs(2), untraceable="error")
    assert gm.quant_report.leaves == ()
    linears = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert sum(bool(row.weight) for row in gm.quant_report) >= linears
    for batch in (2, 5, 1):
        x = inputs(batch)
        with torch.no_grad():
            expected, actual = model(*x), gm(*x)
        assert type(actual) is type(expected)
        assert actual.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(actual[name], expected[name])


def test_one_training_step(case):
    model, inputs = case
    gm = calibrate(prepare_by_platform(model, "ONNXRuntime", example_inputs=inputs(2)), inputs(4)).train()
    sum(tensor.square().mean() for tensor in flatten_tensors(gm(*inputs(4)))).backward()
    gradients = [p.grad for p in gm.parameters() if p.grad is not None]
    assert len(gradients) > 20
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert sum(bool(gradient.abs().sum() > 0) for gradient in gradients) > 20


@pytest.mark.parametrize("backend", ["TSQAT", "ONNXRuntime"])
def test_exported_with_parity_at_any_batch(case, backend, tmp_path):
    model, inputs = case
    gm = calibrate(prepare_by_platform(model, backend, example_inputs=inputs(2)), inputs(4))
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = convert_export(gm, inputs(2), path, dynamic_batch=True)
    assert report.certificate.passed
    x = inputs(5)
    with torch.no_grad():
        expected = [tensor.numpy() for tensor in flatten_tensors(gm(*x))]
    for actual, wanted in zip(run_file(path, x), expected, strict=True):
        assert actual.shape == wanted.shape
        assert np.abs(actual - wanted).max() <= 0.05 * np.abs(wanted).max()


def test_a_mask_of_ones_in_the_example_does_not_fix_the_mask():
    torch.manual_seed(0)
    model = bert().eval()
    (ids,) = tokens(2)
    gm = prepare_by_platform(model, example_inputs=(ids, torch.ones_like(ids)))
    x = masked_tokens(5)
    with torch.no_grad():
        torch.testing.assert_close(gm(*x).last_hidden_state, model(*x).last_hidden_state)
        assert not torch.allclose(model(*x).last_hidden_state, model(x[0]).last_hidden_state)
