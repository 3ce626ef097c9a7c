"""What parameters alone determine becomes a constant of an exported program, if ONNX cannot compute it."""

import numpy as np
import pytest
import torch
from torch import nn

import fxqat
from fxqat.errors import ExportError
from fxqat.utils.fold_parameters import fold_parameters
from tests.export_models import run_file


class Reads(nn.Module):
    def __init__(self, compute):
        super().__init__()
        torch.manual_seed(0)
        self.compute = compute
        self.matrix, self.vector = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(self.compute(self, x))


COMPUTED = {
    "inverse": lambda m, x: x @ torch.linalg.inv(m.matrix @ m.matrix.T + torch.eye(4)).sin(),
    "exponential": lambda m, x: x * torch.matrix_exp(m.matrix).diagonal(),
    "decomposition": lambda m, x: x * torch.linalg.svd(m.matrix)[1] + torch.linalg.svd(m.matrix)[0].sum(0),
    "logarithm of a determinant": lambda m, x: x + torch.linalg.slogdet(m.matrix)[1],
    "median": lambda m, x: x * m.vector.median(),
    "complex": lambda m, x: x * torch.exp(torch.complex(-m.vector.abs(), m.vector)).real,
    "of the length": lambda m, x: x + (m.vector.median() * torch.arange(x.shape[0])).cumsum(0).cos()[:, None],
    "complex product": lambda m, x: (
        x * torch.view_as_real(torch.view_as_complex(m.matrix.view(4, 2, 2)) ** 2).sum((1, 2))
    ),
}
X, OTHER = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("backend", ["TSQAT", "ONNXRuntime"])
@pytest.mark.parametrize("case", COMPUTED)
def test_the_file_has_it_as_a_constant(case, backend, tmp_path):
    gm = fxqat.prepare_by_platform(Reads(COMPUTED[case]).eval(), backend, example_inputs=(X,))
    fxqat.calibrate(gm, [X])
    fxqat.enable_quantization(gm)
    fxqat.convert_export(gm.eval(), (X,), tmp_path / "model.onnx")
    assert not torch.equal(gm(X), gm(OTHER))
    for x in (X, OTHER):
        np.testing.assert_allclose(run_file(tmp_path / "model.onnx", [x])[0], gm(x).detach().numpy(), atol=1e-5)


def test_what_an_input_determines_is_refused(tmp_path):
    gm = fxqat.prepare_by_platform(
        Reads(lambda m, x: torch.linalg.inv(x[:4] + m.matrix)).eval(), "TSQAT", example_inputs=(X,)
    )
    fxqat.calibrate(gm, [X])
    fxqat.enable_quantization(gm)
    with pytest.raises(ExportError, match="cannot write aten.linalg_inv"):
        fxqat.convert_export(gm.eval(), (X,), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def folded(compute):
    """The operators of a model's program, and how many constants it has, as if ONNX had only exp and mul."""
    program = torch.export.export(Reads(compute).eval(), (X,))
    expected = program.module()(X)
    fold_parameters(program, lambda node: str(node.target).split(".")[1] in ("exp", "mul", "linear"))
    torch.testing.assert_close(program.module()(X), expected)
    called = [str(node.target).split(".")[1] for node in program.graph.nodes if node.op == "call_function"]
    return called, len(program.constants)


def test_the_last_value_that_onnx_cannot_compute_is_a_constant():
    found = folded(lambda m, x: x * torch.linalg.inv(m.matrix).sin().diagonal().exp())
    assert found == (["exp", "mul", "linear"], 1)
    assert folded(lambda m, x: x * m.vector.exp()) == (["exp", "mul", "linear"], 0)
    both = folded(lambda m, x: x * m.vector.sin() + torch.linalg.svd(m.matrix)[0].sum(0) * m.vector.sin())
    assert both[0] == ["mul", "mul", "add", "linear"]


def test_random_numbers_are_not_folded():
    program = torch.export.export(Reads(lambda m, x: x * torch.rand_like(m.vector)).eval(), (X,))
    fold_parameters(program, lambda node: False)
    assert "aten.rand_like.default" in {str(node.target) for node in program.graph.nodes}
    assert len(program.constants) == 0
