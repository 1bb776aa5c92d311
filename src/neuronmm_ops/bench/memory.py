"""What a rank of a whole model holds in HBM, and whether it fits."""

from __future__ import annotations

from neuronmm_ops.bench.decoder import HEAD, ITEMSIZE, Decoder
from neuronmm_ops.hardware import resolve_target


def memory_of(decoder: Decoder, prompt: int, new: int) -> dict[str, int]:
    """Bytes of a rank's weights, KV cache and prefill's activations, and how many there are.

    A low-rank pair is counted with the factor whole that every rank reads all of (`decoder`).
    Activations are the residual before and after, the norm, and what the widest component has
    beside them.
    """
    whole, own = decoder.whole, decoder.shape
    cache = 2 * whole.layers * own.kv_heads * own.head_dim * decoder.batch * (prompt + new)
    qkv = (own.heads + 2 * own.kv_heads) * own.head_dim
    widest = max(qkv + own.heads * own.head_dim, 2 * own.intermediate_size)
    tokens = decoder.batch * prompt
    machine = resolve_target(decoder.target)
    return {
        "weight_bytes": weight_bytes(decoder),
        "kv_cache_bytes": ITEMSIZE * cache,
        "activation_bytes": ITEMSIZE * tokens * (3 * whole.hidden_size + widest),
        "capacity_bytes": int(machine.rank_hbm_bytes(decoder.lnc, decoder.tp)),
    }


def weight_bytes(decoder: Decoder) -> int:
    """Of all weights on a rank, with their scales, the embedding and the norms.

    A tied output head in one byte is a second copy beside the embedding.
    """
    whole, own = decoder.whole, decoder.shape
    H, head = whole.hidden_size, decoder.linears[HEAD]
    total = ITEMSIZE * H * (2 * whole.layers + 1)
    if whole.head_norm:
        total += ITEMSIZE * 2 * whole.head_dim * whole.layers
    if not whole.tied or head.stored:
        total += ITEMSIZE * H * own.vocab_size
    # o_proj and down_proj are cut by rows, the others by columns
    for name, (K, N) in own.projections.items():
        total += whole.layers * decoder.linears[name]._replace(K=K, N=N).bytes
    return total + head._replace(N=own.vocab_size).bytes


def check_capacity(decoder: Decoder, memory: dict[str, int]) -> None:
    """Raise ValueError where a rank has no room for what it must hold."""
    capacity = memory["capacity_bytes"]
    held = {name: size for name, size in memory.items() if name != "capacity_bytes"}
    if sum(held.values()) <= capacity:
        return
    names = [name.removesuffix("_bytes").replace("_", " ") for name in held]
    parts = [f"{n} {b / 2**30:.1f}" for n, b in zip(names, held.values(), strict=True)]
    raise ValueError(
        f"{decoder.whole.name} does not fit at tp {decoder.tp}: a rank of {decoder.target} with "
        f"lnc {decoder.lnc} has {capacity / 2**30:.0f} GiB of HBM and needs {', '.join(parts)} "
        "GiB; use a greater tp, a shorter prompt or a smaller batch"
    )
