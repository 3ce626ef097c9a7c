"""Models that are one recurrent layer of torch: refused, with what to do instead on the backend."""

from __future__ import annotations

from torch import nn

from fxqat.custom_quantizer.spec import BackendSpec
from fxqat.errors import ConfigError
from fxqat.ops.families import RECURRENT

LAYERS = (nn.LSTM, nn.GRU, nn.RNN)
CELLS = {nn.LSTMCell: "LSTM", nn.GRUCell: "GRU", nn.RNNCell: "RNN"}


def check_bare_recurrent(model: nn.Module, spec: BackendSpec) -> None:
    """Refuse a model that is a recurrent layer: its forward is one call of torch, which cannot be traced.

    Args:
        model: the user's model.
        spec: the backend, which decides whether the layer is quantized once it is a module of a model.

    Raises:
        ConfigError: the model is a recurrent layer or cell of torch.
    """
    name = type(model).__name__
    if type(model) in CELLS:
        raise ConfigError(
            f"the model is a bare {name}, and cells stay float on every backend: ONNX has operators for whole "
            f"sequences only. Prepare a model with torch.nn.{CELLS[type(model)]} as a module"
        )
    if type(model) not in LAYERS:
        return
    words = (
        f"the model is a bare {name}: a recurrent layer is quantized as a module of a model. Prepare "
        "torch.nn.Sequential(model), or a module of your own that holds it and calls it in forward"
    )
    if spec.rule(name.lower(), RECURRENT) is None:
        words += (
            f". On {spec.name} it then still stays float ({spec.why_float(name.lower(), RECURRENT)}), unless "
            f"prepare_custom_config_dict has {{'extra_quantizer_dict': {{'additional_module_type': [{name!r}]}}}} for "
            f"one operator with integer weights, or {{'overrides': [{{'match': {{'type': {name!r}}}, 'recurrent': "
            "'unrolled'}]} and example_inputs are given for plain operations"
        )
    raise ConfigError(words)
