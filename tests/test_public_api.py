"""The names that users import, under every path they are promised at."""

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import fxqat

STATES = [
    "enable_calibration",
    "enable_quantization",
    "enable_calibration_woquantization",
    "enable_calibration_quantization",
    "disable_all",
    "enable_all",
]
PATHS = {
    "fxqat.prepare_by_platform": ["prepare_by_platform", "BackendType"],
    "fxqat.utils.state": STATES,
    "fxqat.utils.utils": ["save_checkpoint", "load_checkpoint"],
    "fxqat.calibrate": ["calibrate"],
    "fxqat.convert_export": ["convert_export"],
    "fxqat.export_tflite": ["export_tflite"],
}
NAMES = [(path, name) for path, names in PATHS.items() for name in names]
PUBLIC = sorted(
    {name for _, name in NAMES}
    | {"load_quant_params", "compare_with_float", "quantize", "ExportReport", "TfliteReport", "__version__"}
)


@pytest.mark.parametrize(("path", "name"), NAMES)
def test_a_name_is_the_same_object_at_both_paths(path: str, name: str) -> None:
    there = getattr(importlib.import_module(path), name)
    assert there is getattr(fxqat, name)
    assert there.__name__ == name
    assert there.__doc__


def test_the_package_exports_these_names_and_no_others() -> None:
    assert sorted(fxqat.__all__) == PUBLIC
    assert all(hasattr(fxqat, name) for name in PUBLIC)


def test_importing_names_from_the_seed_paths_works_as_written() -> None:
    names: dict[str, object] = {}
    for path, imported in PATHS.items():
        exec(f"from {path} import {', '.join(imported)}", names)
    assert {name for _, name in NAMES} <= set(names)
    assert names["convert_export"] is fxqat.convert_export


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (
            fxqat.prepare_by_platform,
            "model, backend=, prepare_custom_config_dict=, custom_tracer=, *, example_inputs=, is_qat=, untraceable=, "
            "check=",
        ),
        (fxqat.calibrate, "model, batches, max_batches=, progress=, keep=, compare="),
        (fxqat.enable_calibration, "model, keep="),
        (fxqat.enable_calibration_woquantization, "model, quantizer_type=, keep="),
        (fxqat.enable_calibration_quantization, "model, quantizer_type=, keep="),
        (fxqat.enable_quantization, "model, weight_cali_on=, act_cali_on="),
        (fxqat.disable_all, "model"),
        (fxqat.enable_all, "model"),
        (
            fxqat.save_checkpoint,
            "model, file_path, file_path_json=, *, file_path_onnx=, example_inputs=, extra=, runtime=",
        ),
        (fxqat.load_checkpoint, "model, file_path"),
        (fxqat.load_quant_params, "model, file_path_json"),
        (
            fxqat.convert_export,
            "model, example_inputs=, file_path=, file_path_json=, *, opset_version=, input_names=, output_names=, "
            "dynamic_batch=, dynamic_shapes=, verify=, weights=, scales=, input_stats=, runtime=, "
            "custom_translation_table=",
        ),
        (
            fxqat.export_tflite,
            "model, example_inputs, file_path, file_path_json=, *, channels_last=, integer_io=, verify=",
        ),
    ],
)
def test_signatures_are_those_of_the_guide(function: Callable[..., object], parameters: str) -> None:
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        found.append(parameter.name + ("" if parameter.default is parameter.empty else "="))
    assert ", ".join(found) == parameters
    hints = inspect.signature(function)
    assert hints.return_annotation is not hints.empty


def test_defaults_are_those_of_the_guide() -> None:
    export = inspect.signature(fxqat.convert_export).parameters
    assert [export[name].default for name in ("opset_version", "dynamic_batch", "verify", "weights")] == [
        None,
        False,
        True,
        "integer",
    ]
    prepare = inspect.signature(fxqat.prepare_by_platform).parameters
    assert prepare["backend"].default is fxqat.BackendType.TSQAT
    assert prepare["is_qat"].default is True
    assert inspect.signature(fxqat.enable_calibration_quantization).parameters["quantizer_type"].default == "fake_quant"


@pytest.mark.parametrize("name", ["TSQAT", "Experimental", "ONNXRuntime", "TensorRT", "QNN", "OpenVINO_AVX2"])
def test_a_backend_is_known_by_its_name(name: str) -> None:
    member = fxqat.BackendType(name)
    assert member is getattr(fxqat.BackendType, name)
    assert member.value == member.name == name


def test_the_version_is_written_once() -> None:
    package = Path(inspect.getfile(fxqat)).parent
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", fxqat.__version__)
    assignments = [p.name for p in package.rglob("*.py") if re.search(r"^__version__.*=", p.read_text(), re.MULTILINE)]
    assert assignments == ["version.py"]


def test_the_schema_is_part_of_the_package() -> None:
    package = Path(inspect.getfile(fxqat)).parent
    assert (package / "onnx" / "schema.json").is_file()
    assert (package / "py.typed").is_file()
