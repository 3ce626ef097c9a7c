"""The examples on the FAQ page do what the page says."""

import copy
import importlib.util
import warnings
from pathlib import Path

import pytest
import torch

from fxqat import enable_calibration, enable_quantization, prepare_by_platform
from fxqat.errors import TraceError

DOCS = Path(__file__).parents[1] / "docs" / "troubleshooting"


@pytest.fixture(scope="module")
def faq():
    """The file of the examples as a module."""
    spec = importlib.util.spec_from_file_location("faq_examples", DOCS / "faq_examples.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def image(batch=2, size=32):
    return torch.randn(batch, 3, size, size)


def weights(gm):
    return [row.target for row in gm.quant_report if row.weight]


def assert_same(gm, model, *inputs):
    tensors, names = gm.state_dict(), gm.provenance.tensor_names
    model.load_state_dict({name: tensors[path] for name, path in names.items()} | gm.provenance.unread)
    with torch.no_grad():
        torch.testing.assert_close(gm.eval()(*inputs), model.eval()(*inputs))


def test_every_part_of_the_file_is_on_the_page_once():
    page, code = (DOCS / "faq.rst").read_text(encoding="utf-8"), (DOCS / "faq_examples.py").read_text(encoding="utf-8")
    marks = [line for line in code.splitlines() if line.startswith("# [")]
    assert [f":start-after: {mark}" in page for mark in marks[:-1]] == [True] * (len(marks) - 1)
    assert all(code.count(mark) == 1 for mark in marks)
    assert page.count("literalinclude") == len(marks) - 1


def test_dynamic_control_flow_is_a_leaf(faq, capsys):
    gm = faq.dynamic(image())
    assert "normalize Python code branches on gt, which depends on tensor values" in capsys.readouterr().out
    assert weights(gm) == ["first", "last"]
    assert_same(gm, faq.Dynamic(), image() * 100)
    with pytest.raises(TraceError, match="while x.abs"):
        prepare_by_platform(faq.Dynamic(), example_inputs=image(), untraceable="error")


def test_static_control_flow_is_traced(faq, capsys):
    gm = faq.static(image())
    assert " False " in capsys.readouterr().out
    assert weights(gm) == ["stem", "blocks.0", "blocks.1", "blocks.2", "small"]
    assert gm.quant_report.leaves == ()
    assert_same(gm, faq.Static(), image(5))
    wide = faq.static(image(size=40))
    assert weights(wide)[-1] == "large"


def test_constructors_and_asserts_are_traced(faq):
    gm = faq.constructors(image())
    assert weights(gm) == ["conv"]
    assert gm.quant_report.leaves == ()
    assert gm(image(5)).shape == (5, 7, 30, 30)
    assert not torch.equal(gm.train()(x := image()), gm(x))
    assert_same(gm, faq.Constructors(), image(5))


def test_a_detector_is_prepared_as_a_whole(faq):
    pictures = [torch.rand(3, 32, 32) * 255 for _ in range(2)]
    gm = faq.detection(pictures)
    assert weights(gm) == ["stem.0", "down.0", "head.convs.0", "head.convs.1"]
    assert [leaf.path for leaf in gm.quant_report.leaves] == ["suppress"]
    found = gm.eval()([picture.flip(1) for picture in pictures])
    assert [boxes.shape[1] for boxes in found] == [7, 7]
    assert all(0 < len(boxes) <= 10 for boxes in found)
    assert_same(gm, faq.Detector(), [picture.flip(2) for picture in pictures])


def test_a_detector_is_trained_as_a_whole(faq):
    pictures = [torch.rand(3, 32, 32) * 255 for _ in range(2)]
    gm = faq.detection(pictures).eval()
    enable_calibration(gm)
    with torch.no_grad():
        gm(pictures)
    enable_quantization(gm)
    sum(boxes.square().mean() for boxes in gm.train()(pictures)).backward()
    gradients = [p.grad for name, p in gm.named_parameters() if name.endswith("weight") and p.grad is not None]
    assert len(gradients) >= 4
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("name", ["static", "constructors", "network", "leaf_by_path"])
def test_the_examples_are_calibrated_and_exported(faq, name, tmp_path):
    gm = getattr(faq, name)(image())
    before = copy.deepcopy(gm.quant_report)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = faq.calibrate_and_export(gm, image(), tmp_path)
    assert report.certificate.passed
    assert gm.quant_report == before


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("leaf_by_type", ["stem", "last"]),
        ("leaf_by_path", ["stem", "blocks.0.conv", "last"]),
        ("own_tracer", ["stem", "last"]),
    ],
)
def test_leaves_are_not_quantized(faq, name, expected):
    gm = getattr(faq, name)(image())
    assert weights(gm) == expected
    assert_same(gm, faq.WithBlocks(), image(5))


def test_the_network_alone_is_exported_at_any_batch(faq):
    gm = faq.network(image())
    assert gm.quant_report.leaves == ()
    assert gm.eval()(image(5)).shape == (5, 160, 7)
