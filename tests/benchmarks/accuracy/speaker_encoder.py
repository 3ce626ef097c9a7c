"""A pretrained 3-layer LSTM, the speaker encoder of Resemblyzer: embeddings against float, by PTQ and by QAT.

pip download --no-deps resemblyzer; unzip Resemblyzer-*.whl resemblyzer/pretrained.pt
pip download --no-deps --no-binary pocketsphinx pocketsphinx==5.1.1; tar xzf pocketsphinx-5.1.1.tar.gz
cd pocketsphinx-5.1.1/test/data
python tests/benchmarks/accuracy/speaker_encoder.py resemblyzer/pretrained.pt --output PAGE.rst \
    --speech cards/*.wav numbers.raw something.raw goforward.raw tidigits/dhd.2934z.raw \
    --test-speech librivox/*.wav forever/*.wav

It calibrates and trains with synthesised voices and, with ``--speech``, with pieces of real speech as well, which are
mixed, made faster and slower, and filtered at random. Other voices and ``--test-speech`` are for the test.
``--spoken`` takes recordings of a synthesiser, 16-bit mono at 16 kHz, for the learned rounding only. Those of the page
are 12 random words each, by eSpeak NG 1.52 (``pip install espeakng-loader``) in 131 languages and 102 voices.
"""

from __future__ import annotations

import argparse
import logging
import math
import re
import tempfile
import time
import wave
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxqat import convert_export
from fxqat.nn.recurrent import QATRecurrentLayer
from fxqat.numerics import valid_scale
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools import ptq, train_rounding
from fxqat.tools.training.trained_rounding import END
from fxqat.utils.contexts import hooked

RATE, WINDOW, HOP, CHANNELS, FRAMES = 16000, 400, 160, 40, 160
VOICES, PIECES = 512, 1024
"""Synthesised voices and pieces of real speech to calibrate and to train with."""
CALIBRATION = 256
"""Of them, for calibration."""
RATES = {8: 1e-4, 4: 3e-3}
"""Learning rate by bits, relative to the root mean square of each parameter; of scales as well."""
HIDDEN, LEARNED_HIDDEN = {8: 0.0, 4: 1.0}, 0.5
"""Weight of the error of the hidden states of all layers and steps in the loss of QAT, by bits; of learned rounding."""
WARMUP, BATCH = 10, 16
LEARNED_PATH, LEARNED_RATE, RAISED = 15.0, 1e-4, 10.0
"""Of learned rounding: the rate of the rounding variables times the steps, the relative rate of all others, and what
that is multiplied by when all weights are integers."""
SCALE_BITS = 11
"""Of the scales of learned rounding, which the file has as float16."""
VOICES_IN_BATCH = 4
"""Of :data:`BATCH` inputs with :meth:`Material.fresh`."""
LEARNED = "learned rounding"
"""The training by :func:`fxqat.tools.train_rounding`; else QAT."""

INPUT = {"match": {"node": "mels"}}
STATES = {"match": {"node": "re:lstm_layer_[0-9]_(output|hidden)"}, "output": {"bit": 16}}
FIRST = {"match": {"node": "lstm_layer_0"}}
FOUR_BITS = {"w_qscheme": {"bit": 4}, "w_observer": "MSE"}
PARTS = {8: 2, 4: 3}
"""Parts of the first layer's input weight, by bits."""
SMALL_BLOCKS, PARTS_IN_SMALL_BLOCKS = 8, 2
"""The same with scales of so many weights or fewer."""
LOUD, LOUDNESS = 16.0, 32.0
"""The largest value that is not loud, relative to the root mean square; and what the excess is divided by."""
PARTS_IN_BLOCKS = 4
"""The same with scales of blocks, whose size divides the number of inputs."""


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Args:
        bits: of the weights.
        is_divided: the recipe for the input, see :class:`DividedInput`.
        method: reconstruction after calibration.
        training: what follows.
        states: whether the hidden states that a layer gives to the next one have 16 bits.
        first: whether the weights of the first layer have 8 bits.
        block_size: weights that share a scale; None: all of a row.
        has_zero_points: whether they share a zero point as well.
        loud: whether loud values of the divided input are apart.
        first_block_size: weights that share a scale in the first layer, if others than elsewhere.
    """

    bits: int
    is_divided: bool
    method: str | None = None
    training: str | None = None
    states: bool = False
    first: bool = False
    block_size: int | None = None
    has_zero_points: bool = False
    loud: bool = False
    first_block_size: int | None = None

    @property
    def parts(self) -> int:
        """Parts of the first layer's input weight."""
        if self.block_size is not None and self.block_size <= SMALL_BLOCKS:
            return PARTS_IN_SMALL_BLOCKS
        if self.block_size is not None and not self.has_zero_points:
            return PARTS_IN_BLOCKS
        return PARTS[8 if self.first else self.bits]

    @property
    def exceptions(self) -> list[str]:
        """What has more bits than the row says."""
        found = {"input": self.is_divided, "hidden states": self.states}
        return [f"{name} A16" for name, is_given in found.items() if is_given] + ["first layer W8"] * self.first

    def labels(self, steps: int) -> tuple[str, str, str]:
        """The first cells: bits, input and method.

        Args:
            steps: of the training.
        """
        bits = f"W{self.bits}A8" + (f" ({', '.join(self.exceptions)})" if self.exceptions else "")
        bits += "" if self.block_size is None else f" in blocks of {self.block_size}"
        bits += "" if self.first_block_size is None else f" (first layer {self.first_block_size})"
        bits += " with zero points" if self.has_zero_points else ""
        kind = "16 bits, divided" + (", loud apart" if self.loud else "") if self.is_divided else "8 bits"
        bits += ", float16 scales" if self.training == LEARNED else ""
        start = self.method or ("float weights" if self.training == LEARNED else "nearest")
        return bits, kind, start + (f", {self.training}, {steps} steps" if self.training else "")


ROWS = [
    Row(8, False),
    Row(8, False, "GPTQ"),
    Row(8, True),
    Row(8, True, "GPTQ"),
    Row(8, True, "GPTQ", states=True),
    Row(8, True, "GPTQ", "QAT"),
    Row(8, True, "GPTQ", "QAT", states=True),
    Row(4, False, "GPTQ"),
    Row(4, True, "GPTQ"),
    Row(4, True, "GPTQ", "QAT"),
    Row(4, True, "GPTQ", "QAT", states=True, first=True),
    Row(4, True, "GPTQ", block_size=16),
    Row(4, True, "GPTQ", "QAT", block_size=16),
    Row(4, True, "GPTQ", "QAT", states=True, block_size=16),
    Row(4, True, "GPTQ", block_size=16, has_zero_points=True),
    Row(4, True, "GPTQ", "QAT", block_size=16, has_zero_points=True),
    Row(4, True, "GPTQ", block_size=16, has_zero_points=True, loud=True),
    Row(4, True, None, LEARNED, block_size=16, has_zero_points=True, loud=True),
    Row(4, True, "GPTQ", block_size=8, has_zero_points=True, loud=True, first_block_size=4),
    Row(4, True, None, LEARNED, block_size=8, has_zero_points=True, loud=True, first_block_size=4),
]


class Encoder(nn.Module):
    """The network of the encoder, with its names of parameters."""

    def __init__(self, channels: int = CHANNELS) -> None:
        super().__init__()
        self.lstm = nn.LSTM(channels, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: Tensor) -> Tensor:
        """``(N, frames, 40)`` to embeddings ``(N, 256)`` of length 1."""
        _, (hidden, _) = self.lstm(mels)
        return self.embedding(hidden[-1])

    def embedding(self, hidden: Tensor) -> Tensor:
        """The last hidden state of the last layer, ``(N, 256)``, to embeddings."""
        raw = torch.relu(self.linear(hidden))
        return raw / torch.norm(raw, dim=1, keepdim=True)

    @torch.no_grad()
    def hidden_states(self, mels: Tensor) -> list[Tensor]:
        """The hidden states of each layer at all steps, each ``(N, frames, 256)``."""
        found = []
        for number in range(self.lstm.num_layers):
            names = [f"{kind}_l" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            layer = nn.LSTM(mels.shape[2], self.lstm.hidden_size, batch_first=True)
            layer.load_state_dict({f"{name}0": getattr(self.lstm, f"{name}{number}") for name in names})
            mels, _ = layer(mels)
            found.append(mels)
        return found


class DividedInput:
    """The input divided per band, and the input weight of the first layer in several parts: in float the same function.

    Each band is divided by a factor between what makes its values and what makes its weights as large as those of the
    others, ``sqrt(rms / largest weight)``; the column of the weight is multiplied by it. What the rounding of the
    weight leaves, times ``k``, is a second weight, which multiplies the input divided by ``k``; and so on. The host
    computes the input, so it divides and repeats it; all weights of the file have the same bits.

    With zero points, the parts are those of blocks, and each is filled with zeros to whole ones.

    Loud sounds are 100 times as large as usual ones: a step of 16 bits that is fine enough for these clips the loud
    ones. With ``loud`` what exceeds :data:`LOUD` is an input of its own, divided by :data:`LOUDNESS`, whose weight is
    multiplied by it. A block of weights has those of one input only. (A row with one scale would lose the small ones.)

    Args:
        model: the encoder.
        mels: inputs for calibration, ``(N, frames, 40)``.
        row: the recipe.
    """

    @torch.no_grad()
    def __init__(self, model: Encoder, mels: Tensor, row: Row) -> None:
        self.loud = row.loud
        self.block_size = (row.first_block_size or row.block_size or 1) if row.has_zero_points else 1
        weight = model.lstm.weight_ih_l0
        largest = 2 ** ((8 if row.first else row.bits) - 1) - 1
        base = largest if row.has_zero_points else 2 * largest  # the rest is at most one step, or half of one
        self.factor = (mels.square().mean((0, 1)).sqrt() / weight.abs().amax(0)).sqrt()
        self.multiples = [float(base**part) for part in range(row.parts)]
        rest = self._filled(weight * self.factor)
        step = rest.abs().amax(1, keepdim=True) / largest
        found = []
        for multiple in self.multiples[:-1]:
            part = rest * multiple
            rounded = (part / step).round() * step
            found.append(rounded_in_blocks(part, self.block_size, row.bits) if row.has_zero_points else rounded)
            rest = rest - found[-1] / multiple
        found.append(rest * self.multiples[-1])
        if row.loud:
            found.append(self._filled(weight * self.factor * LOUDNESS))
        columns = torch.cat(found, 1)
        self.model = Encoder(columns.shape[1]).eval()
        self.model.load_state_dict(model.state_dict() | {"lstm.weight_ih_l0": columns})

    def __call__(self, mels: Tensor) -> Tensor:
        """The input of the divided model."""
        mels = self._filled(mels / self.factor)
        usual = mels.clamp(max=LOUD) if self.loud else mels
        parts = [usual / multiple for multiple in self.multiples]
        return torch.cat([*parts, (mels - usual) / LOUDNESS] if self.loud else parts, -1)

    def _filled(self, columns: Tensor) -> Tensor:
        """Columns of zeros behind the others: whole blocks."""
        return F.pad(columns, (0, -columns.shape[-1] % self.block_size))


def rounded_in_blocks(weight: Tensor, block_size: int, bits: int) -> Tensor:
    """A weight ``(rows, columns)`` rounded to a grid of its blocks with zero points.

    The smallest and the largest number of each block lie at the ends of its range, so that a quantizer whose scales
    have :data:`SCALE_BITS` finds the same grid. Rows without training have fewer bits: their grid is near to it.
    """
    blocks, last = weight.reshape(len(weight), -1, block_size), 2**bits - 1
    low, high = blocks.amin(2, keepdim=True), blocks.amax(2, keepdim=True)
    scale = valid_scale((high.clamp(min=0) - low.clamp(max=0)) / last, SCALE_BITS, up=True)
    zero_point = (-low.clamp(max=0) / scale).round()
    integers = ((blocks / scale).round() + zero_point).clamp(0, last)
    integers = torch.where((blocks == low) & (low < 0), 0.0, integers)
    integers = torch.where((blocks == high) & (high > 0), float(last), integers)
    return ((integers - zero_point) * scale).reshape(weight.shape)


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
    """A recording, 16-bit mono at 16 kHz (``.raw``: without a header), made as loud as the encoder expects."""
    if path.suffix == ".raw":
        content = path.read_bytes()
    else:
        with wave.open(str(path)) as file:
            if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE, 1, 2):
                raise SystemExit(f"{path}: expected 16-bit mono at {RATE} Hz, got {file.getparams()}")
            content = file.readframes(-1)
    sound = torch.frombuffer(bytearray(content), dtype=torch.int16) / 32768
    return sound * max(1.0, float(10**-1.5 / sound.square().mean().sqrt()))


def windows(sound: Tensor) -> Tensor:
    """The parts of a recording, every 0.2 s one: ``(parts, FRAMES, 40)``; none if it is shorter than one."""
    mels = mel_frames(sound)
    return mels.unfold(0, FRAMES, 20).transpose(1, 2) if len(mels) >= FRAMES else mels.new_zeros(0, FRAMES, CHANNELS)


def varied(sounds: list[Tensor], count: int, seed: int) -> Tensor:
    """Pieces of recordings at random speeds and loudness, a third of them mixed with another, filtered at random."""
    generator = torch.Generator().manual_seed(seed)
    length = RATE * FRAMES // 100 + WINDOW

    def random() -> float:
        return float(torch.rand((), generator=generator))

    def piece() -> Tensor:
        sound, needed = sounds[int(random() * len(sounds))], int(length * (0.8 + 0.45 * random())) + 2
        sound = sound.repeat(-(-(needed + 1) // len(sound)))
        start = int(random() * (len(sound) - needed))
        return F.interpolate(sound[None, None, start : start + needed], size=length, mode="linear")[0, 0]

    bands, found = torch.linspace(0, math.pi, CHANNELS), []
    for _ in range(count):
        sound = piece()
        if random() < 1 / 3:
            sound = sound + random() * piece()
        sound = sound * (10 ** (0.6 * random() - 1.6) / sound.square().mean().sqrt().clamp(min=1e-6))
        gains = 0.35 * torch.randn(4, generator=generator)
        found.append(mel_frames(sound)[:FRAMES] * (gains @ torch.cos(torch.arange(4)[:, None] * bands)).exp())
    return torch.stack(found)


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


def relative_rates(gm: QuantGraphModule, rate: float) -> list[dict[str, Any]]:
    """Each parameter with a learning rate relative to its root mean square.

    A step of a scale and a step of a weight must not be equally long.
    """
    groups: list[dict[str, Any]] = []
    for name, parameter in gm.named_parameters():
        size = 10.0 if name.endswith("zero_point") else float(parameter.detach().square().mean().sqrt())
        groups.append({"params": [parameter], "lr": rate * size})
    return groups


def distill(
    gm: QuantGraphModule, network: Encoder, draw: Callable[[int], Tensor], bits: int, steps: int, training: str
) -> None:
    """Train without labels: the embeddings, and with few bits the hidden states, become those of the float model.

    The learning rate of QAT falls to zero. With learned rounding, that of scales and biases is raised when all weights
    are integers, and falls then.

    Args:
        gm: the calibrated model.
        network: the float model with the same inputs.
        draw: gives the inputs of a step.
        bits: of the weights.
        steps: of the training.
        training: QAT, or :data:`LEARNED`.
    """
    hidden = LEARNED_HIDDEN if training == LEARNED else HIDDEN[bits]
    layers = [module for module in gm.modules() if isinstance(module, QATRecurrentLayer)] if hidden else []
    states: list[Tensor] = []

    def share(step: int) -> float:
        return min(1.0, (step + 1) / WARMUP) * (1 + math.cos(math.pi * step / steps)) / 2

    def share_of_the_rest(step: int) -> float:
        last = (step / steps - END) / (1 - END)  # the part of the training after which all weights are integers
        return min(1.0, (step + 1) / WARMUP) if last < 0 else RAISED * (1 + math.cos(math.pi * last)) / 2

    with train_rounding(gm, steps) if training == LEARNED else nullcontext() as rounding:
        if rounding is None:
            groups = relative_rates(gm, RATES[bits])
            shares = [share] * len(groups)
        else:
            groups = rounding.parameter_groups(LEARNED_PATH / steps, LEARNED_RATE)
            shares = [lambda step: 1.0, *[share_of_the_rest] * (len(groups) - 1)]
        optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, shares)
        gm.train()
        for step in range(steps):
            inputs = draw(step)
            with torch.no_grad():
                theirs = network.hidden_states(inputs)
                expected = network.embedding(theirs[-1][:, -1])
            optimizer.zero_grad()
            states.clear()
            with hooked(layers, lambda _, args, output: states.append(output[0][:, 0].transpose(0, 1))):
                embeddings = gm(inputs)
            loss = (1 - F.cosine_similarity(embeddings, expected)).mean()
            for ours, target in zip(states, theirs if states else (), strict=True):
                loss = loss + hidden * (ours - target).square().mean() / target.square().mean()
            loss.backward()
            if rounding is not None:
                rounding.pull()
            optimizer.step()
            schedule.step()
    gm.eval()


def page(
    names: list[str], speech: list[Path], test_speech: list[Path], spoken: int, rows: list[tuple[str, ...]]
) -> str:
    """The page of the documentation."""
    lines = [
        "Accuracy of a speaker encoder",
        "=============================",
        "",
        "Resemblyzer's 3-layer LSTM. The cosine of an embedding to that of the float model, on parts of 1.6 s.",
        "Experimental's table; activations have 8 bits. The aim is 0.999 for W8A8 and 0.995 for W4A8. Written by",
        "``tests/benchmarks/accuracy/speaker_encoder.py``.",
        "",
        f"Calibrated with {CALIBRATION} and trained with all of {VOICES} synthesised voices"
        + (f" and {PIECES} varied pieces of real speech (" if speech else "; no real speech.")
        + (", ".join(f"``{path.name}``" for path in speech) + ")." if speech else ""),
        "Tested on other synthesised voices"
        + (" and on real speech of other speakers (" if test_speech else ".")
        + (", ".join(f"``{path.name}``" for path in test_speech) + ")." if test_speech else ""),
        "",
        "* *Input*: ``8 bits`` is the power of the sound in 40 bands as it comes. ``16 bits, divided``: 16 bits with",
        "  the observer ``Percentile``, divided per band, and the first layer's input weight in two parts (W4: three,",
        "  in blocks without zero points four, in small blocks two), each of the bits of the row. ``loud apart``: what",
        "  exceeds 16 is its own input, with a larger step, and the observer is ``MinMax``. All are one function in",
        "  float.",
        "* *Bits*: what has more bits is named in brackets. ``hidden states``: those that a layer gives to the next;",
        "  inside a layer they are float in every row.",
        "* *QAT*: no labels. The embeddings of the float model are the target; for W4 its hidden states are as well.",
        "* *Learned rounding*: :func:`fxqat.tools.train_rounding`, with the targets of QAT, new inputs in each step:",
        "  synthesised voices, pieces of the real speech"
        + (f", and of {spoken} recordings of eSpeak NG." if spoken else "."),
        "* *File*: its size as a share of the float parameters. Biases are int32, and scales of rows are float32.",
        "  *In blocks of 16*: each 16 weights of a row have a scale, 2 bits for each weight, and biases are float.",
        "  *With zero points*: each block has a zero point of 4 bits as well. *float16 scales*: the scales have 11",
        "  significant bits and are stored in 16. Then a weight takes 5.25 bits in blocks of 16, 6.5 in blocks of 8",
        "  and 9 in blocks of 4.",
        "",
        ".. list-table::",
        "   :header-rows: 1",
        "",
    ]
    sets = [f"{name}, {kind}" for name in names for kind in ("mean", "smallest")]
    for row in (("bits", "input", "method", *sets, "file", "CPU seconds", "file equals the model"), *rows):
        lines += [f"   {'* -' if place == 0 else '  -'} {cell}" for place, cell in enumerate(row)]
    return "\n".join([*lines, ""])


def rows_of(page: str) -> list[tuple[str, ...]]:
    """The rows of the table of a page that :func:`page` wrote, without the heading."""
    rows = page.partition(":header-rows: 1")[2].split("\n   * - ")[1:]
    return [tuple(cell.strip() for cell in row.split("\n     - ")) for row in rows][1:]


@dataclass(frozen=True)
class Material:
    """What is heard.

    Args:
        data: inputs to calibrate and to train with, ``(N, frames, 40)``.
        speech: recordings.
        spoken: recordings of speech synthesisers.
        tests: inputs by the name of the set.
    """

    data: Tensor
    speech: list[Tensor]
    spoken: list[Tensor]
    tests: dict[str, Tensor]

    def fresh(self, step: int) -> Tensor:
        """Inputs of one step that no other step has, of all kinds: ``(BATCH, frames, 40)``."""
        seed = 3 * step + 1000
        given = [sounds for sounds in (self.speech, self.spoken) if sounds]
        pieces = (BATCH - VOICES_IN_BATCH) // len(given) if given else 0
        parts = [varied(sounds, pieces, seed + place) for place, sounds in enumerate(given)]
        return torch.cat([voices(BATCH - pieces * len(given), seed + 2), *parts])


def measure(row: Row, model: Encoder, material: Material, steps: int) -> tuple[str, ...]:
    """The cells of one row of the table."""
    start = time.process_time()
    data, tests = material.data, material.tests
    with torch.no_grad():
        references = {name: model(mels) for name, mels in tests.items()}
    divided = DividedInput(model, data, row) if row.is_divided else None
    network = model if divided is None else divided.model
    data = data if divided is None else divided(data)
    of_input = INPUT | {"output": {"bit": 16, "observer": "MinMax" if row.loud else "Percentile"}}
    of_first = {"bit": 8} if row.first else {"block_size": row.first_block_size}
    is_first_different = row.first or row.first_block_size is not None
    overrides = (
        [of_input] * row.is_divided + [STATES] * row.states + [FIRST | {"weight": of_first}] * is_first_different
    )
    scheme: dict[str, Any] = {"bit": 4, "block_size": row.block_size, "symmetry": not row.has_zero_points}
    if row.training == LEARNED:
        scheme["scale_bits"] = SCALE_BITS
    weights = FOUR_BITS | {"w_qscheme": scheme}
    config = {"overrides": overrides, "extra_qconfig_dict": {} if row.bits == 8 else weights}
    batches = [(batch,) for batch in data[:CALIBRATION].split(BATCH)]
    gm = ptq(network, batches, "Experimental", config, reconstruct=row.method, compare=False)
    generator = torch.Generator().manual_seed(0)

    def draw(step: int) -> Tensor:
        if row.training != LEARNED:
            return data[torch.randint(len(data), (BATCH,), generator=generator)]
        return material.fresh(step) if divided is None else divided(material.fresh(step))

    if row.training is not None:
        distill(gm, network, draw, row.bits, steps, row.training)
    cells = []
    for name, mels in tests.items():
        with torch.no_grad():
            cosine = F.cosine_similarity(gm(mels if divided is None else divided(mels)), references[name])
        cells += [f"{cosine.mean():.4f}", f"{cosine.min():.4f}"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "encoder.onnx"
        report = convert_export(gm, (data[:2],), path, scales="float16" if row.training == LEARNED else "float32")
        share = path.stat().st_size / (4 * sum(p.numel() for p in model.parameters()))
    assert report.certificate is not None
    took, verdict = f"{time.process_time() - start:.0f}", "passed" if report.certificate.passed else "FAILED"
    return *row.labels(steps), *cells, f"{share:.3f}", took, verdict


def in_order(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows in the order of :data:`ROWS`; of two with the same labels the later one."""
    order = [row.labels(0) for row in ROWS]

    def place(cells: tuple[str, ...]) -> tuple[int, int]:
        steps = re.search(r"\d+(?= steps)", cells[2])
        method = re.sub(r"\d+(?= steps)", "0", cells[2])
        return order.index((*cells[:2], method)), int(steps[0]) if steps else 0

    return sorted({cells[:3]: cells for cells in rows}.values(), key=place)


def main() -> None:
    """Print the cosine of the embeddings and the size of the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("--speech", type=Path, nargs="+", default=[], help="recordings to calibrate and train with")
    parser.add_argument(
        "--spoken", type=Path, nargs="+", default=[], help="of a speech synthesiser, for learned rounding"
    )
    parser.add_argument("--test-speech", type=Path, nargs="+", default=[], help="recordings of other speakers")
    parser.add_argument("--steps", type=int, default=400, help="of the training")
    parser.add_argument("--rows", type=int, nargs="+", default=list(range(len(ROWS))), help="numbers of rows, from 0")
    parser.add_argument("--output", type=Path, help="page to write")
    parser.add_argument("--keep", action="store_true", help="keep the other rows of the page")
    arguments = parser.parse_args()
    logging.getLogger("fxqat").setLevel(logging.ERROR)
    model = Encoder().eval()
    state = torch.load(arguments.weights, map_location="cpu", weights_only=True)["model_state"]
    model.load_state_dict({name: tensor for name, tensor in state.items() if name.startswith(("lstm", "linear"))})
    sets = [voices(VOICES, 0)]
    speech, spoken = ([recorded(path) for path in paths] for paths in (arguments.speech, arguments.spoken))
    if speech:
        sets.append(varied(speech, PIECES, 2))
    data = torch.cat(sets)
    data = data[torch.randperm(len(data), generator=torch.Generator().manual_seed(0))]
    tests = {"synthesised": voices(32, 1)}
    if arguments.test_speech:
        tests["real speech"] = torch.cat([windows(recorded(path)) for path in arguments.test_speech])
        if not len(tests["real speech"]):
            parser.error(f"no recording of --test-speech is as long as {FRAMES} frames")
    is_kept = arguments.keep and arguments.output and arguments.output.exists()
    rows = rows_of(arguments.output.read_text(encoding="utf-8")) if is_kept else []
    for number in arguments.rows:
        rows.append(measure(ROWS[number], model, Material(data, speech, spoken, tests), arguments.steps))
        print(*rows[-1], flush=True)
        if arguments.output:
            text = page(list(tests), arguments.speech, arguments.test_speech, len(spoken), in_order(rows))
            arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
