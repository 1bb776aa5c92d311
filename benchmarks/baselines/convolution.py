"""A depthwise convolution of AWS's samples, in the instructions that its profiles counted.

x [N, channels, W], w [channels, taps] -> [N, channels, W], fp32, edges padded with zeros. Ordered
as the compiler of the Beta dialect must have done: with VectorE active 98 % of the time, no sum
waited for its products and no product for its image.
"""

from __future__ import annotations

from neuroncore import isa as nisa
from neuroncore import jit
from neuroncore import language as nl
from neuroncore.memory.tensor import NkiTensor
from neuronmm_ops.estimate.baselines.tiles import P


@jit
def depthwise(x: NkiTensor, w: NkiTensor, multiplied: int, summed: int) -> NkiTensor:
    """An instruction multiplies the windows of `multiplied` outputs by the taps, which lie in PSUM.

    Another sums `summed` windows.
    """
    images, channels, width = x.shape
    out_hbm = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for c in range(0, channels, P):
        taps_psum = _taps(w, c)
        following_sb = _padded(x, 0, c, w.shape[1])
        for image in range(images):
            x_sb = following_sb
            if image + 1 < images:
                following_sb = _padded(x, image + 1, c, w.shape[1])
            out_sb = nl.ndarray((P, width), dtype=x.dtype)
            products_sb = _products(x_sb, taps_psum, 0, multiplied, summed)
            for start in range(0, width, summed):
                sums_sb, summands_sb = out_sb[:, nl.ds(start, summed)], products_sb
                if start + summed < width:
                    products_sb = _products(x_sb, taps_psum, start + summed, multiplied, summed)
                nisa.tensor_reduce(sums_sb, nl.add, summands_sb, axis=2)
            nisa.dma_copy(out_hbm[image, nl.ds(c, P), :], out_sb)
    return out_hbm


def _products(
    x_sb: NkiTensor, taps_psum: NkiTensor, start: int, multiplied: int, summed: int
) -> NkiTensor:
    taps = taps_psum.shape[1]
    products_sb = nl.ndarray((P, summed, taps), dtype=x_sb.dtype)
    for i in range(0, summed, multiplied):
        nisa.tensor_tensor(
            products_sb[:, nl.ds(i, multiplied), :],
            x_sb.ap([[x_sb.shape[1], P], [1, multiplied], [1, taps]], offset=start + i),
            taps_psum.ap([[taps, P], [0, multiplied], [1, taps]]),
            nl.multiply,
        )
    return products_sb


def _taps(w: NkiTensor, channel: int) -> NkiTensor:
    shape = P, w.shape[1]
    w_sb = nl.ndarray(shape, dtype=w.dtype)
    nisa.dma_copy(w_sb, w[nl.ds(channel, P), :])
    w_psum = nl.ndarray(shape, dtype=w.dtype, buffer=nl.psum)
    nisa.tensor_copy(w_psum, w_sb, engine=nisa.vector_engine)
    return w_psum


def _padded(x: NkiTensor, image: int, channel: int, taps: int) -> NkiTensor:
    edge, width = taps // 2, x.shape[2]
    x_sb = nl.ndarray((P, width + 2 * edge), dtype=x.dtype)
    for start in (0, edge + width):
        nisa.memset(x_sb[:, nl.ds(start, edge)], 0.0, engine=nisa.gpsimd_engine)
    nisa.dma_copy(x_sb[:, nl.ds(edge, width)], x[image, nl.ds(channel, P), :])
    return x_sb
