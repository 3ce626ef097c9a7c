"""Quantizes, finetunes and exports a small model on random data. Writes its files to the current folder."""

import torch
from torch import nn

from fxqat import (
    BackendType,
    calibrate,
    convert_export,
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


# 1. The trained float model and its data; random here.
model = make_float_model()
data = [(torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))) for _ in range(4)]

# 2. Prepare: a copy of the model, with fake quantization.
#    The example inputs let Python code of the model look at sizes, and the copy is compared with the model on them.
gm = prepare_by_platform(model, BackendType.TSQAT, example_inputs=data[0][0])
print(gm.quant_report)

# 3. Calibrate: some batches set the range of each value; labels are ignored.
calibrate(gm, data)

# 4. Train as the float model was trained, with a small learning rate.
enable_quantization(gm)
gm.train()
optimizer = torch.optim.SGD(gm.parameters(), lr=1e-3, momentum=0.9)
for x, y in data:
    optimizer.zero_grad()
    nn.functional.cross_entropy(gm(x), y).backward()
    optimizer.step()

# 5. Save the weights for the float model and all that resuming needs, in one file.
save_checkpoint(gm, "model.pth", extra={"epoch": 1, "optimizer": optimizer.state_dict()})
make_float_model().load_state_dict(torch.load("model.pth", weights_only=True)["state_dict"])
resumed = prepare_by_platform(make_float_model(), BackendType.TSQAT, example_inputs=data[0][0])
extra = load_checkpoint(resumed, "model.pth")
optimizer = torch.optim.SGD(resumed.parameters(), lr=1e-3, momentum=0.9)
optimizer.load_state_dict(extra["optimizer"])

# 6. Export, and compare the file with the model in ONNX Runtime. The file is written for a PC: the same integers in the
#    form that ONNX Runtime runs fast. For the chip of the backend, leave runtime out.
report = convert_export(gm, (data[0][0],), "model.onnx", "model.json", runtime="onnxruntime")
print(report.certificate)
