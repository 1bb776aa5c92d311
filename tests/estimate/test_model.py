"""`estimate.model`: what a document adds up to, which launches are in it, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import (
    CONFIG,
    LAYERS,
    QKV,
    RANK,
    SHORT,
    TINY,
    VOCAB,
    H,
    I,
    Q,
    by_name,
    components,
    decoder,
    run,
    shapes_of,
    write_tiny,
)

from benchmarks.cases import end_to_end
from neuroncore import NkiValidationError
from neuronmm_ops.estimate import attention, one_launch
from neuronmm_ops.estimate.baselines import neuronmm
from neuronmm_ops.estimate.ends import ENDS, spread
from neuronmm_ops.estimate.launches import Tracer
from neuronmm_ops.estimate.linears import divided, linears, selection
from neuronmm_ops.estimate.passes import COMPONENTS, POINTS, lengths
from neuronmm_ops.estimate.ranks import Ranks
from neuronmm_ops.estimate.subject import SPEEDUPS
from neuronmm_ops.models import SHAPES
from neuronmm_ops.plan.linear import MLP


@pytest.fixture(scope="module")
def document(tiny):
    return run(tiny, **SHORT)


def test_document(document, tiny):
    assert document["model"] == "tiny"
    names = ["dense", "low_rank", "pruned", "published_dense", "published_low_rank"]
    assert [row["name"] for row in document["variants"]] == names
    wanted = SHORT | {"lnc": 1, "tp": 1, "batch": 1, "ratio": 0.2, "storage": None}
    assert {key: document[key] for key in wanted} == wanted
    told = []
    again = run(tiny, **SHORT, progress=lambda *step: told.append(step))
    assert again == document
    steps = 5 * 2 * 3  # qkv, output and mlp of both phases
    assert told == [("model", n, steps) for n in range(1, steps + 1)]
    assert json.loads(json.dumps(document)) == document


def test_components_add_up_to_their_phase(document):
    for row in document["variants"]:
        for phase in row["phases"].values():
            assert [each["component"] for each in phase["components"]] == list(COMPONENTS)
            for end in ENDS:
                parts = [each["times_ms"][end] for each in phase["components"]]
                assert sum(parts) == pytest.approx(phase["times_ms"][end])
            assert phase["time_ms"] == phase["times_ms"]["transfers"]
            ends = spread([*phase["times_ms"].values()])
            assert (phase["time_low_ms"], phase["time_high_ms"]) == ends
            moved = sum(each["hbm_bytes"] for each in phase["components"])
            assert moved == pytest.approx(phase["hbm_bytes"], abs=len(COMPONENTS))
            assert sum(each["launches"] for each in phase["components"]) == phase["launches"]


def test_launches_of_a_pass(document):
    wanted = {"norm": 2 * LAYERS + 1, "qkv": LAYERS, "output": LAYERS, "lm_head": 1}
    for row in document["variants"]:
        for phase in ("prefill", "decode"):
            found = components(document, row["name"], phase)
            counted = {name: found[name]["launches"] for name in wanted}
            assert counted == wanted
            assert found["attention"]["launches"] >= LAYERS
            assert found["collectives"]["launches"] == found["collectives"]["time_ms"] == 0
    # gate, up, their product and down, and NeuronMM's two
    of_mlp = {"low_rank": 1, "published_dense": 4, "published_low_rank": 2}
    for name, launches in of_mlp.items():
        assert components(document, name, "decode")["mlp"]["launches"] == launches * LAYERS


def test_totals_follow_from_the_phases(document):
    for row in document["variants"]:
        prefill, decode = row["phases"]["prefill"], row["phases"]["decode"]
        assert row["tokens_per_s"] == pytest.approx(1000 / decode["time_ms"])
        for name, end in row["end_to_end_times_ms"].items():
            steps = (SHORT["new"] - 1) * decode["times_ms"][name]
            assert end == pytest.approx(prefill["times_ms"][name] + steps)
        assert row["end_to_end_ms"] == row["end_to_end_times_ms"]["transfers"]


def test_speedups_are_ratios_at_one_end(document):
    rows, found = by_name(document["variants"]), document["speedups"]
    assert set(found) == {"ours", "width", "published", "ours_over_published"}

    def times(row):
        phases = {phase: row["phases"][phase]["times_ms"] for phase in ("prefill", "decode")}
        return phases | {"end_to_end": row["end_to_end_times_ms"]}

    for speedup in found.values():
        ours, theirs = times(rows[speedup["of"]]), times(rows[speedup["over"]])
        for name, each in ours.items():
            ratios = {end: theirs[name][end] / each[end] for end in ENDS}
            low, high = speedup[name]["low"], speedup[name]["high"]
            assert (low, high) == spread([*ratios.values()])
            middle = ratios["rows"] * ratios["instruction-order"]
            assert speedup[name]["middle"] ** 2 == pytest.approx(middle)
            assert speedup[name]["by_model"] == ratios


def test_layers_that_share_a_launch(document):
    """Each byte once, of fewer launches; the end of a pass as it was."""
    for row in document["variants"][:2]:
        decode = row["phases"]["decode"]
        one = decode["one_launch"]
        assert one["launches"] == 3  # all layers, the last norm, the head
        assert one["bound_ms"] < one["time_low_ms"] <= one["time_ms"] <= one["time_high_ms"]
        weights = row["memory"]["weight_bytes"]
        assert 0.8 * weights < one["hbm_bytes"] < decode["hbm_bytes"]
        assert one["as_served"]["time_ms"] < decode["as_served"]["time_ms"]
    ratio = document["speedups"]["ours"]["decode"]["one_launch"]
    assert ratio["low"] <= ratio["middle"] <= ratio["high"]


def test_layers_that_are_not_traced_take_as_long_as_those_that_are():
    many = decoder(replace(TINY, layers=7))
    cost, launches = one_launch.layers_cost(many, {40: 1.0})
    plan = one_launch._plan(many, many.kinds[0], 40)
    whole = many.tracer.launch(one_launch._launch(plan, 7))
    assert launches == 1
    assert cost.hbm_bytes == whole.hbm_bytes
    assert cost.times_ms == pytest.approx(whole.times_ms, rel=0.02)


def test_a_launch_has_no_more_layers_than_instructions_permit(monkeypatch):
    many = decoder(replace(TINY, layers=7))
    plan = one_launch._plan(many, many.kinds[0], 40)
    monkeypatch.setattr(one_launch, "MAX_INSTRUCTIONS", 3 * plan.instructions)
    assert one_launch.layers_cost(many, {40: 1.0})[1] == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": 2, "targets": ("up_proj",)}, "Linears of a stage are all pairs, or all dense"),
        ({"storage": "fp8", "targets": ("up_proj",)}, "gate_proj, up_proj, down_proj of a launch"),
    ],
)
def test_layers_that_share_no_launch_say_why(tiny, options, words):
    low_rank = by_name(run(tiny, **SHORT, **options)["variants"])["low_rank"]
    assert words in low_rank["phases"]["decode"]["one_launch"]["left_out"]


def test_other_layers_than_the_op_computes_share_no_launch(tmp_path):
    found = run(write_tiny(tmp_path, model_type="gemma2"), **SHORT)
    for variant in found["variants"]:
        assert "left_out" in variant["phases"]["decode"]["one_launch"]
    assert "one_launch" not in found["speedups"]["ours"]["decode"]


def test_stages_of_both_kinds_share_a_launch(tiny):
    for options in ({"targets": ("up_proj", "q_proj")}, {"storage": "fp8"}):
        found = by_name(run(tiny, **SHORT, **options)["variants"])
        assert found["low_rank"]["phases"]["decode"]["one_launch"]["launches"] == 3


def test_batches_share_the_weights(tiny, document):
    more = run(tiny, **SHORT, batch=3)
    one, three = (by_name(d["variants"])["dense"] for d in (document, more))
    cache = [row["memory"]["kv_cache_bytes"] for row in (one, three)]
    assert cache[0] == 2 * LAYERS * 2 * 64 * (40 + 9) * 2
    assert cache[1] == 3 * cache[0]
    assert three["memory"]["weight_bytes"] == one["memory"]["weight_bytes"]
    assert three["tokens_per_s"] == pytest.approx(3000 / three["phases"]["decode"]["time_ms"])
    moved = [components(d, "dense", "decode")["qkv"]["hbm_bytes"] for d in (document, more)]
    assert moved[1] < 1.1 * moved[0]


def test_dense_bytes_by_hand(document):
    layer = H * QKV + Q * H + 3 * H * I
    norms = (2 * LAYERS + 1) * H
    memory = by_name(document["variants"])["dense"]["memory"]
    assert memory["weight_bytes"] == 2 * (LAYERS * layer + VOCAB * H + norms)
    assert memory["activation_bytes"] == 2 * 40 * (3 * H + 2 * I)
    assert memory["capacity_bytes"] == 24 * 2**30  # a stack that no other rank uses
    qkv = components(document, "dense", "decode")["qkv"]
    assert qkv["hbm_bytes"] == LAYERS * 2 * (H * QKV + H + QKV)


def test_low_rank_bytes_by_hand(document):
    row = by_name(document["variants"])["low_rank"]
    ranks = {each["name"]: each["r"] for each in row["linears"]}
    assert ranks == dict.fromkeys(ranks, None) | dict.fromkeys(
        ("gate_proj", "up_proj", "down_proj"), RANK
    )
    saved = LAYERS * 3 * (H * I - RANK * (H + I)) * 2
    dense = by_name(document["variants"])["dense"]
    assert dense["memory"]["weight_bytes"] - row["memory"]["weight_bytes"] == saved
    moved = components(document, "low_rank", "decode")["mlp"]["hbm_bytes"]
    assert moved == LAYERS * 2 * (3 * RANK * (H + I) + 2 * H)  # inner activations stay in SBUF


@pytest.mark.parametrize("storage", ["fp8", "int8"])
def test_one_byte_halves_the_weights(tiny, document, storage):
    options = {"storage": storage, "storage_dense": storage, "storage_lm_head": storage}
    found = run(tiny, **SHORT, **options)
    names = [row["name"] for row in found["variants"]]
    published = ["published_dense", "published_low_rank"]
    assert names == ["dense", "low_rank", "dense_one_byte", "pruned", *published]
    rows = by_name(found["variants"])
    dtypes = {each["dtype"] for each in rows["low_rank"]["linears"]}
    assert dtypes == {"float8_e4m3fn" if storage == "fp8" else "int8"}
    assert {each["r"] for each in rows["dense_one_byte"]["linears"]} == {None}
    scales = 4 * LAYERS * (QKV + H + 3 * RANK + 2 * I + H)
    low = LAYERS * (H * QKV + Q * H + 3 * RANK * (H + I))
    head = VOCAB * H + 4 * VOCAB
    rest = 2 * (2 * LAYERS + 1) * H + 2 * VOCAB * H  # norms, and the embedding beside its copy
    assert rows["low_rank"]["memory"]["weight_bytes"] == low + scales + head + rest
    # what was published stays in bf16
    assert rows["published_dense"] == by_name(document["variants"])["published_dense"]
    for name, variant in (("low_rank", "low_rank"), ("dense_one_byte", "dense")):
        half = components(found, name, "decode")["qkv"]["hbm_bytes"]
        whole = components(document, variant, "decode")["qkv"]["hbm_bytes"]
        assert 2 * half - whole == LAYERS * (2 * 4 * QKV + 2 * (H + QKV))
    assert set(found["speedups"]) == set(SPEEDUPS)


@pytest.mark.parametrize(
    ("targets", "ratio", "tp", "kept"),
    [("mlp", 0.2, 1, 384), ("mlp", 0.2, 2, 384), ("all-linear", 0.6, 1, 384)],
)
def test_narrower_mlps_have_as_few_parameters_as_low_rank(tiny, targets, ratio, tp, kept):
    """Whole tiles of inner features, so that no fewer are removed than by the pairs."""
    options = {"targets": targets, "ratio": ratio, "tp": tp, "storage": "int8"}
    found = by_name(run(tiny, **SHORT, **options)["variants"])
    linears = {each["name"]: each for each in found["pruned"]["linears"]}
    assert {each["r"] for each in linears.values()} == {None}
    assert [linears[name]["N"] for name in MLP[:2]] == [kept, kept] == [linears[MLP[2]]["K"]] * 2
    assert linears["down_proj"]["dtype"] == "int8"

    def numbers(name):
        return sum(
            each["layers"] * (each["K"] * each["N"] if each["r"] is None else pair(each))
            for each in found[name]["linears"]
        )

    def pair(each):
        return each["r"] * (each["K"] + each["N"])

    wider = LAYERS * 3 * H * 128
    assert numbers("pruned") <= numbers("low_rank") < numbers("pruned") + wider


def test_storage_of_some_linears_leaves_the_others(tiny):
    found = by_name(run(tiny, **SHORT, lnc=2, storage="fp8")["variants"])
    for name in ("low_rank", "dense_one_byte"):
        dtypes = {each["name"]: each["dtype"] for each in found[name]["linears"]}
        assert dtypes["down_proj"] == "float8_e4m3fn"
        assert dtypes["q_proj"] == dtypes["lm_head"] == "bfloat16"


def test_prefill_rounds_activations_where_weights_are_in_fp8():
    rounding = Ranks(whole=TINY, target="trn2", lnc=1, tp=1, compute="fp8")
    dense, low = ((2048, 4096),), ((4096, 1024), (1024, 4096))
    for op, matrices, stored, rounds in (
        *[("xw", dense, "float8_e4m3fn", True), ("xuv", low, "float8_e4m3fn", True)],
        *[("xw", dense, "int8", False), ("xw", dense, "", False)],
    ):
        (launch,) = rounding.op(op, 1024, matrices, stored)
        assert launch.arguments.get("double_row", False) == rounds
        (plain,) = replace(rounding, compute="x").op(op, 1024, matrices, stored)
        assert not plain.arguments.get("double_row", False)


def test_the_document_says_whether_activations_are_rounded(tiny, document):
    assert document["compute"] == "x"
    rounded = run(tiny, **SHORT, lnc=2, storage="fp8", compute="fp8")
    plain = run(tiny, **SHORT, lnc=2, storage="fp8")
    assert (rounded["compute"], plain["compute"]) == ("fp8", "x")
    for name, row in by_name(rounded["variants"]).items():
        assert (
            row["phases"]["prefill"]["time_ms"]
            <= (by_name(plain["variants"])[name]["phases"]["prefill"]["time_ms"])
        )


def test_all_linears_get_ranks():
    shape = SHAPES["Llama-3.2-1B"]
    found = linears(shape, selection(shape, ["all-linear"]), ratio=0.2)
    ranks = {name: linear.r for name, linear in found.items()}
    assert ranks == {
        "q_proj": 768, "k_proj": 384, "v_proj": 384, "o_proj": 768,
        "gate_proj": 1280, "up_proj": 1280, "down_proj": 1280, "lm_head": None,
    }  # fmt: skip


def test_targets_select_as_those_of_a_config():
    assert selection(TINY, ["mlp"]) == set(MLP)
    assert selection(TINY, ["mlp", "o_proj"]) == {*MLP, "o_proj"}
    assert selection(TINY, ["attention"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert selection(TINY, ["all-linear"]) == set(TINY.projections)


def test_some_of_query_key_and_value_are_low_rank():
    shape = replace(TINY, hidden_size=512, heads=8, kv_heads=4)
    own = decoder(shape, linears=linears(shape, ["q_proj", "o_proj"], ratio=0.4))
    (qkv,) = [part for part in own.parts(1, {41: 1.0}) if part.component == "qkv"]
    assert [shapes_of(launch) for launch in qkv.ways[0].launches] == [
        [(1, 512), (512, 512)],
        [(1, 512), (512, 128), (128, 512)],
    ]


def test_a_long_prompt_takes_all_launches_of_its_attention(monkeypatch):
    monkeypatch.setattr(attention, "MAX_INSTRUCTIONS", 1)
    parts = decoder(tp=1).parts(40, {40: 1.0})
    (way,) = next(part.ways for part in parts if part.component == "attention")
    assert [launch.operands[1].shape[1] for launch in way.launches] == [1] * TINY.kv_heads


@given(first=st.integers(1, 5000), size=st.integers(0, 600), slope=st.floats(-1, 1))
def test_shares_of_lengths(first, size, slope):
    """A time that is linear in the length has its mean exactly."""
    shares = lengths(first, first + size)
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) >= 0
    assert len(shares) <= POINTS
    mean = sum(share * (3 + slope * T) for T, share in shares.items())
    every = np.arange(first, first + size + 1)
    assert mean == pytest.approx(float((3 + slope * every).mean()))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Llama-3.1-70B, inf2", "Llama-2-7B, trn1"])
def test_no_published_pass_is_quicker(model):
    cases = [case for case in end_to_end.served() if case.name.startswith(model)]
    assert cases
    for case in cases:
        assert case.published_ms / 4 < case.modelled()["time_ms"] < case.published_ms


def test_padded_shapes_divide():
    shape = end_to_end.padded(SHAPES["Llama-3.1-70B"], 24)
    assert (shape.heads, shape.intermediate_size, shape.vocab_size) == (72, 28680, 128256)
    assert divided(shape, 24).heads == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "trn1", "lnc": 2}, "lnc must be 1, or 2 on trn2 and trn3; got 2"),
        ({"prompt": 0}, "prompt must be at least 1 token, got 0"),
        ({"batch": 129}, "batch must be 1 to 128 sequences, got 129"),
        ({"storage": "fp4"}, "storage must be fp8 or int8 or int4, got 'fp4'"),
        ({"storage_dense": "fp4"}, "storage must be fp8 or int8 or int4, got 'fp4'"),
        ({"compute": "fp4"}, "compute must be one of x, fp8; got 'fp4'"),
        ({"compute": "fp8"}, "compute fp8 needs Linears in fp8, got bfloat16; use --storage fp8"),
        ({"compute": "fp8", "storage": "int8"}, "needs Linears in fp8, got int8"),
        (
            {"compute": "fp8", "storage": "fp8", "target": "trn1"},
            "two rows of fp8 at a time, which trn1 does not; use compute x",
        ),
        ({"targets": "("}, "no regular expression"),
        ({"targets": ("mlp", "lm_head")}, "targets must select Linears .*'lm_head' selects none"),
        ({"prompt": 10**7, "batch": 128}, "does not fit at tp 1: a rank of trn2 with lnc 1"),
    ],
)
def test_refusals(tiny, options, words):
    with pytest.raises(ValueError, match=words):
        run(tiny, **SHORT | options)


def test_unknown_models_and_those_without_ranks(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 256}))
    with pytest.raises(ValueError, match=r"no Linear of .* gets a rank that pays at ratio 0.2"):
        run(str(tmp_path), **SHORT)
    with pytest.raises(ValueError, match=r"Llama-3.1-70B does not fit at tp 4.*24 GiB of HBM"):
        run("Llama-3.1-70B", target="trn2", lnc=2, tp=4)


def refuse(monkeypatch, *kernels):
    """Let SBUF be full for these kernels, or for all."""
    whole = Tracer.launch

    def launch(self, launch):
        if not kernels or launch.kernel in kernels:
            raise NkiValidationError("SBUF is full")
        return whole(self, launch)

    monkeypatch.setattr(Tracer, "launch", launch)


def test_a_published_kernel_that_does_not_fit_is_left_out(tiny, monkeypatch):
    refuse(monkeypatch, neuronmm.neuronmm_mlp_up)
    found = run(tiny, **SHORT)
    assert [row["name"] for row in found["variants"]] == [
        *("dense", "low_rank", "pruned", "published_dense")
    ]
    assert found["left_out"][-1] == "published_low_rank: SBUF is full"
    assert set(found["speedups"]) == {"ours", "width", "ours_over_published"}


def test_a_kernel_of_ours_that_does_not_fit_is_an_error(tiny, monkeypatch):
    refuse(monkeypatch)
    with pytest.raises(ValueError, match=r"^tiny on trn2: SBUF is full$"):
        run(tiny, **SHORT)
