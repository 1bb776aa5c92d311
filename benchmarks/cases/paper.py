"""What NeuronMM (arXiv 2510.25977) says of block sizes, fusion and traffic, and the runs for it.

Letters: M tokens, K input features, r rank, N output features; bfloat16.
"""

from typing import NamedTuple

from benchmarks.baselines import matmul
from benchmarks.baselines.spilled import tutorial_spilled
from benchmarks.cases import figure1
from neuroncore import Kernel
from neuronmm_ops.estimate.baselines import neuronmm

_SUMMARY = "arXiv 2510.25977v3, quoted by github.com/AmitSubhash/3brown1blue"
BLOCKS, FUSION, TRAFFIC = "block sizes", "naive fusion", "traffic"
SOURCES = {BLOCKS: f"{_SUMMARY}; bytes: Eq. 10", FUSION: _SUMMARY, TRAFFIC: figure1.SOURCE}
NOTES = {
    BLOCKS: "The simulated core never spills: it refuses what does not fit. The paper's compiler "
    "filled SBUF further than these tensors do, and spilled from blocks of 2,048 tokens on.",
    FUSION: "Compare ratios: 18.06 ms against 1.57, and of X U, (X U) V 65% more DMA time and "
    "twice the traffic, are quoted without shape, blocks or what they exceed. 16 times X U at 4 "
    "times the FLOPs, also quoted, is N = 4 K in 16 blocks of columns; M and r are ours.",
    TRAFFIC: "4.78x at 32K tokens is over a tutorial's kernel that keeps the sums of all tokens in "
    "SBUF, 64 MiB: a compiler spills them, the simulated core refuses. Our X W has blocks that fit "
    "at any M: compared with it, low rank and fusion save only the last ratio.",
}
"""By section; what a ratio needs next to it."""
Sizes = tuple[int, int, int, int]
"""M, K, r and N."""


class Published(NamedTuple):
    """Of a case, what was published; ratios are over the case that it is `against`."""

    time_ms: float | None = None
    hbm_bytes: int | None = None
    sbuf_share: float | None = None
    spill_bytes: int | None = None
    time_ratio: float | None = None
    dma_ratio: float | None = None
    hbm_ratio: float | None = None


class Nest(NamedTuple):
    """A rewritten kernel, the shapes of its operands, its blocks, and how often it is launched."""

    kernel: Kernel
    shapes: tuple[tuple[int, int], ...]
    blocks: neuronmm.Blocks | None = None
    launches: int = 1


class Figure(NamedTuple):
    """A run, and what was published of it.

    Attributes:
        section: of the paper's figures.
        name: unique within the section.
        against: name of the case that its figures are divided by.
        sizes: of all launches together.
        run: None is our planned X W.
        published: of this case.
    """

    section: str
    name: str
    against: str
    sizes: Sizes
    run: Nest | None
    published: Published = Published()


def cases() -> list[Figure]:
    """All cases, by section."""
    return [*_block_sizes(), *_naive_fusion(), *_traffic(8192), *_traffic(32768)]


def _block_sizes() -> list[Figure]:
    """Table 3. A block below 512 tokens, the kernel's tile, is a launch of its own."""
    M, K, r, N = sizes = (4096, 7168, 4096, 18432)
    filled = {1024: (0.90, 0), 2048: (0.96, 29_000_000), 4096: (0.99, 931_000_000)}
    figures: list[Figure] = []
    for block in (128, 256, 512, 1024, 2048, 4096):
        tokens = block if block < 512 else M
        run = _fused((tokens, K, r, N), tiles_m=max(1, block // 512), launches=M // tokens)
        share, spilled = filled.get(block, (None, None))
        published = Published(None, 2 * M * (K + N) * (block + r) // block, share, spilled)
        figures.append(Figure(BLOCKS, f"{block} tokens", "1024 tokens", sizes, run, published))
    return figures


def _naive_fusion() -> list[Figure]:
    """Algorithm 1, X U again for each block of columns: each is a launch of the fused kernel."""
    M, K, r, N = sizes = (4096, 2048, 1024, 8192)
    again = _fused((M, K, r, N // 16), launches=16)
    naive = Published(time_ratio=18.06 / 1.57)
    runs = {
        "fused": (_fused(sizes), Published()),
        "X W": (Nest(matmul.tutorial_blocked_k, ((K, M), (K, N))), Published()),
        "X U, (X U) V": (
            Nest(matmul.unfused_xuv, _shapes(sizes)),
            Published(dma_ratio=1.65, hbm_ratio=2.0),
        ),
        "naive, same blocks": (again, naive),
        "naive, by tiles": (again._replace(blocks=neuronmm.Blocks(1, 1, 1, 4)), naive),
    }
    return [Figure(FUSION, name, "fused", sizes, *of) for name, of in runs.items()]


def _traffic(M: int) -> list[Figure]:
    """Dense over fused: in the tutorial's blocks, with its sums spilled, and in ours."""
    K, r, N = figure1.SIZES
    sizes, operands, tokens = (M, K, r, N), ((K, M), (K, N)), f"{M // 1024}K"
    fused, dense = [
        Published(reading.ms, reading.hbm_bytes)
        for reading in (figure1.READINGS["NeuronMM"][M], figure1.READINGS["NKI XW"][M])
    ]
    runs: dict[str, tuple[Nest | None, Published]] = {
        f"NeuronMM, {tokens}": (_fused(sizes), fused),
        f"NKI X W, {tokens}": (Nest(matmul.tutorial_blocked_k, operands), dense),
    }
    if tokens == "32K":
        runs["NKI X W, sums spilled"] = Nest(tutorial_spilled, operands), Published()
        runs["our X W"] = None, Published()
    return [Figure(TRAFFIC, name, f"NeuronMM, {tokens}", sizes, *of) for name, of in runs.items()]


def _fused(sizes: Sizes, tiles_m: int = neuronmm.UP_DEFAULTS.tiles_m, launches: int = 1) -> Nest:
    blocks = neuronmm.UP_DEFAULTS._replace(tiles_m=tiles_m)
    return Nest(neuronmm.neuronmm_xuv, _shapes(sizes), blocks, launches)


def _shapes(sizes: Sizes) -> tuple[tuple[int, int], ...]:
    M, K, r, N = sizes
    return (M, K), (K, r), (r, N)
