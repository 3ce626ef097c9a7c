"""Training programs of other packages take a prepared model as they take the float one.

``tests/benchmarks/clients.py`` runs more of them.
"""

import copy
import importlib.util

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, load_model, save_file, save_model
from timm.models import resume_checkpoint
from timm.utils import CheckpointSaver, ModelEmaV2, ModelEmaV3, NativeScaler
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from fxqat import convert_export, disable_all, enable_quantization, prepare_by_platform, save_checkpoint
from fxqat.errors import ExportError
from fxqat.fake_quantize.state import named_fake_quants
from tests.models import calibrate, calibrated, inputs, prepared

NAME, BACKEND = "residual", "Experimental"  # learned scales and zero points
DECAY = 0.75
X = inputs(NAME)[0]


@pytest.fixture
def model():
    """A prepared model that is about to be trained."""
    return calibrated(NAME, BACKEND).train()


def fresh():
    """The same model as another process prepares it."""
    return prepared(NAME, BACKEND).train()


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model, optimizer, steps=2, forward=None):
    """Train on the same batch."""
    for _ in range(steps):
        optimizer.zero_grad()
        (forward or model)(X).square().mean().backward()
        optimizer.step()
    return model


def floats(model):
    """What an average of the model averages: parameters and buffers, without the switches."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: value.detach().clone() for name, value in state.items() if value.is_floating_point()}


def assert_same_bits(found, expected):
    assert list(found.state_dict()) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    assert all(quant.fake_quant_enabled and not quant.observer_enabled for _, quant in named_fake_quants(found))
    with torch.no_grad():
        outputs = [copy.deepcopy(gm).eval()(X) for gm in (found, expected)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("kind", [ModelEmaV2, ModelEmaV3])
def test_averages_of_timm(kind, model):
    ema, optimizer, average = kind(model, decay=DECAY), optimizer_of(model), floats(model)
    for _ in range(2):
        train(model, optimizer, steps=1)
        ema.update(model)
        average = {name: value.lerp(floats(model)[name], 1 - DECAY) for name, value in average.items()}
    assert not torch.equal(average["stem.weight"], model.stem.weight)
    for name, value in floats(ema.module).items():
        torch.testing.assert_close(value, average[name])
    assert all(quant.fake_quant_enabled for _, quant in named_fake_quants(ema))
    assert ema(X).isfinite().all()
    assert torch.equal(ema(X), ema.module(X))


def test_an_average_of_every_value_of_the_state_dict(model):
    ema, start = copy.deepcopy(model).eval(), floats(model)
    train(model, optimizer_of(model), steps=1)
    now = model.state_dict()
    for name, value in ema.state_dict().items():
        if value.dtype.is_floating_point:
            value *= DECAY
            value += (1 - DECAY) * now[name].detach()
    torch.testing.assert_close(floats(ema)["stem.weight"], start["stem.weight"].lerp(model.stem.weight, 1 - DECAY))
    assert all(torch.equal(value.clone(), value) for value in now.values())
    assert all(quant.fake_quant_enabled for _, quant in named_fake_quants(ema))


def test_checkpoints_of_timm_resume(model, tmp_path):
    optimizer, ema = optimizer_of(model), ModelEmaV2(model, decay=DECAY)
    saver = CheckpointSaver(
        train(model, optimizer), optimizer, model_ema=ema, checkpoint_dir=tmp_path, recovery_dir=tmp_path
    )
    saver.save_checkpoint(0, metric=1.0)
    resumed = fresh()
    again = optimizer_of(resumed)
    assert resume_checkpoint(resumed, tmp_path / "last.pth.tar", again) == 1
    assert_same_bits(train(resumed, again), train(model, optimizer))


def test_the_scaler_of_timm(model):
    scaler, optimizer, before = NativeScaler(device="cpu"), optimizer_of(model), floats(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(X).square().mean()
    scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    assert scaler.state_dict()["_growth_tracker"] == 1
    assert all(value.isfinite().all() for value in floats(model).values())
    assert not torch.equal(before["stem.weight"], model.stem.weight)


def test_averaged_model_of_torch(model, tmp_path):
    equal, weighted = AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer, seen = optimizer_of(model), []
    for _ in range(2):
        train(model, optimizer, steps=1)
        seen.append(floats(model)["stem.weight"])
        equal.update_parameters(model)
        weighted.update_parameters(model)
    torch.testing.assert_close(equal.module.stem.weight.detach(), (seen[0] + seen[1]) / 2)
    torch.testing.assert_close(weighted.module.stem.weight.detach(), seen[0].lerp(seen[1], 1 - DECAY))
    means = {name: value for name, value in floats(equal.module).items() if name.endswith("running_mean")}
    update_bn([X, X + 1], equal)
    assert means
    assert not any(torch.equal(floats(equal.module)[name], value) for name, value in means.items())

    quantized = equal.eval()(X)
    disable_all(equal)
    assert not torch.equal(equal(X), quantized)
    enable_quantization(equal)
    assert torch.equal(equal(X), quantized)
    save_checkpoint(equal, tmp_path / "model.pth")
    assert "stem.weight" in torch.load(tmp_path / "model.pth", weights_only=True)["state_dict"]
    assert convert_export(equal, (X,), tmp_path / "model.onnx").certificate is not None
    with pytest.raises(ExportError, match="got ModelEmaV3. It holds one: pass its 'module'"):
        convert_export(ModelEmaV3(model), (X,), tmp_path / "model.onnx")


def test_safetensors(model, tmp_path):
    train(model, optimizer_of(model), steps=1)
    save_model(model, str(tmp_path / "model.safetensors"))
    loaded = fresh()
    assert load_model(loaded, tmp_path / "model.safetensors") == (set(), [])
    assert_same_bits(loaded, model)
    save_file(model.state_dict(), tmp_path / "state.safetensors")
    loaded = fresh()
    loaded.load_state_dict(load_file(tmp_path / "state.safetensors"))
    assert_same_bits(loaded, model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoint_in_one_process(model, tmp_path):
    optimizer = optimizer_of(model)
    train(model, optimizer)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=tmp_path)
    resumed = fresh()
    again = optimizer_of(resumed)
    state = dict(zip(("model", "optimizer"), get_state_dict(resumed, again), strict=True))
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(resumed, again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_same_bits(train(resumed, again), train(model, optimizer))


class Classifier(nn.Module):
    """Takes labels and gives a loss, as the models of transformers do; in training, with an auxiliary loss."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.auxiliary = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, values, labels=None, scale=1.0):
        features = self.body(values).relu()
        logits = self.head(features) * scale
        loss = nn.functional.cross_entropy(logits, labels)
        if self.training:
            loss = loss + nn.functional.cross_entropy(self.auxiliary(features), labels)
        return {"loss": loss, "logits": logits}


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="the Trainer of transformers needs accelerate"
)
def test_trainer_of_transformers(tmp_path):
    from transformers import Trainer, TrainingArguments

    values, labels = torch.randn(8, 4), torch.arange(8) % 3

    def classifier():
        torch.manual_seed(0)
        return prepare_by_platform(Classifier().train(), "TSQAT", example_inputs=(values[:4], labels[:4]))

    def trainer(gm):
        rows = [{"values": v, "labels": y, "index": i} for i, (v, y) in enumerate(zip(values, labels, strict=True))]
        arguments = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            num_train_epochs=2,
            save_strategy="epoch",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        return Trainer(gm, arguments, train_dataset=rows, eval_dataset=rows)

    gm = calibrate(classifier(), (values, labels))
    whole = trainer(gm)
    whole.train()
    evaluated = whole.evaluate()["eval_loss"]
    with torch.no_grad():
        losses = [gm.eval()(labels=labels[part], values=values[part])["loss"] for part in (slice(4), slice(4, 8))]
    assert abs(evaluated - sum(losses) / 2) < 1e-5
    resumed = classifier()
    trainer(resumed).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, value in gm.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
