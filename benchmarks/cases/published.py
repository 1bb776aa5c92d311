"""Every published measurement that the simulated core can be held against, and its run.

Each is of a group: "fitted" fixed a constant of `hardware`; "predicted" fixed none, but was known
while the model was made; "held out" was read after it, and what is read from now on is put there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.baselines import convolution, mamba, matmul, profiles
from benchmarks.cases import figure1
from neuroncore import Kernel, TensorSpec
from neuroncore.calibration import profiled
from neuroncore.calibration.cases import of_simulator
from neuroncore.calibration.published import PUBLISHED, TARGET
from neuroncore.dtypes import DType, bfloat16, float32
from neuronmm_ops.estimate.baselines import neuronmm

TUTORIAL = "AWS matmul tutorial, SDK 2.26"
GUIDE = "AWS kernel optimization guide, SDK 2.32"
AUTOTUNE = "awslabs/nki-autotune, kernel_library"
DMA = "AWS DMA overview, SDK 2.32"
PERFORMANCE = "AWS performance guide, SDK 2.32"
MAMBA = "AWS Mamba tutorial, SDK 2.20"
QUERYING = "aws-neuron/neuron-agentic-development, neuron-nki-profile-querying"
SEARCHED = "ucb-bar/autocomp, dd26a565"
CONVOLVED = "UC Berkeley, How to speed up 1D convolution on Trainium by 17x, 2025-11-17"
RESHAPED = "dinghongsong, awslabs/nki-autotune, issue 25"

Measure = Literal["time", "transfer", "trigger to done", "instruction", "interval", "active", "MFU"]
Group = Literal["fitted", "predicted", "held out"]


@dataclass(frozen=True)
class Evidence:
    """One published figure and the run that predicts it.

    Attributes:
        name: what was measured.
        fact: figures of one kernel, which hold or fail together, are one fact.
        target: on which core.
        kernel: rewritten in `baselines`.
        arguments: its operands, and its blocks.
        source: where the figure was published.
        published_ms: the time.
        published_bytes: the HBM traffic.
        measure: whose time: the kernel's; one DMA engine's for its first transfer; that transfer's
            from its trigger; ScalarE's for its last instruction; or from the start of the one
            before to its start. Or which share: an engine's active time, or MFU.
        engine: the engine of "active".
        published_share: that share; where the active time was published, `published_ms` has it.
        group: what the figure was to the model.
        naive: the documentation calls the kernel a naive, or first, step.
    """

    name: str
    fact: str
    target: str
    kernel: Kernel
    arguments: tuple[Any, ...]
    source: str
    published_ms: float | None = None
    published_bytes: int | None = None
    measure: Measure = "time"
    engine: str | None = None
    published_share: float | None = None
    group: Group = "predicted"
    naive: bool = False


def cases() -> list[Evidence]:
    """All published figures."""
    known = [*_matmuls(), *_neuronmm(), *_mamba(), *_profiles(), *_throughput(), *_guide()]
    return [*known, *_held_out(), *_remeasured(), *_convolutions()]


def _group(fitted: bool) -> Group:
    return "fitted" if fitted else "predicted"


def _matrix(rows: int, columns: int, dtype: DType = bfloat16) -> TensorSpec:
    return TensorSpec((rows, columns), dtype)


def _tutorial(dtype: DType = bfloat16) -> tuple[TensorSpec, TensorSpec]:
    return _matrix(8192, 4096, dtype), _matrix(8192, 8192, dtype)


_SHAPE = "[4096,8192]@[8192,8192] bf16"
_TILED: Kernel = of_simulator(profiled.__name__).tiled
_SQUARE = (_matrix(2048, 2048), _matrix(2048, 2048))


def _matmuls() -> list[Evidence]:
    steps = (
        ("tiled", _TILED, 51.80),
        ("hoisted loads", matmul.tutorial_hoisted, 42.96),
        ("blocked M,N", matmul.tutorial_blocked, 22.07),
        ("blocked M,N,K", matmul.tutorial_blocked_k, 6.97),
    )
    tutorial = [
        Evidence(
            f"matmul, {name} {_SHAPE}", f"tutorial, {name}", "trn1", kernel, _tutorial(), TUTORIAL,
            ms,
            # the last fixed the issue of a matmul, the middle two a queue's interval
            group=_group(name != "tiled"), naive=name == "tiled",
        )
        for name, kernel, ms in steps
    ]  # fmt: skip
    return [
        *tutorial,
        Evidence(
            "lhsT@rhs, hand-tuned 2048^3 bf16", "lhsT@rhs", "trn2", matmul.autotune_transposed_lhs,
            _SQUARE, AUTOTUNE, measure="MFU", published_share=0.9092,
        ),
        Evidence(
            "lhs@rhs, hand-tuned 2048^3 bf16", "lhs@rhs", "trn2", matmul.autotune_lhs_rhs, _SQUARE,
            AUTOTUNE, 0.2442,
        ),
    ]  # fmt: skip


def _neuronmm() -> list[Evidence]:
    """The fused kernel and the unfused pair at the shape of the paper's Figure 1."""
    K, r, N = figure1.SIZES
    fused, unfused = figure1.READINGS["NeuronMM"], figure1.READINGS["NKI XUV"]
    runs = [("NeuronMM", neuronmm.neuronmm_xuv, M, fused[M]) for M in fused]
    # From 8K tokens on, the outputs of the unfused kernel do not fit in SBUF.
    runs += [("unfused", matmul.unfused_xuv, M, unfused[M]) for M in (2048, 4096)]
    return [
        Evidence(
            f"{name} X U V, M={M // 1024}K", f"{name} X U V", figure1.TARGET, kernel,
            (_matrix(M, K), _matrix(K, r), _matrix(r, N)),
            figure1.SOURCE, reading.ms, reading.hbm_bytes,
        )
        for name, kernel, M, reading in runs
    ]  # fmt: skip


def _mamba() -> list[Evidence]:
    """channels, seq -> time; fp32, state of 16. The tutorial's core is of trn1's generation."""
    runs = (
        ("v1", mamba.mamba_v1, 256, 512, 0.17293),
        ("v1", mamba.mamba_v1, 4096, 512, 2.34),
        ("v2", mamba.mamba_v3, 4096, 512, 1.61),
        ("v3", mamba.mamba_v3, 4096, 1024, 3.3),
        ("v3", mamba.mamba_v3, 4096, 2048, 6.6),
        ("v3", mamba.mamba_v3, 4096, 3072, 10.1),
        ("v3", mamba.mamba_v3, 4096, 4096, 13.3),
        ("v3", mamba.mamba_v3, 4096, 8192, 27.8),
    )
    return [
        Evidence(
            f"Mamba {version}, {channels} channels, {seq} steps", f"Mamba {version}", "trn1",
            kernel, _scan(channels, seq), MAMBA, ms, naive=version == "v1",
        )
        for version, kernel, channels, seq, ms in runs
    ]  # fmt: skip


def _scan(channels: int, seq: int) -> tuple[TensorSpec, ...]:
    state = 16
    tokens, rows = _matrix(channels, seq, float32), _matrix(state, seq, float32)
    return tokens, tokens, _matrix(channels, state, float32), rows, rows


def _profiles() -> list[Evidence]:
    """Single instructions and short chains of them."""
    square, wide = _matrix(128, 128), _matrix(4, 4096)
    figures: list[tuple[str, TensorSpec, str, Measure, int, bool]] = [
        ("[128,128]", square, "all", "time", 4980, False),
        ("[128,128]", square, "engine, 2 KiB", "transfer", 97, True),
        ("[128,128]", square, "load from trigger to done", "trigger to done", 1207, False),
        ("[128,128]", square, "table load and activation", "instruction", 1290 + 400, True),
        ("[4,4096]", wide, "all", "time", 9930, False),
        ("[4,4096]", wide, "engine, 32 KiB", "transfer", 1416, False),
        ("[4,4096]", wide, "table load and activation", "instruction", 1310 + 3714, False),
    ]
    evidence = [
        Evidence(
            f"exp of {shape}: {what}", f"exp of {shape}", "trn2", profiles.exponential, (x,), DMA,
            ns / 1e6, measure=measure, group=_group(fixed),
        )
        for shape, x, what, measure, ns, fixed in figures
    ]  # fmt: skip
    blocks = TensorSpec((16, 128, 1024), float32)
    return [
        *evidence,
        Evidence(
            "load of [128,1024] fp32: engine, 32 KiB", "load of [128,1024]", "trn1",
            profiles.load_rows, (blocks,), PERFORMANCE, 1810e-6, measure="transfer",
        ),
        Evidence(
            "dependent activations of [128,1]", "dependent activations", "trn1",
            profiles.dependent_activations, (_matrix(128, 1, float32), 4), PERFORMANCE, 189e-6,
            measure="interval", group="fitted",
        ),
    ]  # fmt: skip


_LOADS = 32


def _throughput() -> list[Evidence]:
    """DMA throughput by bytes a partition, read off the plot; its peak taken as 368 GB/s."""
    shares = (
        (32, 0.016), (64, 0.029), (128, 0.054), (256, 0.108), (512, 0.211), (1024, 0.423),
        (2048, 0.816), (4096, 0.964), (8192, 0.983), (16384, 0.990),
    )  # fmt: skip
    return [
        Evidence(
            f"{_LOADS} loads of 128 rows of {size} bytes", "throughput of loads", "trn2",
            profiles.load_rows, (TensorSpec((_LOADS, 128, size // 2), bfloat16),), DMA,
            _LOADS * 128 * size / (share * 368) / 1e6, group=_group(256 <= size <= 1024),
        )
        for size, share in shares
    ]  # fmt: skip


def _guide() -> list[Evidence]:
    """Busy shares of the optimization guide, fp32, trn2."""
    shares: list[tuple[str, Kernel, tuple[int, ...], dict[str, float]]] = [
        ("tiled", _TILED, (), {"DMA": 0.9993, "TensorE": 0.8728}),
        ("hoisted", matmul.tutorial_hoisted, (), {"DMA": 0.9973, "TensorE": 0.9985}),
        ("blocked M,N", matmul.tutorial_blocked, (), {"DMA": 0.9570, "TensorE": 0.9952}),
        (
            "blocked M,N,K (8,2,8)",
            matmul.tutorial_blocked_k,
            (8, 2, 8),
            {"DMA": 0.2154, "TensorE": 0.9950, "VectorE": 0.1055},
        ),
    ]
    return [
        Evidence(
            f"guide, {name} fp32: {engine} active", f"guide, {name}", "trn2", kernel,
            (*_tutorial(float32), *blocks), GUIDE, measure="active", engine=engine,
            published_share=share,
        )
        for name, kernel, blocks, engines in shares
        for engine, share in engines.items()
    ]  # fmt: skip


def _held_out() -> list[Evidence]:
    """Profiles of trn2 that AWS published with its skills: times, and what was active how long."""
    known: dict[tuple[str, str], Group] = {
        # the issue of a matmul, and what PSUM adds to VectorE
        ("2048 matmuls of resident tiles", "TensorE"): "fitted",
        ("blocked 4096^3, loads of 1024 columns (V2)", "TensorE"): "fitted",
        **{(each.name, "VectorE"): "fitted" for each in PUBLISHED},
        ("tiled 4096^3 (V0)", "TensorE"): "predicted",  # throttling was believed for it
    }
    return [
        Evidence(
            f"{each.name} bf16" + (f": {engine} active" if engine else ""), each.name, TARGET,
            each.simulated, (*each.operands, *each.arguments.values()), QUERYING, ms,
            measure="active" if engine else "time", engine=engine or None,
            group=known.get((each.name, engine), "held out"),
        )
        for each in PUBLISHED
        for engine, ms in each.published_ms.items()
    ]  # fmt: skip


def _remeasured() -> list[Evidence]:
    """Kernels of AWS's tutorials at other sizes, by others than AWS."""
    scans = (("v1", mamba.mamba_v1, 0.636), ("v2", mamba.mamba_v3, 0.539))
    products = {  # M, K, N; the one at which the tutorial measured is above
        (4096, 4096, 4096): 2.694, (4096, 4096, 8192): 3.538, (4096, 8192, 4096): 3.539,
        (8192, 4096, 4096): 3.876, (8192, 4096, 8192): 7.516, (8192, 8192, 4096): 7.476,
        (8192, 8192, 8192): 14.72,
    }  # fmt: skip
    mamba_fact, matmul_fact = "Mamba, 256 channels, 2048 steps", "tutorial's matmul, other sizes"
    return [
        *(
            Evidence(
                f"{mamba_fact} {version}", mamba_fact, "trn1", kernel, _scan(256, 2048), SEARCHED,
                ms, group="held out",
            )
            for version, kernel, ms in scans
        ),
        *(
            Evidence(
                f"{matmul_fact} {M}x{K}x{N}", matmul_fact, "trn1", matmul.tutorial_blocked_k,
                (_matrix(K, M), _matrix(K, N)), RESHAPED, ms, group="held out",
            )
            for (M, K, N), ms in products.items()
        ),
    ]  # fmt: skip


def _convolutions() -> list[Evidence]:
    """Two steps of a search, by the instructions that their profiles counted and timed."""
    x, w = TensorSpec((8, 512, 2048), float32), _matrix(512, 3, float32)
    fact = "depthwise convolution"
    steps = (((1, 4), 4.955, 3.84 + 1.03), ((128, 128), 0.461, 0.2 + 0.2))
    return [
        Evidence(
            f"{fact} {8 * 4 * 2048 // blocks[0]} products"
            + (f": {engine} active" if engine else ""),
            fact, "trn1", convolution.depthwise, (x, w, *blocks), CONVOLVED, ms,
            measure="active" if engine else "time", engine=engine, group="held out",
        )
        for blocks, time, active in steps
        for engine, ms in ((None, time), ("VectorE", active))
    ]  # fmt: skip
