"""The reference of `neuronmm::decoder_layer`: values against fp64 and the kernel's, and checks."""

from typing import Any

import pytest
import torch
from attending import EPS
from decoder_layers import (
    KINDS,
    POSITIONS,
    B,
    H,
    M,
    Operands,
    cast,
    operands,
)
from test_decoder_layer import composed
from tolerances import assert_close_to_oracle, assert_same_in_fp64

import neuroncore as nc
import neuronmm_ops as nm
from neuronmm_ops.kernels.decoder_layer.decode import decoder_layer_decode
from neuronmm_ops.ops.definitions.decoder_layer import layers_of, reference
from neuronmm_ops.storages import dequantized


def plain(given: Operands, matrices: list[Any]) -> list[torch.Tensor]:
    """Results and caches of one layer by `composed`, which takes rows."""
    rows = [
        None if each is None else each.flatten(0, 1) for each in (given["x"], given["residual"])
    ]
    norms = [norm for norm in given["norms"] if norm is not None]
    tables = [given[name].flatten(0, 1) for name in ("cos", "sin")]
    shared = given["caches"], POSITIONS, matrices, given["biases"], given["window"]
    out, stream, keys, values = composed(*rows, norms, *tables, *shared)
    return [out.view(B, M, H), stream.view(B, M, H), keys, values]


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
    rows = [launched[name].flatten(0, 1) for name in ("x", "residual", "cos", "sin")]
    launched |= {name: given[name] for name in ("matrices", "scales")}
    names = ("norms", "caches", "matrices", "biases", "scales")
    lists = [tuple(launched[name]) for name in names]
    done = nc.simulate(
        decoder_layer_decode, *rows, launched["positions"], *lists, eps=EPS, target="trn2"
    )
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


def called(given: Operands) -> list[torch.Tensor]:
    return list(torch.ops.neuronmm.decoder_layer(**given))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind, layers):
    given = operands(torch.float32, **kind, layers=layers)
    torch.library.opcheck(torch.ops.neuronmm.decoder_layer.default, (), given)


@pytest.mark.parametrize("storage", ["", "fp8"])
@pytest.mark.parametrize(
    ("ranks", "layers"), [((16, 24, 40), 2), ((0, 0, 0), 1), ((16, 0, 8, 0, 0, 40, 20), 1)]
)
def test_the_simulated_op_has_the_values_of_the_reference(ranks, layers, storage):
    given = operands(torch.float32, ranks, layers=layers, storage=storage)
    on_core = cast({**given, "matrices": [], "scales": []}, torch.float32)
    on_core |= {name: given[name] for name in ("matrices", "scales")}
    with nm.use_impl("simulated", target="trn2"):
        found = [*called(on_core), *on_core["caches"]]
    for own, wanted in zip(found, [*called(given), *given["caches"]], strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("other", [(20, 8, 24), (0, 0, 0), (0, 24, 0)])
def test_layers_of_a_launch_may_differ(other):
    first, second = operands(torch.float32), operands(torch.float32, other)
    names = ("norms", "caches", "matrices", "biases", "scales")
    given = first | {name: first[name] + second[name] for name in names}
    on_core = {**given, "caches": cast(given["caches"], torch.float32)}
    with nm.use_impl("simulated", target="trn2"):
        found = [*called(on_core), *on_core["caches"]]
    for own, wanted in zip(found, [*called(given), *given["caches"]], strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", [slice(0, 8), slice(8, 14)])
def test_stages_may_be_stored_apart(first):
    given, plain_weights = operands(torch.float32, storage="int8"), operands(torch.float32)
    given["matrices"][first] = plain_weights["matrices"][first]
    given["scales"][first] = [None] * len(given["scales"][first])
    on_core = {**given, "caches": cast(given["caches"], torch.float32)}
    with nm.use_impl("simulated", target="trn2"):
        found = [*called(on_core), *on_core["caches"]]
    for own, wanted in zip(found, [*called(given), *given["caches"]], strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-4)


def test_a_stage_is_stored_alike():
    given, other = operands(torch.float32, storage="int8"), operands(torch.float32, storage="fp8")
    for name in ("matrices", "scales"):
        given[name][2:4] = other[name][2:4]
    with pytest.raises(ValueError, match=r"query, key, value must be stored alike, got torch.int8"):
        called(given)
    given["matrices"][1], given["scales"][1] = other["matrices"][1], other["scales"][1]
    with pytest.raises(ValueError, match=r"query: a pair's factors must be stored alike"):
        called(given)


def test_a_prompt_is_no_decode():
    given = operands(torch.float32)
    given |= {name: given[name].repeat(1, 3, 1) for name in ("x", "residual", "cos", "sin")}
    given["positions"] -= given["positions"]
    called(cast(given, torch.float32))
    refused = pytest.raises(ValueError, match="1 to 8 new tokens a sequence, got 9; run a prompt")
    with nm.use_impl("simulated"), refused:
        called(given)


def test_a_gradient_is_refused():
    given = operands(torch.float32)
    given["matrices"][1].requires_grad_()
    with pytest.raises(NotImplementedError, match="decoder_layer: the op has no gradient"):
        called(given)


def test_an_exported_program_changes_the_caches():
    class Step(torch.nn.Module):
        def forward(self, given: Operands) -> list[torch.Tensor]:
            return called(given)

    given, traced = operands(torch.float32), operands(torch.float32)
    program = torch.export.export(Step(), (operands(torch.float32),))
    assert "neuronmm.decoder_layer" in program.graph_module.code
    found = [*program.module()(traced), *traced["caches"]]
    for own, wanted in zip(found, [*called(given), *given["caches"]], strict=True):
        torch.testing.assert_close(own, wanted)


def test_a_graph_has_no_break_and_changes_the_caches():
    given, traced = operands(torch.float32), operands(torch.float32)
    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(traced), reference(**given)
    for own, expected in zip([*found, *traced["caches"]], [*wanted, *given["caches"]], strict=True):
        torch.testing.assert_close(own, expected)


def replaced(name: str, place: int, value: Any) -> Any:
    """A change of one tensor in a list."""

    def change(given: Operands) -> None:
        given[name][place] = value(given[name][place]) if callable(value) else value

    return change


BAD = [
    (lambda g: g.update(x=g["x"][0], residual=None), ValueError, "x and cos must have the same"),
    (lambda g: g.update(x=g["x"].long()), TypeError, "dtype must be bfloat16"),
    (lambda g: g.update(residual=g["x"][:, :2]), ValueError, r"x and residual must have the same"),
    (lambda g: g.update(positions=g["positions"][:1]), ValueError, "positions and key_cache_0,"),
    (lambda g: g.update(positions=g["positions"].long()), TypeError, "must be torch.int32"),
    (lambda g: g.update(positions=g["positions"] + 1), ValueError, r"0..T - M = 17, got \[6, 18\]"),
    (lambda g: g.update(positions=g["positions"] - 6), ValueError, r"got \[-1, 11\]"),
    (lambda g: g.update(activation="tanh"), ValueError, "activation must be one of silu"),
    (lambda g: g.update(window=-1), ValueError, "window must be 0, for all tokens, or more"),
    (lambda g: g.update(biases=g["biases"][:2]), ValueError, "biases must have 3 tensors for each"),
    (lambda g: g.update(norms=g["norms"][:2]), ValueError, "norms must have 4 tensors for each"),
    (lambda g: g.update(scales=[None]), ValueError, "scales must have 14 tensors for each layer"),
    (lambda g: g.update(matrices=[], caches=[]), ValueError, "caches must have 2 tensors for each"),
    (lambda g: g.update(sin=g["sin"][..., :8]), ValueError, "cos and sin must have the same"),
    (replaced("norms", 0, None), ValueError, "input_norm_0 must be a tensor, got None"),
    (replaced("norms", 3, None), ValueError, "norms of query and key heads come together"),
    (replaced("norms", 1, lambda t: t[:8]), ValueError, r"mlp_norm_0 must have shape \[H\]"),
    (replaced("caches", 0, lambda t: t[:1]), ValueError, "B must be the same size in positions"),
    (replaced("caches", 1, lambda t: t.mT), ValueError, "must be the same size|must equal"),
    (replaced("caches", 1, lambda t: t.float()), TypeError, "value_cache_0 must have the same dt"),
    (replaced("matrices", 1, None), ValueError, "query has no weight"),
    (replaced("matrices", 0, lambda t: t[:8]), ValueError, "last dimension of x must equal first"),
    (replaced("matrices", 0, lambda t: t.float()), TypeError, "u_query_0 must have the same dtype"),
    (replaced("matrices", 6, lambda t: t[:, :8]), ValueError, "last dimension of u_output_0 must"),
    (replaced("matrices", 7, lambda t: t.float()), TypeError, "v_output_0 must have the same dty"),
    (replaced("biases", 2, lambda t: t[:8]), ValueError, r"bias_value_0 must have shape \[C\]"),
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


def test_scales_belong_to_stored_matrices():
    given = operands(torch.float32, storage="int8")
    without = {**given, "scales": []}
    with pytest.raises(ValueError, match=r"have scales, others have none, .* no u_query_scale_0"):
        reference(**without)
    given["scales"][0] = given["scales"][0][:4]
    with pytest.raises(ValueError, match=r"u_query_scale_0 must have shape .* got .*\[4\]"):
        reference(**given)
