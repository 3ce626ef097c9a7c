"""Which hooks of a prepared model the exported file does not have."""

import torch
from torch import nn

from fxqat import prepare_by_platform
from fxqat.quantization.user_hooks import drop_hooks, lost_hooks


class Internal:
    """A hook that fxqat itself registers."""

    fxqat_internal = True

    def __call__(self, module, args):
        return None


class Gate(nn.Module):
    """Kept as a whole."""

    def forward(self, x):
        return x * (x.sum() > 0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.gate = Gate()

    def forward(self, x):
        return self.gate(self.body(x))


def noted(module, args, output=None):
    return None


def test_hooks_of_the_model_of_layers_and_of_containers_are_lost_and_those_of_kept_modules_are_not():
    gm = prepare_by_platform(Net(), prepare_custom_config_dict={"leaf_module": [Gate]}, check="off")
    for module in (gm, gm.body, gm.get_submodule("body.0"), gm.gate):
        module.register_forward_hook(noted)
    gm.register_forward_pre_hook(Internal())
    gm.register_forward_pre_hook(nn.Identity())
    assert lost_hooks(gm) == ["the model: noted", "the model: Identity", "body: noted", "body.0: noted"]
    drop_hooks(gm)
    assert lost_hooks(gm) == []
    assert [type(hook) for hook in gm._forward_pre_hooks.values()] == [Internal]
    assert list(gm.gate._forward_hooks.values()) == [noted]
    gm(torch.randn(2, 4))
