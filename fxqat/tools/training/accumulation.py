"""Gradient accumulation: round the weights once for all micro-batches of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fxqat.errors import ConfigError
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.nn.kept_weights import KeptWeights
from fxqat.nn.quantized_layer import QuantizedLayer
from fxqat.quantization.graph_module import prepared_model
from fxqat.utils.torch_compat import is_sharded, tensor_version


@contextmanager
def round_weights_once(model: nn.Module) -> Iterator[None]:
    """Context in which the first forward pass rounds the weights and the next ones reuse the result.

    For the micro-batches of one step::

        with round_weights_once(gm):
            for images, labels in micro_batches:
                (criterion(gm(images), labels) / len(micro_batches)).backward()
        optimizer.step()

    At the end of the context, the gradients of the rounded weights, summed over the micro-batches, go through the
    backward pass of the rounding to the weights and their scales. They are those without the context, in another order
    of summation; with a fake-quant whose gradient is not linear (``EWGS``) they are those of one large batch.
    ``Oscillation`` counts one step. Until then these parameters have no new gradients, so clip gradients after the
    context.

    A layer with a BatchNorm that trains rounds its weight in every pass: its grid follows the running variance, which
    each pass changes. The context holds the rounded weights and their gradients, two more copies of the weights. With
    DDP, give the DDP model, and run all micro-batches but the last one in its ``no_sync()``. Under ``torch.compile``
    the layers run outside of the compiled code. Do not use it with DeepSpeed, which averages gradients before the
    context ends.

    Args:
        model: a prepared and calibrated model, or the DDP model around it, with its observers off.

    Raises:
        ConfigError: an observer is on; the model is sharded (FSDP2 frees the weights after each pass), or its DDP has
            ``find_unused_parameters`` or ``static_graph``; the model is in such a context already; a parameter was
            changed in the context, as by ``optimizer.step()``; no weight was rounded in it with gradients on; or a
            backward pass ran after it.
    """
    gm = prepared_model(model, ConfigError)
    layers = [m for m in gm.modules() if isinstance(m, QuantizedLayer)]
    _check(model, gm, layers)
    before = {name: tensor_version(parameter) for name, parameter in gm.named_parameters()}
    kept = KeptWeights()
    for layer in layers:
        layer.kept_weights = kept
    try:
        yield
        changed = [name for name, parameter in gm.named_parameters() if tensor_version(parameter) != before.get(name)]
        if changed:
            raise ConfigError(
                f"round_weights_once: {len(changed)} parameters were changed inside the context, first {changed[0]}, "
                "before the gradients of weights were complete. Call optimizer.step() after it."
            )
        if not len(kept):
            raise ConfigError(
                "round_weights_once: no weight was rounded inside the context. The model must run there with gradients "
                "on, and have a layer without a BatchNorm that trains; for the others, freeze BatchNorm "
                "('bn_mode': 'freeze')."
            )
        kept.backward()
    finally:
        kept.close()
        for layer in layers:
            layer.kept_weights = None


def _check(model: nn.Module, gm: nn.Module, layers: list[QuantizedLayer]) -> None:
    observed = [name for name, quant in named_fake_quants(gm) if quant.observer_enabled]
    if observed:
        raise ConfigError(
            f"round_weights_once: {len(observed)} observers are on, first {observed[0]}: scales change in each pass. "
            "Call enable_quantization(model) first."
        )
    if any(is_sharded(parameter) for parameter in gm.parameters()):
        raise ConfigError(
            "round_weights_once: the model is sharded, and its weights are freed after each pass. Train without the "
            "context, which changes speed only."
        )
    wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if any(wrapper.find_unused_parameters or wrapper.static_graph for wrapper in wrappers):
        raise ConfigError(
            "round_weights_once: DDP with find_unused_parameters or static_graph expects all gradients in one backward "
            "pass, but those of weights come at the end of the context. Switch both off."
        )
    if any(layer.kept_weights is not None for layer in layers):
        raise ConfigError("round_weights_once: the model is in such a context already")
