"""A pretrained 3-layer LSTM, the speaker encoder of Resemblyzer, on synthesised voices: embeddings against float.

pip download --no-deps resemblyzer; unzip Resemblyzer-*.whl resemblyzer/pretrained.pt
python tests/benchmarks/accuracy/speaker_encoder.py resemblyzer/pretrained.pt --output PAGE.rst
"""

from __future__ import annotations

import argparse
import copy
import logging
import tempfile
import wave
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxqat import calibrate, convert_export, enable_quantization, prepare_by_platform
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.tools import ptq

RATE, WINDOW, HOP, CHANNELS, FRAMES = 16000, 400, 160, 40, 160
VOICES = 512
"""Synthesised voices to calibrate with."""

INPUT = {"match": {"node": "mels"}, "output": {"bit": 16}}
FIRST = {"match": {"module": "lstm.layer_0"}, "weight": {"bit": 16}}
FOUR_BITS = {"w_qscheme": {"bit": 4}, "w_observer": "MSE"}
ROWS: list[tuple[str, str | None, list[dict[str, Any]], dict[str, Any]]] = [
    (f"W{bits}A8{name}", method, overrides, {} if bits == 8 else FOUR_BITS)
    for bits in (8, 4)
    for name, method, overrides in (
        ("", None, []),
        ("", "GPTQ", []),
        (", input A16", None, [INPUT]),
        (", input A16", "GPTQ", [INPUT]),
        (", input A16, first layer W16", "GPTQ", [INPUT, FIRST]),
    )
]
"""Bits, method, overrides and configuration of each row of the table."""


class Encoder(nn.Module):
    """The network of the encoder, with its names of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(CHANNELS, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: Tensor) -> Tensor:
        """``(N, frames, 40)`` to embeddings ``(N, 256)`` of length 1."""
        _, (hidden, _) = self.lstm(mels)
        raw = torch.relu(self.linear(hidden[-1]))
        return raw / torch.norm(raw, dim=1, keepdim=True)


def mel_filters() -> Tensor:
    """Triangular filters of area 1, equally wide in mel as Slaney defines it: ``(40, WINDOW // 2 + 1)``."""
    linear, slope = 15.0, torch.log(torch.tensor(6.4)) / 27  # below 1000 Hz a mel is 200 / 3 Hz, above it is a ratio
    mel = torch.linspace(0, float(linear + torch.log(torch.tensor(RATE / 2 / 1000)) / slope), CHANNELS + 2)
    centers = torch.where(mel < linear, mel * 200 / 3, 1000 * torch.exp(slope * (mel - linear)))
    bins = torch.linspace(0, RATE / 2, WINDOW // 2 + 1)
    up = (bins - centers[:-2, None]) / (centers[1:-1] - centers[:-2])[:, None]
    down = (centers[2:, None] - bins) / (centers[2:] - centers[1:-1])[:, None]
    return torch.minimum(up, down).clamp(min=0) * (2 / (centers[2:] - centers[:-2]))[:, None]


def mel_frames(sound: Tensor) -> Tensor:
    """The encoder's input, power in 40 bands: ``(frames, 40)``."""
    options = {"window": torch.hann_window(WINDOW), "pad_mode": "constant", "return_complex": True}
    return (mel_filters() @ torch.stft(sound, WINDOW, HOP, **options).abs().square()).T


def recorded(path: Path) -> Tensor:
    """Parts of a recording, 16-bit mono at 16 kHz, every 0.2 s one, made as loud as the encoder expects."""
    with wave.open(str(path)) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE, 1, 2):
            raise SystemExit(f"{path}: expected 16-bit mono at {RATE} Hz, got {file.getparams()}")
        sound = torch.frombuffer(bytearray(file.readframes(-1)), dtype=torch.int16) / 32768
    sound = sound * max(1.0, float(10**-1.5 / sound.square().mean().sqrt()))
    return mel_frames(sound).unfold(0, FRAMES, 20).transpose(1, 2)


def voices(count: int, seed: int) -> Tensor:
    """Mel spectrograms of synthesised voices: harmonics of a moving pitch, three formants, pauses and noise."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(RATE * FRAMES // 100 + WINDOW) / RATE
    found = []
    for _ in range(count):
        r = torch.rand(16, generator=generator)
        pitch = (80 + 160 * r[0]) * (1 + 0.15 * torch.sin(6.28 * (1 + 3 * r[1]) * time + 6 * r[2]))
        phase = 6.2832 * torch.cumsum(pitch, 0) / RATE
        syllables = (torch.sin(6.28 * (2 + 3 * r[3]) * time + 6 * r[4]) + 0.5).clamp(min=0)
        sound = torch.zeros_like(time)
        for harmonic in range(1, 30):
            frequency = harmonic * pitch
            gain = sum(
                torch.exp(-(((frequency - low - span * r[5 + i] * (1 + 0.3 * torch.sin(9 * time + i))) / 150) ** 2))
                for i, (low, span) in enumerate(((300, 500), (900, 1200), (2200, 900)))
            )
            sound += gain * torch.sin(harmonic * phase)
        sound = sound * syllables + 0.003 * torch.randn(time.shape, generator=generator)
        sound *= 0.05 * (0.5 + r[9]) / sound.square().mean().sqrt()
        found.append(mel_frames(sound)[:FRAMES])
    return torch.stack(found)


@torch.no_grad()
def alone(model: Encoder, calibration: Tensor, test: Tensor, reference: Tensor) -> dict[str, float]:
    """The mean cosine if one tensor is rounded to 8 bits and all others are float, by tensor."""
    gm = prepare_by_platform(copy.deepcopy(model), "Experimental", example_inputs=(test[:2],)).eval()
    calibrate(gm, calibration.split(16), progress=False, compare=False)
    enable_quantization(gm)
    quants = {name: module for name, module in gm.named_modules() if isinstance(module, FakeQuantizeBase)}
    found = {}
    for name, quant in quants.items():
        for other in quants.values():
            other.fake_quant_enabled = other is quant
        found[name] = float(F.cosine_similarity(gm(test), reference).mean())
    return dict(sorted(found.items(), key=itemgetter(1)))


@torch.no_grad()
def input_bits(model: Encoder, calibration: Tensor, test: Tensor, reference: Tensor) -> dict[int, float]:
    """The mean cosine of the float model if the input alone has a number of bits, with the best of many ranges."""
    found = {}
    for bits in (8, 9, 10, 11, 12):
        steps = 2**bits - 1
        scales = [calibration.max() * factor / 20 / steps for factor in range(1, 21)]
        rounded = ((test / scale).round().clamp(0, steps) * scale for scale in scales)
        found[bits] = max(float(F.cosine_similarity(model(x), reference).mean()) for x in rounded)
    return found


def page(others: float, rows: list[tuple[str, ...]], costs: dict[str, float], inputs: dict[int, float]) -> str:
    """The page of the documentation."""
    worst = [f"``{name}`` {cosine:.4f}" for name, cosine in list(costs.items())[:4]]
    lines = [
        "Accuracy of a speaker encoder",
        "=============================",
        "",
        f"Resemblyzer's 3-layer LSTM, calibrated with {VOICES} synthesised voices, tested on 32 others; "
        "no real speech.",
        f"Cosine of an embedding to float; two different voices have {others:.2f} on average. Experimental's table.",
        "The aim is 0.999 for W8A8 and 0.995 for W4A8. Written by ``tests/benchmarks/accuracy/speaker_encoder.py``.",
        "",
        "What limits it:",
        "",
        "* one tensor rounded to 8 bits and all others float, the four that cost the most: " + ", ".join(worst) + ";",
        "* the input alone, which is the power of the sound, in bits, with the best of 20 ranges: "
        + ", ".join(f"{bits} bits {cosine:.4f}" for bits, cosine in inputs.items())
        + ".",
        "",
        ".. list-table::",
        "   :header-rows: 1",
        "",
    ]
    for row in (("bits", "method", "mean", "smallest", "file, of the parameters", "file equals the model"), *rows):
        lines += [f"   {'* -' if place == 0 else '  -'} {cell}" for place, cell in enumerate(row)]
    return "\n".join([*lines, ""])


def main() -> None:
    """Print the cosine of the embeddings and the size of the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("--speech", type=Path, nargs=2, help="recordings to calibrate with, and to test on")
    parser.add_argument("--output", type=Path, help="page to write, of the synthesised voices")
    arguments = parser.parse_args()
    if arguments.output and arguments.speech:
        parser.error("--output describes the synthesised voices: give it without --speech")
    rows: list[tuple[str, ...]] = []
    logging.getLogger("fxqat").setLevel(logging.ERROR)
    model = Encoder().eval()
    state = torch.load(arguments.weights, map_location="cpu", weights_only=True)["model_state"]
    model.load_state_dict({name: tensor for name, tensor in state.items() if name.startswith(("lstm", "linear"))})
    if arguments.speech:
        calibration, test = map(recorded, arguments.speech)
    else:
        calibration, test = voices(VOICES, 0), voices(32, 1)
    size = 4 * sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        reference = model(test)
    others = float(F.cosine_similarity(reference[:-1], reference[1:]).mean())
    print(f"float: {size / 2**20:.2f} MiB of parameters; cosine of two different voices {others:.4f}")
    costs = alone(model, calibration, test, reference)
    inputs = input_bits(model, calibration, test, reference)
    print(costs, inputs, flush=True)
    for name, method, overrides, qconfig in ROWS:
        config = {"overrides": overrides, "extra_qconfig_dict": qconfig}
        batches = [(batch,) for batch in calibration.split(16)]
        gm = ptq(model, batches, "Experimental", config, reconstruct=method, compare=False)
        with torch.no_grad():
            cosine = F.cosine_similarity(gm(test), reference)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "encoder.onnx"
            report = convert_export(gm, (test[:2],), path)
            share = path.stat().st_size / size
        assert report.certificate is not None
        verdict = "passed" if report.certificate.passed else "FAILED"
        cells = (f"{cosine.mean():.4f}", f"{cosine.min():.4f}", f"{share:.3f}", verdict)
        rows.append((name, method or "nearest", *cells))
        print(*rows[-1], flush=True)
        if arguments.output:
            arguments.output.write_text(page(others, rows, costs, inputs), encoding="utf-8")


if __name__ == "__main__":
    main()
