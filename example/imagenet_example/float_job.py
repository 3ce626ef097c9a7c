"""The float model: trained, evaluated and exported; or trained before quantization if no weights are given."""

from typing import Any

from checkpointing import read_extra, save_float
from distributed import load_in_first
from job import Job
from logs import LOG
from model_zoo import load_weights
from onnx_files import EXPORTER_OPSET, export_float, measure_latency
from summary import Row
from torch import nn


def run_float(job: Job, model: nn.Module) -> list[Row]:
    """Train the float model, or with -e only evaluate it; returns its row of the table."""
    options, files = job.options, job.files
    if not options.evaluate:
        fit = job.fit(model, options)
        training = fit.training
        if options.resume:
            job.resume(training, read_extra(options.resume))

        def save(is_best: bool) -> None:
            extra = job.extra(training, quantized=False)
            if job.process.is_first:
                if is_best:
                    save_float(training.evaluated, extra, files.best)
                save_float(model, extra, files.checkpoint)

        save(False)
        fit.run(save)
        load_in_first(job.process, model, lambda: load_weights(model, files.best))
    job.evaluate("float", model)
    if not job.process.is_first:
        return []
    export_float(model, job.example, files.float_onnx, options.opset_version or EXPORTER_OPSET)
    (latency,) = measure_latency([files.float_onnx], job.example)
    return [Row("float", job.accuracies["float"], files.float_onnx.stat().st_size, latency)]


def float_baseline(job: Job, model: nn.Module, resumed: dict[str, Any] | None) -> None:
    """Train the float model if no weights are given, and evaluate it.

    Args:
        job: the run.
        model: the float model.
        resumed: the extra content of the checkpoint, if this training was interrupted.
    """
    options = job.options
    if options.model_path is None and not options.pretrained:
        first = options.float_first
        LOG.info("no weights given: training the float model for %d epochs", first.epochs)
        fit = job.fit(model, first)
        training = fit.training
        if resumed:
            job.resume(training, resumed)

        def save(is_best: bool) -> None:
            extra = job.extra(training, quantized=False)
            if job.process.is_first:
                save_float(model, extra, job.files.checkpoint)

        if not resumed:
            save(False)
        fit.run(save)
        model.load_state_dict(training.evaluated.state_dict())
        if job.process.is_first:
            save_float(model, {}, job.files.float_weights)
    job.evaluate("float", model)
