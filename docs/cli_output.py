"""Write the output that docs/reference/cli.rst shows of check, verify and bundle: python docs/cli_output.py."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CALLS = {
    "cli_check.txt": ["check torchvision:mobilenet_v3_small --all-backends"],
    "cli_verify.txt": [
        "verify quantized/model.onnx --json quantized/model.json --model net.py:net --weights quantized/model.pth "
        "--config quantized/config.yaml"
    ],
    "cli_bundle.txt": ["bundle net.py:Cube --input 2x3 -o bundle.zip"],
}

with tempfile.TemporaryDirectory() as folder:

    def output(words: str) -> str:
        """What a call prints; it must succeed."""
        command = [sys.executable, "-m", "fxqat", *words.split()]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout

    shutil.copy(ROOT / "tests" / "cli" / "programs.py", Path(folder) / "net.py")
    output("quantize net.py:net --calib net.py:batches -b ONNXRuntime -o quantized")
    for name, calls in CALLS.items():
        text = "\n".join(f"$ fxqat {words}\n{output(words)}" for words in calls)
        (ROOT / "docs" / "reference" / name).write_text(text, encoding="utf-8")
