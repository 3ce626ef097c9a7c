"""Training programs that know nothing of fxqat, with prepared models.

The programs are in ``client_programs``. Each gets a tiny model that is prepared, calibrated and quantized, and trains,
evaluates, saves and resumes it. What it computes is checked: its losses fall, a resumed model equals the uninterrupted
one, an average equals the average by hand. Then each model that it trained is exported and the file compared with it.
Each program runs in its own process.

    python tests/benchmarks/clients.py run
    python tests/benchmarks/clients.py report
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import logging
import math
import multiprocessing
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import fxqat
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.utils.torch_compat import unwrap

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "client_programs"))
from job import CNN, Attention, Job, Outcome, patterns  # noqa: E402  the folder is not a package

COUNT, BATCH = 64, 8
TRANSFORMER = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_labels": 4,
}
Result = dict[str, Any]


@dataclass(frozen=True)
class Client:
    """A training program.

    Args:
        title: what it is, for the page.
        program: ``module.function`` in ``client_programs``.
        model: name of the model that it trains.
        packages: whose versions the page tells, beside torch's.
    """

    title: str
    program: str
    model: str = "CNN"
    packages: tuple[str, ...] = ()


CLIENTS = {
    "timm_ema_v2": Client("``ModelEmaV2``", "timm_programs.model_ema_v2", packages=("timm",)),
    "timm_ema_v3": Client("``ModelEmaV3``", "timm_programs.model_ema_v3", packages=("timm",)),
    "timm_scaler": Client("``NativeScaler``, autocast in bfloat16", "timm_programs.native_scaler", packages=("timm",)),
    "timm_saver": Client(
        "``CheckpointSaver`` and ``resume_checkpoint``", "timm_programs.checkpoint_saver", packages=("timm",)
    ),
    "hf_vit": Client(
        "``Trainer``: train, evaluate, save, resume",
        "huggingface_programs.hf_trainer",
        "ViT",
        ("transformers", "accelerate"),
    ),
    "hf_vit_logits": Client(
        "``Trainer`` with ``compute_loss_func``, model without labels",
        "huggingface_programs.hf_trainer_without_labels",
        "ViT without labels",
        ("transformers", "accelerate"),
    ),
    "hf_bert": Client(
        "``Trainer``: train, evaluate, save, resume",
        "huggingface_programs.hf_trainer",
        "BERT",
        ("transformers", "accelerate"),
    ),
    "accelerate": Client(
        "``prepare``, ``save_state``, ``load_state``",
        "huggingface_programs.accelerate_state",
        packages=("accelerate",),
    ),
    "accelerate_bf16": Client(
        'the same with ``mixed_precision="bf16"``',
        "huggingface_programs.accelerate_bf16",
        packages=("accelerate",),
    ),
    "lightning_checkpoint": Client(
        "``ModelCheckpoint``, resumed", "lightning_programs.lightning_checkpoint", packages=("lightning",)
    ),
    "lightning_ema": Client("``EMAWeightAveraging``", "lightning_programs.lightning_ema", packages=("lightning",)),
    "lightning_swa": Client(
        "``StochasticWeightAveraging``", "lightning_programs.lightning_swa", packages=("lightning",)
    ),
    "lightning_ddp": Client("DDP on two processes", "lightning_programs.lightning_ddp", packages=("lightning",)),
    "lightning_bf16": Client('``precision="bf16-true"``', "lightning_programs.lightning_bf16", packages=("lightning",)),
    "averaged_model": Client("``AveragedModel``, ``update_bn``", "torch_programs.averaged_model"),
    "safetensors_model": Client(
        "``save_model``, ``load_model``", "torch_programs.safetensors_model", packages=("safetensors",)
    ),
    "safetensors_file": Client(
        "``save_file(state_dict())``", "torch_programs.safetensors_file", packages=("safetensors",)
    ),
    "distributed_checkpoint": Client("``torch.distributed.checkpoint``", "torch_programs.distributed_checkpoint"),
    "torchmetrics": Client("loop with metrics", "torch_programs.metrics_loop", packages=("torchmetrics",)),
    "ignite": Client(
        "trainer, evaluator, ``Checkpoint``", "torch_programs.ignite_trainer", packages=("pytorch-ignite",)
    ),
    "compiled": Client("step under ``torch.compile(fullgraph=True)``", "torch_programs.compiled_step"),
    "ddp": Client("DDP on two processes", "torch_programs.ddp"),
    "ddp_attention": Client("DDP on two processes, attention dropout", "torch_programs.ddp_with_dropout", "Attention"),
    "ddp_projected": Client("as above, last layer in the same module", "torch_programs.ddp_with_dropout", "Projected"),
    "deepspeed": Client(
        "ZeRO stage 2 on two processes", "deepspeed_programs.zero", "Attention", packages=("deepspeed",)
    ),
}


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A float model with random weights, and its samples: the arguments of forward by name and the labels."""
    torch.manual_seed(0)
    if name in ("CNN", "ViT", "ViT without labels"):
        images, labels = patterns(COUNT, (3, 8, 8))
        if name == "CNN":
            return CNN(), {"x": images, "labels": labels}
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(**TRANSFORMER, image_size=8, patch_size=4)
        return ViTForImageClassification(config), {"pixel_values": images, "labels": labels}
    if name in ("Attention", "Projected"):
        sequences, labels = patterns(COUNT, (6, 16))
        return Attention(projected=name == "Projected"), {"x": sequences, "labels": labels}
    from transformers import BertConfig, BertForSequenceClassification

    scores, labels = patterns(COUNT, (12,))
    words = 5 + (20 * scores.sigmoid()).long()
    mask = (torch.arange(12) < 12 - torch.arange(COUNT)[:, None] % 4).long()
    config = BertConfig(**TRANSFORMER, vocab_size=32, max_position_embeddings=16)
    return BertForSequenceClassification(config), {"input_ids": words, "attention_mask": mask, "labels": labels}


def example(name: str, samples: dict[str, Tensor]) -> tuple[Any, ...]:
    """The arguments of forward of one batch."""
    first = {key: value[:BATCH] for key, value in samples.items()}
    if name.startswith("ViT"):
        return (first["pixel_values"],) if "without" in name else (first["pixel_values"], first["labels"])
    if name == "BERT":
        return first["input_ids"], first["attention_mask"], None, None, None, first["labels"]
    return (first["x"],)


def prepare(name: str) -> nn.Module:
    """The prepared model, as a new process has it."""
    model, samples = build(name)
    return fxqat.prepare_by_platform(model.train(), "TSQAT", example_inputs=example(name, samples))


def quantized(name: str, samples: dict[str, Tensor]) -> nn.Module:
    """The prepared model, calibrated and quantized."""
    gm = prepare(name)
    rows = [{key: value[i : i + BATCH] for key, value in samples.items()} for i in range(0, COUNT, BATCH)]
    fxqat.calibrate(gm, rows[:4], progress=False)
    fxqat.enable_quantization(gm)
    return gm.train()


def check_trained(name: str, trained: nn.Module, samples: dict[str, Tensor], path: Path) -> float:
    """Check that a trained model is quantized, and export it; the smallest cosine of an output of the file.

    Raises:
        AssertionError: it is not quantized, or its outputs are not finite.
    """
    model = unwrap(trained).eval()
    off = [path for path, quant in named_fake_quants(model) if not quant.fake_quant_enabled or quant.observer_enabled]
    assert not off, f"fake-quant is off, or an observer on: {off[:4]}"
    inputs = tuple(value for value in example(name, samples) if value is not None)
    certificate = fxqat.convert_export(trained, inputs, path).certificate
    assert certificate is not None
    cosine = min(output.cosine for output in certificate.outputs)
    assert math.isfinite(cosine)
    return cosine


def run_one(name: str) -> Result:
    """Run one program; what came of it."""
    client = CLIENTS[name]
    versions = {package: importlib.metadata.version(package) for package in ("torch", *client.packages)}
    result: Result = {"client": name, "versions": versions, "ok": False}
    with tempfile.TemporaryDirectory() as folder:
        try:
            module, _, function = client.program.partition(".")
            program: Callable[[Job], Outcome] = getattr(importlib.import_module(module), function)
            _, samples = build(client.model)
            (Path(folder) / "files").mkdir()
            job = Job(
                quantized(client.model, samples), partial(prepare, client.model), samples, BATCH, Path(folder) / "files"
            )
            outcome = program(job)
            ends = min(2, len(outcome.losses) // 2)
            first, last = sum(outcome.losses[:ends]) / ends, sum(outcome.losses[-ends:]) / ends
            result |= {"first": first, "last": last, "checked": outcome.checked}
            assert all(map(math.isfinite, outcome.losses)), f"losses: {outcome.losses}"
            assert last <= 0.8 * first, f"the loss did not fall: from {first:.3f} to {last:.3f}"
            cosines = [
                check_trained(client.model, model, samples, Path(folder) / f"{index}.onnx")
                for index, model in enumerate(outcome.models.values())
            ]
            result |= {"exported": list(outcome.models), "cosine": min(cosines), "ok": True}
        except Exception as error:  # noqa: BLE001  the page tells what failed
            result |= {"failure": reason(error), "trace": traceback.format_exc()[-4000:]}
    return result


def reason(error: Exception) -> str:
    """Type and first line of an error; of the error in a process that the program started, if it was there."""
    lines = str(error).strip().splitlines() or [""]
    inner = [line for line in lines if re.match(r"\w+(Error|Exception): ", line)]
    return inner[-1][:300] if inner else f"{type(error).__name__}: {lines[0][:300]}"


def _child(name: str, connection: Any) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    connection.send(run_one(name))


def run_in_process(name: str, limit: float) -> Result:
    """Run one program in its own process, at most ``limit`` seconds."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, sender))
    process.start()
    sender.close()
    result: Result = {"client": name, "versions": {}, "ok": False, "failure": f"no result after {limit:.0f} seconds"}
    try:
        if receiver.poll(limit):
            result = receiver.recv()
            process.join(10)
    except EOFError:
        process.join()
        result["failure"] = f"the process ended with exit code {process.exitcode}"
    process.kill()
    process.join()
    return result


def page(results: dict[str, Result]) -> str:
    """The documentation page."""
    versions = {name: version for result in results.values() for name, version in result["versions"].items()}
    passed = sum(result["ok"] for result in results.values())
    lines = [
        "Training programs",
        "=================",
        "",
        "Training programs that know nothing of fxqat, each with a tiny prepared, calibrated and quantized model. A",
        "program trains some steps and does what its row says; *checked* is what its numbers were compared with. Then",
        "every trained model is exported and verified in ONNX Runtime.",
        "",
        f"**{passed} of {len(results)} are ok**: the loss falls, what is checked holds, fake-quant is on at the end,",
        "and the file computes what the model computes.",
        "",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in sorted(versions.items())) + ".",
        "",
        "* *loss*: mean of the first two and of the last two steps, or of all samples before and after training.",
        "* *cosine*: the smallest of the outputs of the exported files to those of the models.",
        "",
        ".. list-table::",
        "   :header-rows: 1",
        "   :widths: 14 30 10 26 12 8",
        "",
        "   * - Package",
        "     - Program",
        "     - Model",
        "     - Checked",
        "     - Loss",
        "     - Cosine",
    ]
    for name, result in results.items():
        client = CLIENTS[name]
        cells = [client.packages[0] if client.packages else "torch", client.title, client.model]
        if result["ok"]:
            checked = "; ".join(result["checked"]) or "-"
            cells += [checked, f"{result['first']:.3f} to {result['last']:.3f}", f"{result['cosine']:.6f}"]
        else:
            cells += [f"**fails**: {result['failure']}", "-", "-"]
        lines += [f"   {'* -' if not index else '  -'} {cell}" for index, cell in enumerate(cells)]
    return "\n".join(lines) + "\n"


def read(path: Path) -> dict[str, Result]:
    """The last line of each client, in the order of ``CLIENTS``."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = {result["client"]: result for result in map(json.loads, lines)}
    return {name: found[name] for name in CLIENTS if name in found}


def main() -> None:
    """Run the programs, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument(
        "--clients", nargs="*", choices=list(CLIENTS), help="default: those without a line in the results"
    )
    parser.add_argument("--limit", type=float, default=300, help="seconds for each program")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "clients.jsonl")
    parser.add_argument("--output", type=Path, default=Path("docs/evidence/clients.rst"))
    options = parser.parse_args()
    if options.command == "report":
        options.output.write_text(page(read(options.results)), encoding="utf-8")
        return
    names = options.clients or [name for name in CLIENTS if name not in read(options.results)]
    options.results.parent.mkdir(exist_ok=True)
    for name in tqdm(names):
        result = run_in_process(name, options.limit)
        print(f"{name}: {'ok' if result['ok'] else result['failure']}", flush=True)
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
