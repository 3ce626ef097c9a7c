"""The effect of each flag about training: on the optimizer, the schedule, the loss, and the loop."""

import math
import re
import shutil
import sys
import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from tests.example.imagenet_example.conftest import MODELS, losses
from tests.example.imagenet_example.tiny_models import Tiny, Wide


@pytest.fixture
def training_of(start):
    """``training_of(*flags)``: the state of a training that has not begun."""

    def training_of(*flags):
        job, model = start(*flags)
        return job.fit(model, job.options).training

    return training_of


def rates(training, steps: int) -> list[float]:
    """The learning rates of the next steps, each relative to ``--lr 1e-3``."""
    found = []
    for _ in range(steps):
        assert len({group["lr"] for group in training.optimizer.param_groups}) == 1
        found.append(training.lr / 1e-3)
        training.step(accepted=True)
    return found


def test_numbers_of_the_optimizer(training_of):
    training = training_of("--momentum", "0.5", "--wd", "0.25", "--lr", "3e-4", "--lr-schedule", "constant")
    decayed, plain = training.optimizer.param_groups
    assert type(training.optimizer) is torch.optim.SGD
    found = [(group["momentum"], group["lr"], group["weight_decay"]) for group in (decayed, plain)]
    assert found == [(0.5, 3e-4, 0.25), (0.5, 3e-4, 0.0)]
    assert {p.ndim for p in decayed["params"]} == {2, 4}
    assert {p.ndim for p in plain["params"]} == {1}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(training.model.parameters()))
    adam = training_of("--optim", "adam", "--momentum", "0.7").optimizer
    assert type(adam) is torch.optim.Adam
    assert [group["betas"] for group in adam.param_groups] == 2 * [(0.7, 0.999)]


def test_schedules(training_of):
    epochs = ("--epochs", "2")  # of four steps
    cosine = [0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(9)]
    assert rates(training_of(*epochs), 9) == pytest.approx(cosine)
    assert rates(training_of(*epochs, "--lr-schedule", "constant"), 9) == 9 * [1.0]
    rising = training_of(*epochs, "--lr-schedule", "constant", "--warmup-epochs", "1.5")
    assert rates(rising, 9) == pytest.approx([min(1, step / 6) for step in range(9)])
    tenth = training_of("--epochs", "91", "--lr-schedule", "step", "--start-epoch", "59")
    assert rates(tenth, 8) == pytest.approx(4 * [0.1] + 4 * [0.01])


def test_first_and_last_epoch(fit):
    loop, printed = fit("--lr-schedule", "step", "--start-epoch", "30", "--epochs", "31")
    assert re.findall(r"Epoch: (\[\d+\])", printed) == 2 * ["[30]"]  # the first step and the last
    assert (loop.training.epochs_done, loop.training.lr) == (31, pytest.approx(1e-4))


def test_epochs_batch_and_print_freq(fit):
    loop, printed = fit("--epochs", "2", "-b", "4", "-p", "3")
    steps = re.findall(r"Epoch: (\[\d\]\[\d/8\])", printed)
    assert steps == [f"[{epoch}][{step}/8]" for epoch in (0, 1) for step in (0, 3, 6, 7)]
    assert printed.count(" * Acc@1 ") == 2  # a line for each epoch
    assert next(iter(loop.task.batches(0, 0)))[0].shape == (4, 3, 16, 16)


def test_profile_of_a_step(fit, train, monkeypatch):
    """Its parts add up, a slow loader is seen, and the training is the same."""
    loader, original = sys.modules["data"].Loaders, sys.modules["data"].Loaders.train

    def slow(self, *arguments):
        for batch in original(self, *arguments):
            time.sleep(0.05)
            yield batch

    monkeypatch.setattr(loader, "train", slow)
    pattern = r"a step takes (\S+) ms \(median of 4\): waiting for data (\S+) ms"
    loop, printed = fit("--profile-step", "--epochs", "2")
    ((step, data),) = re.findall(pattern, printed)  # only in the first epoch
    assert 50 <= float(data) < float(step)
    assert "fake-quant" not in printed  # a float model has none
    assert losses(printed) == losses(fit("--epochs", "2")[1])
    quantized = train("--profile-step").printed
    ((step, data, fake_quant, rest),) = re.findall(rf"{pattern}.*fake-quant (\S+) ms.* (\S+) ms \(-?\d+%\)", quantized)
    assert float(data) + float(fake_quant) + float(rest) == pytest.approx(float(step), abs=0.2)
    assert losses(quantized) == losses(train().printed)


def test_seed(fit):
    found = [losses(fit("--seed", seed)[1]) for seed in ("1", "1", "2")]
    assert found[0] == found[1] != found[2]


def test_label_smoothing(start):
    job, model = start("--label-smoothing", "0.3")
    images, target = batch = next(iter(job.loaders.train(0)))
    found = job.fit(model, job.options).task.step(model.eval(), batch).loss
    log_p = F.log_softmax(model(images), 1)
    expected = -(0.7 * log_p[torch.arange(len(target)), target] + 0.3 * log_p.mean(1)).mean()
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


def test_averaged_weights_follow_the_trained_ones(fit, monkeypatch):
    seen, original = [], sys.modules["training"].Training.step

    def step(self, accepted):
        original(self, accepted)
        seen.append(self.model.fc.weight.detach().clone())

    monkeypatch.setattr(sys.modules["training"].Training, "step", step)
    loop, _ = fit("--ema", "0.9", "--lr", "0.05")
    expected = seen[0]
    for weight in seen[1:]:
        expected = 0.9 * expected + 0.1 * weight
    torch.testing.assert_close(loop.training.evaluated.fc.weight, expected)
    assert loop.training.evaluated is loop.training.average.module
    assert len(seen) == 4
    plain, _ = fit("--lr", "0.05")
    assert plain.training.evaluated is plain.training.model
    assert torch.equal(seen[-1], seen[3])  # averaging does not change the training
    assert not torch.equal(expected, seen[3])


def loss_of(found, **changed) -> float:
    """The loss of a stage's batch, with some options changed."""
    job = replace(found.job, options=replace(found.job.options, **changed))
    distiller = None
    if job.options.distill_method:
        distiller = sys.modules["quantized_job"].make_distiller(job, found.model, found.gm)
    task = job.fit(found.gm, job.options, distiller).task
    return float(task.step(found.gm.eval(), found.batch).loss)


def test_distillation_by_logits_and_its_temperature(stage):
    found = stage("--distill-method", "logits")
    images, target = found.batch
    student, teacher = found.gm(images), found.model.eval()(images)
    hard = float(F.cross_entropy(student, target))
    methods = sys.modules["distillation"].METHODS
    for method, temperature in (("logits", 6.0), ("logits", 0.1), ("dkd", 6.0)):
        soft = float(methods[method](student, teacher, target, temperature))
        assert soft != pytest.approx(hard, rel=0.01)
        same = loss_of(found, distill_method=method, temperature=temperature, distill_alpha=0.25)
        assert same == pytest.approx(0.75 * hard + 0.25 * soft, rel=1e-4)
    soft = float(methods["logits"](student, teacher, target, 6.0))
    assert loss_of(found) == pytest.approx(0.05 * hard + 0.95 * soft, rel=1e-4)


@pytest.mark.parametrize("method", ["hints", "attention"])
def test_distillation_by_features(stage, method):
    found = stage("--distill-method", method)
    hard = float(F.cross_entropy(found.gm(found.batch[0]), found.batch[1]))
    assert loss_of(found, distill_alpha=0.0) == pytest.approx(hard, rel=1e-6)
    soft = loss_of(found, distill_alpha=1.0)
    assert 0 < soft < 0.1  # the same features but for 8 bits
    assert loss_of(found) == pytest.approx(0.05 * hard + 0.95 * soft, rel=1e-5)


def test_the_teacher_of_the_flags(stage, weights, tmp_path, monkeypatch):
    state = {name.removeprefix("module."): value for name, value in torch.load(weights)["state_dict"].items()}
    other = Tiny(2)
    other.load_state_dict({name: value * 1.5 for name, value in state.items()})
    torch.manual_seed(1)
    wide = Wide(2)
    for name, model in (("other", other), ("wide", wide)):
        torch.save(model.state_dict(), tmp_path / f"{name}.pth")
    job = sys.modules["quantized_job"]
    found = stage("--distill-method", "logits")
    images = found.batch[0]
    for arch, path, model in ((None, "other.pth", other), (f"{MODELS}:Wide", "wide.pth", wide)):
        options = replace(found.job.options, teacher_arch=arch, teacher_path=tmp_path / path)
        distiller = job.make_distiller(replace(found.job, options=options), found.model, found.gm)
        torch.testing.assert_close(distiller.teacher(images), model.eval()(images))
    asked = []
    monkeypatch.setattr(job, "build_model", lambda *args, pretrained: asked.append((args, pretrained)) or Wide(2))
    options = replace(found.job.options, teacher_arch="resnet50", teacher_path=None)
    job.make_distiller(replace(found.job, options=options), found.model, found.gm)
    assert asked == [(("torchvision", "resnet50", 2, 16), True)]  # the zoo's own weights


def test_mixed_precision(fit):
    plain, mixed, scaled = (fit(*flags) for flags in ((), ("--amp",), ("--amp", "--amp-dtype", "float16")))
    assert losses(plain[1]) != losses(mixed[1])
    assert losses(mixed[1]) == pytest.approx(losses(plain[1]), rel=0.05)
    dtypes = [loop.training.precision.dtype for loop, _ in (plain, mixed, scaled)]
    assert dtypes == [None, torch.bfloat16, torch.float16]
    assert [loop.training.scaler.is_enabled() for loop, _ in (plain, mixed, scaled)] == [False, False, True]
    assert scaled[0].training.scaler.get_scale() > 1
    assert losses(scaled[1]) == pytest.approx(losses(plain[1]), rel=0.05)


def test_compile(fit, monkeypatch):
    compiled, original = [], torch.compile

    def compiler(model):
        compiled.append(model)
        return original(model, backend="eager")

    monkeypatch.setattr(torch, "compile", compiler)
    plain = fit()
    assert compiled == []
    loop, printed = fit("--compile")
    assert losses(printed) == pytest.approx(losses(plain[1]), rel=1e-4)
    assert compiled == [loop.training.model]
    assert loop.wrapped is not loop.training.model


def test_workers(start, monkeypatch):
    seen, data = [], sys.modules["data"]

    class Loader(data.DataLoader):
        def __init__(self, *args, **options):
            seen.append(options["num_workers"])
            super().__init__(*args, **options)

    monkeypatch.setattr(data, "DataLoader", Loader)
    epochs = []
    for count in ("0", "2"):
        job, _ = start("-j", count)
        epochs.append([images for images, _ in job.loaders.train(0)])
    assert seen == [0, 0, 2, 2]  # validation, training
    assert len(epochs[0]) == 4
    for one, two in zip(*epochs, strict=True):
        assert torch.equal(one, two)  # augmentation does not depend on who loads an image


def test_log_level_and_progress_bars(fit, monkeypatch):
    progress = sys.modules["logs"].progress
    assert "Epoch: " not in fit("-l", "2")[1]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with closing(progress(range(3), "steps")) as bar:
        assert bar.disable  # the log level hides bars, too
    assert "Epoch: " in fit("-l", "0")[1]
    with closing(progress(range(3), "steps")) as bar:
        assert not bar.disable
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    with closing(progress(range(3), "steps")) as bar:
        assert bar.disable  # no bars in a file


def test_a_training_that_is_not_finite_keeps_the_last_good_checkpoint(train, monkeypatch, tmp_path):
    training = sys.modules["training"].Training
    steps = iter(range(100))

    def step(self, accepted):
        original(self, accepted)
        if next(steps) == 9:  # the second of the second epoch
            with torch.no_grad():
                self.model.get_parameter("body.0.weight")[0] = torch.nan

    original = training.step
    monkeypatch.setattr(training, "step", step)
    message = (
        r"the last 5 steps were not finite \(see the warnings above\): lower the learning rate, or leave the layer "
        "named there in float"
    )
    with pytest.warns(RuntimeWarning, match="first appears in .*body.0"), pytest.raises(SystemExit, match=message):
        train("--epochs", "2", "-b", "4")
    state = torch.load(tmp_path / "run0" / "Tiny_checkpoint.pth", weights_only=True)
    assert state["extra"]["training"]["epochs_done"] == 1
    assert all(value.isfinite().all() for value in state["state_dict"].values())


def test_corrupt_image(train, image_tree, tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(image_tree, tree)
    (tree / "train" / "dark" / "3.png").write_bytes(b"not an image")
    for workers in ("0", "1"):
        with pytest.raises(SystemExit, match=r"^error: .*dark/3.png cannot be read as an image") as caught:
            train("--not-qat", "--data", str(tree), "-j", workers)
        assert "\n" not in str(caught.value)
