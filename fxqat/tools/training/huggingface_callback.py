"""Quantization-aware training with the ``Trainer`` of transformers: ``pip install transformers accelerate``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fxqat.tools.training.trainer_callback import QuantizationSteps, prepared_inside


class QuantizationTrainerCallback(QuantizationSteps, TrainerCallback):
    """Calibrates the prepared model of a ``Trainer``, trains it with fake-quant on, and exports it.

    When training starts, a model that is not calibrated runs some batches with its observers on; then its fake-quants
    are switched on. Of a run that is resumed, ranges and switches come from the checkpoint. When training ends, the
    main process exports the model: the best one with ``load_best_model_at_end=True``, else the last one.

    Args: as :class:`~fxqat.tools.training.trainer_callback.QuantizationSteps`.

    Raises:
        ConfigError: at the start of training: the model is not a prepared one, or a batch does not fit it.
        ExportError: at the end of training: the model cannot be exported.

    Example::

        gm = prepare_by_platform(model, "TSQAT", example_inputs=(images, labels))
        callback = QuantizationTrainerCallback(export="model.onnx", example_inputs=(images, labels))
        Trainer(gm, arguments, train_dataset=data, callbacks=[callback]).train()

    Source: https://huggingface.co/docs/transformers/main_classes/callback
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Calibrate, unless the model is calibrated, and switch fake-quant on."""
        self.begin(kwargs["model"], kwargs["train_dataloader"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Export the model."""
        if state.is_world_process_zero:
            self.end(prepared_inside(kwargs["model"])[1])
