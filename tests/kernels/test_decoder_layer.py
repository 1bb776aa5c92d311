"""A layer of a decoder in one launch: values against fp64, one core against two, the caches."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from attending import EPS, angles, decoded, drawn, norm_weights, normalised, on
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.cases import CORES
from kernels.divided_layers import divided, joined
from quantized import nearest
from tolerances import assert_close_to_oracle
from torch import Tensor

import neuroncore as nc
from neuronmm_ops.kernels.decoder_layer import decode
from neuronmm_ops.kernels.decoder_layer.decode import decoder_layer_decode
from neuronmm_ops.storages import dequantized

DTYPES = (torch.bfloat16, torch.float32)


def pair(K, N, r, dtype, seed):
    """u and v, or None and a dense weight."""
    if r == 0:
        return [None, drawn(K, N, dtype=dtype, seed=seed, scale=K**-0.5)]
    return [
        drawn(K, r, dtype=dtype, seed=seed, scale=K**-0.5),
        drawn(r, N, dtype=dtype, seed=seed + 50, scale=r**-0.5),
    ]


def product(x: Tensor, u: Tensor | None, v: Tensor) -> Tensor:
    return x @ v if u is None else (x @ u) @ v


def composed(x, residual, norms, cos, sin, caches, positions, matrices, biases, window):
    """The layer in plain torch."""
    stream = x if residual is None else x + residual
    pairs = list(zip(matrices[::2], matrices[1::2], strict=True))
    h = normalised(stream, norms[0])
    sides = [product(h, *each) for each in pairs[:3]]
    if biases:
        sides = [side + bias for side, bias in zip(sides, biases, strict=True)]
    qkv = torch.cat(sides, 1)
    mixed, k_cache, v_cache = decoded(qkv, cos, sin, *caches, positions, norms[2:], window)
    stream = stream + product(mixed, *pairs[3])
    h = normalised(stream, norms[1])
    gate, up = [product(h, *each) for each in pairs[4:6]]
    return product(F.silu(gate) * up, *pairs[6]), stream, k_cache, v_cache


def check_layer(
    launch, dtype, heads=(4, 2, 32), H=192, inner=320, ranks=(16, 24, 40), T=200, positions=(70,),
    M=1, window=0, head_norm=False, bias=False, residual=True, storage="", schedules=0,
    tp=1, stationary=False,
):  # fmt: skip
    """Values of a layer with pairs of these ranks (qkv, output, MLP; 0: dense) on a launch.

    With `tp` above 1 ranks of tensor parallel have a part each.

    Returns what ran, and its operands and options.
    """
    (target, lnc), (nq, kv, d), B = launch, heads, len(positions)
    rows = B * M
    sizes = [(H, nq * d), (H, kv * d), (H, kv * d), (nq * d, H), (H, inner), (H, inner), (inner, H)]
    of_rank = ranks if len(ranks) == 7 else [*ranks[:1] * 3, ranks[1], *ranks[2:] * 3]
    matrices = [
        matrix
        for n, ((K, N), r) in enumerate(zip(sizes, of_rank, strict=True))
        for matrix in pair(K, N, r, dtype, 10 + n)
    ]
    x, before = [drawn(rows, H, dtype=dtype, seed=seed) for seed in (1, 2)]
    caches = [
        drawn(B, kv, d, T, dtype=dtype, seed=3),
        drawn(B, kv, T, d, dtype=dtype, seed=4),
    ]
    norms = [norm_weights(H, dtype)[0], norm_weights(H, dtype)[1]]
    norms += norm_weights(d, dtype) if head_norm else []
    biases = [drawn(N, dtype=dtype, seed=40, scale=0.2) for _, N in sizes[:3]] if bias else []
    cos, sin = angles(rows, d, dtype)
    stored, scales, exact = matrices, (), matrices
    if storage:
        rounded = [m if m is None else nearest(m, storage) for m in matrices]
        stored = [r if r is None else r[0] for r in rounded]
        scales = tuple([r if r is None else r[1] for r in rounded])
        exact = [r if r is None else dequantized(*r, torch.float64) for r in rounded]
    added = before if residual else None

    def plain(cast, weights):
        def to(tensors):
            return [t if t is None else cast(t) for t in tensors]

        tables = to([cos, sin])
        first = to([x, added])
        return composed(
            *first, to(norms), *tables, to(caches), positions, to(weights), to(biases), window
        )

    oracle = plain(Tensor.double, exact)
    low = plain(lambda t: t.to(dtype), exact)
    for b, position in enumerate(positions):
        caches[0][b, ..., position:], caches[1][b, :, position:] = 1e3, 1e3
    norms += [None] * (4 - len(norms))
    operands = [x, added, cos, sin, torch.tensor(positions, dtype=torch.int32)]
    operands += [tuple(each) for each in (norms, caches, stored, biases, scales)]
    options = {"target": target, "window": window, "eps": EPS, "schedules": schedules}
    if stationary:
        linear = (1024, 0, 1024, 0, 1024, 0, 1024, 256, 8192, 1, 0)
        options |= {"qkv_knobs": linear, "output_knobs": linear, "mlp_knobs": linear}
    kernel = on(decoder_layer_decode, lnc)
    if tp > 1:
        done = nc.simulate(kernel, *divided(operands, tp), **options, tp=tp, ranks=tp)
        out, stream, keys, values = joined(done.outputs, operands[0].shape[1])
    else:
        done = nc.simulate(kernel, *operands, **options)
        out, stream, keys, values = done.outputs
    for got, wanted, rough in ((out, oracle[0], low[0]), (stream, oracle[1], low[1])):
        assert_close_to_oracle(got, wanted, rough, wanted.abs().clamp_min(1))
    for b, position in enumerate(positions):
        own = slice(position, position + M)
        for got, wanted, rough in (
            (keys[b, ..., own], oracle[2][b, ..., own], low[2][b, ..., own]),
            (values[b, :, own], oracle[3][b, :, own], low[3][b, :, own]),
        ):
            assert_close_to_oracle(got, wanted, rough, wanted.abs().clamp_min(1))
    return done, operands, options


@pytest.mark.parametrize("launch", [("trn1", 1), ("trn2", 1), ("trn2", 2), ("trn3", 2)])
@pytest.mark.parametrize("ranks", [(16, 24, 40), (0, 0, 0), (16, 0, 0), (0, 24, 40)])
def test_values(launch, ranks):
    check_layer(launch, torch.bfloat16, ranks=ranks)


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("ranks", [(16, 24, 40), (0, 0, 0), (16, 0, 0)])
@pytest.mark.parametrize(("H", "stationary"), [(192, False), (768, False), (768, True)])
def test_layers_in_one_launch_are_those_of_several(lnc, ranks, H, stationary):
    """Of 192 features two cores hand the stream on through HBM, of 768 in SBUF."""
    sizes = {"ranks": ranks, "positions": (3, 90), "M": 2, "bias": True, "head_norm": True}
    layer = {**sizes, "heads": (4, 2, 64), "H": H, "storage": "fp8", "schedules": lnc - 1}
    _, operands, options = check_layer(
        ("trn2", lnc), torch.bfloat16, **layer, stationary=stationary
    )
    x, added, cos, sin, positions, norms, caches, *weights = operands

    def launched(x, added, caches):
        n, kernel = len(caches) // 2, on(decoder_layer_decode, lnc)
        many = [norms * n, caches, *[each * n for each in weights]]
        return nc.simulate(kernel, x, added, cos, sin, positions, *many, **options)

    def cloned():
        return tuple(cache.clone() for cache in caches)

    apart, together = [cloned(), cloned()], (cloned(), cloned())
    one = launched(x, added, apart[0])
    other = launched(*one.outputs[:2], apart[1])
    both = launched(x, added, (*together[0], *together[1]))
    assert all(map(torch.equal, both.outputs[:2], other.outputs[:2]))
    for own, found in zip(apart, together, strict=True):
        assert all(map(torch.equal, own, found))


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("storage", ["", "fp8"])
@pytest.mark.parametrize(
    "ranks",
    [
        (16, 0, 8, 0, 40, 0, 0),
        (0, 8, 0, 24, 0, 40, 16),
        (0, 0, 0, 0, 0, 0, 40),
        (8, 8, 0, 0, 8, 8, 0),
    ],
)
def test_values_of_stages_of_both_kinds(ranks, storage, lnc):
    check_layer(
        ("trn2", lnc), torch.bfloat16, ranks=ranks, storage=storage, schedules=2 * (lnc - 1)
    )


@pytest.mark.parametrize("storage", ["fp8", "int8"])
@pytest.mark.parametrize("ranks", [(16, 24, 40), (0, 0, 0)])
@pytest.mark.parametrize("lnc", [1, 2])
def test_values_in_one_byte(storage, ranks, lnc):
    check_layer(("trn2", lnc), torch.bfloat16, ranks=ranks, storage=storage)


@pytest.mark.parametrize("ranks", [(16, 24, 40), (0, 0, 0)])
@pytest.mark.parametrize(("heads", "H"), [((4, 2, 32), 192), ((4, 1, 64), 256)])
def test_no_order_of_two_cores_changes_a_value(heads, H, ranks):
    layer = {"ranks": ranks, "positions": (3, 90), "M": 2, "H": H}
    check_layer(("trn2", 2), torch.bfloat16, heads, **layer, schedules=4)


@pytest.mark.parametrize("heads", [(4, 2, 64), (6, 3, 64), (4, 1, 128), (4, 2, 32)])
@pytest.mark.parametrize("positions", [(70,), (3, 90)])
@pytest.mark.parametrize(("launch", "tp"), [(("trn1", 1), 1), (("trn2", 2), 1), (("trn3", 2), 2)])
def test_values_of_stationary_weights(heads, positions, launch, tp):
    """Heads of 64 and 128 features stay transposed, of 32 do not."""
    kinds = {"bias": True, "head_norm": True, "residual": False, "storage": "fp8"}
    heads = (heads[0] * tp, heads[1] * tp, heads[2])
    layer = {"heads": heads, "H": 512, "M": 2, "positions": positions, "tp": tp, **kinds}
    check_layer(launch, torch.bfloat16, **layer, schedules=launch[1] - 1, stationary=True)


def test_two_cores_share_the_tokens_of_transposed_heads():
    layer = {"heads": (4, 1, 64), "H": 256, "positions": (8200,), "T": 8320, "schedules": 2}
    check_layer(("trn2", 2), torch.bfloat16, **layer, stationary=True)


def test_transposed_heads_need_no_dma():
    layer = {"heads": (8, 2, 64), "H": 256, "ranks": (0, 0, 0), "inner": 256}
    done = [
        check_layer(("trn2", 2), torch.bfloat16, **layer, stationary=stationary)[0]
        for stationary in (False, True)
    ]
    rows, turned = [each.profile for each in done]
    assert turned.opcodes["dma_copy"] < rows.opcodes["dma_copy"]
    assert turned.time_ms < rows.time_ms


@pytest.mark.parametrize(
    ("launch", "heads", "positions", "ranks", "storage"),
    [
        (("trn1", 1), (8, 4, 64), (3, 90), (16, 24, 40), ""),
        (("trn1", 1), (8, 4, 64), (3, 90), (0, 0, 0), "fp8"),
        (("trn2", 2), (16, 4, 64), (3, 90), (16, 24, 40), "fp8"),
        (("trn2", 2), (16, 2, 128), (70,), (16, 24, 40), ""),
        (("trn2", 1), (48, 12, 32), (5, 70), (16, 24, 40), ""),  # two parts, several units
        (("trn2", 2), (96, 12, 16), (70, 5), (16, 24, 40), "int8"),
        (("trn2", 1), (72, 9, 16), (70,), (0, 0, 0), ""),  # a part of 64 rows
        (("trn2", 1), (16, 4, 64), (70, 5), (128, 128, 128), "int4"),
        (("trn2", 2), (16, 4, 64), (70,), (128, 128, 128), "int4"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_stays_on_chip(monkeypatch, launch, dtype, heads, positions, ranks, storage):
    monkeypatch.setattr(decode, "HeadsToHbm", None)  # the way through HBM
    H = 512 if storage == "int4" else 192
    layer = {"heads": heads, "positions": positions, "ranks": ranks, "storage": storage, "H": H}
    inner = 384 if storage == "int4" else 320
    check_layer(launch, dtype, inner=inner, **layer, schedules=launch[1] - 1)


@pytest.mark.parametrize(
    ("heads", "positions"),
    [((24, 8, 128), (70,)), ((4, 2, 128), (90, 3)), ((2, 1, 128), (70, 5)), ((12, 4, 96), (5,))],
)
@pytest.mark.parametrize(("ranks", "storage"), [((16, 24, 40), ""), ((0, 0, 0), "fp8")])
@pytest.mark.parametrize("launch", [("trn1", 1), ("trn2", 2)])
def test_attention_of_other_sizes_goes_through_hbm(
    monkeypatch, launch, heads, positions, ranks, storage
):
    monkeypatch.setattr(decode, "HeadsKept", None)
    layer = {"heads": heads, "positions": positions, "ranks": ranks, "storage": storage}
    check_layer(launch, torch.bfloat16, **layer, schedules=launch[1] - 1)


def test_layers_of_transposed_heads_have_no_barrier():
    layer = {"heads": (16, 4, 64), "H": 256, "ranks": (128, 128, 128), "inner": 256}
    done, _, _ = check_layer(("trn2", 2), torch.bfloat16, **layer, stationary=True)
    assert "core_barrier" not in done.profile.opcodes


def test_weights_come_in_short_loads_at_the_ends_of_a_launch_only():
    layer = {"heads": (8, 2, 64), "H": 1024, "inner": 512, "ranks": (0, 0, 0)}
    _, operands, options = check_layer(("trn2", 1), torch.bfloat16, **layer, stationary=True)
    many = [each * 3 for each in operands[5:]]
    done = nc.simulate(decoder_layer_decode, *operands[:5], *many, **options, mode="trace")
    loads = Counter(
        storages[template.hbm_operand].name
        for template, storages, _, _ in done.profile.schedule.cores[0].trace.records
        if template.dma
    )
    query, down = [[loads[f"matrices{14 * n + at}"] for n in range(3)] for at in (1, 13)]
    assert query == [2, 1, 1]
    assert down == [1, 1, 2]


@pytest.mark.parametrize("window", [0, 50])
def test_layers_share_what_queries_see(window):
    """What is seen by the positions and the sizes alone is not found again in each layer."""
    _, operands, options = check_layer(("trn2", 1), torch.bfloat16, window=window, M=2)

    def issued(layers):
        many = [each * layers for each in operands[5:]]
        done = nc.simulate(decoder_layer_decode, *operands[:5], *many, **options, mode="trace")
        records = done.profile.schedule.cores[0].trace.records
        own = [record for record in records if record[2].co_filename.endswith("visible.py")]
        opcodes = done.profile.opcodes
        return len(own) - opcodes["range_select"], opcodes["affine_select"]

    assert issued(3) == issued(1)


def test_sums_of_few_columns_are_exchanged_at_once():
    """Four column groups in one DMA: those of query, key, value, output, gate, up and down."""
    done, _, _ = check_layer(("trn2", 2), torch.float32, ranks=(512, 512, 512))
    assert done.profile.opcodes["sendrecv"] == 2 * 7


@pytest.mark.parametrize("lnc", [1, 2])
def test_a_layer_in_half_a_byte(lnc):
    layer = {"H": 512, "inner": 384, "heads": (4, 2, 64), "ranks": (128, 128, 128)}
    check_layer(("trn2", lnc), torch.bfloat16, storage="int4", **layer)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    "ranks",
    [
        (16, 24, 40),
        (0, 0, 0),
        (16, 8, 24, 24, 40, 50, 32),
        (16, 0, 0),
        (0, 24, 40),
        (0, 24, 0),
        (0, 0, 40),
    ],
)
@pytest.mark.parametrize("storage", ["", "fp8"])
@pytest.mark.parametrize("lnc", [1, 2])
def test_ranks_sum_what_they_have_parts_of(lnc, ranks, tp, storage):
    layer = {"heads": (8, 4, 32), "M": 2, "positions": (3, 90), "bias": True, "head_norm": True}
    check_layer(("trn2", lnc), torch.bfloat16, ranks=ranks, storage=storage, tp=tp, **layer)


@pytest.mark.parametrize("positions", [(70,), (3, 90)])
def test_a_rank_loads_its_part_of_the_stream_in_pieces(positions):
    """160 features: a piece of 128, and one of 32."""
    layer = {"H": 640, "inner": 512, "heads": (8, 4, 64), "M": 2, "positions": positions}
    check_layer(("trn2", 2), torch.bfloat16, ranks=(0, 0, 40), tp=4, **layer)


@pytest.mark.parametrize("ranks", [(16, 24, 40), (0, 0, 0)])
def test_no_order_of_ranks_and_their_cores_changes_a_value(ranks):
    check_layer(("trn2", 2), torch.bfloat16, ranks=ranks, schedules=3, tp=2)


@pytest.mark.parametrize(("ranks", "count"), [((256, 256, 256), 4), ((0, 0, 0), 2)])
def test_weights_come_while_ranks_sum(ranks, count):
    layer = {"H": 512, "inner": 2048, "ranks": ranks}
    done, _, _ = check_layer(("trn2", 1), torch.bfloat16, tp=2, **layer)
    core = done.profile.schedule.cores[0]
    opcodes = [record[0].opcode for record in core.trace.records]
    (first, *others) = [n for n, opcode in enumerate(opcodes) if opcode == "all_reduce"]
    assert len(others) + 1 == count
    loads = [n for n in range(first, len(opcodes)) if core.trace.records[n][0].dma]
    assert any(core.start[n] < core.end[first] for n in loads)


@pytest.mark.parametrize("ranks", [(16, 16, 0, 24, 40, 40, 40), (16, 16, 16, 24, 40, 0, 40)])
def test_ranks_take_stages_of_pairs_or_dense_ones(ranks):
    _, operands, options = check_layer(("trn2", 1), torch.bfloat16, ranks=ranks)
    with pytest.raises(AssertionError, match="Linears of a stage must all be pairs, or all dense"):
        nc.simulate(decoder_layer_decode, *operands, **options, tp=2, ranks=2)


@settings(max_examples=25, deadline=None)
@given(
    launch=CORES, dtype=st.sampled_from(DTYPES), heads=st.sampled_from([(2, 1, 64), (6, 3, 32)]),
    H=st.sampled_from([64, 128, 200, 512]), inner=st.sampled_from([96, 384, 700]),
    ranks=st.tuples(*[st.sampled_from([0, 8, 50])] * 7), M=st.integers(1, 4),
    positions=st.lists(st.integers(0, 130), min_size=1, max_size=3),
    window=st.sampled_from([0, 50]), head_norm=st.booleans(), bias=st.booleans(),
    residual=st.booleans(),
)  # fmt: skip
def test_any_layer(launch, dtype, M, positions, **layer):
    check_layer(launch, dtype, T=134, M=M, positions=positions, **layer)
