"""The reference of `neuronmm::decoder_layer`: values against fp64 and the kernel's, and checks."""

from typing import Any

import pytest
import torch
from attending import EPS, angles, drawn, norm_weights
from quantized import nearest
from test_decoder_layer import composed
from tolerances import assert_close_to_oracle, assert_same_in_fp64

import neuroncore as nc
from neuronmm_ops.kernels.decoder_layer.decode import decoder_layer_decode
from neuronmm_ops.ops.definitions.decoder_layer import layers_of, reference
from neuronmm_ops.storages import dequantized

B, M, H, HEADS, KV, D, T, INNER = 2, 3, 64, 4, 2, 32, 20, 96
POSITIONS = [5, 17]
"""Of each sequence; the last one's new tokens fill its cache."""
SIZES = [(H, HEADS * D), (H, KV * D), (H, KV * D), (HEADS * D, H), (H, INNER), (H, INNER)]
SIZES += [(INNER, H)]
Operands = dict[str, Any]


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A copy of operands, floats in another dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value.clone()
    if isinstance(value, dict):
        return {name: cast(each, dtype) for name, each in value.items()}
    if isinstance(value, list):
        return [cast(each, dtype) for each in value]
    return value


def operands(
    dtype: torch.dtype = torch.float64, ranks: tuple[int, int, int] = (16, 24, 40),
    head_norm: bool = True, bias: bool = True, residual: bool = True, storage: str = "",
    layers: int = 1, window: int = 0,
) -> Operands:  # fmt: skip
    """Operands of `reference` by name; pairs of these ranks (qkv, output, MLP; 0: dense)."""
    of_rank = [ranks[0]] * 3 + [ranks[1]] + [ranks[2]] * 3
    given: Operands = {"norms": [], "caches": [], "matrices": [], "biases": [], "scales": []}
    for layer in range(layers):
        seed = 100 * layer
        heads = norm_weights(D, dtype) if head_norm else [None, None]
        given["norms"] += [*norm_weights(H, dtype), *heads]
        given["caches"].append(drawn(B, KV, D, T, dtype=dtype, seed=seed + 3))
        given["caches"].append(drawn(B, KV, T, D, dtype=dtype, seed=seed + 4))
        for n, ((K, N), r) in enumerate(zip(SIZES, of_rank, strict=True)):
            sizes = [(K, r), (r, N)] if r else [None, (K, N)]
            for side, size in enumerate(sizes):
                if size is None:
                    given["matrices"].append(None)
                    given["scales"].append(None)
                    continue
                own = seed + 10 + 20 * side + n
                matrix, scale = drawn(*size, dtype=dtype, seed=own, scale=size[0] ** -0.5), None
                if storage:
                    matrix, scale = nearest(matrix, storage)
                given["matrices"].append(matrix)
                given["scales"].append(scale)
        if bias:
            given["biases"] += [
                drawn(N, dtype=dtype, seed=seed + 60 + n, scale=0.2)
                for n, (_, N) in enumerate(SIZES[:3])
            ]
    if not storage:
        given["scales"] = []
    x, before = [drawn(B, M, H, dtype=dtype, seed=seed) for seed in (1, 2)]
    tables = [table.view(B, M, D) for table in angles(B * M, D, dtype)]
    given |= {"x": x, "residual": before if residual else None, "rotary": tables}
    given |= {"positions": torch.tensor(POSITIONS, dtype=torch.int32), "eps": EPS}
    return given | {"window": window}


def plain(given: Operands, matrices: list[Any]) -> list[torch.Tensor]:
    """Results and caches of one layer by `composed`, which takes rows."""
    rows = [
        None if each is None else each.flatten(0, 1) for each in (given["x"], given["residual"])
    ]
    norms = [norm for norm in given["norms"] if norm is not None]
    tables = [table.flatten(0, 1) for table in given["rotary"]]
    shared = given["caches"], POSITIONS, matrices, given["biases"], given["window"]
    out, stream, keys, values = composed(*rows, norms, *tables, *shared)
    return [out.view(B, M, H), stream.view(B, M, H), keys, values]


KINDS = [
    {},
    {"ranks": (0, 0, 0), "head_norm": False},
    {"ranks": (16, 0, 40), "bias": False},
    {"residual": False},
    {"window": 4},
]


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_a_layer_in_fp64(kind):
    given = operands(**kind)
    wanted = plain(given, given["matrices"])
    found = [*reference(**given), *given["caches"]]
    for own, expected in zip(found, wanted, strict=True):
        assert_same_in_fp64(own, expected)


@pytest.mark.parametrize("storage", ["", "fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ranks", [(16, 24, 40), (0, 0, 0)])
def test_a_narrow_dtype_is_as_accurate_as_plain_torch(ranks, dtype, storage):
    given = operands(dtype, ranks, storage=storage)
    scales = given["scales"] or [None] * 14
    stored = list(zip(given["matrices"], scales, strict=True))
    exact = cast(given, torch.float64)
    weights = [m if m is None else dequantized(m, s, torch.float64).double() for m, s in stored]
    oracle, rough = plain(exact, weights), plain(given, cast(weights, dtype))
    found = [*reference(**given), *given["caches"]]
    for own, wide, low in zip(found, oracle, rough, strict=True):
        assert_close_to_oracle(own, wide, low, wide.abs().clamp_min(1))


@pytest.mark.parametrize("storage", ["", "fp8"])
@pytest.mark.parametrize("ranks", [(16, 24, 40), (0, 0, 0)])
def test_values_are_the_kernels(ranks, storage):
    given = operands(torch.float32, ranks, storage=storage)
    launched = cast({**given, "matrices": [], "scales": []}, torch.float32)
    rows = [launched[name].flatten(0, 1) for name in ("x", "residual")]
    tables = tuple(table.flatten(0, 1) for table in launched["rotary"])
    lists = [(tuple(launched[name]),) for name in ("norms", "caches")]
    matrices, scales = (tuple(given["matrices"]),), (tuple(given["scales"]),) if storage else ()
    done = nc.simulate(
        decoder_layer_decode, *rows, lists[0], tables, lists[1], launched["positions"],
        matrices, scales, (tuple(launched["biases"]),), eps=EPS, target="trn2",
    )  # fmt: skip
    found = [each.flatten(0, 1) for each in reference(**given)] + given["caches"]
    for own, kernels in zip(found, done.outputs, strict=True):
        torch.testing.assert_close(own, kernels, rtol=1e-4, atol=1e-4)


def test_layers_of_one_call_are_those_of_several():
    together = operands(layers=2)
    apart = cast(together, torch.float64)
    added, stream = reference(**together)
    x, residual = apart["x"], apart["residual"]
    sizes = {"norms": 4, "caches": 2, "matrices": 14, "biases": 3}
    for n in range(2):
        lists = {name: apart[name][n * size : (n + 1) * size] for name, size in sizes.items()}
        x, residual = reference(**{**apart, **lists, "x": x, "residual": residual})
    assert torch.equal(added, x)
    assert torch.equal(stream, residual)
    assert all(map(torch.equal, together["caches"], apart["caches"]))
    assert len(layers_of(*[together[name] for name in (*sizes, "scales")])) == 2


def test_a_graph_has_no_break_and_changes_the_caches():
    given, traced = operands(torch.float32), operands(torch.float32)
    compiled = torch.compile(reference, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(**traced), reference(**given)
    for own, expected in zip([*found, *traced["caches"]], [*wanted, *given["caches"]], strict=True):
        torch.testing.assert_close(own, expected)


def replaced(name: str, place: int, value: Any) -> Any:
    """A change of one tensor in a list."""

    def change(given: Operands) -> None:
        given[name][place] = value(given[name][place]) if callable(value) else value

    return change


BAD = [
    (lambda g: g.update(x=g["x"][0]), ValueError, r"x must have shape \[B, M, H\]"),
    (lambda g: g.update(x=g["x"].long()), TypeError, "dtype must be a float"),
    (lambda g: g.update(residual=g["x"][:, :2]), ValueError, r"residual must be \[2, 3, 64\]"),
    (lambda g: g.update(positions=g["positions"][:1]), ValueError, r"\[1\] for a batch of 2"),
    (lambda g: g.update(positions=g["positions"].long()), TypeError, "must be torch.int32"),
    (lambda g: g.update(positions=g["positions"] + 1), ValueError, r"0..T - M = 17, got \[6, 18\]"),
    (lambda g: g.update(positions=g["positions"] - 6), ValueError, r"got \[-1, 11\]"),
    (lambda g: g.update(rotary=g["rotary"][:1]), ValueError, "rotary must be cos and sin"),
    (lambda g: g.update(activation="tanh"), ValueError, "activation must be one of silu"),
    (lambda g: g.update(window=-1), ValueError, "window must be 0, for all tokens, or more"),
    (lambda g: g.update(biases=g["biases"][:2]), ValueError, "biases must hold 3 a layer, or none"),
    (lambda g: g.update(norms=g["norms"][:2]), ValueError, "norms must hold 4 a layer, 4 for 1"),
    (lambda g: g.update(scales=[None]), ValueError, "scales must hold 14 a layer"),
    (replaced("rotary", 1, lambda t: t[..., :8]), ValueError, r"sin must be \[2, 3, 32\]"),
    (replaced("norms", 0, None), ValueError, "norm before attention must be a tensor"),
    (replaced("norms", 3, None), ValueError, "norms of query and key heads come together"),
    (replaced("norms", 1, lambda t: t[:8]), ValueError, r"a norm of the stream must be \[64\]"),
    (replaced("caches", 0, lambda t: t[:1]), ValueError, r"layer 0: keys must be \[2, 2, 32, 20\]"),
    (replaced("caches", 1, lambda t: t.mT), ValueError, r"values must be \[2, 2, 20, 32\]"),
    (replaced("caches", 1, lambda t: t.float()), TypeError, "values must be torch.float64 on cpu"),
    (replaced("matrices", 1, None), ValueError, "query has no weight"),
    (replaced("matrices", 0, lambda t: t[:8]), ValueError, r"query must be \[64, 128\], got \[8"),
    (replaced("matrices", 0, lambda t: t.float()), ValueError, "query, key, value must be all"),
    (replaced("matrices", 6, lambda t: t[:, :8]), ValueError, "output: u has 8 columns, v 24 rows"),
    (replaced("matrices", 7, lambda t: t.float()), TypeError, "output must be torch.float64, or"),
    (replaced("biases", 2, lambda t: t[:8]), ValueError, r"bias of value must be \[64\]"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_one_line_before_a_cache_changes(change, error, message):
    given = operands()
    change(given)
    before = [cache.clone() for cache in given["caches"]]
    with pytest.raises(error, match=message) as caught:
        reference(**given)
    assert str(caught.value).startswith("decoder_layer: ")
    assert "\n" not in str(caught.value)
    assert all(map(torch.equal, before, given["caches"]))


def test_a_cache_shorter_than_the_new_tokens_is_refused():
    given = operands()
    given["caches"] = [given["caches"][0][..., :2], given["caches"][1][..., :2, :]]
    with pytest.raises(ValueError, match=r"room for 3 new tokens, got T = 2; make T larger"):
        reference(**given)


def test_a_pair_as_wide_as_its_features_is_refused():
    with pytest.raises(ValueError, match=r"query: a pair's rank .* rank 64 of \[64, 128\]; make"):
        reference(**operands(ranks=(64, 24, 40)))


def test_kinds_of_a_stage_are_not_mixed():
    given, dense = operands(), operands(ranks=(0, 0, 0))
    given["matrices"][2:4] = dense["matrices"][2:4]
    with pytest.raises(ValueError, match=r"query, key, value must be all pairs or all dense"):
        reference(**given)


def test_scales_belong_to_stored_matrices():
    given = operands(torch.float32, storage="int8")
    without = {**given, "scales": []}
    with pytest.raises(ValueError, match="query: stored matrices have scales, others none"):
        reference(**without)
    given["scales"][0] = given["scales"][0][:4]
    with pytest.raises(ValueError, match=r"query: the scale must be \(16,\), got \[4\]"):
        reference(**given)
