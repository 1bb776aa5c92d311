"""RMSNorm of the residual stream: one pass over the tokens, in both phases."""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, jit, nisa, nl
from neuronmm_ops.kernels.stages.chunks import itemsize
from neuronmm_ops.kernels.stages.decode import own
from neuronmm_ops.kernels.stages.facts import facts
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, Span, spans


class Normalization(nl.NKIObject):
    """Normalizes tokens, each of which lies on `parts` partitions.

    Args:
        weight_hbm: [H].
        tokens: in a tile, at most.
        parts: a divisor of H.
        eps: added to the mean square.
    """

    def __init__(self, weight_hbm: NkiTensor, tokens: int, parts: int, eps: float) -> None:
        self.weight_hbm = weight_hbm
        self.tokens = tokens
        self.parts = parts
        self.width = weight_hbm.shape[0] // parts
        self.eps = eps
        self.weight_sb: list[NkiTensor] = []
        self.same_token_sb: list[NkiTensor] = []
        # ScalarE loads the table of its function while the first tokens come
        one_sb = nl.ndarray((1, 1), dtype=nl.float32)
        nisa.memset(one_sb, 0.0)
        nisa.activation(one_sb, nl.square, one_sb)
        if parts > 1:
            self.same_token_sb.append(same_token(tokens, parts))

    def place(self, source_hbm: NkiTensor, t: Span) -> NkiTensor:
        """Tokens of a tensor [M, H], a part on each partition."""
        M = source_hbm.shape[0]
        return source_hbm.reshape((M * self.parts, self.width))[
            nl.ds(t.start * self.parts, t.size * self.parts), :
        ]

    def load(self, source_hbm: NkiTensor, t: Span) -> NkiTensor:
        """Tokens in SBUF."""
        tile_sb = nl.ndarray((t.size * self.parts, self.width), dtype=source_hbm.dtype)
        nisa.dma_copy(tile_sb, self.place(source_hbm, t), dge_mode=nisa.dge_mode.none)
        return tile_sb

    def weight(self) -> NkiTensor:
        """The weight below every token of a tile; loaded once, after the first tokens."""
        if len(self.weight_sb) == 0:
            shape = (self.tokens * self.parts, self.width)
            tile_sb = nl.ndarray(shape, dtype=self.weight_hbm.dtype)
            row_hbm = self.weight_hbm.reshape((1, self.parts, self.width))
            row_hbm = row_hbm.broadcast(0, self.tokens)
            nisa.dma_copy(tile_sb, row_hbm, dge_mode=nisa.dge_mode.none)
            self.weight_sb.append(tile_sb)
        return self.weight_sb[0]

    def run(self, out_hbm: NkiTensor, sum_hbm: Any, x_hbm: NkiTensor, added: Any, t: Span) -> None:
        """sum[t] = x[t] + added[t], out[t] = norm(sum[t]); `added` None: of x[t] alone."""
        x_sb = self.load(x_hbm, t)
        if not is_none(added):
            added_sb = self.load(added, t)
            # VectorE and ScalarE have the other passes over the tile
            nisa.tensor_tensor(x_sb, x_sb, added_sb, nl.add, engine=nisa.gpsimd_engine)
            nisa.dma_copy(self.place(sum_hbm, t), x_sb, dge_mode=nisa.dge_mode.none)
        weight_sb = self.weight()[: x_sb.shape[0], :]
        out_sb = nl.ndarray(x_sb.shape, dtype=x_sb.dtype)
        inverse_sb = self.inverse(x_sb, out_sb)
        if facts().fast_modes and itemsize(x_sb.dtype) == 2:
            nisa.tensor_scalar(out_sb, x_sb, nl.multiply, inverse_sb)
        else:
            nisa.activation(out_sb, nl.copy, x_sb, scale=inverse_sb)
        nisa.tensor_tensor(out_sb, out_sb, weight_sb, nl.multiply)
        nisa.dma_copy(self.place(out_hbm, t), out_sb, dge_mode=nisa.dge_mode.none)

    def inverse(self, x_sb: NkiTensor, squares_sb: NkiTensor) -> NkiTensor:
        """1 / sqrt(mean(x^2) + eps) of its token on each partition, [<=128, 1] fp32.

        The squares themselves, in `squares_sb`, are of no use.
        """
        partitions = x_sb.shape[0]
        mean_sb = nl.ndarray((partitions, 1), dtype=nl.float32)
        nisa.activation(
            squares_sb,
            nl.square,
            x_sb,
            scale=self.weight_hbm.shape[0] ** -0.5,
            reduce_op=nl.add,
            reduce_res=mean_sb,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
        mean = mean_sb
        if self.parts > 1:
            mean = nl.ndarray((partitions, 1), dtype=nl.float32, buffer=nl.psum)
            same_sb = self.same_token_sb[0][:partitions, :partitions]
            nisa.nc_matmul(mean, same_sb, mean_sb, accumulate=False)
        inverse_sb = nl.ndarray((partitions, 1), dtype=nl.float32)
        nisa.tensor_scalar(inverse_sb, mean, nl.add, self.eps, op1=nl.power, operand1=-0.5)
        return inverse_sb


def same_token(tokens: int, parts: int) -> NkiTensor:
    """[partitions, partitions] fp32: 1 where both have parts of one token, else 0."""
    size = tokens * parts
    ones_sb = nl.ndarray((size, tokens, parts), dtype=nl.float32)
    nisa.memset(ones_sb, 1.0, engine=nisa.gpsimd_engine)
    if tokens > 1:
        # partition - parts * token is 0 to parts - 1
        steps = [[-parts, tokens], [0, parts]]
        nisa.affine_select(ones_sb, steps, 1, ones_sb, 0.0, nl.greater_equal)
        nisa.affine_select(ones_sb, steps, 1, ones_sb, 0.0, nl.less, offset=-parts)
    return ones_sb.reshape((size, size))


def check_norm(x: NkiTensor, residual: Any, weight: NkiTensor, parts: int) -> None:
    """Check the sizes of a norm's operands."""
    H = x.shape[1]
    assert weight.shape[0] == H, f"weight must be [{H}], got [{weight.shape[0]}]"
    if not is_none(residual):
        assert residual.shape == x.shape, f"residual must be {x.shape}, as x; got {residual.shape}"
    assert parts > 0, f"parts must be at least 1, got {parts}"
    assert parts <= PARTITIONS, f"parts must be at most {PARTITIONS}, got {parts}"
    assert H % parts == 0, f"parts must divide {H}, got {parts}"


@jit
def rms_norm(
    x: NkiTensor,
    residual: NkiTensor | None,
    weight: NkiTensor,
    eps: float = 1e-6,
    parts: int = 1,
) -> Any:
    """out = s / sqrt(mean(s^2) + eps) * weight, where s = x + residual, or x without one.

    Dimensions:
        M: tokens. H: features. Any of at least 1.

    Args:
        x: [M, H], bfloat16, float16 or float32.
        residual: [M, H] or None, dtype of x.
        weight: [H], dtype of x.
        eps: added to the mean square.
        parts: partitions that a token is spread over, a divisor of H; 128 // parts tokens are
            worked on together.

    Returns:
        [M, H] in shared HBM, dtype of x; with a residual s and out, both so.

    Notes:
        Sums of squares are fp32. s is rounded to the dtype of x before it is squared, and
        s / rms before it is multiplied by the weight, as Transformers does. Where parts > 1 a sum
        that is not finite reaches the other tokens of its tile, through products with zeros. Two
        cores share the tokens: one token is the first core's.

    Pseudocode:
        for each tile of 128 // parts tokens:
            s = x + residual
            mean[p] = sum(square(s / sqrt(H)))   (a part of a token on each partition p)
            mean = same_token . mean             (over the partitions of a token)
            out = s * (mean + eps)^-0.5 * weight
    """
    check_norm(x, residual, weight, parts)
    out_hbm = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    sum_hbm: Any = None
    if not is_none(residual):
        sum_hbm = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tokens = own(x.shape[0])
    if tokens.size > 0:
        step = min(tokens.size, PARTITIONS // parts)
        rows = Normalization(weight, step, parts, eps)
        for t in spans(tokens.start, tokens.size, step):
            rows.run(out_hbm, sum_hbm, x, residual, t)
    if not is_none(residual):
        return sum_hbm, out_hbm
    return out_hbm
