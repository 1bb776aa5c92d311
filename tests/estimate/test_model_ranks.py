"""`estimate.model` on ranks of tensor parallel: layouts, exchanges, memory, numbers of them."""

import json
from dataclasses import replace

import pytest
from tiny_model import (
    CONFIG,
    LAYERS,
    QKV,
    RANK,
    SHORT,
    TINY,
    H,
    I,
    Q,
    by_name,
    components,
    decoder,
    run,
    shapes_of,
)

from neuroncore.collectives.links import RankGroup
from neuroncore.hardware import MACHINES, Machine
from neuronmm_ops.estimate import one_launch
from neuronmm_ops.estimate.linears import divided, linears
from neuronmm_ops.estimate.memory import everywhere, weight_bytes
from neuronmm_ops.estimate.passes import fitting
from neuronmm_ops.models import SHAPES
from neuronmm_ops.plan.exchange import PUBLISHED_US
from neuronmm_ops.plan.linear import MLP


def test_ranks_divide_the_sizes():
    llama = SHAPES["Llama-3.1-70B"]
    part = divided(llama, 32)
    assert (part.heads, part.kv_heads, part.intermediate_size) == (2, 1, 896)
    assert (part.hidden_size, part.vocab_size, part.layers) == (8192, 4008, 80)
    assert divided(llama, 1) == llama
    assert divided(llama, 4).kv_heads == 2


@pytest.mark.parametrize("tp", [0, -1, 3, 5, 24, 128])
def test_ranks_that_do_not_divide(tp):
    with pytest.raises(ValueError, match=f"got {tp}, use one of 1, 2, 4, 8, 16, 32, 64$"):
        divided(SHAPES["Llama-3.1-70B"], tp)


def test_collectives_are_of_the_links(tiny):
    found = components(run(tiny, **SHORT, tp=2), "dense", "decode")["collectives"]
    group = RankGroup("all_reduce", MACHINES["trn2"], 1, (0, 1))
    wanted = 2 * LAYERS * group.reduce_ns(2 * H) + group.gather_ns(8)
    assert found["launches"] == 2 * LAYERS + 1
    assert found["time_ms"] == pytest.approx(wanted / 1e6)
    assert found["time_low_ms"] == found["time_high_ms"]


def test_a_rank_holds_its_part(tiny):
    whole, half = (weight_bytes(decoder(tp=tp)) for tp in (1, 2))
    norms = 2 * (2 * LAYERS + 1) * H
    assert half == (whole - norms) / 2 + norms
    pairs = linears(TINY, MLP, ratio=0.2)
    one, two = (weight_bytes(decoder(tp=tp, linears=pairs)) for tp in (1, 2))
    replicated = 2 * LAYERS * 3 * RANK * H  # u of gate and up, v of down
    assert two == (one - norms - replicated) / 2 + norms + replicated
    for layout in ("both", "rows"):
        of_two = decoder(tp=2, linears=pairs)
        divided = weight_bytes(of_two, everywhere(of_two, layout))
        assert divided == (one - norms) / 2 + norms


def ways_of(own, tokens=1):
    parts = {part.component: part for part in own.parts(tokens, {41: 1.0})}
    return {name: parts[name].ways for name in ("qkv", "output", "mlp")}


def low_rank(**options):
    shape = replace(TINY, hidden_size=512, heads=8, kv_heads=4)
    targets = options.pop("targets", tuple(shape.projections))
    return decoder(shape, linears=linears(shape, targets, ratio=0.4), **options)


def test_low_rank_ranks_take_the_quickest_way():
    own = low_rank(tp=2)
    found = ways_of(own)
    named = {
        name: {layout for way in ways for _, layout in way.layouts} for name, ways in found.items()
    }
    assert named["qkv"] == {"one", "both", "rows"}
    assert named["output"] == named["mlp"] == {"sum", "one", "both", "rows"}
    assert len(found["mlp"]) == 1 + 3 * 3
    for ways in found.values():
        chosen = own.tracer.quickest(ways)
        totals = [
            [ms + way.collectives_ms for ms in own.tracer.launches(way.launches).times_ms]
            for way in ways
        ]
        regrets = [
            max(ms / min(under) for ms, under in zip(times, zip(*totals, strict=True), strict=True))
            for times in totals
        ]
        assert regrets[ways.index(chosen)] == min(regrets)


def test_one_rank_has_no_layouts():
    for ways in ways_of(low_rank()).values():
        assert not any(way.layouts or way.collectives for way in ways)
    assert [len(ways) for ways in ways_of(low_rank()).values()] == [2, 1, 1]


def test_a_gated_mlp_is_three_launches_where_its_ranks_are_divided():
    """u of gate and up; v of both with u of down; v of down."""
    r, inner, width = 128, TINY.intermediate_size // 4, 512
    for way in ways_of(low_rank(tp=4))["mlp"][1:]:
        layouts = dict(way.layouts)
        shapes = [shapes_of(launch) for launch in way.launches]
        first = {
            "one": [(1, width), (width, 2 * r)],
            "both": [(1, width), (width, 2 * r // 4)],
            "rows": [(1, width // 4), (width // 4, 2 * r)],
        }[layouts["gate_up"]]
        last = {
            "one": [(1, r), (r, width)],
            "both": [(1, r), (r, width // 4)],
            "rows": [(1, r // 4), (r // 4, width)],
        }[layouts["down"]]
        if layouts["gate_up"] == "rows":
            assert shapes.pop(0) == [(1, width)]  # the rank's part of x
        between = [(1, r), (r, inner), (r, inner), (inner, r), (1, r)]
        assert shapes == [first, between, last]
        sent = {
            "one": [("all_reduce", r)],
            "both": [("all_reduce", r), ("all_gather", width)],
            "rows": [("reduce_scatter", r), ("all_reduce", width)],
        }[layouts["down"]]
        before = {"one": [], "both": [("all_gather", 2 * r)], "rows": [("all_reduce", 2 * r)]}
        assert [(c.kind, c.N) for c in way.collectives] == [*before[layouts["gate_up"]], *sent]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("targets", [["down_proj"], ["gate_proj"], ["up_proj", "gate_proj"]])
def test_a_part_of_the_mlp_is_low_rank(targets, tp):
    own = low_rank(tp=tp, targets=targets)
    ways = ways_of(own)["mlp"]
    for way in ways:
        weights = [
            o.shape for each in way.launches for o in each.operands[1:] if o and o.shape[0] > 1
        ]
        if tp == 1 or {layout for _, layout in way.layouts} <= {"dense", "one"}:
            whole = {(512, 512 // tp), (512 // tp, 512)}
            assert set(weights) - whole <= {
                (512, 128 * len(targets)),
                (128, 512 // tp),
                (512 // tp, 128),
                (128, 512),
            }
    assert own.tracer.quickest(ways) in ways


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("targets", [["down_proj"], ["gate_proj"], MLP])
def test_an_mlp_that_is_not_stored_alike_is_launched_apart(targets, tp):
    """Every Linear as it is stored, and the gated product between them."""
    shape = replace(TINY, hidden_size=512, heads=8, kv_heads=4)
    each = linears(shape, targets, "int8", ratio=0.4)
    each["up_proj"] = each["up_proj"]._replace(stored="float8_e4m3fn")
    own = decoder(shape, linears=each, tp=tp)
    for way in ways_of(own)["mlp"]:
        kernels = [launch.kernel.func.__name__ for launch in way.launches]
        assert kernels.count("gated_product") == 1
        assert not {"mlp", "svd_mlp"} & {name.removesuffix("_decode") for name in kernels}
        weights = {launch.operands[1].dtype for launch in way.launches if len(launch.operands) > 2}
        assert weights == {each[name].stored or "bfloat16" for name in MLP}
    assert tp > 1 or len(way.launches) == 4


def test_dense_weights_of_attention_are_stored_apart(tiny):
    """q in one byte without ranks, and the others in bfloat16: two launches."""
    found = run(tiny, **SHORT, targets=("q_proj", "mlp"), storage="int8", storage_dense="int8")
    assert components(found, "dense_one_byte", "decode")["qkv"]["launches"] == LAYERS
    own = decoder(linears=linears(TINY, ["q_proj", *MLP], "int8"))
    (qkv,) = ways_of(own)["qkv"]
    stored = [(each.operands[1].shape[1], each.operands[1].dtype) for each in qkv.launches]
    assert stored == [(Q, "int8"), (QKV - Q, "bfloat16")]


@pytest.mark.parametrize("layout", ["both", "rows"])
@pytest.mark.parametrize("lnc", [1, 2])
def test_ranks_that_no_size_of_a_factor_is_a_multiple_of(tmp_path, layout, lnc):
    """Parts are padded: rank 128 and hidden size 256 over three ranks."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 768}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | sizes | {"vocab_size": 999}))
    found = run(str(tmp_path), **SHORT, tp=3, lnc=lnc, targets="all-linear", ratio=0.1)
    low = by_name(found["variants"])["low_rank"]
    for phase in low["phases"].values():
        (mlp,) = [
            each
            for each in phase["layouts"]
            if each["component"] == "mlp" and set(each["layouts"].values()) == {layout}
        ]
        u = {"both": 256 * 43, "rows": 86 * 128}[layout]
        v = {"both": 128 * 86, "rows": 43 * 256}[layout]
        assert mlp["weight_bytes"] == 2 * (2 * (u + 128 * 256) + 256 * 128 + v)
        assert mlp["time_ms"] > 0


@pytest.fixture(scope="module")
def of_two(tiny):
    return run(tiny, **SHORT, tp=2, targets="all-linear", ratio=0.1)


def test_layouts_add_up_to_their_components(of_two):
    for name in ("dense", "low_rank"):
        row = by_name(of_two["variants"])[name]
        for phase in row["phases"].values():
            taken = [each for each in phase["layouts"] if each["taken"]]
            assert [each["component"] for each in taken] == ["qkv", "output", "mlp"]
            found = by_name(phase["components"], "component")
            for each in taken:
                assert LAYERS * each["launches_ms"] == pytest.approx(
                    found[each["component"]]["time_ms"]
                )
                assert LAYERS * each["launches"] == found[each["component"]]["launches"]
            sent = [sent["ms"] for each in taken for sent in each["collectives"]]
            of_head = RankGroup("", MACHINES["trn2"], 1, (0, 1)).gather_ns(8) / 1e6
            assert LAYERS * sum(sent) + of_head == pytest.approx(found["collectives"]["time_ms"])


def test_alternatives_are_told_apart(of_two):
    for phase in by_name(of_two["variants"])["low_rank"]["phases"].values():
        for each in phase["layouts"]:
            assert each["time_ms"] == each["launches_ms"] + each["collectives_ms"]
            assert each["collectives_ms"] == sum(c["ms"] for c in each["collectives"])
            assert each["wire_bytes"] == round(sum(c["wire_bytes"] for c in each["collectives"]))
        mlp = [each for each in phase["layouts"] if each["component"] == "mlp"]
        held = {tuple(each["layouts"].values()): each["weight_bytes"] for each in mlp}
        factors = 2 * 3 * RANK * (H + I)
        assert held["both", "both"] == held["rows", "rows"] == factors / 2
        assert held["one", "one"] == held["sum", "sum"] == factors / 2 + 2 * 3 * RANK * H / 2
        dense = by_name(of_two["variants"])["dense"]["phases"]["decode"]["layouts"]
        assert [each["weight_bytes"] for each in dense] == [
            2 * H * QKV / 2, 2 * Q * H / 2, 2 * 3 * H * I / 2,
        ]  # fmt: skip


def test_weights_are_those_of_both_phases(of_two):
    row = by_name(of_two["variants"])["low_rank"]
    by_layout = row["weight_bytes_by_layout"]
    assert by_layout["both"] == by_layout["rows"] < by_layout["one"]
    assert by_layout["both"] <= row["memory"]["weight_bytes"] <= by_layout["one"]
    assert by_name(of_two["variants"])["dense"]["weight_bytes_by_layout"] == {
        "dense": by_name(of_two["variants"])["dense"]["memory"]["weight_bytes"]
    }


def test_published_collectives_take_no_less(of_two):
    for row in of_two["variants"]:
        for name, phase in row["phases"].items():
            collectives = components(of_two, row["name"], name)["collectives"]
            found = phase["published_collectives"]
            more = found["time_ms"] - phase["time_ms"]
            assert more > 0
            if row["name"] == "dense":  # one way only
                wanted = collectives["launches"] * PUBLISHED_US / 1e3 - collectives["time_ms"]
                assert more == pytest.approx(wanted)


def test_one_rank_has_none_of_it(tiny):
    for row in run(tiny, **SHORT)["variants"]:
        assert row["weight_bytes_by_layout"] == {}
        for phase in row["phases"].values():
            assert phase["layouts"] == []
            assert "published_collectives" not in phase


def test_layouts_that_do_not_fit_are_not_taken(monkeypatch):
    own = low_rank(tp=2)
    whole, _, memory = fitting(own, 40, 9, lambda _: None)
    assert "sum" in whole.layouts
    divided_only = weight_bytes(own, everywhere(own, "both"))
    room = memory["kv_cache_bytes"] + memory["activation_bytes"] + divided_only

    monkeypatch.setattr(Machine, "rank_hbm_bytes", lambda *_: room)
    _, phases, memory = fitting(own, 40, 9, lambda _: None)
    assert memory["weight_bytes"] == divided_only
    taken = [
        each["layouts"] for phase in phases.values() for each in phase["layouts"] if each["taken"]
    ]
    assert {layout for each in taken for layout in each.values()} <= {"both", "rows"}
    monkeypatch.setattr(Machine, "rank_hbm_bytes", lambda *_: room - 1)
    with pytest.raises(ValueError, match="does not fit at tp 2"):
        fitting(own, 40, 9, lambda _: None)


@pytest.mark.parametrize(
    ("selected", "count"),
    [
        ((), 2),
        (TINY.projections, 4),
        (MLP, 4),
        (("q_proj", "k_proj", "v_proj"), 4),
        (("o_proj",), 3),
    ],
)
def test_layers_of_ranks_share_a_launch(selected, count):
    """With as many exchanges as are said, none of them between ranks that differ."""
    shape = replace(TINY, layers=4, hidden_size=1024, intermediate_size=2048, heads=16, kv_heads=8)
    own = linears(shape, selected, ratio=0.2 if selected else None)
    many = decoder(shape, tp=2, lnc=2, linears=own)
    assert one_launch.refusal(many) is None
    plan = one_launch._plan(many, many.kinds[0], 40)
    profile = one_launch._launch(plan, 4).profile("trn2")
    exchanges = sum([profile.opcodes.get(name, 0) for name in ("all_reduce", "all_gather")])
    inside = [*one_launch.exchanged(many)][: -len(one_launch.ending(many)) or None]
    # a core of two issues each exchange; those of one layer come with its streams
    assert exchanges == 2 * len(inside)
    assert len(inside) in (4 * count, 4 * count - 1)
    assert plan.problem.tp == plan.arguments["tp"] == 2


def test_a_token_of_ranks_in_one_launch(tiny):
    alone, halves = [run(tiny, **SHORT, tp=tp) for tp in (1, 2)]
    for variant in ("dense", "low_rank"):
        one, of_rank = [
            by_name(document["variants"])[variant]["phases"]["decode"]["one_launch"]
            for document in (alone, halves)
        ]
        assert of_rank["hbm_bytes"] < 0.7 * one["hbm_bytes"]
        assert of_rank["published_collectives_ms"] > of_rank["time_ms"]
        assert "published_collectives_ms" not in one
