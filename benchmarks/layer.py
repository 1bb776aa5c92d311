"""A decoder layer of one token: one launch beside separate ones, dense and low-rank; modelled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.runner import run_all
from neuroncore import NkiValidationError, Profile, TensorSpec, simulate
from neuroncore.dtypes import dtype_of
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.estimate.attention import plan_attention
from neuronmm_ops.estimate.ends import spread, times_at
from neuronmm_ops.estimate.rms_norm import plan_rms_norm
from neuronmm_ops.kernels.simulated import simulated_kernel
from neuronmm_ops.models import SHAPES, ModelShape
from neuronmm_ops.plan import mlp_matrices, plan_op, qkv_matrices
from neuronmm_ops.plan.launches import PlannedKernel, planned_kernels
from neuronmm_ops.plan.tracing import of_least_regret
from neuronmm_ops.rank import aligned_rank

TARGET, TOKENS = "trn2", 2048
SEVERAL = 4
"""Layers in one launch, for what each more takes."""
CASES = (
    ("Llama-3.2-1B", "", 0.2),
    ("Llama-3.2-1B", "float8_e4m3fn", 0.5),
    ("Qwen3-0.6B", "", 0.2),
    ("Llama-3.1-8B", "float8_e4m3fn", 0.5),
)
"""Model, dtype of stored weights (bfloat16 without), ratio; each dense, too."""
KNOBS = (
    *("k_chunk", "dma_cast", "inner_block", "spill"),
    *("rank_block", "fuse", "block", "last_block", "tile_bytes", "stationary"),
)
"""Of a stage of the layer's kernel, in its order, with what a plan without one leaves as it is."""
OTHERWISE = {"k_chunk": 1024, "inner_block": 512, "rank_block": 1024, "block": 1024} | {
    "last_block": 1024, "tile_bytes": 16384,
}  # fmt: skip


class ModelledLayer(NamedTuple):
    """A layer on one launch.

    Attributes:
        model: its shape.
        stored: dtype of stored weights, or "".
        ratio: of every Linear; 0 where they are dense.
        lnc: cores.
    """

    model: str
    stored: str
    ratio: float
    lnc: int

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        return SHAPES[self.model]

    @property
    def machine(self) -> Any:
        """Options of a plan."""
        return {"target": TARGET, "lnc": self.lnc}

    def rank(self, name: str) -> int:
        """Of a Linear; 0 where it is dense."""
        return (aligned_rank(*self.shape.projections[name], self.ratio) or 0) if self.ratio else 0


def run(progress: Progress | None = None) -> list[dict[str, Any]]:
    """Rows of all cases: dense and low-rank, on one core and on two.

    Args:
        progress: called with ("layers", layers done, layers in all).
    """
    layers = [
        ModelledLayer(model, stored, ratio, lnc)
        for model, stored, kept in CASES
        for ratio in (0.0, kept)
        for lnc in (1, 2)
    ]
    return list(run_all("layers", row, layers, progress))


def row(layer: ModelledLayer) -> dict[str, Any]:
    """What a layer takes in separate launches, and in one of their plans' arguments."""
    launches = separate(layer)
    apart = [times_at(launch.profile(TARGET)) for launch in launches]
    apart_ms = [sum(each) for each in zip(*apart, strict=True)]
    profiles = list(one_launch(layer))
    number, _ = of_least_regret([times_at(profile) for profile in profiles])
    one, several = profiles[number], list(one_launch(layer, SEVERAL))[number]
    both = zip(times_at(several), times_at(one), strict=True)
    more_ms = [(many - first) / (SEVERAL - 1) for many, first in both]
    return {
        **layer._asdict(),
        "target": TARGET,
        "tokens": TOKENS,
        "launches": len(launches),
        "separate_ms": apart_ms[0],
        "separate_range_ms": spread(apart_ms),
        "one_ms": one.time_ms,
        "one_range_ms": spread(times_at(one)),
        "more_ms": more_ms[0],
        "more_range_ms": spread(more_ms),
        "bound_ms": one.hbm_bytes / one.dma_peak_gbps / 1e6,
    }


def separate(layer: ModelledLayer) -> list[PlannedKernel]:
    """The launches of today's ops and kernels."""
    shape, machine = layer.shape, layer.machine
    norm = plan_rms_norm(1, shape.hidden_size, residual=True, **machine)
    attention = plan_attention(
        1,
        TOKENS,
        batch=1,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        head_norm=shape.head_norm,
        **machine,
    )
    linears = [launch for planned in stages(layer).values() for launch in planned]
    return [norm, norm, *attention, *linears]


def stages(layer: ModelledLayer) -> dict[str, list[PlannedKernel]]:
    """The launch of each stage of Linears, as it is planned."""
    sizes, H = layer.shape.projections, layer.shape.hidden_size
    inner = sizes["gate_proj"][1]
    qkv, mlp = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
    outputs: Any = tuple([sizes[name][1] for name in qkv])
    if layer.ratio:
        of_qkv: Any = tuple([layer.rank(name) for name in qkv])
        of_mlp: Any = tuple([layer.rank(name) for name in mlp])
        r, (K, N) = layer.rank("o_proj"), sizes["o_proj"]
        problems: Mapping[str, tuple[str, Any]] = {
            "qkv": ("svd_qkv", qkv_matrices(H, of_qkv, outputs)),
            "output": ("xuv", ((K, r), (r, N))),
            "mlp": ("svd_mlp", mlp_matrices(H, of_mlp, inner, H)),
        }
    else:
        problems = {
            "qkv": ("xw", ((H, sum(outputs)),)),
            "output": ("xw", (sizes["o_proj"],)),
            "mlp": ("mlp", ((H, inner), (H, inner), (inner, H))),
        }
    options: Any = {**layer.machine, "weight_dtype": layer.stored}
    return {
        name: planned_kernels(plan_op(op, 1, matrices, **options))
        for name, (op, matrices) in problems.items()
    }


def one_launch(layer: ModelledLayer, count: int = 1) -> Iterator[Profile]:
    """Such layers in one launch: with their stages' arguments, and with weights that all move."""
    kernel = simulated_kernel("decoder_layer", "decoder_layer_decode", layer.lnc)
    planned = {name: launches[0].arguments for name, launches in stages(layer).items()}
    for moving in (False, True):
        changed = {"stationary": False} if moving else {}
        knobs: Any = {
            f"{name}_knobs": knobs_of({**each, **changed}) for name, each in planned.items()
        }
        try:
            yield simulate(
                kernel, *operands(layer, count), target=TARGET, mode="trace", **knobs
            ).profile
        except NkiValidationError:  # it does not fit
            if not moving:
                raise


def knobs_of(arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """A stage's knobs, from the arguments of its own kernel."""
    named = {**arguments, "fuse": arguments.get("fuse_gate_up", arguments.get("fuse", 0))}
    return tuple([int(named.get(name, OTHERWISE.get(name, 0))) for name in KNOBS])


def operands(layer: ModelledLayer, count: int) -> list[Any]:
    """Operands of so many layers, without values."""
    shape, d = layer.shape, layer.shape.head_dim
    H, kv = shape.hidden_size, shape.kv_heads

    def spec(*sizes: int, dtype: str = "bfloat16") -> TensorSpec:
        return TensorSpec(sizes, dtype_of(dtype))

    of_head = spec(d) if shape.head_norm else None
    matrices: list[TensorSpec | None] = []
    scales: list[TensorSpec | None] = []
    for name, (K, N) in shape.projections.items():
        r = layer.rank(name)
        for size in ((K, r), (r, N)) if r else (None, (K, N)):
            matrices.append(size and spec(*size, dtype=layer.stored or "bfloat16"))
            scales.append(size and spec(size[1], dtype="float32"))
    caches = spec(1, kv, d, TOKENS), spec(1, kv, TOKENS, d)
    x, table = spec(1, H), spec(1, d)
    norms = (spec(H), spec(H), of_head, of_head)
    lists = norms, caches, tuple(matrices), (), tuple(scales) if layer.stored else ()
    return [x, x, table, table, spec(1, dtype="int32"), *[each * count for each in lists]]
