"""Further inputs: other values and sizes, of the same kind."""

import torch

import fxqat
from fxqat.quantization.perturbed_inputs import larger, of_other_values, other_weights


def test_other_values_stay_in_their_domain():
    image, ids = torch.rand(2, 3, 4, 4), torch.arange(12).reshape(2, 6)
    mask = torch.tensor([[0.0, float("-inf")], [0.0, 0.0]])
    (x, tokens, masked, flags, number), named = of_other_values(((image, ids, mask, ids > 3, 5), {"y": image - 0.5}))
    assert 0 <= float(x.min()) < float(x.max()) <= 1
    assert not torch.allclose(x, image, atol=0.1)
    assert sorted(tokens.flatten().tolist()) == list(range(12))
    assert not torch.equal(tokens, ids)
    assert torch.equal(masked, mask)
    assert flags.dtype == torch.bool
    assert number == 5
    assert float(named["y"].min()) < 0
    again, _ = of_other_values(((image, ids, mask, ids > 3, 5), {}))
    assert torch.equal(again[0], x)


def test_constant_and_empty_inputs_change_where_they_can():
    (zeros, empty, scalar), _ = of_other_values(((torch.zeros(2, 3), torch.zeros(0, 3), torch.tensor(2.0)), {}))
    assert zeros.unique().numel() > 1
    assert empty.shape == (0, 3)
    assert scalar == 2.0


def test_a_batch_grows_by_its_last_sample():
    x, other = torch.randn(2, 3), torch.randn(4, 3)
    (found, same), named = larger(((x, other), {"z": x, "n": 1}))
    assert torch.equal(found, torch.cat([x, x[-1:]]))
    assert torch.equal(same, other)
    assert named["z"].shape == (3, 3)
    assert larger(((3,), {})) == ((3,), {})


def test_lists_grow_by_their_last_item():
    images = [torch.randn(3, 4), torch.randn(3, 5)]
    (found, x), named = larger(((images, torch.randn(2, 3)), {"more": {"k": images}}))
    assert [tensor.shape for tensor in found] == [(3, 4), (3, 5), (3, 5)]
    assert x.shape == (2, 3)
    assert len(named["more"]["k"]) == 3
    assert len(images) == 2


def test_other_weights_are_those_of_the_float_model_and_come_back():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    model[2].bias.requires_grad_(False)
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(torch.randn(2, 3),), check="off")
    before = {name: tensor.clone() for name, tensor in gm.state_dict().items()}
    weights = {gm.provenance.tensor_names[name] for name, p in model.named_parameters() if p.requires_grad}
    with other_weights(gm):
        changed = {name for name, tensor in gm.state_dict().items() if not torch.equal(tensor, before[name])}
        moved = (gm.get_parameter("0.weight") / before["0.weight"] - 1).abs()
    assert changed == weights
    assert 0 < moved.min() < moved.max() <= 0.11
    assert all(torch.equal(tensor, before[name]) for name, tensor in gm.state_dict().items())
