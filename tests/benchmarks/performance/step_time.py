"""Time and memory of a QAT training step, against the float model's and that of torch's own FX QAT.

The steps of all models are interleaved; fake-quant is on, observers are off. Run nothing else meanwhile: other programs
on the same cores make the figures useless.

    python tests/benchmarks/performance/step_time.py --output docs/evidence/step_time.rst    # about 4 minutes
    python tests/benchmarks/performance/step_time.py --compiled --models resnet18

A row for Brevitas is measured if it is installed (``pip install brevitas``). With ``--compiled`` the models are
compiled too, without caches; *first step* is then the time to compile. On a GPU, steps are also captured as CUDA
graphs::

    python tests/benchmarks/performance/step_time.py --device cuda --bf16 --compiled --batch 64 256 --image 224 \\
        --models resnet50 mobilenet_v3_large --output docs/evidence/step_time_gpu.rst
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import timm
import torch
import torchvision
from machine import processor
from prettytable import PrettyTable
from torch import nn
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

import fxqat
from fxqat.fake_quantize import kernels
from fxqat.tools import round_weights_once

LIMITS = {"resnet18": (1.20, 1.06), "mobilenet_v3_small": (1.50, 1.12), "vit_tiny": (1.25, 1.08)}
"""The ratio to float that a step of each model should not exceed, eager and compiled."""

MEMORY_LIMIT = 1.25

BREVITAS = version("brevitas") if find_spec("brevitas") else ""
"""Its version, if it is installed."""

Step = Callable[[], None]


def build(name: str, device: str, image: int) -> nn.Module:
    """A model of torchvision, or ``vit_tiny`` of timm, with random weights, in training mode."""
    torch.manual_seed(0)
    model: nn.Module
    if name == "vit_tiny":
        model = timm.create_model("vit_tiny_patch16_224", img_size=image)
    else:
        model = getattr(torchvision.models, name)(weights=None)
    return model.to(device).train()


def quantized(model: nn.Module, x: torch.Tensor, backend: str, bn_mode: str) -> nn.Module:
    """The model prepared by fxqat: calibrated on one batch, fake-quant on, observers off."""
    gm = fxqat.prepare_by_platform(model, backend, {"bn_mode": bn_mode})
    fxqat.calibrate(gm, [x], progress=False)
    fxqat.enable_quantization(gm)
    return gm.train()


def torch_fx(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """The model prepared by torch's own FX QAT, in the same state."""
    from torch.ao import quantization as ao
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gm = prepare_qat_fx(copy.deepcopy(model), ao.get_default_qat_qconfig_mapping("x86"), (x,))
    gm.eval().apply(ao.enable_observer)
    with torch.no_grad():
        gm(x)
    gm.apply(ao.enable_fake_quant)
    gm.apply(ao.disable_observer)
    return gm.train()


def brevitas_layerwise(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """The model whose layers Brevitas has replaced: 8-bit inputs and weights, calibrated."""
    from brevitas.graph.calibrate import calibration_mode
    from brevitas.graph.quantize import layerwise_quantize

    quantized_model: nn.Module = layerwise_quantize(copy.deepcopy(model)).eval()
    with torch.no_grad(), calibration_mode(quantized_model):
        quantized_model(x)
    return quantized_model.train()


def step_of(model: nn.Module, x: torch.Tensor, dtype: torch.dtype | None, parts: int = 1, once: bool = False) -> Step:
    """A training step: forward, loss, backward, SGD with momentum (fused: one kernel for all parameters).

    Args:
        model: in training mode.
        x: the batch.
        dtype: of autocast; None for none.
        parts: micro-batches, whose gradients are accumulated.
        once: all of them round the weights once.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True)
    target = torch.arange(len(x), device=x.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with round_weights_once(model) if once else nullcontext():
            for images, classes in zip(x.chunk(parts), target.chunk(parts), strict=True):
                with torch.autocast(x.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                    loss = nn.functional.cross_entropy(model(images), classes) / parts
                loss.backward()
        optimizer.step()

    return step


def variants(name: str, x: torch.Tensor, backends: list[str], frozen: bool) -> dict[str, nn.Module]:
    """The models to compare; the first is the baseline."""
    model = build(name, x.device.type, x.shape[-1])
    found = {"float": model}
    for backend in backends:
        found[f"fxqat {backend}"] = quantized(model, x, backend, "train")
    if frozen:
        found[f"fxqat {backends[0]}, BN frozen"] = quantized(model, x, backends[0], "freeze")
    found["torch.ao FX"] = torch_fx(model, x)
    if BREVITAS:
        found["Brevitas layerwise"] = brevitas_layerwise(model, x)
    return found


def seconds_of(step: Step, device: str) -> float:
    """Seconds of one step."""
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def interleaved(steps: dict[str, Step], rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of every step; the models take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in tqdm(range(rounds + 3), leave=False):
        for name, step in steps.items():
            taken = seconds_of(step, device)
            if number >= 3:
                seconds[name].append(taken)
    return seconds


def peak_memory(model: nn.Module, step: Step) -> float:
    """MiB of the tensors alive at the peak of a step: parameters, gradients, momentum and intermediate tensors.

    The largest of three steps, because in some the gradients of the step before are freed before the record begins.
    """
    return max(_recorded_peak(model, step) for _ in range(3))


def _recorded_peak(model: nn.Module, step: Step) -> float:
    step()
    device = next(model.parameters()).device
    kept = 3 * sum(parameter.nbytes for parameter in model.parameters()) + sum(b.nbytes for b in model.buffers())
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return (kept + torch.cuda.max_memory_allocated(device) - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    profiler = record.profiler
    assert profiler is not None
    assert profiler.kineto_results is not None
    changes = [event.nbytes() for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    return (kept + max(itertools.accumulate(changes))) / 2**20


def captured(step: Step) -> Step:
    """The step as a CUDA graph: the GPU does not wait for Python."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure(name: str, batch: int, arguments: argparse.Namespace, table: PrettyTable) -> None:
    """Add the rows of a model: eager, with memory; as CUDA graphs, on a GPU; and compiled, if asked for."""
    device = "cuda" if arguments.device == "cuda" else "cpu"
    dtype = torch.bfloat16 if arguments.bf16 else None
    torch.manual_seed(0)
    x = torch.randn(batch, 3, arguments.image, arguments.image, device=device)
    models = variants(name, x, arguments.backends, not arguments.no_frozen)
    steps = {key: step_of(model, x, dtype) for key, model in models.items()}
    failed = first_steps(steps, device)[1]
    held = {key: peak_memory(models[key], step) for key, step in steps.items()}
    add_rows(table, (name, batch, "eager"), steps, arguments, memory=held, failed=failed)
    parts, frozen = arguments.micro_batches, f"fxqat {arguments.backends[0]}, BN frozen"
    if parts and frozen in models:
        in_parts = {key: step_of(models[key], x, dtype, parts) for key in ("float", frozen)}
        in_parts[f"{frozen}, weights rounded once"] = step_of(models[frozen], x, dtype, parts, once=True)
        held = {key: peak_memory(models["float" if key == "float" else frozen], step) for key, step in in_parts.items()}
        add_rows(table, (name, batch, f"eager, {parts} micro-batches"), in_parts, arguments, memory=held)
    ours = {key: model for key, model in models.items() if key == "float" or key.startswith("fxqat")}
    if device == "cuda":
        graphs = {key: captured(steps[key]) for key in ours}
        add_rows(table, (name, batch, "CUDA graph"), graphs, arguments)
    if arguments.compiled and batch == arguments.batch[-1]:
        torch.compiler.reset()
        steps = {key: step_of(torch.compile(model, fullgraph=True), x, dtype) for key, model in ours.items()}
        add_rows(table, (name, batch, "compiled"), steps, arguments, first=first_steps(steps, device)[0])


def first_steps(steps: dict[str, Step], device: str) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of each first step; and the errors of other quantizers, whose steps are removed."""
    seconds, failed = {}, {}
    for key, step in list(steps.items()):
        try:
            seconds[key] = seconds_of(step, device)
        except Exception as error:  # noqa: BLE001  of any kind
            if key == "float" or key.startswith("fxqat"):
                raise
            del steps[key]
            failed[key] = f"fails: {error}"
    return seconds, failed


def add_rows(
    table: PrettyTable,
    labels: tuple[str, int, str],
    steps: dict[str, Step],
    arguments: argparse.Namespace,
    memory: dict[str, float] | None = None,
    first: dict[str, float] | None = None,
    failed: dict[str, str] | None = None,
) -> None:
    """Measure the steps in turns; a row for each, and for those that failed."""
    name, batch, mode = labels
    limits = dict(zip(("eager", "compiled"), LIMITS.get(name, ()), strict=False))
    seconds = interleaved(steps, arguments.rounds, arguments.device)
    for key, values in seconds.items():
        ratio = statistics.median(v / base for v, base in zip(values, seconds["float"], strict=True))
        limit = limits.get(mode, "") if key.startswith("fxqat") and arguments.device == "cpu" else ""
        held = [f"{memory[key]:.0f}", f"{memory[key] / memory['float']:.2f}"] if memory else ["", ""]
        cells = [f"{1e3 * statistics.median(values):.1f}", f"{ratio:.2f}", limit, *held]
        table.add_row([name, batch, mode, key, *cells, f"{first[key]:.1f}" if first else ""])
    for key, reason in (failed or {}).items():
        table.add_row([name, batch, mode, key, reason, *[""] * 5])


def where(arguments: argparse.Namespace) -> str:
    """The machine and the kernels, in words."""
    if arguments.device == "cuda":
        used = kernels.gpu_kernels(torch.device("cuda", 0)) is not None
        precision = "bf16 autocast" if arguments.bf16 else "float32"
        return f"{torch.cuda.get_device_name()}, {precision}. Kernels of fake-quant: {'Triton' if used else 'none'}"
    threads = f"{torch.get_num_threads()} threads of {processor()}"
    return f"{threads}.\nKernels of fake-quant (eager, float32): {kernels.STATE}"


def page(table: PrettyTable, arguments: argparse.Namespace) -> str:
    """The documentation page."""
    table.hrules = 1
    peer = (
        f"*Brevitas layerwise*\n  is ``layerwise_quantize`` of Brevitas {BREVITAS}: 8 bits, its default, for the "
        "inputs and weights of layers; it leaves\n  values float that TSQAT rounds, too."
        if BREVITAS
        else "Brevitas is not installed: no row."
    )
    title = f"Time and memory of a training step{' on a GPU' * (arguments.device == 'cuda')}"
    return f"""{title}
{"=" * len(title)}

Milliseconds and memory of one training step with fake-quant on and observers off, against the same step of the float
model: forward, loss, backward, ``torch.optim.SGD`` with momentum and ``fused=True``; {arguments.image} px,
{where(arguments)}. The models are torchvision's,
and ``vit_tiny`` is timm's ``vit_tiny_patch16_224`` at that size.

* *variant*: the backend; *BN frozen* with ``bn_mode="freeze"``. *torch.ao FX* is torch's own ``prepare_qat_fx`` with
  its default x86 configuration. {peer}
* *micro-batches*: the batch in so many parts, whose gradients are accumulated; *weights rounded once* is
  ``fxqat.tools.round_weights_once``.
* *ms*: the median of {arguments.rounds} rounds; in a round each variant makes one step.
* *over float*: the median over the rounds of the ratio to the float model's step. *limit*: what it should not exceed.
* *memory, MiB*: of the tensors alive at the peak of a step, by torch's record of allocations; then its ratio to the
  float model's, which should not exceed {MEMORY_LIMIT}.
* *CUDA graph*: the whole step, captured once and replayed, so that the GPU does not wait for Python.
* *first step*: seconds of the first compiled step, which compiles, without caches.

Written by ``tests/benchmarks/performance/step_time.py`` with torch {torch.__version__} on {date.today()}; do not edit.

{table.get_string()}
"""


def main() -> None:
    """Measure, print the table, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(LIMITS))
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--image", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--backends", nargs="+", default=["TSQAT", "TensorRT"])
    parser.add_argument("--no-frozen", action="store_true", help="leave out the variant with BatchNorm frozen")
    parser.add_argument(
        "--micro-batches",
        type=int,
        default=4,
        help="of gradient accumulation, with BatchNorm frozen; 0 leaves them out",
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--bf16", action="store_true", help="under bf16 autocast")
    parser.add_argument("--compiled", action="store_true", help="compiled, too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no GPU on this machine; nothing was measured")
    torch.compiler.config.force_disable_caches = True
    torch.set_num_threads(arguments.threads)
    columns = ["model", "batch", "mode", "variant", "ms", "over float", "limit", "memory, MiB", "over float "]
    table = PrettyTable([*columns, "first step, s"], align="l")
    for name, batch in itertools.product(arguments.models, arguments.batch):
        measure(name, batch, arguments, table)
        if arguments.output:
            arguments.output.write_text(page(table, arguments), encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
