"""The float model: trained, evaluated, exported; and the training that comes first where no weights are given."""

from checkpointing import read_extra, save_float
from deploy import export_float, measure_latency
from job import Job
from logs import LOG
from model_zoo import load_weights
from summary import Row
from torch import nn


def run_float(job: Job, model: nn.Module) -> list[Row]:
    """Train, or with -e only evaluate, the float model."""
    options, files = job.options, job.files
    if not options.evaluate:
        fit = job.fit(model, options.epochs, options.lr)
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
        load_weights(model, files.best)
    job.evaluate("float", model)
    if not job.process.is_first:
        return []
    export_float(model, job.example, files.float_onnx, options.opset_version)
    (latency,) = measure_latency([files.float_onnx], job.example)
    return [Row("float", job.accuracies["float"], files.float_onnx.stat().st_size, latency)]


def float_baseline(job: Job, model: nn.Module) -> None:
    """Note the accuracy of the float model, which is trained first if no weights were given."""
    options = job.options
    if options.model_path is None and not options.pretrained:
        epochs, lr = options.float_recipe
        LOG.info("no weights given: training the float model for %d epochs", epochs)
        fit = job.fit(model, epochs, lr)
        fit.run(save=lambda is_best: None)
        model.load_state_dict(fit.training.evaluated.state_dict())
        if job.process.is_first:
            save_float(model, {}, job.files.float_weights)
    job.evaluate("float", model)
