"""Low-rank gated MLP with visible loops: read it before `prefill.py`; models do not run it."""

from neuronmm_ops.kernels.shim import NkiTensor, jit, nisa, nl

TILE = 128  # partitions of SBUF and PSUM, and columns of a stationary operand
BANK = 512  # fp32 sums of a partition in one PSUM bank, and columns of a moving operand


@jit
def svd_mlp_naive(
    x: NkiTensor,
    u_gate: NkiTensor,
    v_gate: NkiTensor,
    u_up: NkiTensor,
    v_up: NkiTensor,
    u_down: NkiTensor,
    v_down: NkiTensor,
) -> NkiTensor:
    """out = ((silu(x u_gate v_gate) * (x u_up v_up)) u_down) v_down, 128 tokens at a time.

    Dimensions:
        M: tokens. K: input features. I: inner features. N: output features. r: rank of each pair.
        Any sizes of at least 1.

    Args:
        x: [M, K].
        u_gate: [K, r_gate], dtype of x, as all factors.
        v_gate: [r_gate, I].
        u_up: [K, r_up].
        v_up: [r_up, I].
        u_down: [I, r_down].
        v_down: [r_down, N].

    Returns:
        [M, N] in shared HBM, dtype of x.
    """
    M, K = x.shape
    r, N = v_down.shape
    out = nl.ndarray((M, N), dtype=x.dtype, buffer=nl.shared_hbm)
    for m in range(0, M, TILE):
        tokens = min(TILE, M - m)
        x_tiles = []
        for k in range(0, K, TILE):
            features = min(TILE, K - k)
            x_tile = nl.ndarray((features, tokens), dtype=x.dtype, buffer=nl.sbuf)
            nisa.dma_transpose(dst=x_tile, src=x[m : m + tokens, k : k + features])
            x_tiles.append(x_tile)
        gate_tiles = product(product(x_tiles, u_gate), v_gate)
        up_tiles = product(product(x_tiles, u_up), v_up)
        for i in range(len(gate_tiles)):
            nisa.activation(dst=gate_tiles[i], op=nl.silu, data=gate_tiles[i])
            nisa.tensor_tensor(
                dst=gate_tiles[i], data1=gate_tiles[i], data2=up_tiles[i], op=nl.multiply
            )
        low_tiles = product(gate_tiles, u_down)
        # The last product has the tokens stationary: they lie on the partitions, as in HBM.
        for n in range(0, N, BANK):
            columns = min(BANK, N - n)
            sums = nl.ndarray((tokens, columns), dtype=nl.float32, buffer=nl.psum)
            for i in range(len(low_tiles)):
                j = i * TILE
                v_tile = nl.ndarray((min(TILE, r - j), columns), dtype=x.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=v_tile, src=v_down[j : min(j + TILE, r), n : n + columns])
                nisa.nc_matmul(dst=sums, stationary=low_tiles[i], moving=v_tile, accumulate=i > 0)
            y = nl.ndarray((tokens, columns), dtype=x.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=y, src=sums)
            nisa.dma_copy(dst=out[m : m + tokens, n : n + columns], src=y)
    return out


def product(tiles: list[NkiTensor], w: NkiTensor) -> list[NkiTensor]:
    """Return the tiles of (a w)^T [columns, tokens] from the tiles of a^T [rows, tokens].

    Args:
        tiles: 128 rows each, the last one the rest.
        w: [rows, columns] in HBM.
    """
    rows, columns = w.shape
    tokens = tiles[0].shape[1]
    products = []
    for n in range(0, columns, TILE):
        width = min(TILE, columns - n)
        sums = nl.ndarray((width, tokens), dtype=nl.float32, buffer=nl.psum)
        for i in range(len(tiles)):
            k = i * TILE
            w_tile = nl.ndarray((min(TILE, rows - k), width), dtype=w.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=w_tile, src=w[k : min(k + TILE, rows), n : n + width])
            nisa.nc_matmul(dst=sums, stationary=w_tile, moving=tiles[i], accumulate=i > 0)
        tile = nl.ndarray((width, tokens), dtype=w.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=tile, src=sums)
        products.append(tile)
    return products
