"""What is run on a device: the kernels of all ops, from small to real sizes, smallest first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from neuroncore.hardware import resolve_target
from neuronmm_ops.device import layer
from neuronmm_ops.kernels import problems
from neuronmm_ops.kernels.problem import Problem
from neuronmm_ops.models import SHAPES, ModelShape
from neuronmm_ops.rank import aligned_rank
from neuronmm_ops.storages import STORAGES

RATIO = 0.2
SMALL = ModelShape("small", 256, 640, 1, 4, 2, 64, 0, tied=True)
"""Sizes that are no multiples of the kernels' tiles, and take a device no time."""
SIZES = (
    (SMALL, (1, 200), 40),
    (SHAPES["Qwen3-0.6B"], (1, 512), 128),
    (SHAPES["Llama-3.2-1B"], (1, 512), 128),
)
"""Each with its tokens, of decode and of prefill, and the block of its ranks."""
STORED = {"bf16": "", **{name: STORAGES[name].dtype for name in ("fp8", "int8")}}
LOW_RANK = ("xuv", "svd_qkv", "svd_mlp")
OPS = ("xw", "mlp", *LOW_RANK)


@dataclass(frozen=True)
class KernelCase:
    """A problem whose kernel is run: its values are compared, and its time."""

    name: str
    problem: Problem


def kernel_cases(target: str) -> list[KernelCase]:
    """Layers, then every op in bfloat16 and one byte at each of `SIZES`, low rank on two cores.

    Raises:
        ValueError: a target that is none.
    """
    machine = resolve_target(target)
    layers = [
        KernelCase(
            f"{layer.OP} of {SMALL.name}, {kind}, M=1, {stored}",
            layer.problem(SMALL, ratio, 40, machine.target, STORED[stored]),
        )
        for kind, ratio in (("dense", 0.0), ("low rank", RATIO))
        for stored in STORED
    ]
    one_core = product(SIZES, OPS, (1,))
    two_cores = product(SIZES[-1:], LOW_RANK, (2,)) if machine.has("paired_cores") else ()
    return layers + [
        KernelCase(
            f"{op} of {shape.name}, M={M}, {stored}" + ", 2 cores" * (lnc == 2),
            Problem(
                *(op, M, _matrices(op, shape, block), "bfloat16", machine.target, lnc),
                weight_dtype=STORED[stored],
            ),
        )
        for (shape, tokens, block), op, lnc in (*one_core, *two_cores)
        for M, stored in product(tokens, STORED)
    ]


def _matrices(op: str, shape: ModelShape, block: int) -> problems.Matrices:
    """Shapes of an op's weights in a model; xw and xuv are its gate."""
    sizes = shape.projections
    K, inner = sizes["gate_proj"]

    def rank(name: str) -> int:
        r = aligned_rank(*sizes[f"{name}_proj"], RATIO, block)
        assert r is not None, f"no rank of {shape.name}'s {name}"
        return r

    if op == "xw":
        return ((K, inner),)
    if op == "mlp":
        return ((K, inner), (K, inner), (inner, K))
    if op == "xuv":
        return problems.xuv(K, rank("gate"), inner)[1]
    if op == "svd_mlp":
        return problems.mlp_matrices(K, (rank("gate"), rank("up"), rank("down")), inner, K)
    outputs = sizes["q_proj"][1], sizes["k_proj"][1], sizes["v_proj"][1]
    return problems.qkv_matrices(K, (rank("q"), rank("k"), rank("v")), outputs)
