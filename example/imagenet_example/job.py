"""The objects that all stages of a run share."""

from dataclasses import dataclass, field
from typing import Any

import torch
from accuracy import Accuracy, evaluate
from checkpointing import OutputFiles
from data import Loaders
from distillation import Distiller
from distributed import Process, gather
from engine import Classification
from fit import Fit
from logs import LOG, Board
from options import Options
from step_profile import StepProfile
from torch import Tensor, nn
from training import Precision, Training


@dataclass
class Job:
    """The objects that all stages of a run share; `example` is a batch with the input shape of the ONNX files."""

    options: Options
    process: Process
    loaders: Loaders
    files: OutputFiles
    board: Board
    example: Tensor
    accuracies: dict[str, Accuracy] = field(default_factory=dict)

    def fit(self, model: nn.Module, options: Options, distiller: Distiller | None = None) -> Fit:
        """The training loop for a model, built from the options."""
        device = self.process.device
        extra = distiller.regressors if distiller else None
        precision = Precision.of(options, device)
        training = Training(model, options, precision, self.loaders.steps_per_epoch, extra)
        wrapped: Any = torch.compile(model) if options.compile else model
        task = Classification(self.loaders, device, options.label_smoothing, distiller)
        fit = Fit(training, self.process.wrapped(wrapped), task, self.process, self.board, options.print_freq)
        fit.profile = StepProfile(device, precision) if options.profile_step else None
        return fit

    def resume(self, training: Training, extra: dict[str, Any]) -> None:
        """Continue a training from the extra content of its checkpoint."""
        training.resume(self.options.resume, extra["training"], self.files.folder, self.process.rank)

    def extra(self, training: Training, quantized: bool) -> dict[str, Any]:
        """The content of a checkpoint besides the model; all processes must call this."""
        return {
            "options": self.options.state_dict(),
            "training": training.state_dict() | {"rng": gather(torch.get_rng_state())},
            "quantized": quantized,
            "accuracies": {name: list(accuracy) for name, accuracy in self.accuracies.items()},
        }

    def evaluate(self, name: str, model: nn.Module) -> None:
        """Evaluate a model and keep its accuracy for the table."""
        self.accuracies[name] = evaluate(model, self.loaders.val, self.process.device)
        LOG.info("%s: * %s", name, self.accuracies[name])
