"""Two processes under gloo compute what one does on the union of their images."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.example.imagenet_example.conftest import EXAMPLE, MODELS
from tests.example.imagenet_example.tiny_models import WithoutBatchNorm

CONFIG = "extra_qconfig_dict: {w_observer: MinMax, a_observer: MinMax}\n"
CHECKPOINT = "WithoutBatchNorm_checkpoint.pth"
TWO_NODES = ["--multiprocessing-distributed", "--world-size", "2", "--dist-url", "tcp://127.0.0.1:5"]


@pytest.fixture
def flags(image_tree: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "quant.yaml").write_text(CONFIG)
    torch.manual_seed(3)
    torch.save(WithoutBatchNorm(2).state_dict(), tmp_path / "weights.pth")
    found = [
        "-a",
        f"{MODELS}:WithoutBatchNorm",
        "--model-path",
        str(tmp_path / "weights.pth"),
        "--data",
        str(image_tree),
    ]
    found += ["--image-size", "16", "-b", "8", "-j", "0", "--seed", "5", "--epochs", "2", "--lr", "0.05"]
    return [*found, "--device", "cpu", "--quant-config", str(tmp_path / "quant.yaml")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_are_as_one(flags, train, tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    two = subprocess.Popen(
        [*command, str(EXAMPLE / "main.py"), *flags, "--output-dir", str(tmp_path / "two")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    one = train(*flags, "--output-dir", str(tmp_path / "one"), model=False, small=False)
    printed, errors = two.communicate(timeout=300)
    assert two.returncode == 0, errors
    found = torch.load(tmp_path / "two" / CHECKPOINT, weights_only=True)
    expected = torch.load(tmp_path / "one" / CHECKPOINT, weights_only=True)
    assert found["qat_state_dict"].keys() == expected["qat_state_dict"].keys()
    assert not any(name.startswith("module.") for name in (*found["state_dict"], *found["qat_state_dict"]))
    for name, value in expected["qat_state_dict"].items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found["qat_state_dict"][name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert printed.count("| float ") == one.printed.count("| float ") == 1  # the first process prints
    assert printed.count("Epoch: [1][3/4]") == 1
    assert len(found["extra"]["training"]["rng"]) == 2
    assert (tmp_path / "two" / "WithoutBatchNorm_bestonnx_quantization.onnx").exists()


def test_a_signal_to_two_processes_leaves_a_checkpoint(flags, tmp_path):
    command = [sys.executable, str(EXAMPLE / "main.py"), *flags, "--multiprocessing-distributed", "--world-size", "2"]
    command += ["--epochs", "5000", "-p", "1", "--output-dir", str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert any("Epoch: [1][0/4]" in line for line in process.stdout)
    process.terminate()
    printed = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert printed.count("SIGTERM: the checkpoint is saved; continue with --resume") == 1
    state = torch.load(tmp_path / "out" / CHECKPOINT, weights_only=True)["extra"]["training"]
    assert state["epochs_done"] >= 1
    assert len(state["rng"]) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_nodes_on_the_cpu_start_one_process_each(example, monkeypatch, rank):
    """Rank, number and address of the process that a node of two starts."""
    distributed, started, seen = sys.modules["distributed"], [], []
    running = SimpleNamespace(processes=[], join=lambda: True)
    monkeypatch.setattr(distributed.mp, "start_processes", lambda *args, **how: started.append((*args, how)) or running)
    options = sys.modules["options"].parse_options([*TWO_NODES, "--rank", str(rank), "--device", "cpu"])
    distributed.launch(example.run, options)
    ((function, place, count, how),) = started
    assert (place, count) == ((example.run, options, rank, 2, "tcp://127.0.0.1:5"), 1)
    assert how == {"join": False, "start_method": "spawn"}

    monkeypatch.setattr(distributed.dist, "init_process_group", lambda *args, **options: seen.append((args, options)))
    monkeypatch.setattr(distributed.dist, "destroy_process_group", lambda: seen.append("left"))
    job = lambda options, process: seen.append(process)  # noqa: E731
    function(0, job, *place[1:])
    meeting = {"init_method": "tcp://127.0.0.1:5", "rank": rank, "world_size": 2}
    assert seen == [(("gloo",), meeting), distributed.Process(rank, 2, torch.device("cpu")), "left"]


def test_processes_of_one_node(example):
    parse, count = sys.modules["options"].parse_options, sys.modules["distributed"].nodes_and_processes
    assert count(parse(["--multiprocessing-distributed", "--world-size", "3", "--device", "cpu"])) == (1, 3)
    assert count(parse(["--multiprocessing-distributed", "--device", "cpu"])) == (1, 1)
    assert count(parse([*TWO_NODES, "--rank", "0", "--device", "cpu"])) == (2, 1)
    few = ["--multiprocessing-distributed", "--world-size", "3", "--device", "cpu", "-b", "2"]
    with pytest.raises(SystemExit, match="-b 2 gives less than one image to each of 3 processes"):
        example.main(few)


def test_another_process_may_try_the_folder_first(example, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "touch", lambda path: None)  # the other one has taken the file away already
    files = sys.modules["checkpointing"].open_output(tmp_path / "new", "resnet18")
    assert files.folder.is_dir()


@pytest.mark.parametrize(("rank", "beginning"), [(0, "error: "), (1, "error in process 1: ")])
def test_each_process_prints_its_error_in_one_line(example, rank, beginning):
    distributed = sys.modules["distributed"]
    options = sys.modules["options"].parse_options([*TWO_NODES, "--sync-bn", "--device", "cpu"])
    with pytest.raises(SystemExit) as caught:
        distributed.spawned(rank, example.run, options, 0, 2, "tcp://127.0.0.1:5")
    assert str(caught.value) == (
        f"{beginning}--sync-bn: torch's SyncBatchNorm does not train on the CPU; drop the flag"
    )
