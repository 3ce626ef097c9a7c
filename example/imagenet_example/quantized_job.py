"""The quantized model: prepare, calibrate, finetune, export, compare with the float model."""

from pathlib import Path
from typing import Any

from accuracy import Accuracy
from checkpointing import copy_file, read_extra
from deploy import compare_outputs, evaluate_onnx
from distillation import Distiller
from distributed import load_in_first
from float_job import float_baseline
from job import Job
from logs import LOG, shows_progress
from model_zoo import build_model, load_weights
from onnx_files import EXPORTER_OPSET, export_float, measure_latency, runtime_for
from summary import Row
from torch import nn

from fxqat import (
    calibrate,
    convert_export,
    enable_quantization,
    load_checkpoint,
    prepare_by_platform,
    save_checkpoint,
)
from fxqat.tools import NaNGuard, profile

PROFILED_IMAGES, PROFILED_ROWS = 8, 20


def run_quantized(job: Job, model: nn.Module) -> list[Row]:
    """Prepare, calibrate, finetune and export the model; returns the rows of the table."""
    options, files = job.options, job.files
    resumed = read_extra(options.resume) if options.resume else None
    if resumed is None or not resumed["quantized"]:
        float_baseline(job, model, resumed)
        resumed = None
    else:
        model.load_state_dict(resumed["float_state_dict"])  # the checkpoint's own weights are the finetuned ones
        job.accuracies |= {name: Accuracy(*values) for name, values in resumed["accuracies"].items()}
    if job.process.is_first:
        export_float(model, job.example, files.float_onnx, max(options.opset_version or 0, EXPORTER_OPSET))

    gm = prepared(job, model)
    distiller = make_distiller(job, model, gm) if options.distill_method and not options.evaluate else None
    if resumed is None:
        calibrate(gm, job.loaders.calibration(options.calib_batches), progress=shows_progress())
        enable_quantization(gm)
        job.evaluate("fake-quant, calibrated", gm)
    else:
        load_checkpoint(gm, options.resume)
    if options.profile and job.process.is_first:
        write_profile(job, gm)

    onnx_file = files.onnx
    export_quantized(job, gm)  # before training: a model that cannot be exported fails now, not after an epoch
    if not options.evaluate:
        finetune(job, gm, model, distiller, resumed)
        load_in_first(job.process, gm, lambda: load_checkpoint(gm, files.best))
        onnx_file = files.best_onnx
    if resumed or not options.evaluate:
        job.evaluate("fake-quant, finetuned", gm)
    return compare(job, gm, onnx_file) if job.process.is_first else []


def prepared(job: Job, model: nn.Module) -> Any:
    """The model with fake-quants, as the flags configure them."""
    config = str(job.options.quant_config) if job.options.quant_config else None
    return prepare_by_platform(model, job.options.backend, config, example_inputs=(job.example,))


def make_distiller(job: Job, model: nn.Module, gm: nn.Module) -> Distiller:
    """The loss with the teacher that the flags name; by default the float model with its current weights."""
    options = job.options
    teacher = model
    if options.teacher_arch or options.teacher_path:
        arch, size = options.teacher_arch or options.arch, job.example.shape[-1]
        pretrained = options.teacher_path is None
        teacher = build_model(options.model_zoo, arch, job.loaders.data.num_classes, size, pretrained=pretrained)
        if options.teacher_path:
            load_weights(teacher, options.teacher_path, "--teacher-path")
        teacher.to(job.process.device)
    method = options.distill_method or ""
    example = job.example.to(job.process.device)
    return Distiller(gm, prepared(job, teacher), example, method, options.distill_alpha, options.temperature)


def finetune(job: Job, gm: Any, model: nn.Module, distiller: Distiller | None, resumed: dict[str, Any] | None) -> None:
    """Quantization-aware training; each epoch writes a checkpoint, each new best one also ONNX and `model_best`."""
    files, options = job.files, job.options
    fit = job.fit(gm, options, distiller)
    training = fit.training
    fit.guard = NaNGuard(gm)
    if resumed:
        job.resume(training, resumed)
    enable_quantization(gm)

    def save(is_best: bool) -> None:
        extra = job.extra(training, quantized=True) | {"float_state_dict": dict(model.state_dict())}
        if not job.process.is_first:
            return
        if is_best:
            for path in export_quantized(job, training.evaluated):
                copy_file(path, path.with_name(path.name.replace(files.onnx.stem, files.best_onnx.stem)))
            save_checkpoint(training.evaluated, files.best, extra=extra)
        save_checkpoint(gm, files.checkpoint, extra=extra)  # last: after a crash before it, the epoch is repeated

    if not resumed:
        save(False)
    LOG.info("quantization-aware training for %d epochs", training.epochs)
    fit.run(save)


def export_quantized(job: Job, gm: Any) -> list[Path]:
    """Write and verify the QDQ ONNX file and its JSON, in the first process; returns the files written."""
    if not job.process.is_first:
        return []
    path, options = job.files.onnx, job.options
    report = convert_export(
        gm,
        (job.example,),
        path,
        path.with_suffix(".json"),
        opset_version=options.opset_version,
        runtime=runtime_for(gm, options.runtime),
    )
    parity = report.certificate
    first = f", the first one in {parity.first_diverging}" if parity.first_diverging else ""
    LOG.info("%s: verified; %.3f%% of its quantized values off by a step%s", path.name, 100 * parity.off_share, first)
    written = (report.onnx_path, report.json_path, report.certificate_path)
    return [file for file in written if file is not None]


def write_profile(job: Job, gm: Any) -> None:
    """Compare every layer with the float model, on a few validation images."""
    found = profile(gm, [job.loaders.example(PROFILED_IMAGES, job.process.device)], progress=shows_progress())
    found.write_csv(job.files.profile_csv)
    found.write_html(job.files.profile_page, title=f"{job.options.arch}: quantized against float")
    files = job.files.profile_csv, job.files.profile_page
    LOG.info("%s\n%s\nall %d tensors: %s and %s", found.verdict, found.table(PROFILED_ROWS), len(found), *files)


def compare(job: Job, gm: Any, onnx_file: Path) -> list[Row]:
    """Measure the ONNX files; returns the rows of the table, from the float model to the exported file."""
    loaders, float_file, accuracies = job.loaders.alone(), job.files.float_onnx, job.accuracies
    float_latency, latency = measure_latency([float_file, onnx_file], job.example)
    accuracy, off_by_a_step = evaluate_onnx(onnx_file, loaders.val), compare_outputs(gm, onnx_file, loaders.val)
    rows = {name: Row(name, value) for name, value in accuracies.items()}
    rows["float"] = Row("float", accuracies["float"], float_file.stat().st_size, float_latency)
    exported = Row("ONNX Runtime int8", accuracy, onnx_file.stat().st_size, latency, off_by_a_step)
    return [*rows.values(), exported]
