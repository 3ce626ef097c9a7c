"""Two processes under gloo compute what one does on the union of their images."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.example.imagenet_example.conftest import EXAMPLE, MODELS

CONFIG = "extra_qconfig_dict: {w_observer: MinMax, a_observer: MinMax}\n"


@pytest.fixture(scope="module")
def flags(image_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("processes")
    (folder / "quant.yaml").write_text(CONFIG)
    module = {}
    exec(compile(MODELS.read_text(), str(MODELS), "exec"), module)
    torch.manual_seed(3)
    torch.save(module["WithoutBatchNorm"](2).state_dict(), folder / "weights.pth")
    found = ["-a", f"{MODELS}:WithoutBatchNorm", "--model-path", str(folder / "weights.pth"), "--data", str(image_tree)]
    found += ["--image-size", "32", "-b", "8", "-j", "0", "--seed", "5", "--epochs", "2", "--lr", "0.05"]
    return [*found, "--device", "cpu", "--quant-config", str(folder / "quant.yaml")]


def run(command: list[str], folder: Path) -> tuple[dict, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, "--output-dir", str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "WithoutBatchNorm_checkpoint.pth", weights_only=True), done.stdout


@pytest.fixture(scope="module")
def alone(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    return run([str(EXAMPLE / "main.py"), *flags], tmp_path_factory.mktemp("one"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("way", ["torchrun", "nodes"])
def test_two_are_as_one(way: str, flags: list[str], alone: tuple[dict, str], tmp_path: Path) -> None:
    command = [str(EXAMPLE / "main.py"), *flags]
    if way == "nodes":
        command += ["--multiprocessing-distributed", "--world-size", "2", "--dist-backend", "gloo"]
        command += ["--dist-url", f"tcp://127.0.0.1:{free_port()}"]
        second = [sys.executable, *command, "--rank", "1", "--output-dir", str(tmp_path / "second")]
        other = subprocess.Popen(second, stdout=subprocess.PIPE, text=True)
        command += ["--rank", "0"]
    else:
        port = free_port()
        command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port), *command]
    found, printed = run(command, tmp_path)
    if way == "nodes":
        assert "| float " not in other.communicate(timeout=60)[0]
        assert other.returncode == 0
    expected, expected_print = alone
    assert found["qat_state_dict"].keys() == expected["qat_state_dict"].keys()
    assert not any(name.startswith("module.") for name in (*found["state_dict"], *found["qat_state_dict"]))
    for name, value in expected["qat_state_dict"].items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found["qat_state_dict"][name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert printed.count("| float ") == expected_print.count("| float ") == 1  # the first process prints
    assert len(found["extra"]["training"]["rng"]) == 2


def test_a_signal_to_two_processes_leaves_a_checkpoint(flags: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "main.py"), *flags, "--multiprocessing-distributed", "--world-size", "2"]
    command += ["--epochs", "500", "-p", "1", "--output-dir", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert any("Epoch: [1][0/4]" in line for line in process.stdout)
    process.terminate()
    printed = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert printed.count("SIGTERM: a checkpoint is written; go on with --resume") == 1
    state = torch.load(tmp_path / "WithoutBatchNorm_checkpoint.pth", weights_only=True)["extra"]["training"]
    assert state["epochs_done"] >= 1
    assert len(state["rng"]) == 2


def test_another_process_may_try_the_folder_first(example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "touch", lambda path: None)  # the other one has taken the file away already
    files = sys.modules["checkpointing"].open_output(tmp_path / "new", "resnet18")
    assert files.folder.is_dir()


def test_each_process_tells_its_error_in_one_line(flags: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE / "main.py"), *flags, "--multiprocessing-distributed", "--world-size", "2"]
    done = subprocess.run([*command, "--sync-bn"], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode != 0
    assert done.stderr.count("error: --sync-bn: torch's SyncBatchNorm does not train on the CPU") == 1
    assert done.stderr.count("error in process 1: --sync-bn: torch's SyncBatchNorm does not train on the CPU") == 1
    assert "Traceback" not in done.stderr
