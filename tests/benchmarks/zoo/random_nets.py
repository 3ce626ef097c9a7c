"""Networks of random topology on random backends: prepare, calibrate, one training step, export, ONNX Runtime.

Prints a summary and each failure with its random seed; with ``--output`` it writes the page.

    python tests/benchmarks/zoo/random_nets.py --count 300 --seed 0 --output docs/evidence/random_nets.rst
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import onnx
import torch
from prettytable import PrettyTable, TableStyle
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[3]))

import fxqat  # noqa: E402
from fxqat import BackendType  # noqa: E402
from tests.random_net import RandomNet, RandomRecurrentNet  # noqa: E402


@dataclass(frozen=True)
class Outcome:
    """The result of one network; ``stage`` is the stage that failed, or empty."""

    seed: int
    backend: str
    stage: str = ""
    failure: str = ""
    steps: int = 0
    nodes: int = 0
    quantized: int = 0
    tensors: int = 0
    off_by_1: float = 0.0
    seconds: float = 0.0


class CheckError(Exception):
    """A check failed."""


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of an output."""
    if isinstance(output, Tensor):
        return [output]
    return list(output.values()) if isinstance(output, dict) else list(output)


def close(actual: Any, expected: Any) -> bool:
    """Whether two outputs are equal up to rounding."""
    pairs = zip(tensors_of(actual), tensors_of(expected), strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max() + 1)) for a, b in pairs)


def runs(model: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    """Whether a network takes inputs: a split along the batch of a recurrent module fixes the batch."""
    try:
        model(*inputs)
    except RuntimeError:
        return False
    return True


def train_one_step(gm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Make one SGD step; gradients must be finite."""
    loss = torch.stack([t.square().mean() for t in tensors_of(gm.train()(*inputs))]).sum()
    if not loss.requires_grad:  # a conversion to integers ends every gradient
        gm.eval()
        return
    optimizer = torch.optim.SGD(gm.parameters(), lr=1e-3)
    loss.backward()
    bad = [name for name, p in gm.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if bad:
        raise CheckError(f"gradients that are not finite: {', '.join(bad[:3])}")
    nn.utils.clip_grad_norm_(gm.parameters(), 1.0)
    optimizer.step()
    gm.eval()


def stages(seed: int, path: Path, found: dict[str, Any], kind: type[RandomNet] = RandomNet) -> Iterator[str]:
    """Run all stages with one network; yields the name of each before it starts."""
    draw = random.Random(seed)
    yield "build"
    model = kind(seed)
    kept = copy.deepcopy(model.state_dict())
    backend = draw.choice([b.value for b in BackendType])
    found |= {"backend": backend, "steps": len(model.plan)}
    yield "prepare"
    gm = fxqat.prepare_by_platform(model, backend, example_inputs=model.inputs(), untraceable="error")
    report = gm.quant_report
    found |= {"nodes": len(report), "quantized": report.num_quantized}
    yield "same values at another batch"
    other = model.inputs(3, seed=1)
    with torch.no_grad():
        if runs(model, other) and not close(gm(*other), model(*other)):
            raise CheckError("the outputs of the prepared model differ from the model's")
    yield "calibrate"
    fxqat.enable_calibration(gm)
    with torch.no_grad():
        for number in range(2):
            gm(*model.inputs(4, seed=2 + number))
    fxqat.enable_quantization(gm)
    yield "train"
    train_one_step(gm, model.inputs(4, seed=4))
    if any(not torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items()):
        raise CheckError("the float model was changed")
    yield "export"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = fxqat.convert_export(
            gm, model.inputs(2, seed=5), path, opset_version=draw.choice((None, 21)), dynamic_batch=draw.random() < 0.5
        )
    yield "verify"
    onnx.checker.check_model(str(path), full_check=True)
    certificate = result.certificate
    assert certificate is not None
    if not certificate.passed:
        raise CheckError("the parity certificate does not pass")
    found |= {"tensors": len(certificate.tensors)}
    found |= {"off_by_1": max((t.step.off_by_1 for t in certificate.tensors), default=0.0)}


def run(seed: int, folder: Path, kind: type[RandomNet] = RandomNet) -> Outcome:
    """Run one network, from the seed to the certificate."""
    found: dict[str, Any] = {"backend": "-"}
    start, stage = time.perf_counter(), ""
    try:
        for stage in stages(seed, folder / "net.onnx", found, kind):  # noqa: B007  the last stage is the one that failed
            pass
    except Exception as error:  # noqa: BLE001  a failure stays visible in the table
        found |= {"stage": stage, "failure": reason_of(error)}
    return Outcome(seed, seconds=time.perf_counter() - start, **found)


def reason_of(error: BaseException) -> str:
    """An error and its root cause, in one line."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    texts = dict.fromkeys(f"{type(e).__name__}: {' '.join(str(e).split())[:160]}" for e in (error, root))
    return " / ".join(texts)


def summary(outcomes: list[Outcome]) -> PrettyTable:
    """One row for each backend."""
    header = ["backend", "networks", "passed", "steps", "nodes", "quantized", "tensors compared", "worst off by 1"]
    table = PrettyTable([*header, "s a network"], align="l")
    for backend in [*(b.value for b in BackendType), "all"]:
        rows = [o for o in outcomes if backend in (o.backend, "all")]
        if not rows:
            continue
        sums = [sum(getattr(o, name) for o in rows) for name in ("steps", "nodes", "quantized", "tensors")]
        worst = f"{max(o.off_by_1 for o in rows):.3%}"
        mean = f"{sum(o.seconds for o in rows) / len(rows):.1f}"
        table.add_row([backend, len(rows), sum(not o.failure for o in rows), *sums, worst, mean])
    return table


def failures(outcomes: list[Outcome]) -> PrettyTable:
    """One row for each network that failed."""
    table = PrettyTable(["seed", "backend", "stage", "reason"], align="l", max_width=90)
    for o in outcomes:
        if o.failure:
            table.add_row([o.seed, o.backend, o.stage, o.failure])
    return table


STEPS = {
    RandomNet: """\
A network has 5 to 24 random steps: convolutions (grouped, strided, transposed, padded in every mode), linear layers,
norms, activations, pools, arithmetic, concatenation, splits, shared modules, unused branches, attention, reshapes and
other moves, changes of dtype, one or several inputs and outputs.""",
    RandomRecurrentNet: """\
The first step of a network is a recurrent module: an LSTM, GRU or RNN of one or two layers, in one or both directions,
with or without biases, whose output or states are read. Among the further steps are others, and those of
:doc:`random_nets`.""",
}
"""What the networks of a kind consist of."""

TITLES = {RandomNet: "Networks of random topology", RandomRecurrentNet: "Recurrent networks of random topology"}


def page(outcomes: list[Outcome], kind: type[RandomNet]) -> str:
    """The documentation page."""
    tables = [summary(outcomes), failures(outcomes)]
    for table in tables:
        table.set_style(TableStyle.DEFAULT)
        table.hrules = 1
    failed = f"Failures\n--------\n\n{tables[1].get_string()}\n" if tables[1].rows else "None failed.\n"
    return f"""{TITLES[kind]}
{"=" * len(TITLES[kind])}

Whether networks that nobody wrote by hand go all the way: each is prepared for a random backend, compared with the
float model at another batch size, calibrated, trained one step, exported at opset 21 or the least one for its widths,
with a fixed or dynamic batch, and compared with ONNX Runtime. It passes if the parity certificate passes.

{STEPS[kind]}

* *steps*, *nodes*, *quantized*: sums over the networks: random steps, rows of the quantization reports, and those that
  are quantized.
* *worst off by 1*: the largest share of values of a tensor that are one step off when it is computed from the
  fake-quant model's own integers.

Written by ``tests/benchmarks/zoo/random_nets.py`` with torch {torch.__version__} on {date.today()}, random seeds
{outcomes[0].seed} to {outcomes[-1].seed}; do not edit.

{tables[0].get_string()}

{failed}"""


def main() -> None:
    """Measure, print the tables, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="number of networks")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--show", action="store_true", help="print the plan and the traceback of each failure")
    parser.add_argument("--recurrent", action="store_true", help="networks with recurrent modules")
    parser.add_argument("--output", type=Path, help="write the documentation page here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    outcomes, kind = [], RandomRecurrentNet if arguments.recurrent else RandomNet
    with tempfile.TemporaryDirectory() as folder:
        for seed in tqdm(range(arguments.seed, arguments.seed + arguments.count), disable=None):
            outcomes.append(run(seed, Path(folder), kind))
            if outcomes[-1].failure:
                tqdm.write(f"{seed} {outcomes[-1].backend} {outcomes[-1].stage}: {outcomes[-1].failure}")
                if arguments.show:
                    show(seed, Path(folder), kind)
    print(summary(outcomes))
    print(failures(outcomes))
    if arguments.output:
        arguments.output.write_text(page(outcomes, kind), encoding="utf-8")


def show(seed: int, folder: Path, kind: type[RandomNet] = RandomNet) -> None:
    """Print the plan of a network and the traceback of its failure."""
    print(kind(seed).describe())
    try:
        for _ in stages(seed, folder / "net.onnx", {}, kind):
            pass
    except Exception:  # noqa: BLE001  it is printed
        traceback.print_exc(file=sys.stdout)


if __name__ == "__main__":
    main()
