"""Quantizes a small classifier of handwritten digits after training, and runs the file in ONNX Runtime."""

from pathlib import Path

import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import nn

from fxqat import (
    BackendType,
    calibrate,
    convert_export,
    enable_quantization,
    prepare_by_platform,
)

torch.manual_seed(0)

digits = load_digits()  # 1797 images of 8x8 pixels
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
train, test = slice(0, 1500), slice(1500, None)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1, stride=2),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(512, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for _ in range(5):
    for batch in torch.randperm(1500).split(50):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
model.eval()

# [prepare]
gm = prepare_by_platform(model, BackendType.TSQAT, example_inputs=images[:16])
print(gm.quant_report)

# [calibrate]
calibrate(gm, images[:512].split(64), progress=False)
enable_quantization(gm)
gm.eval()

# [export]
report = convert_export(gm, (images[test],), "digits.onnx", "digits.json", runtime="onnxruntime")
print(report.certificate)

# [run]
session = onnxruntime.InferenceSession("digits.onnx", providers=["CPUExecutionProvider"])
name = session.get_inputs()[0].name
(in_file,) = session.run(None, {name: images[test].numpy()})
with torch.no_grad():
    in_float, in_fake_quant = model(images[test]).numpy(), gm(images[test]).numpy()

expected = digits.target[test]
for title, scores in (("float", in_float), ("fake-quant", in_fake_quant), ("ONNX Runtime", in_file)):
    print(f"{title:<13} {(scores.argmax(1) == expected).mean():.1%}")
print(f"same class in fake-quant and ONNX Runtime: {(in_file.argmax(1) == in_fake_quant.argmax(1)).mean():.1%}")
float_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
print(f"bytes: {float_bytes} of float weights, {Path('digits.onnx').stat().st_size} of file")
