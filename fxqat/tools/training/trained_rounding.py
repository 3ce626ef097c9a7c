"""Learn the rounding of all weights together, in the user's own training loop.

Straight-through training at few bits ends in weights that jump between two integers: the smaller the learning rate, the
less they do, and the less is learned. Here no weight is rounded while it is learned. Each lies at a fraction between
its two integers, as in AdaRound (Nagel et al. 2020, arXiv:2004.10568, equations 22 and 23), and during the training the
fractions are pulled to 0 or 1, harder and harder: first those that the loss does not mind, the others make up for them.
The weights with the largest gradients would stay undecided to the end, with none left to make up for them. So from the
share :data:`LIMITED` of the steps on, the number of undecided weights is limited. The limit falls to 0 as a parabola,
and the weights that are nearest to an integer are rounded. AdaRound learns the layers one after another on their own
outputs; this learns the model on the user's loss.

The pull is measured by the gradients of the loss. ``g`` is the root mean square of the gradients of a weight's rounding
variables V, averaged over the steps; the pull is the gradient of ``sum 1 - (2 h(V) - 1)**2``, AdaRound's regularization
with the exponent 2, times ``strength(step) * g``. So it needs no coefficient that fits the loss.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxqat.errors import CalibrationError, ConfigError
from fxqat.nn.parametrized import has_computed_weight
from fxqat.nn.qat import BN_FREEZE, QATLayer
from fxqat.quantization.graph_module import QuantGraphModule, finished_model
from fxqat.tools.post_training.adaround import AdaRoundFakeQuantize
from fxqat.tools.post_training.layer_weights import LayerWeight, require_plain, weights_of
from fxqat.tools.post_training.segments import WEIGHTED_LAYERS

START, LIMITED, END = 0.1, 0.45, 0.75
"""Shares of the steps after which the pull starts, the number of undecided weights is limited, and the limit is 0."""

WEAKEST, STRONGEST = 0.03, 5.0
"""Strength of the pull at the start and at the end; it grows exponentially."""

MOMENTUM = 0.05
"""Of the moving average of the gradients."""

SMALLEST = 0.01
"""Smaller parameters, such as biases that are zero, have the learning rate of this size."""

PATH = 40.0
"""Learning rate of the rounding variables times the steps. A variable goes 2.4 from one half to an integer."""

LARGEST = 0.02
"""Learning rate of the rounding variables with few steps. Adam's first step moves every variable by it, each in the
direction of its gradient: with a larger one the loss becomes many times as large, and few steps do not mend it.
"""

MOST_BEFORE, MOST_AFTER = 0.9, 0.01
"""Warn if more weights are undecided: when the limit begins, and when it has ended."""

NEAR = 1e-3
"""A fraction this near to 0 or 1 counts as decided: float32 does not give an exact 0 for a weight on an integer."""

LEAST_BITS = 8
"""Scales with fewer significant bits, such as powers of two, are not learned."""


class TrainedRounding:
    """What :func:`train_rounding` gives: the parameters to train, and the pull on the fractions.

    Args:
        gm: the prepared model, whose weights have ``quants``.
        quants: the learned rounding of each weight.
        steps: of the training.
    """

    def __init__(self, gm: QuantGraphModule, quants: list[AdaRoundFakeQuantize], steps: int) -> None:
        self._gm = gm
        self._quants = quants
        self._steps = steps
        self._done = 0
        self._is_decided = False
        self._sizes: dict[AdaRoundFakeQuantize, Tensor] = {}

    def parameter_groups(self, rounding_lr: float | None = None, relative_lr: float = 3e-4) -> list[dict[str, Any]]:
        """Groups for an optimizer, Adam or one of its kind: all that is learned.

        Args:
            rounding_lr: of the rounding variables; None: ``40 / steps``, at most 0.02.
            relative_lr: of the scales of weights and of all other parameters that require gradients, relative to the
                root mean square of each. Zero points are not learned, nor are scales of weights with fewer than
                :data:`LEAST_BITS` significant bits.

        Returns:
            Dicts with ``params`` and ``lr``.
        """
        rounding_lr = min(PATH / self._steps, LARGEST) if rounding_lr is None else rounding_lr
        if not (rounding_lr > 0 and relative_lr > 0):
            raise ConfigError(f"learning rates must be positive, got {rounding_lr} and {relative_lr}")
        own = [(quant.rounding, quant.log_factor) for quant in self._quants]
        known = {parameter for pair in own for parameter in pair}
        groups = [
            {"params": [rounding for rounding, _ in own], "lr": rounding_lr},
            {"params": [factor for _, factor in own if factor.requires_grad], "lr": relative_lr},
        ]
        for name, parameter in self._gm.named_parameters():
            if parameter.requires_grad and parameter not in known and not name.endswith("fake_quant.shift"):
                size = max(float(parameter.detach().float().square().mean().sqrt()), SMALLEST)
                groups.append({"params": [parameter], "lr": relative_lr * size})
        return [group for group in groups if group["params"]]

    @torch.no_grad()
    def pull(self) -> None:
        """Pull the fractions to 0 or 1: call it in each step, between ``loss.backward()`` and ``optimizer.step()``.

        After the share :data:`LIMITED` of the steps it rounds more and more weights, after :data:`END` all, and only
        scales and the other parameters are learned.

        Raises:
            ConfigError: there is no gradient.
        """
        before, progress = (self._done - 1) / self._steps, self._done / self._steps
        self._done += 1
        if progress >= END:
            self.decide()
            for quant in self._quants:  # its optimizer leaves a parameter without a gradient
                quant.rounding.grad = None
            return
        if progress >= LIMITED:
            if before < LIMITED:
                self._tell(MOST_BEFORE)
            self._limit((1 - (progress - LIMITED) / (END - LIMITED)) ** 2)
        trained = [quant for quant in self._quants if quant.rounding.grad is not None]
        if not trained:
            raise ConfigError("pull: no weight has a gradient. Call it after loss.backward(), before optimizer.step()")
        strength = WEAKEST * (STRONGEST / WEAKEST) ** ((progress - START) / (END - START))
        for quant in trained:
            gradient = quant.rounding.grad
            assert gradient is not None
            size = gradient.float().square().mean().sqrt()
            average = self._sizes.get(quant, torch.zeros_like(size))
            # a step that a gradient scaler skips has infinite gradients: its first ones do
            self._sizes[quant] = torch.where(size.isfinite(), torch.lerp(average, size, MOMENTUM), average)
            if progress >= START:
                with torch.enable_grad():
                    (pull,) = torch.autograd.grad(quant.regularization(2.0), quant.rounding)
                gradient.add_(strength * self._sizes[quant] * pull)

    def decide(self) -> None:
        """Round all weights, if they are not yet; :meth:`pull` and the end of the block do this."""
        if self._is_decided:
            return
        self._tell(MOST_AFTER)
        for quant in self._quants:
            quant.decide_()
        self._is_decided = True

    def _limit(self, share: float) -> None:
        """Round the weights nearest to an integer, so that this share of each tensor is undecided."""
        for quant in self._quants:
            quant.decide_(int(share * quant.rounding.numel()))

    def _tell(self, most: float) -> None:
        """Warn if a larger share of the weights is not decided."""
        left = self.undecided()
        if left > most:
            logging.getLogger("fxqat").warning(
                "train_rounding: after %d of %d steps, %.0f %% of the weights were not decided, and are rounded to the "
                "nearest. Take more steps, or a larger rounding_lr",
                self._done,
                self._steps,
                100 * left,
            )

    @torch.no_grad()
    def undecided(self) -> float:
        """The share of the weights whose fraction is neither 0 nor 1, to be printed now and then."""
        distances = torch.cat([(quant.fraction() - 0.5).abs().flatten() for quant in self._quants])
        return float((distances < 0.5 - NEAR).float().mean())


@contextmanager
def train_rounding(model: nn.Module, steps: int) -> Iterator[TrainedRounding]:
    """Inside, the weights of a model are not rounded but lie between their integers, and a training loop decides.

    ::

        with train_rounding(gm, steps) as rounding:
            optimizer = torch.optim.Adam(rounding.parameter_groups())
            for x, y in batches:
                optimizer.zero_grad()
                criterion(gm(x), y).backward()
                rounding.pull()
                optimizer.step()

    Afterwards the weights are what was decided, so that rounding to the nearest gives it, with the learned scales.
    Inside, the quantized weights themselves and the BatchNorm that is folded into them do not change; biases, scales of
    activations and whatever else requires gradients may be trained as usual. If an error leaves the block, weights and
    their scales are as before. A model is not exported or saved inside.

    A weight that several layers share, one that is computed from other tensors, and tables of embeddings are trained as
    in QAT, rounded to the nearest; the first two are told.

    Args:
        model: a prepared and calibrated model, with its fake-quants on.
        steps: how often :meth:`TrainedRounding.pull` will be called. With few steps or few data, nothing is gained:
            hundreds are needed, thousands are better.

    Raises:
        CalibrationError: no weight has its fake-quant on.
        ConfigError: ``steps`` is not positive, a weight fake-quant rounds a function of the weight, or the model is
            wrapped by DDP, whose buckets would not have the new parameters: wrap it inside the block.
    """
    if steps < 1:
        raise ConfigError(f"train_rounding: steps must be at least 1, got {steps}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            "train_rounding: the model is wrapped by DistributedDataParallel already, which would not average the new "
            "gradients. Give it the prepared model, and wrap that inside the block"
        )
    gm = finished_model(model, ConfigError)
    weights = _weights(gm)
    norms = [weight.layer for weight in weights if isinstance(weight.layer, QATLayer) and weight.layer.bn is not None]
    modes = [layer.bn_mode for layer in norms]
    frozen = [tensor for weight in weights for tensor in _parameters(weight) if tensor.requires_grad]
    given = [weight.quant for weight in weights]
    quants = [AdaRoundFakeQuantize(weight.quant, weight.value()) for weight in weights]
    for quant in quants:
        quant.log_factor.requires_grad_(quant.scale_bits >= LEAST_BITS)
    try:
        for tensor in frozen:
            tensor.requires_grad_(False)
        for layer in norms:
            layer.bn_mode = BN_FREEZE
        for weight, quant in zip(weights, quants, strict=True):
            weight.quant = quant
        rounding = TrainedRounding(gm, quants, steps)
        yield rounding
        rounding.decide()
    finally:
        for weight, before in zip(weights, given, strict=True):
            weight.quant = before
        for layer, mode in zip(norms, modes, strict=True):
            layer.bn_mode = mode
        for tensor in frozen:
            tensor.requires_grad_(True)
    for weight, quant in zip(weights, quants, strict=True):
        weight.quant.set_qparams(*quant.qparams())
        weight.write_(quant.decided(weight.value().shape))


def _weights(gm: QuantGraphModule) -> list[LayerWeight]:
    """The weights whose rounding is learned."""
    layers = {path: module for path, module in gm.named_modules() if isinstance(module, WEIGHTED_LAYERS)}
    owners = Counter(id(parameter) for _, parameter in gm.named_parameters(remove_duplicate=False))
    found, left = [], []
    for path, layer in layers.items():
        tensors = [tensor for parts in layer.weight_tensors() for tensor in parts]
        if has_computed_weight(layer) or any(owners[id(tensor)] > 1 for tensor in tensors):
            left.append(path)
            continue
        for weight in weights_of(layer):
            if not weight.quant.fake_quant_enabled:
                continue
            require_plain(path, weight, "train_rounding")
            found.append(weight)
    if not found:
        raise CalibrationError(
            f"train_rounding: none of {len(layers)} layers has a weight of its own with its fake-quant on. Calibrate "
            "the model and call enable_quantization(model) first."
        )
    if left:
        logging.getLogger("fxqat").warning(
            "train_rounding: the weights of %s are trained as in QAT, rounded to the nearest: they are computed from "
            "other tensors, or several layers share them",
            ", ".join(left),
        )
    return found


def _parameters(weight: LayerWeight) -> list[Tensor]:
    """The parameters that hold a weight, and the factors that are folded into it."""
    place = [f"{name}_fake_quant" for name in weight.layer.weight_names].index(weight.attribute)
    bn = weight.layer.bn if isinstance(weight.layer, QATLayer) else None
    of_bn = [bn.weight] if bn is not None and bn.weight is not None else []
    return [*weight.layer.weight_tensors()[place], *of_bn]
