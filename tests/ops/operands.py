"""Operands of the ops in every layout, and the ops written out in plain torch."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LAYOUTS = ("contiguous", "transposed", "sliced", "stepped")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def make(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
    generator: torch.Generator | None = None,
    device: str = "cpu",
) -> Tensor:
    """Draw a tensor whose storage has the given layout.

    `transposed` has its last two dimensions swapped in memory, `sliced` is a window of a wider
    matrix, `stepped` every second element of one.
    """
    generator = generator or torch.Generator().manual_seed(0)
    if not shape:
        return torch.randn((), generator=generator).to(dtype).to(device)
    *lead, last = shape
    if layout == "transposed" and lead:
        stored = (*lead[:-1], last, lead[-1])
    elif layout == "sliced":
        stored = (*lead, last + 5)
    elif layout == "stepped":
        stored = (*lead, 2 * last)
    else:
        stored = (*lead, last)
    values = torch.randn(stored, generator=generator, dtype=torch.float64).to(dtype).to(device)
    if layout == "transposed" and lead:
        return values.transpose(-1, -2)
    if layout == "sliced":
        return values[..., 2 : 2 + last]
    return values[..., ::2] if layout == "stepped" else values


def plain_xuv(x: Tensor, u: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    y = (x @ u) @ v
    return y if bias is None else y + bias


def plain_xw(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x @ w
    return y if bias is None else y + bias


def plain_svd_mlp(x: Tensor, *factors: Tensor, activation: str = "silu") -> Tensor:
    u_gate, v_gate, u_up, v_up, u_down, v_down = factors
    act = ACTIVATIONS[activation]
    return act(x @ u_gate @ v_gate) * (x @ u_up @ v_up) @ u_down @ v_down


def svd_mlp_magnitude(x: Tensor, *factors: Tensor) -> Tensor:
    """Bound the sums of absolute terms: every activation obeys |act(z)| <= |z|."""
    return plain_svd_mlp(x.abs(), *(f.abs() for f in factors), activation="relu")


def doubled(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in tensors]


def mlp_shapes(
    K: int, inner: int, N: int, ranks: tuple[int, int, int] = (3, 4, 5)
) -> list[tuple[int, int]]:
    gate, up, down = ranks
    return [(K, gate), (gate, inner), (K, up), (up, inner), (inner, down), (down, N)]


leading = st.one_of(
    st.just([]), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.just([0]), st.just([2, 0])
)
widths = st.one_of(st.just(1), st.integers(1, 40))
dtypes = st.sampled_from(DTYPES)
layouts = st.sampled_from(LAYOUTS)
generators = st.integers(0, 2**32).map(lambda seed: torch.Generator().manual_seed(seed))


@st.composite
def xuv_operands(draw: st.DrawFn) -> list[Tensor | None]:
    lead, K, r, N = draw(leading), draw(widths), draw(widths), draw(widths)
    dtype, generator = draw(dtypes), draw(generators)
    operands: list[Tensor | None] = [
        make(shape, dtype, draw(layouts), generator) for shape in ((*lead, K), (K, r), (r, N))
    ]
    bias = make((N,), dtype, draw(layouts), generator) if draw(st.booleans()) else None
    return [*operands, bias]


@st.composite
def xw_operands(draw: st.DrawFn) -> list[Tensor | None]:
    lead, K, N = draw(leading), draw(widths), draw(widths)
    dtype, generator = draw(dtypes), draw(generators)
    operands: list[Tensor | None] = [
        make(shape, dtype, draw(layouts), generator) for shape in ((*lead, K), (K, N))
    ]
    bias = make((N,), dtype, draw(layouts), generator) if draw(st.booleans()) else None
    return [*operands, bias]


@st.composite
def svd_mlp_operands(draw: st.DrawFn) -> list[Tensor]:
    lead, K, inner, N = draw(leading), draw(widths), draw(widths), draw(widths)
    ranks = draw(st.tuples(*[st.integers(1, 12)] * 3))
    dtype, generator = draw(dtypes), draw(generators)
    # Scaled down: three matmuls in a row leave fp16's range otherwise.
    shapes = [(*lead, K), *mlp_shapes(K, inner, N, ranks)]
    return [make(shape, dtype, draw(layouts), generator).mul_(0.25) for shape in shapes]
