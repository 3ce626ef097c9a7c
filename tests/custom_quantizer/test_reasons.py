"""Every reason of the report is true of its own row: checked against the prepared graph, not against the words."""

import pytest
import torch
from torch import nn

from fxqat import prepare_by_platform
from fxqat.custom_quantizer.backend_type import BACKENDS, BackendType
from fxqat.custom_quantizer.float_reads import DECIDES
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.utils.fx_graph import called_module
from tests.custom_quantizer.prepared_once import prepared_once
from tests.models import TOYS

REFUSED = [("conv1d", "ArmCPU"), ("conv3d", "ArmCPU"), ("transpose_convs", "ArmCPU")]
KINDS = ("TSQAT", "ONNXRuntime", "TensorRT", "OpenVINO", "QNN", "Vitis", "ArmCPU")


def is_quantizer(node):
    return isinstance(called_module(node), FakeQuantizeBase)


def clauses_with(row, words):
    return [clause.partition(words)[2] for clause in row.reason.split("; ") if clause.startswith(words)]


@pytest.mark.parametrize("name", TOYS)
def test_the_reasons_agree_with_the_graph(name):
    for backend in KINDS:
        if (name, backend) in REFUSED:
            continue
        gm, spec = prepared_once(name, backend), BACKENDS[BackendType(backend)]
        nodes = {node.name: node for node in gm.graph.nodes}
        rows = {row.node: row for row in gm.quant_report}
        assert len(gm.quant_report) > 1
        for row in gm.quant_report:
            where, node = (name, backend, row), nodes[row.node]
            rounded = [user for user in node.users if is_quantizer(user)]
            if row.status != "float":
                assert not any(why in row.reason for why in spec.left_float.values()), where
            for readers in clauses_with(row, "read quantized by "):
                users = {user.name for quantizer in rounded for user in quantizer.users}
                moved = {user.name for user in node.users if user.name in rows and rows[user.name].output}
                assert set(readers.split(", ")) <= users | moved, where
            for reader in clauses_with(row, "quantized after "):
                assert rows[reader].output, where
                assert not rounded, where
            if "no quantized op reads it" in row.reason:
                assert not row.output, where
                assert not rounded, where
            if "its operand is float" in row.reason:
                assert not any(is_quantizer(operand) for operand in node.all_input_nodes), where
            if "computed in integers" in row.reason and row.op not in ("conv2d", "linear"):
                operands = node.all_input_nodes
                inside = "runs inside" in row.reason
                assert inside or any(is_quantizer(operand) or rows[operand.name].output for operand in operands), where
            group = [other for other in gm.quant_report if row.group is not None and other.group == row.group]
            for shared in clauses_with(row, "one scale for "):
                assert shared == f"{len(group)} values", where


class Ratio(nn.Module):
    """A quotient, a root, an excluded layer, and one whose inputs are left float."""

    def __init__(self):
        super().__init__()
        self.divisor, self.dividend, self.last = (nn.Conv2d(3, 3, 1) for _ in range(3))

    def forward(self, x):
        return self.last(self.dividend(x) / (self.divisor(x).abs() + 1)).sqrt()


def test_a_reason_for_each_way_to_stay_float():
    config = {
        "overrides": [{"match": {"module": "last"}, "activation": None, "output": None}],
        "extra_quantizer_dict": {"exclude_module_name": ["dividend"]},
    }
    reasons = {row.node: row.reason for row in prepare_by_platform(Ratio(), "TSQAT", config).quant_report}
    near = "read by an op with a singularity at zero: rounding would turn small values into zero"
    singular = "computed in float: rounding an operand could make it zero, where the op is singular"
    assert reasons == {
        "x": "input of the model; read quantized by divisor",
        "dividend": "left float by exclude_module_name; read quantized by truediv",
        "divisor": f"in the op table: computed in integers; {near}",
        "abs_1": near,
        "add": near,
        "truediv": f"{singular}; read float because of an override",
        "last": "weights only: it reads float values; changed by overrides[0]; reads its operands float; "
        "its value is left float",
        "sqrt": f"{singular}; TSQAT quantizes its output",
    }


def test_sizes_indices_masks_and_buffers():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("order", torch.arange(4))

        def forward(self, x):
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            y = self.fc(x[:, self.order])
            return y.argmax(1)

    reasons = {row.node: row.reason for row in prepare_by_platform(Odd(), "TSQAT").quant_report}
    assert reasons["mean"] == reasons["add_"] == "updates a buffer of the model: not part of the result"
    assert reasons["order"] == "tensor of the model; not a float tensor"
    assert reasons["argmax"] == "gives sizes, indices or booleans"
    assert reasons["fc"] == f"in the op table: computed in integers; {DECIDES}"


def test_ops_without_a_rule():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU(), nn.Conv2d(4, 4, 1), nn.SiLU())
    reasons = [row.reason for row in prepare_by_platform(model, "TensorRT").quant_report if row.op == "silu"]
    why = BACKENDS[BackendType.TensorRT].left_float["activation"]
    assert reasons == [
        "computed in float: TensorRT has no rule for silu; read quantized by _2",
        f"TensorRT has no rule for silu: {why}",
    ]
