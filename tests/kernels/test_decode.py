"""The decode kernels of factors: values, FLOPs and traffic on small sizes; plans that run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.cases import (
    ACTIVATIONS,
    LARGEST,
    OPS,
    SIZES,
    TARGETS,
    TOKENS,
    Case,
    biased,
    check,
    composed,
    decode_arguments,
    drawn,
    matrices_of,
    of_model,
    problems,
    run,
    traced,
)

from neuroncore import Profile, TensorSpec, dtypes, simulate
from neuroncore.hardware import TRN1, TRN2, TRN3
from neuroncore.timing.trace import InstructionTemplate
from neuronmm_ops.kernels.stages import decode_tiling, tiling
from neuronmm_ops.kernels.xw.decode import xw_decode
from neuronmm_ops.plan import Problem, mlp_matrices, plan_problem
from neuronmm_ops.plan.search import knobs_of

FP8, INT8 = LARGEST
CUT: dict[str, dict[str, Any]] = {
    "xw": {"k_chunk": 128, "block": 96, "last_block": 64, "tile_bytes": 512},
    "xuv": {"k_chunk": 128, "rank_block": 128, "block": 96, "last_block": 64, "tile_bytes": 512},
    "svd_mlp": {"k_chunk": 128, "rank_block": 128, "inner_block": 128, "last_block": 64},
}
CUT["svd_qkv"] = CUT["xuv"]
SWITCHES = {"xw": "resident", "svd_mlp": "spill", "svd_qkv": "fuse"}
"""What a kernel does in one of two ways."""


def forms_of(profile: Profile) -> list[InstructionTemplate]:
    return [form for core in profile.schedule.cores for form, *_ in core.trace.records]


def decode(problem: Problem, *, bias: bool = False, **blocks: Any) -> Case:
    return Case(problem, bias, blocks=blocks, phase="decode")


@pytest.mark.slow
@pytest.mark.parametrize("stored", [("",), tuple(LARGEST)], ids=["of x", "one byte"])
@pytest.mark.parametrize("op", OPS)
@settings(max_examples=8)
@given(data=st.data())
def test_any_size(op, stored, data):
    problem = data.draw(problems(op, TOKENS, SIZES, stored))
    if data.draw(st.integers(0, 2)) == 0:
        blocks = decode_arguments(problem)
    else:
        blocks = CUT[op] | (
            {"dma_cast": data.draw(st.sampled_from((0, 2, 3)))} if stored[0] else {}
        )
        if op in SWITCHES:
            blocks = blocks | {SWITCHES[op]: data.draw(st.booleans())}
        blocks = blocks | {"stationary": data.draw(st.booleans())}
    name = data.draw(st.sampled_from(sorted(ACTIVATIONS)))
    check(Case(problem, data.draw(biased(op)), name, blocks, "decode"))


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["", *LARGEST])
@pytest.mark.parametrize("core", [("trn1", 1), ("trn2", 2), ("trn3", 1)])
@pytest.mark.parametrize("M", [3, 100])
def test_several_banks_and_a_last_tile_in_two_parts(M, core, stored):
    def of(*matrices: tuple[int, int], dtype: str = "bfloat16") -> Problem:
        op = {2: "xuv", 6: "svd_mlp"}[len(matrices)]
        return Problem(op, M, matrices, dtype, *core, weight_dtype=stored)

    pair = of((130, 700), (700, 2600), dtype="bfloat16" if stored else "float32")
    check(decode(pair, block=1024, last_block=1400, rank_block=1536, bias=bool(stored)))
    blocks = {"block": 1024, "last_block": 1300, "rank_block": 512, "tile_bytes": 99999}
    check(decode(pair, **blocks, bias=not stored))
    few = of((300, 7), (7, 1400), dtype="float32")
    check(decode(few, last_block=1400, tile_bytes=99999))
    mlp = of(*mlp_matrices(70, (600, 300, 500), 1200, 90))
    check(decode(mlp, inner_block=1024, spill=False, **({"rank_block": 256} if stored else {})))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("weights", LARGEST)
def test_rank_1(target, weights):
    pair = Problem("xuv", 1, ((300, 1), (1, 200)), target=target, weight_dtype=weights)
    check(decode(pair, **decode_arguments(pair), bias=True))


@pytest.mark.parametrize("target", TARGETS)
def test_sums_beyond_fp16_are_scaled_before_they_are_rounded(target):
    """x @ u of stored values up to 240 may exceed 65,504; scaled it does not."""
    problem = Problem("xuv", 2, ((512, 40), (40, 60)), "float16", target, weight_dtype=FP8)
    case = decode(problem)
    given = drawn(case)
    same = torch.full_like(given.weights[0].float(), 240).to(torch.float8_e4m3fn)
    given = replace(given, x=torch.ones_like(given.x), weights=[same, given.weights[1]])
    exact = composed(case, given, exact=True)
    assert (run(case, given).outputs.double() - exact).abs().max() <= 0.01 * exact.abs().max()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("M", "dtype", "core", "stored", "blocks"),
    [
        (1, "float16", ("trn2", 2), FP8, {}),
        (5, "bfloat16", ("trn3", 1), INT8, {"dma_cast": 2, "tile_bytes": 512}),
        (32, "bfloat16", ("trn2", 1), FP8, {"block": 96, "last_block": 64}),
        (64, "float32", ("trn3", 2), FP8, {"k_chunk": 128}),
        (128, "bfloat16", ("trn1", 1), "", {}),
    ],
)
def test_stationary_weights(op, M, dtype, core, stored, blocks):
    matrices = matrices_of(op, 300, (40, 133, 260), (1290, 129, 7), 1100)
    case = decode(
        Problem(op, M, matrices, dtype, *core, weight_dtype=stored),
        bias=op != "svd_mlp",
        stationary=True,
        **blocks,
    )
    assert not {form.pe_tile for form in forms_of(check(case))} - {None}
    if core[1] == 2:  # in any order that the cores' waiting allows
        run(case, drawn(case), schedules=2)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("M", "options", "offered"),
    [
        (1, {"weight_dtype": FP8}, True),
        (64, {"weight_dtype": INT8, "target": "trn3"}, True),
        (65, {"weight_dtype": FP8}, False),
        (1, {}, False),
        (1, {"weight_dtype": FP8, "target": "trn1"}, False),
        (1, {"weight_dtype": FP8, "dtype": "float32"}, False),
    ],
)
def test_stationary_weights_are_tried_where_column_groups_matter(op, M, options, offered):
    matrices = matrices_of(op, 256, (128, 128, 128), (256, 256, 256), 256)
    starts = [knobs.starts[0] for knobs in knobs_of(Problem(op, M, matrices, **options), "decode")]
    assert [bool(each.get("stationary")) for each in starts] == [False, True][: 1 + offered]


@pytest.mark.parametrize("op", OPS)
def test_scales_and_dtypes_must_agree(op):
    matrices = matrices_of(op, 64, (32, 32, 32), (48, 64, 16), 48)
    case = decode(Problem(op, 2, matrices, weight_dtype=INT8))
    given = drawn(case)
    wide = [w.bfloat16() for w in given.weights]
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("a weight without a scale must have the dtype of x", {"scales": [None] * len(matrices)}),
        (r"scales must be \[\d+\], got \[\d+\]", {"scales": [s[:-1] for s in given.scales]}),
        ("a scale is for stored weights, got bfloat16", {"weights": wide}),
    ]
    if op == "xuv":
        one, none = given.weights, given.scales
        words = "all factors must have one dtype; got"
        wrong.append((words, {"weights": [wide[0], one[1]], "scales": [None, none[1]]}))
        wrong.append((words, {"weights": [one[0], wide[1]], "scales": [none[0], None]}))
    for words, change in wrong:
        with pytest.raises(AssertionError, match=words):
            run(case, replace(given, **change))


MACHINES = st.sampled_from((TRN1, TRN2, TRN3))


@given(st.integers(1, 9000), TOKENS, MACHINES, st.sampled_from((32, 128)), st.sampled_from((2, 4)))
def test_sums_are_cut_without_overlap(size, M, machine, unit, itemsize):
    step = decode_tiling.matmul_columns(M, machine.moving_max)
    sums = decode_tiling.SumTiling(size, M, machine.pe_tile, unit, step)
    assert sums.partitions <= 128
    whole = tiling.Span(0, size)

    def columns(parts: list[decode_tiling.GroupSpan]) -> list[int]:
        starts = [sums.groups[part.group].start + part.start for part in parts]
        return [c for a, part in zip(starts, parts, strict=True) for c in range(a, a + part.size)]

    assert columns(sums.evictions()) == list(range(size))
    assert sorted(columns(sums.matmuls(whole))) == list(range(size))
    parts = [part for half in sums.halves(itemsize) for part in sums.matmuls(half)]
    assert sorted(columns(parts)) == list(range(size))


@pytest.mark.parametrize(
    ("unit", "size", "widths"),
    [
        (32, 32, [32]), (32, 64, [32, 32]), (32, 128, [64, 64]), (32, 256, [96, 96, 64]),
        (32, 512, [128] * 4), (128, 128, [128]), (128, 256, [128, 128]),
        (128, 448, [128, 128, 128, 64]),
    ],
)  # fmt: skip
def test_few_columns_are_in_fewer_groups(unit, size, widths):
    """All groups' matmuls are issued while one streams its columns at half the rate."""
    sums = decode_tiling.SumTiling(size, 1, TRN2.pe_tile, unit, 512)
    assert [group.size for group in sums.groups] == widths
    assert sums.group_partitions == 32


@given(st.integers(1, 9000), st.integers(-4000, 9000))
def test_two_cores_share_columns(size, ahead):
    first, second = [tiling.core_columns(size, core, 2, ahead) for core in range(2)]
    assert (first.start, first.size) == (0, second.start)
    assert second.start + second.size == size
    if size >= 256 and -size < ahead < size - 64:
        assert abs(second.size - first.size - ahead) <= 64
    whole = tiling.core_columns(size, 0, 1, ahead)
    assert (whole.start, whole.size) == (0, size)


@given(st.integers(0, 60), st.integers(2, 9000), st.sampled_from((512, 4096, 16384)), st.booleans())
def test_loads_follow_one_another(tiles, row_bytes, tile_bytes, first):
    loads = decode_tiling.Loads(tile_bytes)
    for last in (False, True):
        found = loads.tiles(tiles, row_bytes, first, last)
        starts = [0, *[s.start + s.size for s in found]]
        assert [s.start for s in found] == starts[:-1]
        assert starts[-1] == tiles
        assert all(s.size == 1 or s.size * row_bytes <= tile_bytes for s in found)
        for s in found[:1] * first + found[-1:] * last:
            assert s.size == 1 or s.size * row_bytes <= decode_tiling.EDGE_TILE_BYTES


@given(st.integers(0, 99), st.lists(st.integers(1, 20), max_size=9), st.integers(1, 9))
def test_dma_casts_one_k_tile_of_every_few(seen, loads, every):
    counts: list[int] = []
    for tiles in loads:
        counts.append(decode_tiling.cast_by_dma(seen, tiles, every))
        assert counts[-1] == len([n for n in range(seen, seen + tiles) if n % every == 0])
        assert decode_tiling.cast_by_dma(seen, tiles, 0) == 0
        seen += tiles


@given(st.integers(1, 9000), MACHINES)
def test_engines_share_casts(columns, machine):
    shares = decode_tiling.cast_shares(columns, machine.casting_mhz)
    assert [c for s in shares for c in range(s.start, s.start + s.size)] == list(range(columns))
    assert len(shares) <= (2 if machine is TRN1 else 3)


@given(
    st.integers(0, 60), st.integers(2, 9000), st.sampled_from((512, 16384)),
    st.sampled_from((1024, 3072)),
)  # fmt: skip
def test_last_loads_get_smaller(tiles, row_bytes, tile_bytes, least):
    loads = decode_tiling.Loads(tile_bytes)
    usual = loads.tiles(tiles, row_bytes, False, False)
    found = loads.tiles(tiles, row_bytes, False, False, least)
    assert [s.start for s in found] == [sum([t.size for t in found[:n]]) for n in range(len(found))]
    assert sum([s.size for s in found]) == tiles
    assert len(found) <= len(usual) + 2
    assert all(s.size * row_bytes >= least for s in found[len(usual) :])


@given(st.integers(0, 60), st.integers(2, 9000), st.sampled_from((512, 16384)), st.booleans())
def test_only_the_ends_of_a_launch_have_short_loads(tiles, row_bytes, tile_bytes, opens):
    """Of its first stage the last loads are as any, of its last the first."""

    def cut(loads: decode_tiling.Loads, first: bool, last: bool) -> list[tuple[int, int]]:
        found = loads.tiles(tiles, row_bytes, first, last, 1024)
        return [(s.start, s.size) for s in found]

    alone, between = decode_tiling.Loads(tile_bytes), decode_tiling.Loads(tile_bytes, False, False)
    usual = [(s.start, s.size) for s in alone.tiles(tiles, row_bytes, False, False)]
    assert cut(between, True, True) == usual
    end = decode_tiling.Loads(tile_bytes, opens, not opens)
    assert cut(end, not opens, opens) == usual
    own = alone.tiles(tiles, row_bytes, opens, not opens)
    assert cut(end, True, True) == [(s.start, s.size) for s in own]


@pytest.mark.parametrize("M", [1, 32, 33, 64, 65, 128])
def test_transposes_on_trn1(M):
    """TensorE writes fp32 there, and reads from partitions 0 and 64 only."""
    assert 128 // decode_tiling.column_groups(M, TRN1.pe_tile) >= 64
    problem = Problem("xuv", M, ((600, 300), (300, 200)), "bfloat16", "trn1")
    records = traced(plan_problem(problem)).schedule.cores[0].trace.records
    into = [storages[0] for form, storages, _, _ in records if form.opcode == "nc_transpose"]
    assert into
    assert {storage.layout.dtype for storage in into} == {dtypes.dtype_of("float32")}


@pytest.mark.parametrize(
    ("M", "target", "stores"),
    [
        (1, "trn1", 1),
        (1, "trn2", 1),
        (8, "trn2", 2),
        (32, "trn3", 2),
        (33, "trn2", 2),
        (65, "trn2", 1),
    ],
)
def test_the_last_sums_are_stored_by_few_dmas(M, target, stores):
    """A queue starts DMAs one after the other: four column groups share two, of one token one."""
    specs = [TensorSpec(s, dtypes.dtype_of("bfloat16")) for s in ((M, 256), (256, 1024))]
    arguments = {"block": 1024, "last_block": 1024}
    done = simulate(xw_decode, *specs, target=target, mode="trace", **arguments)
    records = done.profile.schedule.cores[0].trace.records
    found = [form.dma for form, *_ in records if form.dma and form.dma.direction == "store"]
    assert [dma.bytes for dma in found] == [M * 1024 * 2 // stores] * stores


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "M", "targets", "share", "slack_us"),
    [
        ("xuv", 1, TARGETS, 0.9, 5.5),
        ("xuv", 16, ("trn2",), 0.88, 7),
        ("xuv", 128, TARGETS, 0.88, 7.5),
        ("svd_mlp", 1, ("trn2",), 0.87, 6.5),
        ("svd_mlp", 8, ("trn3",), 0.87, 6.5),
    ],
)
def test_model_shapes_are_near_the_limit(op, M, targets, share, slack_us):
    """Share of the modelled limit, or microseconds above it. Most of the plans are shipped."""
    for target in targets:
        for name in ("Qwen3-0.6B", "Llama-3.2-1B"):
            problem = of_model(name, M, target, op)
            back = replace(problem, matrices=tuple([s[::-1] for s in problem.matrices[::-1]]))
            for each in (problem, back) if op == "xuv" else (problem,):
                time_ms, roofline_ms = plan_problem(each).time_ms, each.roofline_ms
                near = roofline_ms >= share * time_ms or time_ms <= roofline_ms + slack_us / 1e3
                assert near, f"{each}: {time_ms} ms, limit {roofline_ms} ms"


@pytest.mark.slow
def test_two_cores_are_nearly_twice_as_fast():
    one, two = [
        plan_problem(of_model("Llama-3.2-1B", 1, "trn3", lnc=lnc)).time_ms for lnc in (1, 2)
    ]
    assert one > 1.7 * two


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "target"), [*[("Llama-3.2-1B", t) for t in TARGETS], ("Llama-3.1-8B", "trn2")]
)
def test_fp8_decodes_faster_than_bf16(model, target):
    """Under both DMA models at least 1.8 times."""
    wide, narrow = [
        plan_problem(of_model(model, 1, target, weight_dtype=stored)).times_ms
        for stored in ("", FP8)
    ]
    assert min([old / new for old, new in zip(wide, narrow, strict=True)]) >= 1.8
