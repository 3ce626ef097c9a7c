"""Lightning and the Trainer of transformers calibrate, train, resume and export a prepared model by one callback."""

import copy
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxqat
from fxqat.checkpoint import float_state_dict
from fxqat.errors import ConfigError
from fxqat.fake_quantize.state import is_calibrated, named_fake_quants

pl = pytest.importorskip("lightning.pytorch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from fxqat.tools.training.huggingface_callback import QuantizationTrainerCallback  # noqa: E402
from fxqat.tools.training.lightning_callback import QuantizationCallback  # noqa: E402

pytestmark = pytest.mark.xdist_group("trainers")

CLASSES = torch.arange(32) % 4
IMAGES = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))[CLASSES]
EXAMPLE = (IMAGES[:4],)


class Net(nn.Module):
    """A classifier with its loss, as the models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.hidden(x).relu())}


def prepared() -> nn.Module:
    torch.manual_seed(0)
    return fxqat.prepare_by_platform(Net(), "TSQAT", example_inputs=EXAMPLE).train()


def loss_of(outputs: dict[str, Tensor], labels: Tensor, **_: Any) -> Tensor:
    return nn.functional.cross_entropy(outputs["logits"], labels)


def assert_quantized_everywhere(gm: nn.Module) -> None:
    assert is_calibrated(gm)
    assert all(quant.fake_quant_enabled and not quant.observer_enabled for _, quant in named_fake_quants(gm))


def assert_file_computes(path: Path, gm: nn.Module) -> None:
    session = onnxruntime.InferenceSession(path)
    (name,) = (value.name for value in session.get_inputs())
    with torch.no_grad():
        expected = copy.deepcopy(gm).eval()(*EXAMPLE)["logits"]
    torch.testing.assert_close(torch.from_numpy(session.run(None, {name: EXAMPLE[0].numpy()})[0]), expected)


# Lightning


class Task(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = prepared()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = loss_of(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(task: Task, folder: Path, callbacks: list[Any], epochs: int = 2, resume: Path | None = None) -> Any:
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=epochs,
        default_root_dir=folder,
        callbacks=callbacks,
    )
    trainer.fit(task, DataLoader(TensorDataset(IMAGES, CLASSES), 8), ckpt_path=resume)
    return trainer


@pytest.mark.filterwarnings("ignore")
def test_lightning_calibrates_trains_and_exports_the_best_checkpoint(tmp_path: Path) -> None:
    """The best is the worst here, so that it is not the last."""
    keep = pl.callbacks.ModelCheckpoint(tmp_path, "{epoch}", monitor="loss", mode="max", save_top_k=1)
    task = Task()
    callback = QuantizationCallback(export=tmp_path / "model.onnx", example_inputs=EXAMPLE)
    fit(task, tmp_path, [callback, keep], epochs=3)
    assert_quantized_everywhere(task.net)
    assert keep.best_model_path.endswith("epoch=0.ckpt")
    best = prepared()
    state = torch.load(keep.best_model_path, weights_only=True)["state_dict"]
    best.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})
    assert not torch.equal(best.hidden.weight, task.net.hidden.weight)
    assert_file_computes(tmp_path / "model.onnx", best)


@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes_with_the_ranges_of_the_checkpoint(tmp_path: Path) -> None:
    """The resumed run is given other data for the calibration, and does not use it."""
    keep = pl.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    task, resumed = Task(), Task()
    fit(task, tmp_path, [QuantizationCallback(), keep])
    fit(resumed, tmp_path / "resumed", [QuantizationCallback([100 * IMAGES])], resume=tmp_path / "epoch=0.ckpt")
    for name, value in task.net.state_dict().items():
        assert torch.equal(resumed.net.state_dict()[name], value), name


@pytest.mark.filterwarnings("ignore")
def test_lightning_averages_with_ranges(tmp_path: Path) -> None:
    """The average is made before the calibration; at the end it is the model."""
    task = Task()
    average = pl.callbacks.EMAWeightAveraging(decay=0.7)
    fit(task, tmp_path, [average, QuantizationCallback(export=tmp_path / "model.onnx", example_inputs=EXAMPLE)])
    assert_quantized_everywhere(task.net)
    assert all(float(quant.scale.abs().max()) < 1 for _, quant in named_fake_quants(task.net))
    assert (tmp_path / "model.onnx").exists()


# transformers


def trainer_of(gm: nn.Module, folder: Path, callback: Any, **options: Any) -> Any:
    rows = [{"x": image, "labels": label} for image, label in zip(IMAGES, CLASSES, strict=True)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_train_epochs=2,
        learning_rate=0.1,
        save_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        label_names=["labels"],
        **options,
    )
    return transformers.Trainer(
        gm, arguments, train_dataset=rows, eval_dataset=rows, compute_loss_func=loss_of, callbacks=[callback]
    )


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers_calibrates_trains_resumes_and_exports(tmp_path: Path) -> None:
    gm, resumed = prepared(), prepared()
    callback = QuantizationTrainerCallback(export=tmp_path / "model.onnx", example_inputs=EXAMPLE)
    trainer = trainer_of(gm, tmp_path, callback, eval_strategy="epoch", load_best_model_at_end=True)
    trainer.train()
    assert_quantized_everywhere(gm)
    assert_file_computes(tmp_path / "model.onnx", gm)
    other = QuantizationTrainerCallback([100 * IMAGES])
    trainer_of(resumed, tmp_path, other).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    for name, value in gm.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_a_trained_model_is_kept_as_transformers_keeps_its_models(tmp_path: Path) -> None:
    """As on the page: float weights by ``save_pretrained``, the rest by ``save_checkpoint``."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = transformers.ViTModel(transformers.ViTConfig(image_size=8, patch_size=4, **sizes)).eval()
    x = torch.randn(2, 3, 8, 8)

    def prepare(model: nn.Module) -> nn.Module:
        return fxqat.prepare_by_platform(model.eval(), "TSQAT", example_inputs=(x,))

    gm = prepare(model)
    fxqat.calibrate(gm, [x], progress=False)
    fxqat.enable_quantization(gm)
    with torch.no_grad():
        for parameter in gm.parameters():  # trained: neither the model's weights nor the calibrated scales
            parameter.mul_(1.1)
    model.save_pretrained(tmp_path, state_dict=float_state_dict(gm))
    fxqat.save_checkpoint(gm, f"{tmp_path}/fxqat.pth")

    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        fxqat.disable_all(gm)
        assert torch.equal(loaded.eval()(x).last_hidden_state, gm(x).last_hidden_state)
        assert not torch.equal(loaded(x).last_hidden_state, model(x).last_hidden_state)
        fxqat.enable_quantization(gm)
        again = prepare(loaded)
        fxqat.load_checkpoint(again, tmp_path / "fxqat.pth")
        assert torch.equal(again(x).last_hidden_state, gm(x).last_hidden_state)


# Wrong use


@pytest.mark.parametrize("callback", [QuantizationCallback, QuantizationTrainerCallback])
def test_wrong_options_are_refused_before_training(callback: Any) -> None:
    with pytest.raises(ConfigError, match="export is None"):
        callback(example_inputs=EXAMPLE)
    with pytest.raises(ConfigError, match=f"{callback.__name__}: convert_export: .*'dynamic'"):
        callback(export="model.onnx", example_inputs=EXAMPLE, dynamic=True)


def test_a_model_that_was_not_prepared_is_refused() -> None:
    with pytest.raises(ConfigError, match="in Net, found none. Prepare the model"):
        QuantizationCallback().begin(Net(), [IMAGES])
    with pytest.raises(ConfigError, match="in ModuleList, found 0, 1"):
        QuantizationCallback().begin(nn.ModuleList([prepared(), prepared()]), [IMAGES])
