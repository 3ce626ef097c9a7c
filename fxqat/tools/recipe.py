"""What the ladder tries: recipes for quantizing a model, and steps of them in order of their cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fxqat.errors import ConfigError
from fxqat.utils.flags import check_flags


@dataclass(frozen=True)
class Recipe:
    """How a model is quantized: the arguments of :func:`fxqat.tools.ptq` that the ladder chooses.

    Args:
        w_observer: observer of weights; empty for that of the backend or the configuration.
        a_observer: observer of activations; the same.
        equalize: equalize consecutive layers.
        smooth: move large channels behind LayerNorm and RMSNorm into the weights that read them.
        correct_bias: correct the bias of every layer.
        reconstruct: ``"GPTQ"``, ``"QDrop"``, or empty.
        overrides: rules for single tensors, after those of the configuration.
    """

    w_observer: str = ""
    a_observer: str = ""
    equalize: bool = False
    smooth: bool = False
    correct_bias: bool = False
    reconstruct: str = ""
    overrides: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        flags = {"equalize": self.equalize, "smooth": self.smooth, "correct_bias": self.correct_bias}
        check_flags(ConfigError, "Recipe", **flags)

    def __str__(self) -> str:
        words = [f"{name} {value}" for name in ("w_observer", "a_observer") if (value := getattr(self, name))]
        words += [name for name in ("equalize", "smooth", "correct_bias") if getattr(self, name)]
        words += [self.reconstruct] if self.reconstruct else []
        widths: dict[str, str] = {}  # by tensor
        for rule in self.overrides:
            (part, change), *_ = ((key, value) for key, value in rule.items() if key != "match")
            kind = "weight" if part == "weight" else "value"
            widths[f"{rule['match']} {kind}"] = "float" if change is None else f"with {change['bit_width']} bits"
        for width, number in Counter(widths.values()).items():
            words.append(f"{number} {'tensor' if number == 1 else 'tensors'} {width}")
        return ", ".join(words) or "calibration"


STEPS: tuple[tuple[str, tuple[Mapping[str, Any], ...]], ...] = (
    ("calibration", ({},)),
    ("observers", ({"w_observer": "MSE"}, {"a_observer": "MSE"}, {"a_observer": "Percentile"})),
    (
        "biases and ranges",
        (
            {"correct_bias": True},
            {"equalize": True},
            {"equalize": True, "correct_bias": True},
            {"smooth": True},
        ),
    ),
    ("rounding", ({"reconstruct": "GPTQ", "correct_bias": True}, {"reconstruct": "QDrop", "correct_bias": False})),
)
"""The steps in order of their cost, with the changes of the best recipe so far that each of them tries."""
