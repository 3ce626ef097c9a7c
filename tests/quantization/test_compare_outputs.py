"""The comparison of a prepared model with its float model: what counts as the same, and that nothing is changed."""

import copy

import pytest
import torch
from torch import nn

from fxqat.errors import TraceError
from fxqat.quantization.compare_outputs import check_same_outputs, run_reference


class Scaled(nn.Module):
    """Two outputs, a buffer that each call changes, and noise in every mode."""

    def __init__(self, factor=1.0, extra=False):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.factor, self.extra = factor, extra

    def forward(self, x, shift=0.0):
        self.calls += 1
        y = self.fc(x) * self.factor + shift + torch.rand_like(x)
        return (y, y.sum(), y) if self.extra else (y, y.sum())


@pytest.fixture
def x():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def test_equal_models_pass_and_stay_as_they_are(x):
    model, prepared = Scaled().train(), Scaled().train()
    generator, bits = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    reference = run_reference(model, (x,))
    check_same_outputs(prepared, reference)
    assert model.training
    assert prepared.training
    assert torch.equal(torch.get_rng_state(), generator)
    for key, value in bits.items():
        assert torch.equal(model.state_dict()[key], value)
        assert torch.equal(prepared.state_dict()[key], value)
    assert [tuple(output.shape) for output in reference.outputs] == [(3, 4), ()]


@pytest.mark.parametrize(("factor", "same"), [(1 + 1e-5, True), (1.01, False), (float("nan"), False)])
def test_a_difference_beyond_the_tolerance_is_an_error(x, factor, same):
    reference = run_reference(Scaled(), (x,))
    if same:
        check_same_outputs(Scaled(factor), reference)
        return
    with pytest.raises(TraceError, match="the traced Scaled computes something else than the model") as caught:
        check_same_outputs(Scaled(factor), reference)
    assert "concrete_args" in str(caught.value)
    assert "leaf_module" in str(caught.value)


def test_another_number_or_shape_of_outputs_is_an_error(x):
    reference = run_reference(Scaled(), (x,))
    for other in (Scaled(extra=True), nn.Linear(4, 4), nn.Identity()):
        with pytest.raises(TraceError, match="computes something else"):
            check_same_outputs(other, reference)


def test_nan_equals_nan(x):
    x[0, 0] = float("nan")
    reference = run_reference(nn.ReLU(), (x,))
    assert reference.outputs[0].isnan().any()
    check_same_outputs(nn.ReLU(), reference)


def test_arguments_that_tracing_fixed_are_given_to_the_float_model_only(x):
    class Fixed(Scaled):
        def forward(self, x):
            return super().forward(x, 2.0)

    check_same_outputs(Fixed(), run_reference(Scaled(), (x,), {"shift": 2.0}))
    with pytest.raises(TraceError, match="computes something else"):
        check_same_outputs(Fixed(), run_reference(Scaled(), (x,)))


def test_inputs_left_out_are_not_given_to_the_prepared_model(x):
    class Optional(Scaled):
        def forward(self, x, shift=None):
            return super().forward(x, 0.0 if shift is None else shift)

    check_same_outputs(Scaled(), run_reference(Optional(), (x, None)))
    assert run_reference(Optional(), (x, None)).inputs == (x, None)


def test_half_precision_is_compared_within_its_own_precision(x):
    def off(by):
        model = Scaled()
        model.factor *= by
        return model

    half = run_reference(Scaled().bfloat16(), (x.bfloat16(),))
    check_same_outputs(off(1.02).bfloat16(), half)
    with pytest.raises(TraceError, match="computes something else"):
        check_same_outputs(off(1.2).bfloat16(), half)
    with pytest.raises(TraceError, match="computes something else"):
        check_same_outputs(off(1.02), run_reference(Scaled(), (x,)))
