"""Prefill with activations rounded to fp8, two rows a matmul: values, plans and speed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.cases import (
    ACTIVATIONS,
    DTYPES,
    OPS,
    Case,
    Operands,
    biased,
    composed,
    drawn,
    matrices_of,
    of_model,
    rounded_rows,
    run,
)

from neuronmm_ops.plan import Problem, mlp_matrices, plan_problem

FP8 = {"weight_dtype": "float8_e4m3fn", "compute": "fp8"}
launches = st.sampled_from([("trn2", 1), ("trn2", 2), ("trn3", 1), ("trn3", 2)])
sizes = st.integers(1, 500)


def check(case: Case) -> None:
    """Compare with fp64 products of activations that are rounded in the same places.

    Sums in another order move an activation by an ulp of x's dtype, and with it, rarely, over a
    boundary of e4m3, whose steps are 2^-3 of a value at most: so much a token may be off, whose
    result may be of one activation. Most have none and are as near as without rounding, and all
    together are off by 2^-6: with 2^-8 of the steps crossed by an ulp of bfloat16, half of
    2^-3 * sqrt(2^-8). Rounding itself is an error of 2^-5.
    """
    given = drawn(case)
    actual = run(case, given).outputs.double()
    oracle, plain = composed(case, given, exact=True), composed(case, given, exact=False)
    eps = torch.finfo(given.x.dtype).eps
    errors = (actual - oracle).abs().amax(1)
    # the plain composition has such activations, too: its typical token has none
    typical = (plain - oracle).abs().amax(1).median()
    size = composed(case, given, exact=True, absolute=True)
    near = errors <= 4 * eps * size.amax(1) + 2 * typical
    assert near.double().mean() >= 0.75
    norms = (actual - oracle).norm(dim=1)
    # MLPs round the inputs of gate and up, and their product, whose few terms may cancel
    is_mlp = case.problem.op in ("svd_mlp", "mlp")
    most = ((1 + 2**-3) ** 3 - 1) * size.norm(dim=1) if is_mlp else 2**-3 * oracle.norm(dim=1)
    assert bool((norms <= most + 1e-30).all())
    assert float(norms.square().sum()) <= 2**-12 * float(oracle.square().sum()) + 1e-30


@st.composite
def cases(draw: st.DrawFn) -> Case:
    op, (target, lnc) = draw(st.sampled_from((*OPS, "mlp"))), draw(launches)
    ranks = draw(sizes), draw(sizes), draw(sizes)
    inner = draw(st.integers(1, 1400))
    outputs = draw(sizes), draw(sizes), draw(sizes)
    matrices, others = matrices_of(op, draw(sizes), ranks, outputs, inner), ()
    if op == "mlp":
        (K, _), K_up = matrices[0], draw(st.none() | sizes)
        others = () if K_up is None else (("x_up", (-1, K_up), ""),)
        matrices = ((K, inner), (K_up or K, inner), (inner, outputs[0]))
    dtype, options = draw(st.sampled_from(DTYPES)), {**FP8, "others": others}
    problem = Problem(op, draw(st.integers(1, 1200)), matrices, dtype, target, lnc, **options)
    blocks = {
        "double_row": True,
        "token_block": draw(st.sampled_from([128, 512, 1024, 1536])),
        "token_tiles": draw(st.sampled_from([1, 2, 4])),
    }
    if op == "svd_mlp":
        blocks["spill"] = draw(st.integers(0, inner // 512))
        blocks["v_block"] = draw(st.sampled_from([128, 640, 1280]))
    if op == "mlp":
        blocks["spill"] = draw(st.integers(0, inner // 512))
        blocks["inner_block"] = draw(st.sampled_from([128, 640, 1280]))
    return Case(problem, op != "mlp" and draw(biased(op)), blocks=blocks)


@pytest.mark.slow
@settings(max_examples=8)
@given(cases())
def test_any_size(case):
    check(case)


DENSE = ((300, 700), (300, 700), (700, 150))
OF_OPS = {"svd_mlp": mlp_matrices(300, (200, 130, 256), 700, 150), "mlp": DENSE}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("op", OF_OPS)
def test_activations(op, activation, dtype):
    problem = Problem(op, 600, OF_OPS[op], dtype, "trn2", **FP8)
    check(Case(problem, activation=activation, blocks={"double_row": True, "token_block": 1024}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_tokens_are_rounded_bit_for_bit(target, dtype):
    """Products with the identity show what each activation is rounded to."""
    K, M = 256, 200
    problem = Problem("xw", M, ((K, K),), dtype, target, **FP8)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((M, K), generator=generator)
    x *= torch.exp2(torch.arange(M).float() % 17 - 8)[:, None]
    x[:, 0] *= 10  # an outlier
    x[0] = 0
    x[1] = 1.0  # an rms that is a power of two
    x[2], x[2, 7] = 0, 3.0  # all of it in one feature
    x = x.to(getattr(torch, dtype))
    given = Operands(x, [torch.eye(K).to(torch.float8_e4m3fn)], [torch.ones(K)], None)
    found = run(Case(problem, blocks={"double_row": True}), given).outputs
    expected = rounded_rows(x)
    # where the mean of squares is next to a power of 4 either scale may be found; normal numbers of
    # e4m3 are the same with both
    scale = x.float().square().mean(1, keepdim=True).sqrt()
    normal = x.float().abs() >= 2**-4 * scale
    assert torch.equal(torch.where(normal, found, 0), torch.where(normal, expected, 0))
    same = (found == expected).all(1)
    assert same[:3].all()
    assert same.double().mean() > 0.97


def test_weights_of_another_dtype_are_refused():
    problem = Problem("xuv", 8, ((64, 16), (16, 32)), target="trn2", weight_dtype="int8")
    case = Case(problem, blocks={"double_row": True})
    with pytest.raises(AssertionError, match="double_row needs float8_e4m3fn weights, got int8"):
        run(case, drawn(case))


MATRICES = mlp_matrices(1024, (768, 768, 768), 3072, 1024)


@pytest.mark.slow
def test_plans_of_any_token_count_and_a_loop():
    for M, lnc in ((1000, 1), (2304, 2)):
        plan = plan_problem(Problem("svd_mlp", M, MATRICES, target="trn2", lnc=lnc, **FP8))
        assert plan.arguments["double_row"]
    long = Problem("svd_mlp", 4096, MATRICES, target="trn2", **FP8)
    looped = plan_problem(long, 1500, device_loop=True)
    assert looped.arguments["device_loop"]
    assert looped.arguments["double_row"]
    assert looped.instructions <= 1500


@pytest.mark.parametrize(("target", "compute"), [("trn1", "fp8"), ("trn2", "x"), ("trn3", "x")])
def test_is_planned_where_it_is_allowed_only(target, compute):
    options = {**FP8, "compute": compute}
    plan = plan_problem(Problem("svd_mlp", 1000, MATRICES, target=target, **options))
    assert "double_row" not in plan.arguments


def test_tokens_too_long_for_fp8_are_not_rounded():
    problem = Problem("xuv", 512, ((60000, 128), (128, 128)), target="trn2", **FP8)
    assert "double_row" not in plan_problem(problem).arguments


# of a model, how much quicker than with 16 bits, both DMA models: its ranks bind
SPEEDS = [("Qwen3-0.6B", 1.21), ("Llama-3.2-1B", 1.8)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), SPEEDS)
def test_is_as_much_quicker_as_said(name, least):
    plain = plan_problem(of_model(name, 1024, "trn2"))
    plan = plan_problem(of_model(name, 1024, "trn2", **FP8))
    both = zip(plain.times_ms, plan.times_ms, strict=True)
    assert min([before / after for before, after in both]) >= least
