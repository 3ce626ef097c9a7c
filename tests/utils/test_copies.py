import torch
from torch import nn

from fxqat.utils.copies import buffers_kept, copy_model


class Counting(nn.Module):
    """Counts its calls in two ways, and remembers its last output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.linear.weight
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("again", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.again = self.again + 1
        self.last = self.tied(self.linear(x))
        return self.last


def test_a_copy_is_a_model_of_its_own():
    model, x = Counting(), torch.randn(2, 3)
    handle = model.linear.register_forward_hook(lambda module, args, result: 2 * result)
    expected = model(x)
    copied = copy_model(model)
    assert copied.tied.weight is copied.linear.weight
    assert copied.linear.weight is not model.linear.weight
    assert torch.equal(copied(x), expected)
    assert int(model.calls) == 1
    handle.remove()  # of the model
    assert torch.equal(copied(x), expected)
    copied.tied.register_forward_hook(lambda module, args, result: 2 * result)
    assert not torch.equal(copied(x), expected)
    assert torch.equal(model(x), model(x))
    assert not model.tied._forward_hooks


def test_buffers_are_the_same_and_have_their_content_afterwards():
    model, x = Counting(), torch.randn(2, 3)
    before = dict(model.named_buffers())
    with buffers_kept(model):
        model(x)
        assert int(model.calls) == int(model.again) == 1
        assert model.again is not before["again"]
    assert int(model.calls) == int(model.again) == 0
    assert all(buffer is before[name] for name, buffer in model.named_buffers())
