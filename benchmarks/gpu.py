"""The ops on an NVIDIA GPU next to dense layers in bf16 and fp8, and next to cuBLAS's pairs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from neuronmm_ops.measure.cpu import OPS, RATIOS, Comparison, layer_of, makers
from neuronmm_ops.measure.timing import copies_for, time_paired
from neuronmm_ops.rank import aligned_rank
from neuronmm_ops.storages import STORAGES, factor_bytes

SHAPES = ((2048, 8192), (4096, 14336))
TOKENS = (1, 8, 64, 512)
# Of each candidate's weights, several times a GPU's second-level cache.
_COLD_BYTES = 256 * 2**20


def run(
    shapes: Sequence[tuple[int, int]] = SHAPES,
    ratios: Sequence[float] = RATIOS,
    tokens: Sequence[int] = TOKENS,
    rounds: int = 20,
) -> list[dict[str, Any]]:
    """Time `xuv` and `svd_mlp` in bf16, each candidate a CUDA graph over copies of its weights.

    Args:
        shapes: hidden and intermediate sizes `[K, N]`.
        ratios: compression ratios; ranks as `aligned_rank` gives them.
        tokens: values of M.
        rounds: paired rounds.

    Returns:
        A row for each op, shape, ratio and number of tokens: `device`, `op`, `M`, `K`, `N`, `r`;
        microseconds a call (medians) of `dense`, `dense_fp8` (`torch._scaled_mm` on x that is
        rounded beforehand), `two_gemm` (cuBLAS's products with the factors), `op` and the op in
        each storage; `of_two_gemm`, its time over the op's, and `of_dense_fp8`, its time over that
        of the op in fp8 (medians of paired rounds).

    Raises:
        RuntimeError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("benchmarks gpu needs an NVIDIA GPU, and a torch that is built for it")
    cases: list[Comparison] = []
    for op, (K, N), ratio, M in product(OPS, shapes, ratios, tokens):
        r = aligned_rank(K, N, ratio)
        assert r is not None
        cases.append(Comparison(op, M, K, N, r, torch.bfloat16, rounds, False, None))
    return [_row(case) for case in cases]


@torch.inference_mode()
def _row(case: Comparison) -> dict[str, Any]:
    K, N, r = case.K, case.N, case.r
    x = torch.randn(case.M, K, dtype=case.dtype, device="cuda")
    made = makers(case)
    made["dense_fp8"] = lambda: layer_of(case.op, K, N, _Fp8Linear)
    for name in STORAGES:
        made[name] = makers(replace(case, storage=name))["stored"]
    copies = copies_for(case.matrices * factor_bytes(K, N, r, 1), _COLD_BYTES)
    graphs = {name: _graph(make, copies, x) for name, make in made.items()}
    times = time_paired(graphs, case.rounds)
    return {
        "device": torch.cuda.get_device_name(),
        "op": case.op,
        "M": case.M,
        "K": K,
        "N": N,
        "r": r,
        **{f"{name}_us": 1e3 * times.median_ms(name) / copies for name in made},
        "of_two_gemm": times.speedup("op", "two_gemm"),
        "of_dense_fp8": times.speedup("fp8", "dense_fp8"),
    }


def _graph(make: Callable[[], nn.Module], copies: int, x: Tensor) -> Callable[[int], None]:
    """Return what runs every copy once: in a graph, where the host's time does not count."""
    with torch.device("cuda"):
        layers = [make() for _ in range(copies)]
    layers[0](x)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            layer(x)

    def replay(_: int) -> None:
        graph.replay()
        torch.cuda.synchronize()

    # the graph reads the weights
    replay.layers = layers  # pyright: ignore[reportFunctionMemberAccess]
    return replay


class _Fp8Linear(nn.Module):
    """A dense Linear in e4m3, with a scale for each token and each column."""

    def __init__(self, K: int, N: int) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.randn(N, K).to(torch.float8_e4m3fn))
        self.scale = nn.Buffer(torch.rand(1, N))
        self.rounded: dict[torch.Size, tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape not in self.rounded:
            self.rounded[x.shape] = x.to(torch.float8_e4m3fn), x.new_ones(len(x), 1).float()
        rounded, scale = self.rounded[x.shape]
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            rounded, self.weight.t(), scale, self.scale, out_dtype=torch.bfloat16
        )
