"""Quantization-aware training with Lightning: ``pip install lightning``."""

from __future__ import annotations

import copy
import logging

import lightning.pytorch as pl
import torch

from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools.training.trainer_callback import QuantizationSteps, prepared_inside


class QuantizationCallback(QuantizationSteps, pl.Callback):
    """Calibrates the prepared model in a LightningModule, trains it with fake-quant on, and exports the best one.

    When training starts, a model that is not calibrated runs some batches with its observers on; then its fake-quants
    are switched on. Of a run that is resumed, ranges and switches come from the checkpoint. At the end of ``fit``, rank
    0 exports the model of the best checkpoint of ``ModelCheckpoint``, or the last model if there is none.

    Args: as :class:`~fxqat.tools.training.trainer_callback.QuantizationSteps`.

    Raises:
        ConfigError: at the start of training: the module does not hold exactly one prepared model, or a batch does not
            fit it.
        ExportError: at the end of ``fit``: the model cannot be exported.

    Example::

        class Task(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = prepare_by_platform(net, "TSQAT", example_inputs=(images,))

            ...


        callback = QuantizationCallback(export="model.onnx", example_inputs=(images,))
        pl.Trainer(callbacks=[callback]).fit(Task(), data)

    Source: https://lightning.ai/docs/pytorch/stable/extensions/callbacks.html
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Calibrate, unless the model is calibrated, and switch fake-quant on."""
        assert trainer.train_dataloader is not None  # training starts
        self.begin(pl_module, trainer.train_dataloader)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Export the best model."""
        if trainer.is_global_zero:
            self.end(_best(trainer, pl_module))


def _best(trainer: pl.Trainer, pl_module: pl.LightningModule) -> QuantGraphModule:
    """A copy of the prepared model with the weights of the best checkpoint; the model itself if there is none."""
    path, gm = prepared_inside(pl_module)
    file = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if not file:
        return gm
    prefix = f"{path}."
    content = torch.load(file, map_location="cpu", weights_only=False)  # this run wrote it, with what its module holds
    state = content["state_dict"]
    best = copy.deepcopy(gm)
    best.load_state_dict({name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)})
    logging.getLogger("fxqat").info("exporting the model of %s", file)
    return best
