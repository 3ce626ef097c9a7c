"""Annotations are the only thing that annotating writes."""

import copy
import dataclasses

import pytest
import torch

from fxqat.custom_quantizer.backend_type import BackendType, backend_spec
from fxqat.custom_quantizer.quantizer import BackendQuantizer
from fxqat.quantization import annotation
from fxqat.quantization.annotation import Annotation, ValueQuant, annotation_of
from fxqat.quantization.fuse import fuse
from fxqat.quantization.standardize import standardize
from fxqat.scheme import QuantizeScheme, TensorQConfig
from fxqat.tracing.trace import trace
from fxqat.utils.node_meta import ANNOTATION
from tests.models import TOYS, build


def fused(name):
    return fuse(standardize(trace(build(name))[1]))


def snapshot(gm):
    nodes = [(n.name, n.op, n.target, str(n.args), str(n.kwargs), [u.name for u in n.users]) for n in gm.graph.nodes]
    metas = [{key: str(value) for key, value in n.meta.items() if key != ANNOTATION} for n in gm.graph.nodes]
    modules = {name: (id(module), module.training) for name, module in gm.named_modules()}
    return nodes, metas, modules, gm.graph.python_code("self").src, sorted(vars(gm))


@pytest.mark.parametrize("name", TOYS)
def test_annotating_changes_nothing_but_the_annotation(name):
    gm = fused(name)
    before, tensors = snapshot(gm), copy.deepcopy(gm.state_dict())
    for backend in BackendType:
        for node in gm.graph.nodes:
            node.meta.pop(ANNOTATION, None)
        BackendQuantizer(backend_spec(backend)).annotate(gm)
        assert snapshot(gm) == before, backend
        assert all(torch.equal(tensor, tensors[key]) for key, tensor in gm.state_dict().items()), backend
        missing = [node.name for node in gm.graph.nodes if annotation_of(node) is None]
        assert missing == ["output"], backend


@pytest.mark.parametrize("name", TOYS)
def test_statuses_and_values_agree(name):
    gm = fused(name)
    BackendQuantizer(backend_spec("TSQAT")).annotate(gm)
    found = [annotation_of(node) for node in gm.graph.nodes if node.op != "output"]
    for a in found:
        assert a.status in (annotation.QUANTIZED, annotation.SHARES, annotation.FLOAT)
        assert (a.status == annotation.FLOAT) == (a.value is None and a.weight is None)
        assert a.reason
    groups = {}
    for a in found:
        if a.value is not None:
            groups.setdefault(a.value.group, []).append(a)
    assert sorted(groups) == list(range(len(groups)))
    for members in groups.values():
        assert len({repr(a.value.config) for a in members}) == 1
        assert {a.status for a in members} == ({annotation.SHARES} if len(members) > 1 else {annotation.QUANTIZED})


def test_annotating_again_replaces_the_annotation():
    gm = fused("residual")
    BackendQuantizer(backend_spec("TSQAT")).annotate(gm)
    first = {node.name: annotation_of(node) for node in gm.graph.nodes}
    BackendQuantizer(backend_spec("TensorRT")).annotate(gm)
    second = {node.name: annotation_of(node) for node in gm.graph.nodes}
    assert first != second
    BackendQuantizer(backend_spec("TSQAT")).annotate(gm)
    assert {node.name: annotation_of(node) for node in gm.graph.nodes} == first


def test_nothing_is_annotated_before():
    gm = fused("conv_bn_relu")
    assert [annotation_of(node) for node in gm.graph.nodes] == [None] * len(gm.graph.nodes)
    assert ANNOTATION not in next(iter(gm.graph.nodes)).meta


def test_annotations_are_frozen_values():
    config = TensorQConfig(QuantizeScheme())
    value = ValueQuant(config, 0)
    found = Annotation("conv2d", annotation.QUANTIZED, "why", value)
    assert found == Annotation("conv2d", annotation.QUANTIZED, "why", ValueQuant(config, 0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.status = annotation.FLOAT
    assert (value.readers, value.on_grid, value.transparent) == (None, False, False)
