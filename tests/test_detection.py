"""torchvision's detectors, unchanged: pre- and post-processing stay float, every layer with weights is quantized."""

import pytest
import torch
import torchvision
from torch import nn

from fxqat import enable_calibration, enable_quantization, prepare_by_platform
from fxqat.utils.tensors import flatten_tensors

pytestmark = pytest.mark.xdist_group("detection")  # a worker prepares both detectors once
OPTIONS = {
    "fasterrcnn_mobilenet_v3_large_320_fpn": {"min_size": 96, "max_size": 128, "box_score_thresh": 0.0},
    "ssdlite320_mobilenet_v3_large": {"score_thresh": 0.0},
}
POST_PROCESSING = {
    "fasterrcnn_mobilenet_v3_large_320_fpn": ["batched_nms", "BoxCoder.decode"],
    "ssdlite320_mobilenet_v3_large": ["_topk_min", "batched_nms"],
}


def images(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return ([torch.rand(3, 96, 128, generator=generator), torch.rand(3, 100, 96, generator=generator)],)


@pytest.fixture(scope="module", params=OPTIONS)
def detector(request):
    """The float model, the prepared model, and the name."""
    torch.manual_seed(0)
    build = getattr(torchvision.models.detection, request.param)
    model = build(weights=None, weights_backbone=None, num_classes=5, **OPTIONS[request.param]).eval()
    return model, prepare_by_platform(model, example_inputs=images()), request.param


def test_backbone_pyramid_and_heads_are_quantized(detector):
    model, gm, name = detector
    layers = {path for path, module in model.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))}
    assert {row.target for row in gm.quant_report if row.weight} == layers
    found = {leaf.path.partition("boxes.")[2] or leaf.path.partition("_utils.")[2] for leaf in gm.quant_report.leaves}
    assert found == set(POST_PROCESSING[name])
    assert gm.quant_report.unread == ()


def test_the_same_boxes_before_calibration(detector):
    model, gm, _ = detector
    for seed in range(2):
        with torch.no_grad():
            expected, actual = model(*images(seed)), gm(*images(seed))
        assert len(actual) == 2
        assert all(len(detections["boxes"]) > 0 for detections in expected)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_one_training_step(detector):
    _, gm, _ = detector
    enable_calibration(gm.eval())
    with torch.no_grad():
        gm(*images())
    enable_quantization(gm)
    found = [tensor for tensor in flatten_tensors(gm.train()(*images())) if tensor.is_floating_point()]
    sum(tensor.square().mean() for tensor in found).backward()
    gradients = {name: parameter.grad for name, parameter in gm.named_parameters()}
    without = {name for name, gradient in gradients.items() if gradient is None}
    # torchvision detaches the proposals of the region proposal network, which is trained by a loss of its own
    assert all(name.startswith(("rpn.head.", "rpn_head_")) for name in without)
    assert all(gradient.isfinite().all() for gradient in gradients.values() if gradient is not None)
    assert sum(bool(gradient.abs().sum() > 0) for gradient in gradients.values() if gradient is not None) > 200
