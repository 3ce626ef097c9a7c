"""Losses of distillation against what their papers say, in double precision."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from fxqat import prepare_by_platform
from fxqat.fake_quantize.state import named_fake_quants
from tests.example.imagenet_example.tiny_models import Tiny, Wide, WithoutBatchNorm


@pytest.fixture(scope="module")
def distillation(example: ModuleType) -> ModuleType:
    return sys.modules["distillation"]


def softmax(values, temperature):
    e = np.exp(values / temperature - (values / temperature).max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def some_logits():
    random = np.random.default_rng(0)
    return random.normal(size=(6, 5)) * 3, random.normal(size=(6, 5)) * 3, random.integers(0, 5, 6)


@pytest.mark.parametrize("temperature", [1.0, 6.0])
def test_logits(distillation, temperature):
    student, teacher, target = some_logits()
    p, q = softmax(teacher, temperature), softmax(student, temperature)
    expected = temperature**2 * (p * np.log(p / q)).sum(1).mean()
    found = distillation.logits(torch.tensor(student), torch.tensor(teacher), torch.tensor(target), temperature)
    assert float(found) == pytest.approx(expected, rel=1e-12)
    assert float(distillation.logits(*[torch.tensor(teacher)] * 2, torch.tensor(target), temperature)) < 1e-12


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_decoupled(distillation, temperature):
    student, teacher, target = some_logits()
    p, q = softmax(teacher, temperature), softmax(student, temperature)
    binary = others = 0.0
    for i, t in enumerate(target):
        for a, b in ((p[i, t], q[i, t]), (1 - p[i, t], 1 - q[i, t])):
            binary += a * np.log(a / b)
        rest = [c for c in range(5) if c != t]
        a, b = p[i, rest] / p[i, rest].sum(), q[i, rest] / q[i, rest].sum()
        others += (a * np.log(a / b)).sum()
    expected = temperature**2 * (binary + 8 * others) / len(target)
    found = distillation.decoupled(torch.tensor(student), torch.tensor(teacher), torch.tensor(target), temperature)
    assert float(found) == pytest.approx(expected, rel=1e-9)


def test_hints_and_attention(distillation):
    torch.manual_seed(0)
    student = {"2x3": torch.randn(4, 6, 2, 3, dtype=torch.float64).float()}
    teacher = {"2x3": torch.randn(4, 6, 2, 3)}
    regressors = nn.ModuleDict({"2x3": nn.Identity()})
    x, y = (features["2x3"].double().numpy() for features in (student, teacher))
    hints = ((x - y) ** 2).mean() / (y**2).mean()
    assert float(distillation.hints(student, teacher, regressors)) == pytest.approx(hints, rel=1e-5)
    maps = [(values**2).mean(1).reshape(4, -1) for values in (x, y)]
    maps = [m / np.linalg.norm(m, axis=1, keepdims=True) for m in maps]
    attention = ((maps[0] - maps[1]) ** 2).sum(1).mean()
    assert float(distillation.attention(student, teacher, regressors)) == pytest.approx(attention, rel=1e-5)


def distiller(module, student, teacher, method, alpha=0.5):
    x = torch.randn(4, 3, 32, 32)
    gms = [prepare_by_platform(model, "TSQAT", example_inputs=(x,)) for model in (student, teacher)]
    return module.Distiller(*gms, x, method, alpha, 2.0), x


@pytest.mark.parametrize("teacher", [Tiny, Wide])
@pytest.mark.parametrize("method", ["hints", "attention"])
def test_features_are_paired_by_the_size_of_the_grid(distillation, teacher, method):
    found, x = distiller(distillation, Tiny(5), teacher(5), method)
    assert list(found.pairs) == ["16x16", "8x8", "4x4"]
    with found.watching() as features:
        output = found.student(x)
    assert [tuple(value.shape) for value in features.values()] == [(4, 16, 16, 16), (4, 16, 8, 8), (4, 32, 4, 4)]
    target, hard = torch.zeros(4, dtype=torch.int64), torch.tensor(2.0)
    loss = found.loss(x, output, features, target, hard)
    loss.backward()
    assert float(loss) > 1.0
    assert all(p.grad is None for p in found.teacher.parameters())
    trained = list(found.regressors.parameters())
    assert len(trained) == (6 if (method, teacher) == ("hints", Wide) else 0)
    assert all(float(p.grad.abs().sum()) > 0 for p in trained)


def test_the_teacher_computes_in_float_and_in_eval_mode(distillation):
    found, _ = distiller(distillation, Tiny(5), Tiny(5), "logits")
    assert not found.teacher.training
    assert not any(quant.fake_quant_enabled for _, quant in named_fake_quants(found.teacher))
    assert not any(p.requires_grad for p in found.teacher.parameters())


def test_teachers_that_do_not_fit(distillation, example):
    with pytest.raises(Exception, match="the teacher has 6 classes, the model 5"):
        distiller(distillation, Tiny(5), Tiny(6), "logits")
    with pytest.raises(Exception, match="no feature maps of the same size"):
        distiller(distillation, nn.Sequential(nn.Flatten(), nn.Linear(3072, 5)), WithoutBatchNorm(5), "hints")
