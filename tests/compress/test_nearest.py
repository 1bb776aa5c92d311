"""Of configs the one that is nearest to the dense model, by text that neither has seen."""

import pytest
import torch
from tiny import tiny_ids, tiny_model

from neuronmm_ops import NonFiniteError, SVDConfig
from neuronmm_ops.compress.compare import candidates, described, divergence, nearest

pytestmark = pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
MILD, HARSH = (SVDConfig(ratio=ratio, block=8, targets="all-linear") for ratio in (0.2, 0.6))


@pytest.mark.parametrize("configs", [(MILD, HARSH), (HARSH, MILD)])
def test_the_nearer_is_taken_and_the_model_left_as_it_was(configs):
    model, told = tiny_model(), []
    before = {name: value.clone() for name, value in model.state_dict().items()}
    chosen, found = nearest(model, configs, [tiny_ids(9)], lambda *args: told.append(args))
    assert chosen is MILD
    assert found[configs.index(MILD)] == min(found) > 0
    assert told == [("compare", 1, 2), ("compare", 2, 2)]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert chosen is nearest(model, (MILD, MILD), [tiny_ids(2)])[0]


def test_svd_llm_removes_as_much():
    model = tiny_model()
    config = SVDConfig(ratio=0.3, block=8, importance="error")
    ours, *narrower, refined, theirs = candidates(model, config, {})
    assert [each.prune_share for each in narrower] == [0.5, 0.75, 1.0]
    assert (ours, refined.method) == (config, "kfac")
    assert (theirs.method, theirs.allocation, theirs.ratio) == ("whiten", "uniform", ours.ratio)
    for size in ((64, 176), (64, 64), (128, 512)):
        K, N = size
        rank = theirs.rank(K, N)
        assert rank is None or rank * (K + N) <= 0.7 * K * N
    assert described((ours, theirs), [0.5, 0.25]) == (
        "kfac-drift greedy without storage 0.5; whiten uniform without storage 0.25 (taken)"
    )


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="at least 2 calibration blocks, got 1"):
        nearest(tiny_model(), (MILD, HARSH), [tiny_ids(1)])
    broken = tiny_model()
    broken.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="divergence must be finite"):
        divergence(tiny_model(), broken, [tiny_ids(1)])
