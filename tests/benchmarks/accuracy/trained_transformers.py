"""Two trained transformers that read chemical reactions, quantized by fxqat and by other tools.

The weights are in packages of PyPI, and so are 50,000 labelled reactions (Schneider et al. 2015)::

    pip download --no-deps rxnfp==0.1.0 rxnmapper==0.4.3
    pip download --no-deps --no-binary drfp drfp==0.3.7
    for wheel in *.whl; do unzip $wheel -d DIR; done; tar xzf drfp-0.3.7.tar.gz -C DIR

Each row adds a line to ``results/trained_transformers.jsonl``; rows that have a line there are skipped, and so are
tools that are not installed::

    pip install --target EXTRA nncf openvino
    PYTHONPATH=EXTRA python tests/benchmarks/accuracy/trained_transformers.py run --data DIR
    python tests/benchmarks/accuracy/trained_transformers.py report
"""

from __future__ import annotations

import argparse
import csv
import logging
import random
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import experiments
import numpy as np
import onnx
import onnxruntime as ort
import torch
from prettytable import PrettyTable
from torch import Tensor, nn
from tqdm import tqdm

import fxqat
from fxqat.tools import ptq

CLASSIFIER, MAPPER = "classifier", "mapper"
WEIGHTS = {
    CLASSIFIER: "rxnfp/models/transformers/bert_ft_10k_25s",
    MAPPER: "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k",
}
REACTIONS = "drfp-0.3.7/data/schneider50k.tsv"
TOKEN = re.compile(r"\[[^\]]+\]|Br|Cl|%\d\d|>>|[A-Za-z0-9=#()+.~:@*$?/\\|-]")
LENGTH = 128
"""Tokens of a reaction; longer ones are left out."""
CALIBRATION, BATCH = 64, 16
TEST = {CLASSIFIER: 256, MAPPER: 64}
LAYER, HEAD = 10, 5
"""Whose attention rxnmapper reads."""
NAMES = ("input_ids", "attention_mask")


@dataclass(frozen=True)
class Row:
    """One recipe of one tool on one model."""

    model: str
    tool: str
    backend: str
    recipe: str


SUMS_FLOAT = "calibration, sums and products of activations float"
RECIPES: dict[str, dict[str, Any]] = {
    "calibration": {},
    "calibration, Histogram": {"config": {"extra_qconfig_dict": {"a_observer": "Histogram"}}},
    "calibration, 16-bit activations": {"config": {"extra_qconfig_dict": {"a_qscheme": {"bit": 16}}}},
    SUMS_FLOAT: {
        "config": {
            "overrides": [
                {"match": {"function": "add"}, "activation": None, "output": None},
                {"match": {"function": "matmul"}, "activation": None},
            ]
        }
    },
    "dynamic": {"config": {"activation": "dynamic"}},
    "4-bit weights in blocks of 32, GPTQ": {
        "config": {"extra_qconfig_dict": {"w_observer": "MSE", "w_qscheme": {"bit": 4, "block_size": 32}}},
        "reconstruct": "GPTQ",
    },
}
BACKENDS = {
    "TSQAT": tuple(recipe for recipe in RECIPES if recipe not in ("dynamic", SUMS_FLOAT)),
    "ONNXRuntime": tuple(recipe for recipe in RECIPES if "16-bit" not in recipe and recipe != SUMS_FLOAT),
    "OpenVINO": ("calibration", "calibration, Histogram", SUMS_FLOAT),
}
FXQAT, ONNXRUNTIME, NNCF = "fxqat", "ONNX Runtime", "NNCF"
OTHERS = {ONNXRUNTIME: ("static, MinMax", "dynamic"), NNCF: ("default", "transformer")}
ROWS = [
    *(Row(model, FXQAT, name, recipe) for model in WEIGHTS for name, found in BACKENDS.items() for recipe in found),
    *(Row(model, tool, "", recipe) for model in WEIGHTS for tool, recipes in OTHERS.items() for recipe in recipes),
]


class Network(nn.Module):
    """A model that returns what its users read: class scores, or hidden states and one head's attention."""

    def __init__(self, model: nn.Module, is_mapper: bool) -> None:
        super().__init__()
        self.model, self.is_mapper = model, is_mapper

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """``(N, LENGTH)`` each to scores ``(N, 50)``, or to ``(N, LENGTH, 256)`` and ``(N, LENGTH, LENGTH)``."""
        found = self.model(input_ids, attention_mask=attention_mask)
        if self.is_mapper:
            return found.last_hidden_state, found.attentions[LAYER][:, HEAD]
        return (found.logits,)


@dataclass(frozen=True)
class Task:
    """A model, and reactions to calibrate and to test it with."""

    network: Network
    batches: list[dict[str, Tensor]]
    test: list[dict[str, Tensor]]
    labels: Tensor


def load(name: str, data: Path) -> Task:
    """The trained model and its reactions."""
    import transformers  # noqa: PLC0415

    folder, is_mapper = data / WEIGHTS[name], name == MAPPER
    kind, settings = (
        (transformers.AlbertModel, transformers.AlbertConfig)
        if is_mapper
        else (transformers.BertForSequenceClassification, transformers.BertConfig)
    )
    config = settings.from_pretrained(folder, output_attentions=is_mapper, attn_implementation="eager")
    config.num_labels = 50
    model = kind(config)
    state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    wanted = model.state_dict().keys()
    model.load_state_dict({k: v for key, v in state.items() if (k := key.removeprefix("albert.")) in wanted})
    tokens = {token: i for i, token in enumerate((folder / "vocab.txt").read_text(encoding="utf-8").splitlines())}
    with (data / REACTIONS).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    classes = sorted({row["rxn_class"] for row in rows})
    random.Random(0).shuffle(rows)
    train, test = (
        list(_encoded([row for row in rows if row["split"] == split], tokens, classes, count))
        for split, count in (("train", CALIBRATION), ("test", TEST[name]))
    )
    return Task(Network(model, is_mapper).eval(), _batches(train), _batches(test), torch.tensor([r[2] for r in test]))


def _encoded(
    rows: list[dict[str, str]], tokens: dict[str, int], classes: list[str], count: int
) -> Iterator[tuple[list[int], list[int], int]]:
    """Ids, mask and class of the first reactions that are short enough."""
    for row in rows:
        found = ["[CLS]", *TOKEN.findall(row["rxn"]), "[SEP]"]
        if len(found) <= LENGTH and count:
            count -= 1
            rest = LENGTH - len(found)
            ids = [tokens.get(token, tokens["[UNK]"]) for token in found]
            yield ids + [tokens["[PAD]"]] * rest, [1] * len(ids) + [0] * rest, classes.index(row["rxn_class"])


def _batches(rows: list[tuple[list[int], list[int], int]]) -> list[dict[str, Tensor]]:
    parts = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
    return [{name: torch.tensor([row[i] for row in part]) for i, name in enumerate(NAMES)} for part in parts]


def float_file(task: Task, folder: Path) -> Path:
    """The float model as an ONNX file, of a free batch."""
    path, shapes = folder / "float.onnx", {name: {0: torch.export.Dim("batch")} for name in NAMES}
    torch.onnx.export(
        task.network, (), path, kwargs=task.batches[0], input_names=NAMES, dynamic_shapes=shapes, verbose=False
    )
    return path


class Reader:
    """The calibration batches in the form that ONNX Runtime reads them."""

    def __init__(self, task: Task) -> None:
        self.feeds = iter([{name: value.numpy() for name, value in batch.items()} for batch in task.batches])

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next batch, None at the end."""
        return next(self.feeds, None)


def with_fxqat(task: Task, row: Row, path: Path) -> None:
    """Write the file of a recipe."""
    options = {"config": None} | RECIPES[row.recipe]
    gm = ptq(task.network, task.batches, row.backend, options.pop("config"), compare=False, **options)
    runtime = "onnxruntime_avx2" if row.recipe == "dynamic" else None  # exact on every processor
    fxqat.convert_export(gm, task.batches[0], path, dynamic_batch=True, runtime=runtime)


def with_onnxruntime(task: Task, row: Row, path: Path) -> None:
    """``quantize_static`` with a scale for each channel, or ``quantize_dynamic``, after ``quant_pre_process``."""
    from onnxruntime import quantization as q  # noqa: PLC0415
    from onnxruntime.quantization.shape_inference import quant_pre_process  # noqa: PLC0415

    ready = path.parent / "ready.onnx"
    quant_pre_process(float_file(task, path.parent), ready)
    kind, _, method = row.recipe.partition(", ")
    if kind == "dynamic":
        q.quantize_dynamic(ready, path, per_channel=True, weight_type=q.QuantType.QInt8)
        return
    q.quantize_static(
        ready,
        path,
        Reader(task),
        per_channel=True,
        activation_type=q.QuantType.QUInt8,
        weight_type=q.QuantType.QInt8,
        calibrate_method=getattr(q.CalibrationMethod, method),
    )


def with_nncf(task: Task, row: Row, path: Path) -> None:
    """``nncf.quantize`` of the ONNX file; ``transformer`` is its mode for transformers."""
    import nncf  # noqa: PLC0415

    feeds = [{name: value.numpy() for name, value in batch.items()} for batch in task.batches]
    kind = nncf.ModelType.TRANSFORMER if row.recipe == "transformer" else None
    onnx.save(nncf.quantize(onnx.load(float_file(task, path.parent)), nncf.Dataset(feeds), model_type=kind), path)


PACKAGES = {ONNXRUNTIME: "onnxruntime", NNCF: "nncf"}
TOOLS = {FXQAT: with_fxqat, ONNXRUNTIME: with_onnxruntime, NNCF: with_nncf}


def outputs(path: Path, task: Task) -> list[Tensor]:
    """What a file computes as it is written, in ONNX Runtime without optimizations."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options)
    names = [value.name for value in session.get_inputs()]
    found = [
        session.run(None, dict(zip(names, (batch[name].numpy() for name in NAMES), strict=True))) for batch in task.test
    ]
    return [torch.cat([torch.from_numpy(batch[i]) for batch in found]) for i in range(len(found[0]))]


def compared(found: list[Tensor], expected: list[Tensor], task: Task) -> dict[str, float]:
    """The figures of a row; padding does not count."""
    used = torch.cat([batch["attention_mask"] for batch in task.test]).bool()
    ours, theirs = (values[0][used] if task.network.is_mapper else values[0] for values in (found, expected))
    figures = {"sqnr": float(10 * torch.log10(theirs.square().mean() / (ours - theirs).square().mean()))}
    if task.network.is_mapper:
        attended, wanted = (values[1].argmax(-1)[used] for values in (found, expected))
        return figures | {"same": percent(attended == wanted)}
    same, right, exact = (
        percent(a.argmax(1) == b) for a, b in ((ours, theirs.argmax(1)), (ours, task.labels), (theirs, task.labels))
    )
    return figures | {"same": same, "top1": right, "float": exact}


def percent(holds: Tensor) -> float:
    """The share of True."""
    return 100 * float(holds.float().mean())


def installed(tool: str) -> bool:
    """Whether a tool can be imported."""
    try:
        version(PACKAGES.get(tool, "fxqat"))
    except PackageNotFoundError:
        return False
    return True


def measure(row: Row, task: Task) -> dict[str, Any]:
    """The figures of a row."""
    with torch.no_grad():
        expected = [torch.cat(parts) for parts in zip(*(task.network(**batch) for batch in task.test), strict=True)]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quantized.onnx"
        try:
            TOOLS[row.tool](task, row, path)
        except Exception as error:  # noqa: BLE001  a tool that fails has a row that says so
            return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"}
        seconds = time.perf_counter() - start
        floats = 4 * sum(parameter.numel() for parameter in task.network.parameters())
        sizes = {"file": path.stat().st_size / floats, "seconds": seconds}
        return compared(outputs(path, task), expected, task) | sizes


def run(arguments: argparse.Namespace) -> None:
    """Measure the rows that have no result yet."""
    torch.set_num_threads(arguments.threads)
    logging.getLogger("fxqat").setLevel(logging.ERROR)
    done = {tuple(result[key] for key in asdict(ROWS[0])) for result in experiments.read(arguments.results)}
    rows = [row for row in ROWS if row.model in arguments.models and row.tool in arguments.tools]
    rows = [row for row in rows if row.recipe in arguments.recipes]
    task_of = cache(lambda name: load(name, arguments.data))
    for row in tqdm([row for row in rows if tuple(asdict(row).values()) not in done and installed(row.tool)]):
        found = {"version": version(PACKAGES[row.tool])} if row.tool in PACKAGES else {}
        experiments.add(arguments.results, asdict(row) | measure(row, task_of(row.model)) | found)


def report(arguments: argparse.Namespace) -> None:
    """Write the page."""
    results = {tuple(r[key] for key in asdict(ROWS[0])): r for r in experiments.read(arguments.results)}
    tables = {}
    for name in WEIGHTS:
        table = PrettyTable(["tool", "recipe", "top-1", "same", "SQNR", "file", "s"], align="l", hrules=1)
        for row in ROWS:
            found = results.get(tuple(asdict(row).values()))
            if row.model != name or found is None:
                continue
            if "error" in found:
                figures = [found["error"], "", "", "", ""]
            else:
                top1 = f"{found['top1']:.2f}" if "top1" in found else ""
                figures = [top1, f"{found['same']:.2f}", f"{found['sqnr']:.1f}", f"{found['file']:.3f}"]
                figures.append(f"{found['seconds']:.0f}")
            table.add_row([f"{row.tool} {row.backend}".strip(), row.recipe, *figures])
        tables[name] = table.get_string()
    versions = sorted({f"{r['tool']} {r['version']}" for r in results.values() if r["tool"] in PACKAGES})
    exact = {f"{r['float']:.2f}" for r in results.values() if "float" in r}
    text = f"""Accuracy of trained transformers
================================

Two transformers of 12 layers and 256 channels that read chemical reactions, with their trained weights, quantized
without training by each tool. {CALIBRATION} reactions of the training set of Schneider et al. (2015) calibrate, others
of its test set test. All reactions are padded to {LENGTH} tokens, and longer ones are left out.

* *Classifier*: the BERT of rxnfp 0.1.0 with 50 classes, tested on {TEST[CLASSIFIER]} reactions. Its float top-1 is
  {", ".join(exact)} %. *same*: reactions with the class of the float model, in percent.
* *Mapper*: the ALBERT of rxnmapper 0.4.3, whose 12 layers share their weights, tested on {TEST[MAPPER]} reactions. It
  maps atoms by the token that each token attends to in one head of layer {LAYER}. *same*: tokens that attend to the
  same token as in the float model, in percent.
* *SQNR*: of the class scores and of the hidden states, in dB, the float model being the signal. *top-1*, in percent,
  says less: the standard error of 98 % on {TEST[CLASSIFIER]} reactions is .9.
* *file*: its size as a share of the float parameters. *s*: seconds to quantize and export, the order of magnitude;
  some rows were measured beside other work.
* Tested is what each file says: it runs in ONNX Runtime without optimizations, also NNCF's, whose files are for
  OpenVINO.
* *static, MinMax* of ONNX Runtime and NNCF's *default* give the sum of the scores and the attention mask one scale. The
  mask holds -3.4e38 for padding, so that this scale is 1.3e36 (ONNX Runtime) or infinite (NNCF), and all scores round
  to zero.
* NNCF's *transformer* leaves float all sums, all LayerNorms and the product of attention and values. It smooths every
  layer of the classifier and one of the mapper by products before them, and corrects biases. fxqat's row with float
  sums leaves both products of attention float, too.
* fxqat's *dynamic* files are written with ``runtime="onnxruntime_avx2"``, which is exact on every processor. In ONNX
  Runtime's *dynamic* files sums can saturate on processors without VNNI, as on the one that measured.
* Not run: 4-bit weights for the mapper.

Versions: {", ".join(versions)}.

Written by ``tests/benchmarks/accuracy/trained_transformers.py`` with torch
{experiments.torch_versions(list(results.values()))}; do not edit.

Classifier
----------

{tables[CLASSIFIER]}

Mapper
------

{tables[MAPPER]}
"""
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    CHOICES = {"models": list(WEIGHTS), "tools": list(TOOLS), "recipes": sorted({row.recipe for row in ROWS})}
    experiments.command_line(__file__, str(__doc__), "accuracy_transformers.rst", run, report, CHOICES)
