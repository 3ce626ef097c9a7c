"""Quantizes, finetunes and exports a small model on random data; writes its files to the current folder."""

import torch
from torch import nn

from fxqat import (
    BackendType,
    convert_export,
    enable_calibration,
    enable_quantization,
    load_checkpoint,
    prepare_by_platform,
    save_checkpoint,
)

torch.manual_seed(0)


def make_float_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


# 1. The trained float model and its data. Here: random ones.
model = make_float_model()
data = [(torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))) for _ in range(4)]

# 2. Prepare: a copy of the model with fake quantization in it.
gm = prepare_by_platform(model, BackendType.TSQAT)
print(gm.quant_report)

# 3. Calibrate: a few batches, in eval mode, without gradients.
gm.eval()
enable_calibration(gm)
with torch.no_grad():
    for x, _ in data:
        gm(x)

# 4. Train as the float model was trained, at a small learning rate.
gm.train()
enable_quantization(gm)
optimizer = torch.optim.SGD(gm.parameters(), lr=1e-3, momentum=0.9)
for x, y in data:
    optimizer.zero_grad()
    nn.functional.cross_entropy(gm(x), y).backward()
    optimizer.step()

# 5. Save: the weights for the float model and all that resuming needs, in one file.
save_checkpoint(gm, "model.pth", "model.quant.json", extra={"epoch": 1, "optimizer": optimizer.state_dict()})
make_float_model().load_state_dict(torch.load("model.pth", weights_only=True)["state_dict"])
resumed = prepare_by_platform(make_float_model(), BackendType.TSQAT)
extra = load_checkpoint(resumed, "model.pth")
optimizer = torch.optim.SGD(resumed.parameters(), lr=1e-3, momentum=0.9)
optimizer.load_state_dict(extra["optimizer"])

# 6. Export, and compare the file with the model.
report = convert_export(gm, (data[0][0],), "model.onnx", "model.json")
print(report.certificate)
