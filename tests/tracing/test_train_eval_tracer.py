"""Models that branch on ``self.training``: the prepared model computes in each mode what the model does."""

import copy
import pickle
import random
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

import fxqat
from fxqat import prepare_by_platform
from fxqat.tracing.trace import trace
from fxqat.utils.node_meta import MODE
from fxqat.utils.tensors import flatten_tensors
from fxqat.utils.train_eval_graph import differs_in_training, eval_or_train
from tests.export_models import run_session, session

Scores = namedtuple("Scores", ["logits", "auxiliary"])


@dataclass
class Result:
    logits: Tensor
    auxiliary: Tensor | None = None


class Body(nn.Module):
    """Two layers and a head for training; ``result`` combines the outputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.fc = nn.Linear(8, 5)
        self.auxiliary = nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x):
        x = self.first(x)
        auxiliary = self.auxiliary(x) if self.training else None
        logits = self.fc(self.second(x).mean((2, 3)))
        return self.result(logits, auxiliary)

    def result(self, logits, auxiliary):
        return logits if auxiliary is None else (logits, auxiliary)


class AuxiliaryLast(Body):
    def forward(self, x):
        x = self.first(x)
        logits = self.fc(self.second(x).mean((2, 3)))
        return (logits, self.auxiliary(x)) if self.training else logits


class NamedTuple(Body):
    def result(self, logits, auxiliary):
        return logits if auxiliary is None else Scores(logits, auxiliary)


class Dict(Body):
    def result(self, logits, auxiliary):
        return {"logits": logits} if auxiliary is None else {"logits": logits, "auxiliary": auxiliary}


class Dataclass(Body):
    def result(self, logits, auxiliary):
        return Result(logits, auxiliary)


class AuxiliaryFirst(Body):
    """The operations of training come before those of both modes."""

    def __init__(self):
        super().__init__()
        self.auxiliary = nn.Linear(3, 5)

    def forward(self, x):
        total = 0.0
        if self.training:
            total = self.auxiliary(x.mean((2, 3)))
        return self.fc(self.second(self.first(x)).mean((2, 3))) + total


class Inside(nn.Module):
    """A submodule branches; the structure of its result stays the same."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3)
        self.heads = Heads()
        self.last = nn.Linear(5, 5)

    def forward(self, x):
        return self.last(self.heads(self.conv(x).relu().mean((2, 3))))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_eval, self.in_training = nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x):
        return self.in_training(x) if self.training else self.in_eval(x)


class Structure(Inside):
    """A submodule returns one value in eval mode and two in training; the model checks which."""

    def __init__(self):
        super().__init__()
        self.heads = StructureHeads()

    def forward(self, x):
        found = self.heads(self.conv(x).relu().mean((2, 3)))
        return (self.last(found[0]), found[1]) if isinstance(found, tuple) else self.last(found)


class StructureHeads(Heads):
    def forward(self, x):
        found = self.in_eval(x)
        return (found, self.in_training(x)) if self.training else found


class InList(Inside):
    """That submodule is in a list, which has no forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.conv, StructureHeads()])
        del self.conv, self.heads

    def forward(self, x):
        found = self.layers[1](self.layers[0](x).relu().mean((2, 3)))
        return (self.last(found[0]), found[1]) if isinstance(found, tuple) else self.last(found)


class LaterStructure(Inside):
    """The result of a submodule differs in its first value, and in the structure of its second."""

    def __init__(self):
        super().__init__()
        self.heads = LaterStructureHeads()

    def forward(self, x):
        first, second = self.heads(self.conv(x).relu().mean((2, 3)))
        return self.last(first) if second is None else (self.last(first), second)


class LaterStructureHeads(Heads):
    def forward(self, x):
        return (self.in_training(x), x) if self.training else (self.in_eval(x), None)


class Counting(Body):
    """A buffer that is changed in training, before it is read in both modes."""

    def __init__(self):
        super().__init__()
        del self.auxiliary
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.steps.add_(1)
        return self.fc(self.second(self.first(x)).mean((2, 3))) * (1 + self.steps)


class Plain(Body):
    """Without a head for training."""

    def __init__(self):
        super().__init__()
        del self.auxiliary


class Noisy(Plain):
    """Training changes what the next layer gets."""

    def forward(self, x):
        x = self.first(x)
        if self.training:
            x = x + 0.1 * torch.ones_like(x)
        return self.fc(self.second(x).mean((2, 3)))


class Called(Plain):
    """Training calls a layer once more, with other values, and skips an operation of eval mode."""

    def forward(self, x):
        x = self.second(self.first(x))
        if self.training:
            x = self.second(x * 2)
        x = self.second(x)
        return self.fc((x if self.training else x.sigmoid()).mean((2, 3)))


class WithWeight(Plain):
    """A function gets a parameter of the model, and another value in training."""

    def forward(self, x):
        x = self.second(self.first(x)).mean((2, 3))
        return nn.functional.linear(x * 0.5 if self.training else x, self.fc.weight, bias=self.fc.bias)


MODELS = [Body, AuxiliaryLast, NamedTuple, Dict, Dataclass, AuxiliaryFirst, Inside, Structure, InList, Counting]
MODELS += [LaterStructure, Noisy, WithWeight]


def image(batch=4):
    torch.manual_seed(1)
    return torch.randn(batch, 3, 8, 8)


@pytest.mark.parametrize("starts_in", ["train", "eval"])
@pytest.mark.parametrize("kind", [*MODELS, Called])
def test_each_mode_computes_what_the_model_does(kind, starts_in):
    model = getattr(kind(), starts_in)()
    reference = copy.deepcopy(model)
    gm = prepare_by_platform(model, example_inputs=(image(),))
    assert gm.quant_report.eval_only == ()
    assert gm.quant_report.unread == ()
    assert differs_in_training(gm.graph)
    for mode in ("train", "eval", "train", "train", "eval"):
        expected, actual = getattr(reference, mode)()(image()), getattr(gm, mode)()(image())
        assert type(actual) is type(expected)
        for a, b in zip(flatten_tensors(actual), flatten_tensors(expected), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", MODELS)
def test_only_deployed_layers_are_quantized_and_fused(kind):
    gm = prepare_by_platform(kind().train(), example_inputs=(image(),))
    rows = {row.target: row for row in gm.quant_report}
    for path in ("auxiliary.0", "auxiliary", "heads.in_training"):
        if path in rows:
            assert rows[path].status == "float"
            assert rows[path].reason == "runs in training only: not deployed"
    for path in ("first.0", "second.0", "fc", "conv", "heads.in_eval", "last"):
        if path in rows:
            assert rows[path].weight
    for path in ("first.0", "second.0"):
        if path in rows:
            layer = gm.get_submodule(path)
            assert type(layer.bn) is nn.BatchNorm2d
            assert type(layer.activation) is nn.ReLU


@pytest.mark.parametrize("kind", MODELS)
def test_calibrated_in_eval_mode_and_trained(kind):
    gm = prepare_by_platform(kind().train(), example_inputs=(image(),))
    fxqat.enable_calibration(gm.eval())
    gm(image())
    fxqat.enable_quantization(gm)
    gm.train()
    outputs = flatten_tensors(gm(image()))
    sum(output.square().sum() for output in outputs).backward()
    missing = [name for name, parameter in gm.named_parameters() if parameter.grad is None]
    assert [name for name in missing if "in_eval" not in name and "act_fake_quant" not in name] == []


@pytest.mark.parametrize("kind", [AuxiliaryLast, Dict, Dataclass, AuxiliaryFirst, InList, Counting, Noisy])
def test_eval_mode_is_exported(kind, tmp_path):
    gm = prepare_by_platform(kind().train(), example_inputs=(image(),))
    fxqat.enable_calibration(gm.eval())
    gm(image())
    fxqat.enable_quantization(gm)
    gm.train()(image())  # changes the buffers of Counting and of the BatchNorms
    gm.eval()
    report = fxqat.convert_export(gm, (image(),), tmp_path / "model.onnx")
    assert report.certificate.passed
    file = tmp_path / "model.onnx"
    found = run_session(session(file, optimized_to=tmp_path / "optimized.onnx"), [image()])
    expected = flatten_tensors(gm(image()))
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert np.abs(a - b.detach().numpy()).max() <= 0.05 * b.abs().max()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("way", [copy.deepcopy, lambda gm: pickle.loads(pickle.dumps(gm))])
def test_copies_keep_both_modes(kind, way):
    gm = prepare_by_platform(kind().train(), example_inputs=(image(),))
    other = way(gm)
    for mode in ("train", "eval"):
        expected, actual = (flatten_tensors(getattr(m, mode)()(image())) for m in (gm, other))
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [Dict, Inside, Counting])
def test_each_mode_compiles_in_one_graph(kind):
    torch.compiler.reset()
    gm = prepare_by_platform(kind().train(), example_inputs=(image(),))
    compiled = torch.compile(copy.deepcopy(gm), backend="aot_eager", fullgraph=True)
    for mode in ("train", "eval"):
        expected, actual = (flatten_tensors(getattr(m, mode)()(image())) for m in (gm, compiled))
        torch.testing.assert_close(actual, expected)
    torch.compiler.reset()


# where the graph has eval mode only


class Swapped(Body):
    """Training uses the same layers in another order."""

    def __init__(self):
        super().__init__()
        self.third = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        layers = (self.third, self.second) if self.training else (self.second, self.third)
        return self.fc(nn.Sequential(self.first, *layers)(x).mean((2, 3)))


class Augmented(Body):
    """Training draws a number of Python or numpy, which would be the same in every step."""

    def forward(self, x):
        x = self.first(x)
        if self.training:
            x = x * (random.random() + 0.5) + float(np.random.uniform())
        return self.fc(self.second(x).mean((2, 3)))


class Shorter(Body):
    """Training reads another part of a parameter."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        x = self.second(self.first(x))
        rows = x[:, :, :4] if self.training else x
        return self.fc((rows + self.places[: rows.shape[2]]).mean((2, 3)))


class NeedsTargets(Body):
    def forward(self, x, targets=None):
        logits = self.fc(self.second(self.first(x)).mean((2, 3)))
        if self.training:
            return nn.functional.cross_entropy(logits, targets.long())
        return logits


@pytest.mark.parametrize("kind", [Swapped, Augmented, Shorter, NeedsTargets])
def test_modules_that_train_in_another_way_compute_as_in_eval_mode(kind):
    model = kind().train()
    gm = prepare_by_platform(model, example_inputs=(image(),))
    assert gm.quant_report.eval_only == (kind.__name__,)
    assert f"computes in training what it computes in eval mode: {kind.__name__}" in str(gm.quant_report)
    assert not differs_in_training(gm.graph)
    torch.testing.assert_close(gm.eval()(image()), model.eval()(image()))
    assert {row.target for row in gm.quant_report if row.weight} >= {"first.0", "second.0", "fc"}
    assert type(gm.train()(image())) is Tensor


def test_random_numbers_of_torch_are_drawn_anew_in_each_step():
    class Masked(Plain):
        def forward(self, x):
            x = self.first(x)
            if self.training:
                x = x * (torch.rand_like(x[:, :1]) > 0.2)
            return self.fc(self.second(x).mean((2, 3)))

    x = image()
    gm = prepare_by_platform(Masked().train(), example_inputs=(x,))
    assert gm.quant_report.eval_only == ()
    assert not torch.equal(gm(x), gm(x))
    assert torch.equal(gm.eval()(x), gm(x))


def test_a_model_that_does_the_same_in_both_modes_has_no_modes():
    class Asks(Body):
        def forward(self, x):
            if self.training:
                assert x.shape[0] > 1
            return self.fc(self.second(self.first(x)).mean((2, 3)))

    traced = trace(Asks(), example_inputs=(image(),))
    assert not differs_in_training(traced.gm.graph)
    assert traced.eval_only == ()


def test_the_nodes_of_each_mode_are_in_its_order():
    traced = trace(Counting(), example_inputs=(image(),))
    targets = [str(node.target) for node in traced.gm.graph.nodes]
    write = next(node for node in traced.gm.graph.nodes if node.target == "add_")
    assert write.meta[MODE] is True
    assert targets.index("add_") < targets.index("first.0")


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_auxiliary_heads_of_torchvision_train(name):
    size = 96 if name == "inception_v3" else 64
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, init_weights=False, num_classes=10, aux_logits=True)
    x = torch.randn(2, 3, size, size)
    if name == "inception_v3":
        model.AuxLogits = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(768, 10))
    gm = prepare_by_platform(model.train(), example_inputs=(x,))
    assert gm.quant_report.eval_only == ()
    assert gm.quant_report.unread == ()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for module in gm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    expected, actual = model(x), gm(x)
    assert type(actual) is type(expected)
    for a, b in zip(flatten_tensors(actual), flatten_tensors(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    sum(output.sum() for output in flatten_tensors(actual)).backward()
    auxiliary = [p for name, p in gm.named_parameters() if "aux" in name.lower()]
    assert auxiliary
    assert all(p.grad is not None for p in auxiliary)


def test_values_merged_before_a_difference_of_structure_are_undone():
    model = LaterStructure().train()
    gm = prepare_by_platform(model, example_inputs=(image(),))
    assert gm.quant_report.leaves == ()
    chosen = [node for node in gm.graph.nodes if node.target is eval_or_train]
    assert len(chosen) == 2  # what the last layer reads, and the whole result
    assert all(node.users for node in chosen)


class Record(dict):
    """A dict whose entries are attributes too."""

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        setattr(self, name, value)


class Recording(nn.Module):
    """Returns such a dict, and computes differently in training."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        result = Record()
        result["state"] = self.fc(x) * (2 if self.training else 3)
        return result


class Reading(nn.Module):
    """Reads an attribute of what a module returns."""

    def __init__(self):
        super().__init__()
        self.body = Recording()

    def forward(self, x):
        return torch.relu(self.body(x).state)


def test_a_dict_of_both_modes_keeps_its_type():
    model, x = Reading(), torch.ones(2, 4)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=x)
    assert not gm.quant_report.leaves
    for training in (True, False):
        torch.testing.assert_close(gm.train(training)(x), model.train(training)(x))


class Padded:
    """Images and where they end: no value of a graph."""

    def __init__(self, images, ends):
        self.images, self.ends = images, ends


class Positions(nn.Module):
    """Without parameters, as the encoding of RF-DETR: other values in training, and a cache in eval mode."""

    def __init__(self):
        super().__init__()
        self.cache = {}

    def forward(self, padded):
        if self.training:
            return padded.images * padded.ends
        key = tuple(padded.images.shape)
        if key not in self.cache:
            self.cache[key] = torch.ones_like(padded.images).cumsum(2)
        return self.cache[key]


class TakesPadded(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.positions, self.last = nn.Conv2d(3, 4, 1), Positions(), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        y = self.first(x)
        return self.last(y + self.positions(Padded(y, 0.5)))


def test_a_module_without_parameters_whose_arguments_fit_no_node_is_traced_in_both_modes(tmp_path):
    model, x = TakesPadded(), torch.randn(2, 3, 6, 6)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=x)
    assert gm.quant_report.leaves == ()
    torch.testing.assert_close(gm.train()(x), model.train()(x))
    torch.testing.assert_close(gm.eval()(x), model.eval()(x))
    assert not torch.allclose(model.train()(x), model.eval()(x))
    fxqat.calibrate(gm, [x])
    assert fxqat.convert_export(gm, x, tmp_path / "net.onnx").certificate.passed
