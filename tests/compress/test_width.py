"""prune_share: what narrower MLPs have of what a budget removes."""

import copy
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from compress.toys import causal_lm, token_batches
from hf.families import tiny_family
from hf.multimodal import MULTIMODAL
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_ids, tiny_model

from neuronmm_ops import CalibrationWarning, SVDConfig, compress_, prune_
from neuronmm_ops.compress import compare
from neuronmm_ops.compress.allocate import NoAllocationError
from neuronmm_ops.compress.pipeline import compress_layers
from neuronmm_ops.compress.record import attached_report
from neuronmm_ops.compress.report import CompressionReport
from neuronmm_ops.compress.source import LayersInMemory
from neuronmm_ops.compress.width import SHARES, compared, kept_width
from neuronmm_ops.plan import plan_op

pytestmark = pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
BATCHES = token_batches()
BFLOAT16 = {f"model.layers.0.mlp.{name}_proj": torch.bfloat16 for name in ("gate", "up", "down")}
CONFIG = SVDConfig(ratio=0.4, block=8, prune_share=0.5)


def changed(**options):
    return SVDConfig(**{**CONFIG.__dict__, **options})


def numbers(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("share", [0.25, 0.75, 1.0])
@pytest.mark.parametrize("method", ["kfac-drift", "whiten", "plain", "zero-sum"])
def test_the_budget_is_of_the_dense_model(share, method):
    model = tiny_model()
    before, mlps = numbers(model), 3 * sum(64 * 176 for _ in model.model.layers)
    report = compress_(model, changed(prune_share=share, method=method), BATCHES)
    gone = before - numbers(model)
    assert report.narrowed.parameters < gone or share == 1
    assert gone / mlps == pytest.approx(report.effective_ratio)
    assert gone / before == pytest.approx(report.model_ratio)
    assert report.model_parameters == before
    assert 0.4 <= report.effective_ratio < 0.45
    assert report.config == changed(prune_share=share, method=method)
    assert (report.narrowed.inner, report.narrowed.kept) == (176, model.config.intermediate_size)
    assert torch.isfinite(model(tiny_ids()).logits).all()


def test_it_is_prune_and_then_compress():
    """Of what 0.4 * 0.5 leaves, 141 features and a bit are 144 in whole blocks."""
    both, apart = tiny_model(), tiny_model()
    compress_(both, CONFIG, BATCHES)
    prune_(apart, 32 / 176, BATCHES, block=8)
    assert both.config.intermediate_size == apart.config.intermediate_size == 144
    compress_(apart, SVDConfig(ratio=1 - 0.6 * 176 / 144, block=8), BATCHES)
    found, expected = both.state_dict(), apart.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_all_of_it_is_prune():
    model, pruned = tiny_model(), tiny_model()
    report = compress_(model, changed(prune_share=1.0), BATCHES)
    prune_(pruned, 0.4, BATCHES, block=8)
    assert all(layer.r is None and not layer.is_replaced for layer in report.layers)
    expected = pruned.state_dict()
    assert all(torch.equal(expected[n], value) for n, value in model.state_dict().items())


@settings(max_examples=60, deadline=None)
@given(st.floats(0.01, 0.95), st.floats(0.01, 1), st.sampled_from([8, 16, 40]))
def test_whole_blocks_remove_at_most_the_share_and_at_least_all(ratio, share, block):
    model = tiny_model()
    config = changed(ratio=ratio, prune_share=share, block=block)
    asked = ratio * share * 176
    try:
        kept = kept_width(model, config, {}, only_text=False)
    except ValueError:
        assert asked < block or asked > 176 - block
        return
    assert 0 < kept < 176
    assert kept % block == 0
    removed = 176 - kept
    if share == 1:
        assert asked - 1e-6 <= removed < asked + block
    else:
        assert asked - block < removed <= asked + 1e-6


@pytest.mark.parametrize("storage", ["int8", "auto"])
def test_bytes(storage):
    model = causal_lm(hidden_size=128, intermediate_size=384)
    config = changed(storage=storage, budget="bytes", ratio=0.8, prune_share=0.25)
    report = compress_(model, config, BATCHES)
    assert report.narrowed.bytes == 4 * report.narrowed.parameters
    dense = 4 * 3 * 128 * 384 * len(model.model.layers)
    assert report.dense_bytes == dense
    assert 0.15 * dense < sum(layer.bytes for layer in report.layers) <= 0.2 * dense
    assert attached_report(model) == report


def test_time_is_that_of_the_dense_model_too():
    """Of `ratio` of the modelled time, narrower MLPs take their share or less, pairs the rest."""
    model = causal_lm(hidden_size=512, intermediate_size=1024, num_hidden_layers=1)

    def spent_us(layers):
        matrices = [((e.K, e.N),) if e.r is None else ((e.K, e.r), (e.r, e.N)) for e in layers]
        ops = ["xw" if e.r is None else "xuv" for e in layers]
        each = zip(ops, matrices, strict=True)
        return sum(1e3 * plan_op(op, 1, pair, target="trn2").time_ms for op, pair in each)

    config = changed(ratio=0.1, prune_share=0.7, block=64, budget="time", target="trn2")
    dense = compress_(copy.deepcopy(model), SVDConfig(ratio=0.1, method="plain"))
    whole = spent_us([replace(layer, r=None) for layer in dense.layers])
    report = compress_(model, config, BATCHES, dtypes=BFLOAT16)
    assert report.narrowed.kept == 960
    narrower = spent_us([replace(layer, r=None) for layer in report.layers])
    assert spent_us(report.layers) <= 0.9 * whole * (1 + 1e-9) < narrower < whole


@contextmanager
def is_as_it_was(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    yield
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.intermediate_size == model.model.layers[0].mlp.fc2.in_features == 176


def test_what_no_allocation_meets_leaves_the_model_as_it_was():
    """Of so narrow matrices no pair is quicker than the dense one."""
    model, stages = tiny_family("phi"), []
    config = changed(budget="time", target="trn2")
    with (
        is_as_it_was(model),
        pytest.raises(NoAllocationError, match="no allocation meets the budget"),
    ):
        compress_(model, config, BATCHES, lambda *stage: stages.append(stage))
    assert stages == []  # before anything is measured
    with pytest.raises(NoAllocationError):
        compare.nearest(model, [changed(prune_share=0.0, budget="time", target="trn2")], BATCHES)
    possible = SVDConfig(ratio=0.4, block=8)
    for configs in ([possible, config], [config, possible]):
        taken, found = compare.nearest(model, configs, BATCHES)
        assert taken == possible
        assert found[configs.index(config)] == float("inf")


def test_what_fails_after_the_mlps_are_narrower_leaves_them_as_they_were():
    def refuse(needed):
        raise OSError(f"no room for {needed}")

    model = tiny_family("phi")
    source = LayersInMemory(model, check_room=refuse)
    with is_as_it_was(model), pytest.raises(OSError, match="no room"):
        compress_layers(source, CONFIG, BATCHES, only_text=True)


def test_room_is_looked_for_without_what_left():
    rooms, model = [], tiny_model()
    source = LayersInMemory(model, check_room=rooms.append)
    report = compress_layers(source, CONFIG, BATCHES, only_text=True)
    pairs = sum(layer.dense_bytes - layer.bytes for layer in report.layers)
    assert len(rooms) == 1
    assert -pairs - report.narrowed.bytes <= rooms[0] < -report.narrowed.bytes


def test_the_record_is_read_back_and_checked():
    model = tiny_model()
    report = compress_(model, CONFIG, BATCHES)
    assert attached_report(model) == report
    record = report.to_dict()
    assert CompressionReport.from_dict({**record, "narrowed": None}).narrowed is None
    for change in ({"kept": 176}, {"kept": 0}, {"inner": True}, {"bytes": -1}, {"more": 1}):
        with pytest.raises(ValueError, match="narrowed"):
            CompressionReport.from_dict({**record, "narrowed": {**record["narrowed"], **change}})
    with pytest.raises(ValueError, match="narrowed must have exactly inner, kept, parameters"):
        CompressionReport.from_dict({**record, "narrowed": [176, 144]})


def test_a_later_run_of_other_layers_keeps_the_record():
    model = tiny_model()
    first = compress_(model, CONFIG, BATCHES)
    compress_(model, SVDConfig(ratio=0.2, block=8, targets="attention"), BATCHES)
    both = attached_report(model)
    assert (both.narrowed, both.model_parameters) == (first.narrowed, first.model_parameters)
    assert both.model_ratio == pytest.approx(1 - numbers(model) / first.model_parameters)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_too_little_text_is_warned_of_once(share):
    with pytest.warns(CalibrationWarning, match=r"fewer than 10\*K = 1760 of") as warned:
        compress_(tiny_model(), changed(prune_share=share), BATCHES[:1])
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prune_share": 1.5}, "prune_share must be in"),
        ({"prune_share": -0.5}, "prune_share must be in"),
        ({"prune_share": float("nan")}, "prune_share must be in"),
        ({"allocation": "uniform"}, "0 with allocation uniform or layer ratios; got 0.5"),
        ({"layer_ratios": {"down_proj": 0.1}}, "0 with allocation uniform or layer ratios"),
        ({"targets": "attention"}, "mlp.gate_proj is not among the targets; add mlp"),
        ({"targets": "up_proj"}, "mlp.gate_proj is not among the targets; add mlp"),
        ({"ratio": 0.0, "prune_share": 1.0}, "prune_share is of what ratio removes, got ratio 0"),
        ({"ratio": 0.1}, "of ratio 0.1 leaves 176; use another share or a smaller block"),
        ({"ratio": 0.9, "targets": "all-linear", "prune_share": 1.0}, "leaves -?[0-9]+; use"),
    ],
)
def test_shares_that_cannot_be(options, message):
    block = {"block": 64} if options.get("ratio") == 0.1 else {}
    model = tiny_model()
    with pytest.raises(ValueError, match=message):
        compress_(model, changed(**options, **block), BATCHES)
    assert model.config.intermediate_size == 176
    assert attached_report(model) is None


def test_a_share_is_a_number():
    with pytest.raises(TypeError, match="prune_share must be a number, got 'half'"):
        changed(prune_share="half")


def test_plain_needs_text_for_it():
    with pytest.raises(ValueError, match="prune_share needs calibration batches"):
        compress_(tiny_model(), changed(method="plain", importance="error"))


def test_what_reads_images_keeps_its_width():
    model = MULTIMODAL["gemma3"]()
    before = {name: p.shape for name, p in model.named_parameters() if "vision" in name}
    report = compress_(model, CONFIG, BATCHES)
    assert model.config.get_text_config().intermediate_size == report.narrowed.kept < 176
    assert before == {name: p.shape for name, p in model.named_parameters() if "vision" in name}


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "opt"])
def test_other_mlps_are_compared_without(kind):
    model, config = tiny_family(kind), SVDConfig(ratio=0.3, block=8, targets="all-linear")
    assert compared(model, config, {}) == []
    assert not any(each.prune_share for each in compare.candidates(model, config, {}))


def test_where_nothing_is_removed_no_share_is_tried():
    for budget in ("bytes", "parameters"):
        config = SVDConfig(ratio=0.0, storage="int8", budget=budget)
        assert compared(tiny_model(), config, {}) == []


def test_a_share_that_is_asked_for_is_not_overruled():
    found = compare.candidates(tiny_model(), CONFIG, {})
    assert [each.prune_share for each in found] == [0.5, 0.5, 0.0]
    everything = compare.candidates(tiny_model(), changed(prune_share=0.0), {})
    assert tuple(each.prune_share for each in everything[1:4]) == SHARES


def test_features_that_nothing_reads_are_what_compare_takes_for():
    model = tiny_model()
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data[:, ::2] = 0
    dense = copy.deepcopy(model)
    config = SVDConfig(ratio=0.4, block=8)
    taken, found = compare.nearest(model, compare.candidates(model, config, {}), BATCHES)
    assert taken.prune_share == 1.0
    assert min(found) < 1e-6
    compress_(model, taken, BATCHES)
    torch.testing.assert_close(
        model(tiny_ids()).logits, dense(tiny_ids()).logits, atol=1e-4, rtol=1e-3
    )
