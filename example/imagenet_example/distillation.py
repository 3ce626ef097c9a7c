"""Knowledge distillation: a quantized student learns from a float teacher in addition to the labels.

The teacher is prepared like the student, with all fake-quants off: it computes in float, and its layers correspond to
the student's, so that their features can be compared. It stays in eval mode and gets no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from errors import UserError
from torch import Tensor, nn
from torch.nn import functional as F

from fxqat import disable_all
from fxqat.nn.qat import QATLayer

Features = dict[str, Tensor]
DKD_BETA = 8.0  # the paper uses 0.5 to 2 for ImageNet and 6 to 8 for CIFAR


def logits(student: Tensor, teacher: Tensor, target: Tensor, temperature: float) -> Tensor:
    """KL divergence of the softened probabilities, times the temperature squared.

    student, teacher: logits (batch, classes). Source: Hinton et al. 2015 (arXiv:1503.02531), section 2.
    """
    soft = F.log_softmax(student / temperature, 1)
    return (
        F.kl_div(soft, F.log_softmax(teacher / temperature, 1), log_target=True, reduction="batchmean") * temperature**2
    )


def decoupled(student: Tensor, teacher: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Decoupled KL divergence: the target class against the rest, plus `DKD_BETA` times that among the other classes.

    student, teacher: logits (batch, classes); target: labels (batch,). Source: Zhao et al. 2022 (arXiv:2203.08679),
    equation 7, with alpha 1 and beta 8.
    """
    hit = F.one_hot(target, student.shape[1]).bool()
    parts = []
    for values in (student / temperature, teacher / temperature):
        log_p = F.log_softmax(values, 1)
        rest = log_p.masked_fill(hit, -torch.inf).logsumexp(1)
        binary = torch.stack([log_p[hit], rest], 1)
        others = F.log_softmax(values.masked_fill(hit, -1e4 if values.dtype == torch.float16 else -1e9), 1)
        parts.append((binary, others))
    (binary, others), (teacher_binary, teacher_others) = parts
    first, second = (
        F.kl_div(a, b, log_target=True, reduction="batchmean")
        for a, b in ((binary, teacher_binary), (others, teacher_others))
    )
    return (first + DKD_BETA * second) * temperature**2


def hints(student: Features, teacher: Features, regressors: nn.ModuleDict) -> Tensor:
    """Mean squared difference of features; a linear map adapts the student's where the channels differ.

    Each layer's term is divided by the mean square of the teacher's features, so that all layers have equal weight.
    Source: FitNets, Romero et al. 2015 (arXiv:1412.6550), equation 3.
    """
    total = torch.zeros((), device=next(iter(student.values())).device)
    for name, found in student.items():
        wanted = teacher[name].float()
        mapped = regressors[name](found.float().movedim(1, -1)).movedim(-1, 1)
        total = total + (mapped - wanted).square().mean() / wanted.square().mean().clamp_min(1e-12)
    return total / len(student)


def attention(student: Features, teacher: Features, regressors: nn.ModuleDict) -> Tensor:
    """Squared distance of the normalized attention maps; a map is the mean square over channels.

    Source: Zagoruyko and Komodakis 2017 (arXiv:1612.03928), equation 2, with p = 2.
    """
    total = torch.zeros((), device=next(iter(student.values())).device)
    for name, found in student.items():
        maps = [F.normalize(x.float().square().mean(1).flatten(1)) for x in (found, teacher[name])]
        total = total + (maps[0] - maps[1]).square().sum(1).mean()
    return total / len(student)


METHODS: dict[str, Callable[..., Tensor]] = {"logits": logits, "dkd": decoupled, "hints": hints, "attention": attention}
FEATURE_METHODS = ("hints", "attention")


class Distiller:
    """The loss with a teacher.

    Features are the outputs of the last layer of each feature map size, such as `layer2` of a ResNet. Layers of student
    and teacher are paired by the size of their maps.

    Args:
        student: the prepared model that is trained.
        teacher: the prepared model to learn from; its fake-quants are disabled.
        example: one batch of images, used to find the layers to compare.
        method: a name in `METHODS`.
        alpha: share of the teacher in the loss; the labels have the rest.
        temperature: of `logits` and `dkd`.

    Raises:
        UserError: student and teacher differ in the number of classes, or have no map size in common.
    """

    def __init__(
        self, student: nn.Module, teacher: nn.Module, example: Tensor, method: str, alpha: float, temperature: float
    ) -> None:
        disable_all(teacher)
        self.student, self.teacher = student, teacher.eval().requires_grad_(False)
        self.method, self.alpha, self.temperature = method, alpha, temperature
        self.regressors = nn.ModuleDict()
        self.pairs: dict[str, tuple[nn.Module, nn.Module]] = {}
        ours, theirs = map_layers(student, example), map_layers(teacher, example)
        classes = ours.pop("output"), theirs.pop("output")
        if classes[0] != classes[1]:
            raise UserError(f"--distill-method: the teacher has {classes[1]} classes, the model {classes[0]}")
        if method in FEATURE_METHODS:
            self.pairs = {name: (ours[name][0], theirs[name][0]) for name in ours if name in theirs}
            if not self.pairs:
                raise UserError(
                    f"--distill-method {method}: teacher and model have no feature maps of the same size: the teacher "
                    f"has {list(theirs)}, the model {list(ours)}; use logits or dkd"
                )
        for name in self.pairs if method == "hints" else ():  # attention maps have no channels
            widths = ours[name][1], theirs[name][1]
            self.regressors[name] = nn.Identity() if widths[0] == widths[1] else nn.Linear(*widths)
        self.regressors.to(example.device)

    @contextmanager
    def watching(self) -> Iterator[Features]:
        """Record the student's features in the block, by the size of the map."""
        with recording({name: pair[0] for name, pair in self.pairs.items()}) as features:
            yield features

    def loss(self, images: Tensor, output: Tensor, features: Features, target: Tensor, hard: Tensor) -> Tensor:
        """The loss of a batch: `(1 - alpha) * hard + alpha * soft`; `hard` is the loss of the labels."""
        with torch.no_grad(), recording({name: pair[1] for name, pair in self.pairs.items()}) as wanted:
            answer = self.teacher(images)
        if self.method in FEATURE_METHODS:
            soft = METHODS[self.method](features, wanted, self.regressors)
        else:
            soft = METHODS[self.method](output.float(), answer.float(), target, self.temperature)
        return (1 - self.alpha) * hard + self.alpha * soft


@contextmanager
def recording(layers: dict[str, nn.Module]) -> Iterator[Features]:
    """Record the outputs of layers in the block, as (batch, channels, *positions)."""
    found: Features = {}

    def note(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: object, output: Tensor) -> None:
            found[name] = channels_first(layer, output)

        return hook

    handles = [layer.register_forward_hook(note(name)) for name, layer in layers.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def map_layers(model: nn.Module, example: Tensor) -> dict[str, Any]:
    """For each feature map size the last layer with that output and its channels; "output": the number of classes."""
    found: dict[str, Any] = {}

    def note(layer: nn.Module, args: object, output: Tensor) -> None:
        features = channels_first(layer, output)
        if features.dim() > 2:
            name = "x".join(map(str, features.shape[2:]))
            found.pop(name, None)
            found[name] = layer, features.shape[1]

    layers = [layer for layer in model.modules() if isinstance(layer, QATLayer)]
    handles = [layer.register_forward_hook(note) for layer in layers]
    training = model.training
    try:
        found["output"] = model.eval()(example).shape[1]
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return found


def channels_first(layer: nn.Module, output: Tensor) -> Tensor:
    """A layer's output as (batch, channels, ...); a linear layer has the channels last."""
    return output.movedim(-1, 1) if output.dim() > 2 and layer.weight.dim() == 2 else output
