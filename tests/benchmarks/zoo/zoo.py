"""Every architecture of timm and torchvision: prepared, and some exported and compared with ONNX Runtime.

Each model runs in its own process, with random weights, at the smallest input it takes. Models of more than 60M
parameters are on the meta device and are prepared only. Each model adds a line to a file in ``results``; models that
have a line there are skipped, so a run can be stopped, resumed and split into shards.

    cd tests/benchmarks/zoo/results
    python ../zoo.py run --suite timm --results timm.jsonl
    python ../zoo.py run --suite timm --export --families-of timm.jsonl --results exported.jsonl
    python ../zoo.py run --suite torchvision --export --results torchvision.jsonl
    python ../zoo.py report --results *.jsonl --output ../../../../docs/evidence/zoo.rst
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm
from zoo_report import MIN_COSINE, page

import fxqat
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.qat import QATLayer
from fxqat.onnx.verify import ParityCertificate
from fxqat.ops.identify import identify
from fxqat.utils.fx_graph import called_module
from fxqat.utils.tensors import flatten_tensors

BIG = 60_000_000
SIZES = (32, 64, 96, 128, 160, 192, 224, 256, 288, 299, 320, 384, 448, 512)
DETECTION: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("faster_rcnn", "mask_rcnn", "keypoint_rcnn"), {"box_score_thresh": 0.0}),
    **dict.fromkeys(("retinanet", "fcos", "ssd", "ssdlite"), {"score_thresh": 0.0}),
}
"""Options of detection models, by module file: with random weights no box would reach the default score."""
WEIGHTED = ("convolution", "mm", "addmm")
Result = dict[str, Any]


def names(suite: str) -> list[str]:
    """All models of a suite."""
    if suite == "timm":
        return timm.list_models()
    return [name for name in torchvision.models.list_models() if not name.startswith("quantized_")]


def family(suite: str, name: str) -> str:
    """The module file that a model is defined in."""
    builder = timm.model_entrypoint(name) if suite == "timm" else torchvision.models.get_model_builder(name)
    return str(builder.__module__).rpartition(".")[2]


def build(suite: str, name: str, **options: Any) -> nn.Module:
    """A model with random weights and random BatchNorm statistics."""
    torch.manual_seed(0)
    if suite == "timm":
        model = timm.create_model(name, pretrained=False, **options)
    else:
        extra = {"weights_backbone": None} if _takes(name, "weights_backbone") else {}
        extra |= DETECTION.get(family(suite, name), {})
        extra |= {"min_size": 128, "max_size": 192} if is_detection(suite, name) and "ssd" not in name else {}
        extra |= {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
        model = torchvision.models.get_model(name, weights=None, **extra, **options)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


def is_detection(suite: str, name: str) -> bool:
    """Whether a model detects objects: its pre- and post-processing are Python and are not exported."""
    return suite == "torchvision" and family(suite, name) in DETECTION


def _takes(name: str, option: str) -> bool:
    builder = inspect.unwrap(torchvision.models.get_model_builder(name))
    return option in inspect.signature(builder).parameters


def default_inputs(suite: str, name: str, model: nn.Module) -> tuple[Any, ...]:
    """Inputs of the size that the model was designed for."""
    kind = family(suite, name)
    if suite == "timm":
        return (torch.randn(1, *model.default_cfg["input_size"]),)
    where = type(model).__module__
    if ".detection" in where:
        return ([torch.rand(3, 160, 160), torch.rand(3, 160, 192)],)
    if ".video" in where:
        return (torch.randn(1, 3, 16, 224, 224) if kind in ("mvit", "s3d") else torch.randn(1, 3, 16, 64, 64),)
    if ".optical_flow" in where:
        return (torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128))
    size = 299 if kind == "inception" else 224
    return (torch.randn(1, 3, size, size),)


def runs(model: nn.Module, inputs: tuple[Any, ...]) -> bool:
    """Whether the float model takes these inputs, also in training (auxiliary heads may need larger ones)."""
    work = copy.deepcopy(model)
    try:
        with torch.no_grad():
            work.eval()(*inputs)
            work.train()(*inputs)
    except Exception:  # noqa: BLE001  models complain in many ways
        return False
    return True


def smallest(suite: str, name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model and the smallest square images it takes."""
    model = build(suite, name)
    inputs = default_inputs(suite, name, model)
    if len(inputs) > 1 or not isinstance(inputs[0], torch.Tensor) or inputs[0].dim() != 4:
        return model, inputs
    for size in SIZES:
        images = torch.randn(2, inputs[0].shape[1], size, size)
        if size >= max(inputs[0].shape[-2:]):
            break
        if runs(model, (images,)):
            return model, (images,)
        if suite == "timm" and size >= 64 and getattr(model, "patch_embed", None) is not None:
            try:
                resized = build(suite, name, img_size=size)
            except Exception:  # noqa: BLE001
                continue
            if runs(resized, (images,)):
                return resized, (images,)
    return model, (torch.cat([inputs[0]] * 2),)


def multiplications(gm: nn.Module, inputs: tuple[Any, ...]) -> tuple[int, int]:
    """Multiply-accumulates of weighted ops: of all, and of those with a quantized weight."""
    trained = [parameter for parameter in gm.parameters() if parameter.requires_grad]
    gm.requires_grad_(False)  # the counter's hooks do not expect parameters that are views
    with torch.no_grad(), FlopCounterMode(display=False, depth=99) as counter:
        gm(*inputs)
    for parameter in trained:
        parameter.requires_grad_(True)
    layers = {name for name, module in gm.named_modules() if isinstance(module, QATLayer)}
    total = quantized = inside = 0
    for path, counts in counter.get_flop_counts().items():
        flops = sum(value for op, value in counts.items() if str(op).removeprefix("aten.") in WEIGHTED)
        name = path.partition(".")[2]
        total += flops if path == "Global" else 0
        quantized += flops if name in layers else 0
        inside += flops if name and not any(name.startswith(f"{other}.") for other in called_paths(gm)) else 0
    if all(reads_quantized(gm, node) for node in functional_layers(gm)):
        quantized += total - inside
    return total // 2, quantized // 2


def called_paths(gm: nn.Module) -> set[str]:
    """Paths of the modules that the graph calls."""
    return {str(node.target) for node in gm.graph.nodes if node.op == "call_module"}


def functional_layers(gm: nn.Module) -> list[fx.Node]:
    """Convolutions and linear layers whose weights are computed."""
    return [node for node in gm.graph.nodes if node.op == "call_function" and identify(node).family == "weighted"]


def reads_quantized(gm: nn.Module, node: fx.Node) -> bool:
    """Whether its input and weight come from fake-quants."""
    sources = list(node.all_input_nodes)[:2]
    return all(isinstance(called_module(source), FakeQuantizeBase) for source in sources)


def reals_of(output: Any) -> list[torch.Tensor]:
    """The floating-point tensors in a nested output."""
    return [tensor for tensor in flatten_tensors(output) if tensor.is_floating_point()]


def loss_of(output: Any) -> torch.Tensor:
    """A scalar loss of a nested output."""
    return torch.stack([torch.zeros(()), *(t.float().square().mean() for t in reals_of(output))]).sum()


def train_a_step(gm: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Calibrate and train one step."""
    fxqat.calibrate(gm, [inputs], progress=False)
    fxqat.enable_quantization(gm)
    gm.train()
    optimizer = torch.optim.SGD(gm.parameters(), lr=1e-4, momentum=0.9)
    loss_of(gm(*inputs)).backward()
    broken = [name for name, p in gm.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if broken:
        raise RuntimeError(f"gradients of {len(broken)} parameters are not finite: {', '.join(broken[:4])}")
    nn.utils.clip_grad_value_(gm.parameters(), 1e15)  # with random weights their squares may overflow
    nn.utils.clip_grad_norm_(gm.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    gm.eval()


def export(gm: nn.Module, inputs: tuple[Any, ...], result: Result) -> None:
    """Export, and add the figures of the parity certificate to ``result``."""
    with tempfile.TemporaryDirectory() as folder:
        report = fxqat.convert_export(gm, inputs, Path(folder) / "model.onnx", opset_version=18)
    certificate = report.certificate
    assert certificate is not None
    tensors, first = certificate.tensors, [t for t in certificate.tensors if t.is_first]
    result["off_by_1"] = max((t.step.off_by_1 - t.step.ties for t in tensors), default=0.0)
    result["ties"] = max((t.step.ties for t in tensors), default=0.0)
    result["off_by_2"] = max((t.step.off_by_2_plus for t in tensors), default=0.0)
    result["first_off_by_1"] = max((t.free.off_by_1 - t.free.ties for t in first), default=0.0)
    result["first_off_by_2"] = max((t.free.off_by_2_plus for t in first), default=0.0)
    result["cosine"] = min(o.cosine for o in certificate.outputs)
    if result["cosine"] <= MIN_COSINE:
        result["own_cosine"] = own_cosine(gm, inputs, certificate)


def own_cosine(gm: nn.Module, inputs: tuple[Any, ...], certificate: ParityCertificate) -> float:
    """The cosine between the fake-quant model's outputs and those with as many values moved by a step as in the file.

    The certificate gives the number of values in each tensor that differ although the inputs are equal (they lie on a
    rounding boundary); as many random values of these tensors are moved. No export is involved, so the cosine shows how
    much the network itself amplifies single steps.
    """
    counts = {t.name: round(t.step.off_by_1 * t.size) for t in certificate.tensors}
    generator = torch.Generator().manual_seed(0)

    def move(module: Any, _: Any, kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
        steps = torch.zeros(output.numel())
        steps[torch.randperm(output.numel(), generator=generator)[: counts.get(kwargs.get("tensor_name", ""), 0)]] = 1.0
        scale, _zero_point = module.qparams()
        return output + steps.view(output.shape) * scale.abs().mean()

    with torch.no_grad():
        expected = reals_of(gm(*inputs))
        quants = [module for module in gm.modules() if isinstance(module, FakeQuantizeBase)]
        handles = [module.register_forward_hook(move, with_kwargs=True) for module in quants]
        moved = reals_of(gm(*inputs))
        for handle in handles:
            handle.remove()
    pairs = zip(expected, moved, strict=True)
    return min(float(torch.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0)) for a, b in pairs)


def measure(suite: str, name: str, exported: bool, big: int = BIG) -> Result:
    """All figures of one model."""
    start = time.perf_counter()
    try:
        with torch.device("meta"):
            model = build(suite, name)
            inputs = default_inputs(suite, name, model)
    except Exception:  # noqa: BLE001  a few read their weights while they are built
        model, inputs = smallest(suite, name)
    parameters = sum(p.numel() for p in model.parameters())
    result: Result = {"suite": suite, "name": name, "family": family(suite, name), "parameters": parameters}
    result |= {"torch": torch.__version__, "detection": is_detection(suite, name)}
    if parameters <= big:
        model, inputs = smallest(suite, name)
    result["input"] = list(inputs[0].shape) if isinstance(inputs[0], torch.Tensor) else "list of images"
    result["build_seconds"] = time.perf_counter() - start
    start = time.perf_counter()
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=inputs)
    result["prepare_seconds"] = time.perf_counter() - start
    report = gm.quant_report
    result |= {"nodes": len(report), "quantized": report.num_quantized, "forced": len(report.forced)}
    result["leaves"] = [f"{leaf.path}: {leaf.reason} ({inside_package(leaf.source)})" for leaf in report.leaves]
    result["macs"], result["quantized_macs"] = multiplications(gm.eval(), inputs)
    if exported and parameters <= big:
        start = time.perf_counter()
        try:
            train_a_step(gm, inputs)
            result["trained"] = True
            if not is_detection(suite, name):
                export(gm, inputs, result)
        except Exception as error:  # noqa: BLE001  stays visible in the table
            result["export_error"] = describe(error)
        result["export_seconds"] = time.perf_counter() - start
    return result


def inside_package(source: str) -> str:
    """A source line without the folder of the installed packages."""
    return source.rpartition("site-packages/")[2]


def describe(error: BaseException) -> str:
    """An error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines)[:300]}"


def in_child(suite: str, name: str, exported: bool, big: int, pipe: Any) -> None:
    """The body of the child process."""
    torch.set_num_threads(1)
    try:
        pipe.send(measure(suite, name, exported, big))
    except Exception as error:  # noqa: BLE001  stays visible in the table
        traceback.print_exc()
        pipe.send({"suite": suite, "name": name, "family": family(suite, name), "error": describe(error)})


def run_one(suite: str, name: str, exported: bool, big: int, limit: float) -> Result:
    """One model in its own process, with a time limit."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=in_child, args=(suite, name, exported, big, sender))
    child.start()
    sender.close()
    lost: Result = {"suite": suite, "name": name, "family": family(suite, name)}
    try:
        return receiver.recv() if receiver.poll(limit) else lost | {"error": f"more than {limit:.0f} s"}
    except EOFError:
        child.join()
        return lost | {"error": f"the process ended with code {child.exitcode}"}
    finally:
        child.kill()
        child.join()


def chosen(arguments: argparse.Namespace, done: set[str]) -> Iterator[tuple[str, bool]]:
    """The models to run, and whether each is exported."""
    everything = arguments.models or names(arguments.suite)
    if arguments.families_of:
        everything = smallest_of_families(arguments.families_of)
    index, count = (int(part) for part in arguments.shard.split("/"))
    for position, name in enumerate(everything):
        if position % count == index and name not in done:
            yield name, arguments.export


def smallest_of_families(path: Path) -> list[str]:
    """The model with the fewest parameters of each family, from the results of a run without export."""
    results = [json.loads(line) for line in path.read_text().splitlines()]
    best: dict[str, Result] = {}
    for result in sorted((r for r in results if "parameters" in r), key=lambda r: r["parameters"]):
        best.setdefault(result["family"], result)
    return [result["name"] for result in best.values()]


def run(arguments: argparse.Namespace) -> None:
    """Measure the models that have no result yet."""
    path: Path = arguments.results[0]
    done = {json.loads(line)["name"] for line in path.read_text().splitlines()} if path.exists() else set()
    with path.open("a") as file:
        for name, exported in tqdm(list(chosen(arguments, done))):
            result = run_one(arguments.suite, name, exported, arguments.big, arguments.limit)
            file.write(json.dumps(result) + "\n")
            file.flush()


def report(arguments: argparse.Namespace) -> None:
    """Write the page."""
    results = [json.loads(line) for path in arguments.results for line in path.read_text().splitlines()]
    text = page(results, {suite: len(names(suite)) for suite in ("timm", "torchvision")})
    print(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


def main() -> None:
    """Parse the arguments and call ``run`` or ``report``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands: dict[str, Callable[[argparse.Namespace], None]] = {"run": run, "report": report}
    parser.add_argument("command", choices=list(commands))
    parser.add_argument("--suite", choices=("timm", "torchvision"), default="timm")
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--export", action="store_true", help="also export and compare")
    parser.add_argument("--families-of", type=Path, help="results of a run: only its smallest model of each family")
    parser.add_argument("--shard", default="0/1", help="which part of the models: INDEX/COUNT")
    parser.add_argument(
        "--big", type=int, default=BIG, help="models with more parameters are on the meta device and prepared only"
    )
    parser.add_argument("--limit", type=float, default=300, help="seconds for one model")
    parser.add_argument("--results", type=Path, nargs="+", required=True)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    commands[arguments.command](arguments)


if __name__ == "__main__":
    main()
