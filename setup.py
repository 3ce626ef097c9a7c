"""Packaging of fxqat. Tool settings are in pyproject.toml."""

import re
import zlib
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """Return the version written in fxqat/version.py, without importing the package (torch may not be installed)."""
    text = (ROOT / "fxqat" / "version.py").read_text(encoding="utf-8")
    match = re.search(r"""^__version__(?:\s*:\s*\w+)?\s*=\s*["']([^"']+)["']""", text, re.MULTILINE)
    if match is None:
        raise RuntimeError("fxqat/version.py holds no line of the form: __version__ = '1.2.3'")
    return match.group(1)


# Plain C for ctypes, without headers of Python or torch. Without a compiler fxqat works on torch's operators. The
# threads are those of the OpenMP runtime that torch has loaded, so no other one is linked. No option may change a
# result's bits.
KERNELS_SOURCE = "fxqat/fake_quantize/kernels.c"
KERNELS = Extension(
    "fxqat.fake_quantize._kernels",
    [KERNELS_SOURCE],
    define_macros=[("FXQAT_SOURCE", f"{zlib.crc32((ROOT / KERNELS_SOURCE).read_bytes())}u")],
    extra_compile_args=[
        *("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
        *("-fopenmp-simd", "-fvisibility=hidden"),
    ],
    libraries=["m"],
    optional=True,
)

ENGINES = ["openvino>=2026.4"]
EXAMPLE = ["scikit-learn", "matplotlib", "pycocotools", "tensorboard"]

setup(
    name="fxqat",
    version=read_version(),
    description="Quantization-aware training with torch.fx, and a QDQ ONNX file that computes what was trained",
    long_description=(ROOT / "README.rst").read_text(encoding="utf-8"),
    long_description_content_type="text/x-rst",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["fxqat", "fxqat.*"]),
    package_data={
        "fxqat": ["py.typed", "onnx/*.json", "tools/profiling/*.jinja", "cli/*.jinja", "fake_quantize/kernels.c"]
    },
    ext_modules=[KERNELS],
    zip_safe=False,
    install_requires=[
        "torch>=2.9",
        "torchvision",
        "onnx",
        "onnxscript",
        "onnx-ir",
        "onnxruntime",
        "numpy",
        "prettytable",
        "easydict",
        "timm",
        "pulp>=3.3,<4",  # 4 brings no solver along
        "PyYAML",
        "tqdm",
        "Jinja2",
        "click",
    ],
    entry_points={"console_scripts": ["fxqat = fxqat.cli.main:command"]},
    extras_require={
        "example": EXAMPLE,
        "engines": ENGINES,
        # The tests run the examples; ruff and mypy are bounded because their verdicts change between versions.
        "test": [
            *EXAMPLE,
            "pytest>=8.2,<9.2",  # with 9.2, pytest-xdist 3.8 runs the tests of an xdist_group in several processes
            "pytest-xdist",
            "hypothesis",
            "jsonschema",
            "transformers",
            "onnx2torch",
            "ruff>=0.17,<0.18",
            "mypy>=2.4,<3",
        ],
        "docs": ["sphinx>=8", "furo", "sphinx-copybutton", "matplotlib"],
        "onnx2torch": ["onnx2torch>=1.5.15"],  # the command reads ONNX files
        "trainers": ["lightning>=2.6", "transformers", "accelerate"],
        "litert": [
            "litert-torch>=0.10,<0.11",
            "ai-edge-litert>=2.3,<2.4",
        ],  # the versions that export_tflite was tried with
    },
)
