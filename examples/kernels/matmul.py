"""A blocked matmul in NKI: `lhsT.T @ rhs`, in blocks that are loaded in long rows.

`import nki` finds the simulator when the simulated NeuronCore runs it:

    neuronmm simulate examples/kernels/matmul.py:matmul \
        --arg lhsT=bf16[1024,512] --arg rhs=bf16[1024,2048] --target trn2
"""
# pyright: reportMissingImports=false, reportMissingParameterType=false

import nki
import nki.isa as nisa
import nki.language as nl

TILE = 128
COLUMNS = 512  # of one PSUM bank, in fp32


@nki.jit
def matmul(lhsT, rhs, rows=4, columns=2):
    """Return `lhsT[K, M].T @ rhs[K, N]`, in blocks of `rows` tiles by `columns` PSUM banks."""
    K, M = lhsT.shape
    N = rhs.shape[1]
    height, width = rows * TILE, columns * COLUMNS
    assert K % TILE == 0
    assert M % height == 0
    assert N % width == 0
    out = nl.ndarray((M, N), dtype=lhsT.dtype, buffer=nl.shared_hbm)
    for n in range(N // width):
        right = nl.ndarray((TILE, K // TILE, width), dtype=rhs.dtype, buffer=nl.sbuf)
        load(right, rhs, n * width)
        for m in range(M // height):
            left = nl.ndarray((TILE, K // TILE, height), dtype=lhsT.dtype, buffer=nl.sbuf)
            load(left, lhsT, m * height)
            for r in range(rows):
                row = m * height + r * TILE
                result = nl.ndarray((TILE, width), dtype=out.dtype, buffer=nl.sbuf)
                for c in range(columns):
                    total = nl.ndarray((TILE, COLUMNS), dtype=nl.float32, buffer=nl.psum)
                    for k in range(K // TILE):
                        nisa.nc_matmul(
                            dst=total,
                            stationary=left[:, k, r * TILE : (r + 1) * TILE],
                            moving=right[:, k, c * COLUMNS : (c + 1) * COLUMNS],
                        )
                    nisa.tensor_copy(
                        dst=result[:, c * COLUMNS : (c + 1) * COLUMNS],
                        src=total,
                    )
                nisa.dma_copy(dst=out[row : row + TILE, n * width : (n + 1) * width], src=result)
    return out


def load(block, source, column):
    """Fill block[TILE, K // TILE, width] with the columns of source[K, ...] from `column` on."""
    for k in range(block.shape[1]):
        rows = source[k * TILE : (k + 1) * TILE, column : column + block.shape[2]]
        nisa.dma_copy(dst=block[:, k, :], src=rows)


def reference(lhsT, rhs):
    """The same by NumPy, for `--reference examples/kernels/matmul.py:reference`."""
    return lhsT.T @ rhs
