"""Two processes under gloo compute what one does on the union of their images."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.example.conftest import EXAMPLE, MODELS

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
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "WithoutBatchNorm_checkpoint.pth", weights_only=True), done.stdout


@pytest.fixture(scope="module")
def alone(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    return run([str(EXAMPLE / "main.py"), *flags], tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("way", ["spawned", "torchrun"])
def test_two_are_as_one(way: str, flags: list[str], alone: tuple[dict, str], tmp_path: Path) -> None:
    command = [str(EXAMPLE / "main.py"), *flags]
    if way == "spawned":
        command += ["--multiprocessing-distributed", "--world-size", "2", "--dist-backend", "gloo"]
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port), *command]
    found, printed = run(command, tmp_path)
    expected, expected_print = alone
    assert found["qat_state_dict"].keys() == expected["qat_state_dict"].keys()
    assert not any(name.startswith("module.") for name in (*found["state_dict"], *found["qat_state_dict"]))
    for name, value in expected["qat_state_dict"].items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found["qat_state_dict"][name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert printed.count("| float ") == expected_print.count("| float ") == 1  # the first process prints
    assert len(found["extra"]["training"]["rng"]) == 2


def test_errors_are_one_line(flags: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE / "main.py"), *flags, "--multiprocessing-distributed", "--world-size", "2"]
    for wrong, message in (["-nc", "7"], "-nc 7"), (["--sync-bn"], "SyncBatchNorm does not train on the CPU"):
        done = subprocess.run([*command, *wrong], capture_output=True, text=True, timeout=600, env=environment)
        assert done.returncode != 0
        assert message in done.stderr
        assert "Traceback" not in done.stderr
