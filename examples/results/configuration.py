"""The README's numbers: quality, size and speed of one checkpoint, which `make demo` writes."""

import math

from measured import excess_share
from selection import Row, document, gain_as_served
from sources import (
    COMPRESSED,
    DENSE,
    SHOWN,
    TARGET,
    evaluate_command,
    machine_of,
    model_command,
    of_checkpoint,
)
from writing import ranged, span

from neuronmm_ops.plan.linear import Linear

RATIO = 0.4
"""Of the checkpoint."""


def configuration() -> list[str]:
    """What the numbers are of, then a number a line; nothing where data are missing."""
    if any(document(name) is None for name in ("configuration", "methods", "generate")):
        return []
    return [_introduction(), *(f"- {line}" for line in (_quality(), _size(), _here(), *_there()))]


def _introduction() -> str:
    return (
        f"One configuration: `{COMPRESSED}`, which `make demo` writes: the default method at ratio "
        f"{RATIO:g} on the MLPs of a small Llama."
    )


def _quality() -> str:
    dense, own = (
        document("configuration", evaluate_command(name))["ppl_token"]
        for name in (DENSE, COMPRESSED)
    )
    share, baseline = excess_share(math.log(own / dense), RATIO)
    removed = _modelled()["checkpoint"]["effective_ratio"]
    return (
        f"**Quality**: perplexity {own:.2f}, dense {dense:.2f}: **{share:.2f}x** the excess "
        f"log-perplexity of SVD-LLM with uniform ranks, with {removed:.1%} instead of "
        f"{baseline['effective_ratio']:.1%} of the MLP parameters removed (*measured*)"
    )


def _size() -> str:
    before, after = (row["bytes"] / 1e6 for row in _generated())
    own = _modelled()["checkpoint"]
    share = own["matrix_bytes"] / own["dense_matrix_bytes"]
    variants = {row["name"]: row for row in _modelled()["variants"]}
    mlp = [row for row in variants["dense_one_byte"]["linears"] if row["dtype"] != "bfloat16"]
    stored, wide = (
        sum(row["layers"] * Linear(row["K"], row["N"], None, dtype).bytes for row in mlp)
        for dtype in (mlp[0]["dtype"], "")
    )
    return (
        f"**Size**: **{after:.1f} MB** of weights, dense {before:.1f} (*measured*); its MLPs have "
        f"{share:.2f} of their bytes. Dense fp8 has {stored / wide:.2f} of bf16's"
    )


def _here() -> str:
    _, own = _generated()
    prefill, decode = (own["speedup"][phase] for phase in ("prefill", "decode"))
    return (
        f"**Speed on a CPU**: prefill **{prefill['median']:.2f}x** "
        f"({span(prefill['low'], prefill['high'])}), decode {decode['median']:.2f}x "
        f"({span(decode['low'], decode['high'])}) (*measured*, {machine_of('generate')}, "
        f"{own['compute_dtype']})"
    )


def _there() -> list[str]:
    own = _modelled()["speedups"]
    bf16, fp8 = (
        document("configuration", model_command(SHOWN, RATIO, storage, "mlp"))
        for storage in ("bf16", "fp8")
    )
    large, split = bf16["speedups"]["ours"], fp8["speedups"]
    return [
        f"**Speed on a {TARGET} core** (*modelled*): prefill {ranged(own['ours']['prefill'])}, "
        f"decode {ranged(own['ours']['decode'])}; dense fp8 decodes at "
        f"{ranged(own['storage']['decode'])}. So small a model waits for launches",
        f"**At {SHOWN}'s shape** (*modelled*; uniform ranks, its weights are not at hand), same "
        f"ratio and MLPs: prefill **{ranged(large['prefill'])}**, decode "
        f"**{ranged(large['decode'])}**, {gain_as_served(bf16)} as served. MLPs dense in fp8 "
        f"decode at {ranged(split['storage']['decode'])}; pairs in fp8 at "
        f"{ranged(split['ours']['decode'])}, of which rank is {ranged(split['rank']['decode'])}",
    ]


def _modelled() -> Row:
    return document("configuration", of_checkpoint())


def _generated() -> list[Row]:
    """The dense model and the checkpoint."""
    return document("generate")
