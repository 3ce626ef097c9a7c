"""The two jobs: a float model alone (--not-qat), and the whole way to a quantized one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arguments import Options
from checkpointing import OutputFiles, copy, read_extra, save_float
from data import Loaders
from deploy import EXPORTER_OPSET, compare_outputs, evaluate_onnx, export_float, measure_latency
from engine import Accuracy, Training, calibrate, evaluate, fit
from model_zoo import load_weights
from summary import Row
from torch import Tensor, fx, nn
from tqdm import tqdm

from fxqat import (
    convert_export,
    enable_calibration,
    enable_quantization,
    load_checkpoint,
    prepare_by_platform,
    save_checkpoint,
)


@dataclass(frozen=True)
class Job:
    """What every part of a run needs; `example` is one batch as the ONNX files take it."""

    options: Options
    loaders: Loaders
    files: OutputFiles
    example: Tensor

    def training(self, model: nn.Module) -> Training:
        """A training of the model as the flags ask for it."""
        options = self.options
        return Training(model, options.optim, options.lr, options.epochs, self.loaders.steps_per_epoch)

    def resume(self, training: Training, extra: dict[str, Any]) -> None:
        """Continue the training whose checkpoint held `extra`."""
        training.load_state_dict(extra["training"])
        if self.options.resume.resolve().parent != self.files.folder.resolve():
            training.best = Accuracy(-1.0, -1.0)  # the best of before is not in this folder
        tqdm.write(f"resuming {self.options.resume} after {training.epochs_done} of {training.epochs} epochs")

    def extra(self, training: Training, accuracies: dict[str, Accuracy] | None) -> dict[str, Any]:
        """What a checkpoint holds beside the model; `accuracies`: those before finetuning, None for a float model."""
        return {
            "options": self.options.state_dict(),
            "training": training.state_dict(),
            "quantized": accuracies is not None,
            "accuracies": {name: list(accuracy) for name, accuracy in (accuracies or {}).items()},
        }


def run_float(job: Job, model: nn.Module) -> list[Row]:
    """Train, or with -e only evaluate, the float model."""
    options, files = job.options, job.files
    if not options.evaluate:
        train_float(job, model)
    accuracy = evaluate(model, job.loaders.val)
    tqdm.write(f"float: * {accuracy}")
    export_float(model, job.example, files.float_onnx, options.opset_version)
    (latency,) = measure_latency([files.float_onnx], job.example)
    return [Row("float", accuracy, files.float_onnx.stat().st_size, latency)]


def train_float(job: Job, model: nn.Module) -> None:
    """Train the float model, and leave it as it was after its best epoch."""
    files, training = job.files, job.training(model)
    if job.options.resume:
        job.resume(training, read_extra(job.options.resume))

    def save(is_best: bool) -> None:
        extra = job.extra(training, accuracies=None)
        if is_best:
            save_float(model, extra, files.best)
        save_float(model, extra, files.checkpoint)

    fit(model, job.loaders, training, save)
    load_weights(model, files.best)


def run_quantized(job: Job, model: nn.Module) -> list[Row]:
    """Prepare, calibrate, finetune, export, and compare with the float model."""
    options, files = job.options, job.files
    resumed = read_extra(options.resume) if options.resume else None
    if resumed is None:
        accuracies = {"float": float_baseline(job, model)}
    else:
        accuracies = {name: Accuracy(*values) for name, values in resumed["accuracies"].items()}
    export_float(model, job.example, files.float_onnx, max(options.opset_version, EXPORTER_OPSET))

    gm = prepare_by_platform(model, options.backend, example_inputs=(job.example,))
    if resumed is None:
        enable_calibration(gm)
        calibrate(gm, job.loaders.calibration)
        enable_quantization(gm)
        accuracies["fake-quant, calibrated"] = evaluate(gm, job.loaders.val)
        tqdm.write(f"calibrated: * {accuracies['fake-quant, calibrated']}")
    else:
        load_checkpoint(gm, options.resume)

    export_quantized(job, gm)  # before training too: what cannot be exported shows now, not after an epoch
    onnx_file = files.onnx
    if not options.evaluate:
        finetune(job, gm, accuracies, resumed)
        load_checkpoint(gm, files.best)
        onnx_file = files.best_onnx
    if resumed or not options.evaluate:
        accuracies["fake-quant, finetuned"] = evaluate(gm, job.loaders.val)
    return compare(job, gm, onnx_file, accuracies)


def float_baseline(job: Job, model: nn.Module) -> Accuracy:
    """Accuracy of the float model, which is trained first if no weights were given."""
    if job.options.model_path is None:
        epochs, lr = job.options.float_recipe
        tqdm.write(f"no weights given: training the float model for {epochs} epochs")
        training = Training(model, "sgd", lr, epochs, job.loaders.steps_per_epoch)
        fit(model, job.loaders, training, save=lambda is_best: None)
        save_float(model, {}, job.files.float_weights)
    accuracy = evaluate(model, job.loaders.val)
    tqdm.write(f"float: * {accuracy}")
    return accuracy


def finetune(job: Job, gm: fx.GraphModule, accuracies: dict[str, Accuracy], resumed: dict[str, Any] | None) -> None:
    """Quantization-aware training; every epoch leaves a checkpoint and an ONNX file, the best one a second pair."""
    files, training = job.files, job.training(gm)
    if resumed:
        job.resume(training, resumed)
    tqdm.write(f"quantization-aware training for {training.epochs} epochs")
    enable_quantization(gm)

    def save(is_best: bool) -> None:
        written = export_quantized(job, gm)
        extra = job.extra(training, accuracies)
        if is_best:
            for path in written:
                copy(path, path.with_name(path.name.replace(files.onnx.stem, files.best_onnx.stem)))
            save_checkpoint(gm, files.best, extra=extra)
        save_checkpoint(gm, files.checkpoint, extra=extra)  # last: after a crash before it, the epoch is repeated

    fit(gm, job.loaders, training, save)


def export_quantized(job: Job, gm: fx.GraphModule) -> list[Path]:
    """Write and verify the QDQ ONNX file with its JSON; returns all files written."""
    path, opset_version = job.files.onnx, job.options.opset_version
    report = convert_export(gm, (job.example,), path, path.with_suffix(".json"), opset_version=opset_version)
    parity = report.certificate
    first = f", the first of them in {parity.first_diverging}" if parity.first_diverging else ""
    tqdm.write(f"{path.name}: verified; {parity.off_share:.3%} of its quantized values off by a step{first}")
    written = (report.onnx_path, report.json_path, report.certificate_path)
    return [file for file in written if file is not None]


def compare(job: Job, gm: fx.GraphModule, onnx_file: Path, accuracies: dict[str, Accuracy]) -> list[Row]:
    """Measure the ONNX files; returns the rows of the table, the float model first and the exported file last."""
    loaders, float_file = job.loaders, job.files.float_onnx
    float_latency, latency = measure_latency([float_file, onnx_file], job.example)
    accuracy, off_by_a_step = evaluate_onnx(onnx_file, loaders.val), compare_outputs(gm, onnx_file, loaders.val)
    rows = {name: Row(name, value) for name, value in accuracies.items()}
    rows["float"] = Row("float", accuracies["float"], float_file.stat().st_size, float_latency)
    exported = Row("ONNX Runtime int8", accuracy, onnx_file.stat().st_size, latency, off_by_a_step)
    return [*rows.values(), exported]
