"""Operands of the ops in every layout, and the ops written out in plain torch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from neuronmm_ops.ops.definitions import SPECS

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


def plain_svd_mlp(
    x: Tensor,
    u_gate: Tensor,
    v_gate: Tensor,
    u_up: Tensor,
    v_up: Tensor,
    u_down: Tensor,
    v_down: Tensor,
    activation: str = "silu",
) -> Tensor:
    act = ACTIVATIONS[activation]
    return act(x @ u_gate @ v_gate) * (x @ u_up @ v_up) @ u_down @ v_down


def plain_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    x_up: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    up = x if x_up is None else x_up
    return ACTIVATIONS[activation](x @ w_gate) * (up @ w_up) @ w_down


def plain_svd_qkv(x: Tensor, *tensors: Tensor | None) -> Tensor:
    factors, biases = tensors[:6], [*tensors[6:], None, None, None][:3]
    pairs = zip(factors[::2], factors[1::2], biases, strict=True)
    return torch.cat([plain_xuv(x, u, v, bias) for u, v, bias in pairs], -1)


def doubled(*arguments: Any) -> list[Any]:
    return [a.double() if isinstance(a, Tensor) else a for a in arguments]


PLAIN: dict[str, Callable[..., Tensor]] = {
    "xuv": plain_xuv,
    "xw": plain_xw,
    "mlp": plain_mlp,
    "svd_mlp": plain_svd_mlp,
    "svd_qkv": plain_svd_qkv,
}
"""Each op written out in plain torch."""
OPS = tuple(op for op, spec in SPECS.items() if not spec.states)
SIZES = {"K": 6, "K_up": 4, "I": 7, "N": 5, "r": 3, "r_gate": 3, "r_up": 4, "r_down": 5}
SIZES |= {"r_query": 3, "r_key": 4, "r_value": 5, "N_query": 12, "N_key": 10, "N_value": 13}
"""Small sizes of the dimensions of the ops' operands, no two of one operand alike."""


def names_of(op: str) -> list[str]:
    """Names of an op's tensors."""
    return [operand.name for operand in SPECS[op].operands]


def shapes_of(
    op: str, lead: Sequence[int] = (2, 3), optional: bool = True, **sizes: int
) -> list[tuple[int, ...]]:
    """Shapes of an op's tensors, by default small ones, those that it may lack included."""
    spec = SPECS[op]
    chosen = with_x_for(op, SIZES | sizes, () if optional else spec.activations[1:])
    shapes = zip(spec.operands, spec.shapes(chosen, lead), strict=True)
    return [shape for operand, shape in shapes if optional or not operand.optional]


def weight_shapes_of(op: str, **sizes: int) -> list[tuple[int, ...]]:
    """Shapes of an op's tensors without x, beside which it has no other activation."""
    spec = SPECS[op]
    shapes = spec.shapes(with_x_for(op, SIZES | sizes, spec.activations[1:]))
    return [shape for n, shape in enumerate(shapes) if n not in spec.activations]


def one_byte_factor(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, by_column: bool = True
) -> tuple[Tensor, Tensor]:
    """A matrix [K, N] whose values fill the dtype's range, and scales that make it of size 1."""
    values = torch.randn(shape, generator=generator) * 60
    matrix = values.clamp(-127, 127).round() if dtype == torch.int8 else values.clamp(-240, 240)
    scale = (0.5 + torch.rand(shape[1], generator=generator)) / 60 / shape[0] ** 0.5
    rounded = matrix.to(dtype)
    return (rounded.t().contiguous().t() if by_column else rounded), scale.bfloat16().float()


ONE_BYTE_SIZES = {"K": 64, "K_up": 32, "r": 24, "N": 40, "I": 96, "r_gate": 24, "r_up": 16}
ONE_BYTE_SIZES |= {"r_down": 32, "r_query": 32, "r_key": 16, "r_value": 24, "N_query": 40}
ONE_BYTE_SIZES |= {"N_key": 10, "N_value": 12}


def one_byte_call(
    op: str,
    dtype: torch.dtype,
    x_dtype: torch.dtype,
    lead: tuple[int, ...] = (3,),
    generator: torch.Generator | None = None,
    by_column: bool = True,
    has_bias: bool = True,
    **sizes: int,
) -> dict[str, Tensor]:
    """The tensors of a call by name, factors in one byte."""
    generator = generator or torch.Generator().manual_seed(0)
    known = ONE_BYTE_SIZES | sizes
    tensors: dict[str, Tensor] = {}
    for operand in SPECS[op].operands:
        shape = tuple(known[size] for size in operand.sizes)
        if operand.role == "factor":
            own = one_byte_factor(shape, dtype, generator, by_column)
            tensors[operand.name], tensors[f"{operand.name}_scale"] = own
        elif operand.role == "activation" or has_bias:
            lead_of = lead if operand.role == "activation" else ()
            tensors[operand.name] = make((*lead_of, *shape), x_dtype, generator=generator)
    return tensors


def with_x_for(op: str, sizes: dict[str, int], missing: Sequence[int]) -> dict[str, int]:
    """Sizes where x stands for the `missing` activations of an op, places of operands."""
    return sizes | {SPECS[op].operands[place].sizes[-1]: sizes["K"] for place in missing}


def magnitude_of(op: str, *tensors: Tensor | None) -> Tensor:
    """Bound the sums of absolute terms: every activation obeys |act(z)| <= |z|."""
    absolute = [None if t is None else t.double().abs() for t in tensors]
    choices = {"activation": "relu"} if "activation" in SPECS[op].choices else {}
    return PLAIN[op](*absolute, **choices)


def split_call(op: str, *arguments: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Positional arguments of an op as launchers take them: all tensors, and all options."""
    return SPECS[op].split(SPECS[op].complete(arguments, {}))


def mlp_shapes(
    K: int, inner: int, N: int, ranks: tuple[int, int, int] = (3, 4, 5)
) -> list[tuple[int, ...]]:
    """Shapes of the factors of svd_mlp."""
    gate, up, down = ranks
    sizes = {"K": K, "I": inner, "N": N, "r_gate": gate, "r_up": up, "r_down": down}
    return shapes_of("svd_mlp", **sizes)[1:]


leading = st.one_of(
    st.just([]), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.just([0]), st.just([2, 0])
)
widths = st.one_of(st.just(1), st.integers(1, 40))
layouts = st.sampled_from(LAYOUTS)
generators = st.integers(0, 2**32).map(lambda seed: torch.Generator().manual_seed(seed))


@st.composite
def operands_of(draw: st.DrawFn, op: str, dtypes: Sequence[torch.dtype] = DTYPES) -> list[Any]:
    """All arguments of a call of an op: tensors of any layout, None for some, then choices."""
    spec, generator, dtype = SPECS[op], draw(generators), draw(st.sampled_from(dtypes))
    missing = [n for n, o in enumerate(spec.operands) if o.optional and draw(st.booleans())]
    sizes = {name: draw(widths) for operand in spec.operands for name in operand.sizes}
    sizes = with_x_for(op, sizes, [n for n in missing if n in spec.activations])
    tensors = [
        None if n in missing else make(shape, dtype, draw(layouts), generator)
        for n, shape in enumerate(spec.shapes(sizes, draw(leading)))
    ]
    if len(spec.factors) > 2:
        # Scaled down: more matmuls in a row leave fp16's range otherwise.
        tensors = [t if t is None else t.mul_(0.25) for t in tensors]
    return [*tensors, *[draw(st.sampled_from(values)) for values in spec.choices.values()]]
