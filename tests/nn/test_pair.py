"""LinearPair: what it computes, what it is stored as, and when it is no plain pair any more."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from neuronmm_ops import SVDLinear
from neuronmm_ops.nn import LinearPair

SIZES = st.integers(1, 9)


@given(K=SIZES, N=SIZES, r=SIZES, bias=st.booleans())
def test_there_and_back(K, N, r, bias):
    layer = SVDLinear(K, N, r, bias).eval()
    layer.v.requires_grad_(False)
    x = torch.randn(3, K)
    pair = layer.to_pair()
    assert isinstance(pair, nn.Sequential)
    assert [type(child) for child in pair] == [nn.Linear, nn.Linear]
    assert all(linear.weight.is_contiguous() for linear in pair)
    assert pair[0].bias is None
    assert pair[1].bias is layer.bias
    torch.testing.assert_close(pair(x), layer(x))
    back = SVDLinear.from_pair(pair)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)
    assert (back.u.requires_grad, back.v.requires_grad, back.training) == (True, False, False)
    assert back.u.stride() == layer.u.stride()


def test_its_state_dict_is_the_low_rank_layers():
    model = nn.ModuleDict({"fc": SVDLinear(8, 6, 3)})
    expected = model.state_dict()
    paired = nn.ModuleDict({"fc": model["fc"].to_pair()})
    state = paired.state_dict()
    assert set(state) == set(expected) == {"fc.u", "fc.v", "fc.bias", "fc.weight"}
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    other = copy.deepcopy(nn.ModuleDict({"fc": SVDLinear(8, 6, 3).to_pair()}))
    other.load_state_dict(state)
    x = torch.randn(2, 8)
    torch.testing.assert_close(other["fc"](x), paired["fc"](x))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda pair: setattr(pair, "u", nn.Sequential(pair[0])),
            "u is a torch.nn.modules.container.Sequential; merge adapters",
        ),
        (
            lambda pair: prune.random_unstructured(pair[1], "weight", amount=0.5),
            "v.weight is a Tensor|v.weight is computed",
        ),
        (lambda pair: pair[0].register_forward_hook(lambda *_: None), "u has hooks"),
        (lambda pair: setattr(pair[0], "bias", nn.Parameter(torch.zeros(3))), "u has a bias"),
    ],
    ids=["wrap", "prune", "hook", "bias"],
)
def test_a_changed_pair_keeps_its_own_keys_and_is_not_turned_back(change, words):
    pair = SVDLinear(8, 6, 3).to_pair()
    change(pair)
    assert "u" not in pair.state_dict()
    with pytest.raises(ValueError, match=words):
        SVDLinear.from_pair(pair)


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="u must give what v takes, got 3 and 4 features"):
        LinearPair(nn.Linear(8, 3, bias=False), nn.Linear(4, 6))
    with pytest.raises(ValueError, match="u must have no bias"):
        LinearPair(nn.Linear(8, 3), nn.Linear(3, 6))
