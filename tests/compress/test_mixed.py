"""One budget over ranks and storages: what is bought, what it costs, and what it loses."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import causal_lm, token_batches

from neuronmm_ops import SVDConfig, compress_
from neuronmm_ops.compress import budget
from neuronmm_ops.compress.allocate import Matrix
from neuronmm_ops.compress.compare import candidates, divergence
from neuronmm_ops.compress.measured import Divergence, Losses
from neuronmm_ops.compress.mixed import Choice, Offer, buy, choices_of
from neuronmm_ops.nn import dense_linears
from neuronmm_ops.plan import plan_op
from neuronmm_ops.plan.linear import Linear
from neuronmm_ops.storages import STORAGES, dtype_name

pytestmark = pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
AUTO = SVDConfig(ratio=0.6, block=8, targets="all-linear", storage="auto", budget="bytes")
WIDER = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
offers = st.lists(
    st.builds(lambda cost, loss: (float(cost), loss), st.integers(1, 50), st.floats(0, 9)),
    min_size=1,
    max_size=8,
).map(lambda pairs: [Offer(Choice(i, None), *pair) for i, pair in enumerate(pairs)])


def share(report):
    """The bytes of the targets, of their dense ones in bfloat16."""
    return sum(each.bytes for each in report.layers) / sum(2 * e.K * e.N for e in report.layers)


def in_bfloat16(model):
    return dict.fromkeys(dense_linears(model), torch.bfloat16)


@given(st.dictionaries(st.sampled_from("abc"), offers, min_size=1), st.floats(0, 1))
@settings(max_examples=80)
def test_what_is_bought_is_within_the_budget_and_nothing_better_fits(offered, part):
    least = sum(min(o.cost for o in each) for each in offered.values())
    limit = least + part * 60
    bought = buy(offered, limit)
    taken = {name: next(o for o in offered[name] if o.choice == c) for name, c in bought.items()}
    left = limit - sum(offer.cost for offer in taken.values())
    assert left >= -1e-9
    for name, now in taken.items():
        assert not any(o.loss < now.loss and o.cost <= now.cost + left for o in offered[name])
    with pytest.raises(ValueError, match="no allocation meets the budget"):
        buy(offered, least - 1)


def test_an_exact_budget_is_spent_on_the_hull():
    """Of three matrices the one whose bits avoid most gets them."""
    each = {
        n: [Offer(Choice(None, "int4"), 1.0, loss), Offer(Choice(None, "int8"), 2.0, 0.0)]
        for n, loss in (("a", 1.0), ("b", 3.0), ("c", 2.0))
    }
    bought = buy(each, 5.0)
    assert [bought[name].storage for name in "abc"] == ["int4", "int8", "int8"]


@pytest.mark.parametrize(
    ("K", "bounds", "expected"),
    [
        (64, (0.0, 1.0), {None, *STORAGES}),
        (65, (0.0, 1.0), {None, *STORAGES} - {"int4"}),  # packs two rows in a byte
        (64, (0.6, 0.6), {None, *STORAGES}),
        (64, (0.0, 0.0), {None, *STORAGES}),
        (64, (0.0, 0.3), {None}),
        (64, (0.995, 0.999), {"int4"}),
    ],
)
def test_choices(K, bounds, expected):
    matrix = Matrix(K, 64, torch.ones(64).double(), 1.0, *bounds, itemsize=2)
    found = choices_of(matrix, 8)
    assert {choice.storage for choice in found} == expected
    low, high = bounds if bounds[0] != bounds[1] else (bounds[0], 1.0)
    assert len(found) == 1 or all(low <= removed <= high for removed in found.values())


def test_losses_are_the_metrics_times_what_was_measured():
    matrix = Matrix(64, 64, torch.ones(64).double())
    rounding = torch.full((len(STORAGES), 3), torch.inf).double()
    rounding[list(STORAGES).index("int8")] = torch.tensor([2.0, 4.0, 8.0])
    losses = Losses(torch.tensor([8, 32]), torch.tensor([0.5, 16.0, 1.0]).double(), rounding)
    expected = {
        (None, None): 0.0,
        (None, "int8"): 0.5 * 2,
        (8, None): 16.0 * 56,
        (16, None): 4.0 * 48,  # halfway in logarithms
        (16, "int8"): 4.0 * (48 + 6),
        (40, "int8"): 1.0 * (24 + 8),
    }
    for choice, loss in expected.items():
        assert losses.of(matrix, Choice(*choice)) == pytest.approx(loss)


def test_divergence_is_of_one_linear_and_the_model_is_left_as_it_was():
    model, batches = causal_lm(), token_batches(2)
    name = "model.layers.0.mlp.up_proj"
    weight = model.get_submodule(name).weight.detach().clone()
    measured = Divergence(model, batches)
    assert measured.of(name, weight.t()) == pytest.approx(0, abs=1e-7)
    other = copy.deepcopy(model)
    other.get_submodule(name).weight.data.mul_(0.5)
    rows = [row for batch in batches for row in batch.split(1)]
    expected = divergence(model, other, rows)
    assert measured.of(name, weight.t() / 2) == pytest.approx(expected, rel=1e-4)
    assert torch.equal(model.get_submodule(name).weight, weight)


@pytest.mark.parametrize("method", ["kfac", "kfac-drift", "swift"])
def test_a_layer_gets_its_own_storage_and_the_bytes_are_spent(method):
    model, batches = causal_lm(**WIDER), token_batches(10)
    config = SVDConfig(**{**AUTO.__dict__, "method": method})
    stages = []
    report = compress_(
        *(model, config, batches, lambda stage, *_: stages.append(stage)),
        dtypes=in_bfloat16(model),
    )
    assert len({layer.storage for layer in report.layers}) > 1
    assert 0.36 < share(report) <= 0.4
    for layer in report.layers:
        module = model.get_submodule(layer.name)
        assert getattr(module, "storage", None) == layer.storage
    assert "measure" in stages
    assert model(batches[0]).logits.isfinite().all()


def test_it_is_nearer_than_the_storage_that_fits():
    dense, batches = causal_lm(**WIDER), token_batches(10)
    found = {}
    for storage, ratio in (("int4", 0.0), ("auto", 0.7)):
        model = copy.deepcopy(dense)
        budgets = {} if ratio == 0 else {"budget": "bytes"}
        config = SVDConfig(ratio=ratio, block=8, targets="all-linear", storage=storage, **budgets)
        report = compress_(model, config, batches, dtypes=in_bfloat16(model))
        found[storage] = divergence(dense, model, batches), share(report)
    assert found["auto"][0] < found["int4"][0]
    assert found["auto"][1] <= 0.3


def test_matrices_without_a_rank_are_rounded():
    model = causal_lm(**WIDER)
    config = SVDConfig(ratio=0.4, targets="all-linear", storage="auto", budget="bytes")
    report = compress_(model, config, token_batches(10), dtypes=in_bfloat16(model))
    assert all(layer.dense for layer in report.layers)
    assert share(report) <= 0.6


@pytest.mark.parametrize(
    ("tokens", "taken"), [({1: 0.8, 2048: 0.2}, "int8"), ({1: 8, 2048: 32}, "fp8"), (1, "int8")]
)
def test_time_is_a_cost_too(monkeypatch, tokens, taken):
    """Here a launch of a pair takes its rank, of a dense matrix 60, of int8 or fp8 half."""

    def time_us(linear, M, dtype, target, lnc, tp, *group):
        assert (lnc, tp) == (2, 4)
        assert group in (("gate_up",), ("down",))
        halved = dtype_name("int8" if M == 1 else "fp8")
        return (linear.r or 60) * (0.5 if linear.stored == halved else 1.0)

    monkeypatch.setattr(budget, "time_us", time_us)
    model = causal_lm(**WIDER)
    changed = {"ratio": 0.4, "targets": "mlp", "budget": "time", "target": "trn2"}
    config = SVDConfig(**{**AUTO.__dict__, **changed, "tokens": tokens, "lnc": 2, "tp": 4})
    report = compress_(model, config, token_batches(10))
    assert {layer.storage for layer in report.layers} - {None} == {taken}
    weights = config.token_weights
    spent = [
        weight
        * time_us(Linear(64, 64, layer.r, dtype_name(layer.storage)), M, "", "", 2, 4, "down")
        for layer in report.layers
        for M, weight in weights
    ]
    budget_us = 0.6 * 60 * len(report.layers) * sum(weight for _, weight in weights)
    assert sum(spent) <= budget_us * (1 + 1e-9)


def test_a_budget_of_modelled_time_is_met_by_the_plans_of_what_was_bought():
    """At these widths pairs are quicker than dense matrices, in whatever storage."""
    tokens, (hidden, inner) = {1: 0.9, 8: 0.1}, (512, 1024)
    model = causal_lm(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=1)
    changed = {"ratio": 0.1, "block": 128, "targets": "up_proj", "budget": "time", "target": "trn2"}
    config = SVDConfig(**{**AUTO.__dict__, **changed, "tokens": tokens})
    report = compress_(model, config, token_batches(2), dtypes=in_bfloat16(model))

    def planned_us(K, N, r, storage):
        matrices, stored = ((K, N),) if r is None else ((K, r), (r, N)), dtype_name(storage) or ""
        op = "xw" if r is None else "xuv"
        times = {M: plan_op(op, M, matrices, target="trn2", weight_dtype=stored) for M in tokens}
        return 1e3 * sum(weight * times[M].time_ms for M, weight in tokens.items())

    spent = sum(planned_us(each.K, each.N, each.r, each.storage) for each in report.layers)
    dense = sum(planned_us(each.K, each.N, None, None) for each in report.layers)
    assert 0.8 * dense < spent <= 0.9 * dense
    assert any(layer.r for layer in report.layers)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"ratio": 0.3}, ["auto", "auto", "fp8", "int8", "int4", None]),
        ({"ratio": 0.6}, ["auto", "auto", "int4", None]),
        ({"ratio": 0.6, "method": "whiten"}, ["auto", "int4", None]),
        ({"ratio": 0.8}, ["auto", "auto"]),  # one block of each is too much
        ({"ratio": 0.6, "storage": "int8"}, ["int8", "int8", "int8"]),
        ({"ratio": 0.6, "storage": None, "budget": "parameters"}, [None, None, None]),
    ],
)
def test_candidates_cost_no_more(config, expected):
    model = causal_lm(**WIDER)
    asked = SVDConfig(**{**AUTO.__dict__, **config})
    found = candidates(model, asked, in_bfloat16(model))
    narrower = [each for each in found if each.prune_share]
    assert {each.storage for each in narrower} == {asked.storage}
    assert found[1 : 1 + len(narrower)] == narrower != []
    found = [found[0], *found[1 + len(narrower) :]]
    assert [each.storage for each in found] == expected
    assert found[0] == asked
    if len(found) > 3 or asked.storage == "int8":
        plain = {"method": "plain", "ratio": found[-1].ratio}  # has the same ranks
        config = SVDConfig(**{**found[-1].__dict__, **plain})
        assert share(compress_(model, config, dtypes=in_bfloat16(model))) <= 1 - asked.ratio


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": "parameters"}, "use budget bytes or time"),
        ({"method": "plain", "importance": None}, "other than plain and zero-sum"),
        ({"method": "zero-sum"}, "other than plain and zero-sum"),
        ({"importance": "gradient"}, "storage auto do not"),
        ({"allocation": "uniform"}, "uniform knows no budget in bytes"),
        ({"ratio": 0}, "ratio must be in"),
    ],
)
def test_what_auto_cannot_be_asked_for(options, words):
    with pytest.raises(ValueError, match=words):
        SVDConfig(**{**AUTO.__dict__, **options})
