"""Prepares and exports a small model for a chip that has no backend in fxqat; writes own_backend.onnx."""

import torch
from torch import nn

from fxqat import convert_export, enable_calibration, prepare_by_platform
from fxqat.custom_quantizer.backends.onnxruntime import ONNXRUNTIME
from fxqat.custom_quantizer.spec import LegalSchemes, Rule

# An imaginary chip. Of the tables in fxqat, that of ONNX Runtime is the most similar. The chip differs in three ways:
# weights have one scale per layer, the output of Linear is an integer, and hardsigmoid and mul have integer kernels.
INTEGERS = Rule(reason="data sheet, table 7: integers in and out")
MY_CHIP = ONNXRUNTIME.for_target(
    "MyChip",
    source="data sheet of the chip, chapter 4",
    weight=ONNXRUNTIME.weight.with_scheme(per_channel=False),
    rules={"linear": INTEGERS, "hardsigmoid": INTEGERS, "mul": INTEGERS},
    fixed_ranges={"hardsigmoid": (0.0, 1.0)},
    left_float={"activation": "data sheet, table 7: no kernel"},
    legal_weights=(LegalSchemes(frozenset({8}), symmetric=True, per_channel=False),),
    legal_activations=(LegalSchemes(frozenset({8})),),
)


class SqueezeExcite(nn.Module):
    """A convolution whose channels are weighted by a function of their averages."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.fc = nn.Linear(8, 8)
        self.gate = nn.Hardsigmoid()

    def forward(self, x):
        y = self.conv(x).relu()
        return y * self.gate(self.fc(y.mean((2, 3))))[:, :, None, None]


torch.manual_seed(0)
x = torch.randn(8, 3, 16, 16)
gm = prepare_by_platform(SqueezeExcite(), MY_CHIP)
print(gm.quant_report)

gm.eval()
enable_calibration(gm)
with torch.no_grad():
    gm(x)
print(convert_export(gm, (x,), "own_backend.onnx"))
