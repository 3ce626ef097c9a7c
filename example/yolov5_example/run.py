"""The two kinds of training: float, and quantization-aware."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpointing import OutputFiles, copy_file, save_float
from dataset import Picture
from detection import HEADLINE, Scores
from detector import OnnxDetector, export, prepared
from distributed import Process, gather, load_in_first
from fit import Fit
from logs import LOG, Board, shows_progress
from model import Yolo
from onnx_files import runtime_for
from options import Options
from task import Detection, evaluate
from torch import nn
from training import Precision, Training
from weights import read_weights

from fxqat import calibrate, enable_quantization, load_checkpoint, save_checkpoint
from fxqat.tools import NaNGuard


class Run:
    """One training.

    Args:
        options: the flags.
        process: this process.
        files: paths of the output files.
        names: names of the classes.
        pictures: pictures of "train" and "val".
        resumed: the checkpoint's content besides the weights, if a training is resumed.
    """

    def __init__(
        self, options: Options, process: Process, files: OutputFiles, names: tuple[str, ...],
        pictures: dict[str, Sequence[Picture]], resumed: dict[str, Any] | None,
    ) -> None:  # fmt: skip
        self.options, self.process, self.files, self.names = options, process, files, names
        self.pictures, self.resumed = pictures, resumed

    def float(self, model: Yolo) -> Scores:
        """Train in float; returns the scores of the best epoch."""
        task, training = self.start(model, model)

        def save(is_best: bool) -> None:
            extra = self.extra(training)
            if self.process.is_first:
                if is_best:
                    save_float(training.evaluated, extra, self.files.best)
                save_float(model, extra, self.files.checkpoint)

        self.fit(model, task, training, None).run(save)
        load_in_first(self.process, model, lambda: model.load_state_dict(read_weights(self.files.best)["state_dict"]))
        return self.scores("float", model, task)

    def quantized(self, model: Yolo) -> Scores:
        """Prepare, calibrate, finetune and export; returns the scores of the best epoch."""
        options, files = self.options, self.files
        if self.resumed:
            model.load_state_dict(self.resumed["float_state_dict"])
        model.to(self.process.device)
        gm = prepared(model, options.state_dict())
        task, training = self.start(model, gm)
        if self.resumed:
            load_checkpoint(gm, options.resume)
        else:
            self.scores("float", model, task)
            images = (batch.images.float() / 255 for batch in task.calibration(options.calib_pictures))
            calibrate(gm, images, progress=shows_progress())
            enable_quantization(gm)
            training.best = self.scores("fake-quant, calibrated", gm, task).map

        def save(is_best: bool) -> None:
            extra = self.extra(training) | {"float_state_dict": dict(model.state_dict())}
            if not self.process.is_first:
                return
            # No export after an interrupt: the run should end soon.
            written = [] if training.steps_done else self.export(training.evaluated)
            if is_best:
                for path in written:
                    copy_file(path, path.with_name(path.name.replace(files.onnx.stem, files.best_onnx.stem)))
                save_checkpoint(training.evaluated, files.best, extra=extra)
            save_checkpoint(gm, files.checkpoint, extra=extra)  # last: after a crash before it, the epoch is repeated

        if not self.resumed:
            save(True)  # the calibrated model is the first candidate; a model that cannot be exported fails now
        fit = self.fit(gm, task, training, NaNGuard(gm))
        fit.run(save)
        load_in_first(self.process, gm, lambda: load_checkpoint(gm, files.best))
        best = self.scores("fake-quant, best epoch", gm, task)
        if self.process.is_first:
            found = evaluate(OnnxDetector(files.best_onnx), task.pictures["val"], options.img, 16, 0, rectangular=False)
            LOG.info("ONNX Runtime, %s, square images:\n%s\n%s", files.best_onnx.name, HEADLINE, found)
        return best

    def start(self, model: Yolo, trained: nn.Module) -> tuple[Detection, Training]:
        """The task, and the training's state: new, or from the checkpoint."""
        options, device = self.options, self.process.device
        model.to(device)
        teacher = copy.deepcopy(model).eval().requires_grad_(False) if options.distill else None
        task = Detection(
            self.pictures, model.model[-1], options.hyp, options.img, options.batch_size, options.workers,
            options.seed, self.process, teacher,
        )  # fmt: skip
        training = Training(trained, options, Precision.of(options, device), task.steps_per_epoch)
        if self.resumed:
            training.resume(options.resume, self.resumed["training"], self.files.folder, self.process.rank)
        return task, training

    def fit(self, model: nn.Module, task: Detection, training: Training, guard: NaNGuard | None) -> Fit:
        """The training loop."""
        wrapped = self.process.wrapped(model)
        return Fit(training, wrapped, task, self.process, Board(None), self.options.print_freq, guard)

    def extra(self, training: Training) -> dict[str, Any]:
        """The content of a checkpoint besides the model; all processes must call this."""
        return {
            "options": self.options.state_dict(),
            "training": training.state_dict() | {"rng": gather(torch.get_rng_state())},
            "quantized": self.options.quantize,
            "names": list(self.names),
        }

    def scores(self, name: str, model: nn.Module, task: Detection) -> Scores:
        """Measure and print how good a model is."""
        LOG.info("%s:", name)
        return task.measure(model, Precision(self.process.device.type, None))

    def export(self, gm: nn.Module) -> list[Path]:
        """Write and verify the QDQ ONNX file and its JSON, in the first process; returns the files written."""
        if not self.process.is_first:
            return []
        options = self.options
        runtime = runtime_for(gm, options.runtime)
        report = export(
            gm, self.files.onnx, options.img, self.names, options.with_decode, options.opset_version, runtime
        )
        LOG.info(
            "%s: verified; %.3f%% of its values off by a step", self.files.onnx.name, 100 * report.certificate.off_share
        )
        return [path for path in (report.onnx_path, report.json_path, report.certificate_path) if path is not None]
