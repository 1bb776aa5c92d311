"""Tables of tensor parallelism: what ranks send and hold, and what low rank gains on them."""

from selection import Row, document, gain_as_served, one_launch_as_served, variant
from sources import DIVIDED, DIVIDED_MODELS, divided_command
from writing import number, ranged, table

from neuronmm_ops import aligned_rank
from neuronmm_ops.estimate.ends import compared
from neuronmm_ops.estimate.linears import divided
from neuronmm_ops.models import ModelShape, model_shape
from neuronmm_ops.plan.exchange import Collectives
from neuronmm_ops.plan.layouts import GROUPS, Layout, exchanged, held_bytes
from neuronmm_ops.plan.linear import Linear

_TERMS = {"all_reduce": "sum", "all_gather": "gather", "reduce_scatter": "scattered sum"}
_LAYOUTS = ("sum", "one", "both", "rows")


def traffic_of_ranks() -> str:
    """What a rank sends for a token and holds of the layers, computed from shapes alone."""
    rows: list[list[str]] = []
    for name in ("Llama-3.1-8B", "Llama-3.1-70B", "Qwen3-8B"):
        shape = model_shape(name)
        for tp in (2, 8, 32):
            pairs = [_sent_and_held(shape, layout, tp) for layout in ("dense", "one", "both")]
            rows.append([name, str(tp), *(cell for pair in pairs for cell in pair)])
    head = [
        f"{layout}: {value}"
        for layout in ("dense", "`one`", "`both`")
        for value in ("sends, MB", "holds, GB")
    ]
    return table(["model", "tp", *head], rows)


def _sent_and_held(shape: ModelShape, layout: Layout, tp: int) -> tuple[str, str]:
    """MB that a rank sends for a token, and GB of the layers' weights that it holds."""
    own, links = divided(shape, tp).projections, Collectives("trn2", 1, tp)
    sent = held = 0.0
    for group, names in GROUPS.items():
        ranks = {name: aligned_rank(*shape.projections[name], 0.2) for name in names}
        every = [Linear(*own[n], None if layout == "dense" else r) for n, r in ranks.items()]
        r = sum(linear.r or 0 for linear in every)
        exchange = exchanged(links, group, layout, 1, r, every[0].N)
        sent += sum(each.wire_bytes for each in exchange)
        held += sum(held_bytes(group, [layout], linear, tp) for linear in every)
    return f"{shape.layers * sent / 1e6:.2f}", f"{shape.layers * held / 1e9:.2f}"


def layouts() -> str:
    """One layer's MLP of the largest model on the fewest ranks, by layout."""
    documents: list[Row] = (
        document("tensor_parallel", divided_command(DIVIDED_MODELS[0], *DIVIDED[0])) or []
    )
    rows = [
        _layout_row(one["tp"], name, *(_mlp(one, name, phase) for phase in ("decode", "prefill")))
        for one in documents[:1]
        for name in ("dense", *_LAYOUTS)
    ]
    head = (
        *("tp", "layout", "exchanged", "KB, a token", "us", "launches us"),
        *("MB, a prompt", "us", "launches us", "weights MB"),
    )
    return table(head, rows) if rows else ""


def _mlp(one: Row, layout: str, phase: str) -> Row:
    """The MLP's entry where both of its groups have the layout."""
    of = variant(one, "dense" if layout == "dense" else "low_rank")
    (entry,) = (
        entry
        for entry in of["phases"][phase]["layouts"]
        if entry["component"] == "mlp" and set(entry["layouts"].values()) == {layout}
    )
    return entry


def _layout_row(tp: int, layout: str, token: Row, prompt: Row) -> list[str]:
    exchanged = ", ".join(f"{_TERMS[c['kind']]} [M, {c['N']}]" for c in token["collectives"])
    cells: list[str] = []
    for entry, unit in ((token, 1e3), (prompt, 1e6)):
        fastest = " *" if entry["taken"] and layout != "dense" else ""
        cells += [
            f"{entry['wire_bytes'] / unit:.1f}",
            f"{1e3 * entry['collectives_ms']:.1f}",
            number(1e3 * entry["launches_ms"]) + fastest,
        ]
    name = layout if layout == "dense" else f"`{layout}`"
    return [str(tp), name, exchanged, *cells, number(token["weight_bytes"] / 1e6)]


VARIANTS = ("dense", "low_rank")


def speedups() -> str:
    """MLPs in low rank over dense bf16 on the same ranks, and dense MLPs in the same storage."""
    rows: list[list[str]] = []
    for name in DIVIDED_MODELS:
        for ratio, stored in DIVIDED:
            documents: list[Row] = (
                document("tensor_parallel", divided_command(name, ratio, stored)) or []
            )
            start = [name, f"{ratio:g}", stored]
            rows += [[*start, str(one["tp"]), *_gains(one), *_dense(one)] for one in documents]
    head = (
        "model",
        "ratio",
        "stored",
        "tp",
        "dense ms a token",
        "prefill",
        "decode",
        "as served",
        "slow links",
        "one launch",
        "as served",
        "slow links",
        "dense fp8: decode",
        "one launch",
    )
    return table(head, rows) if rows else ""


def _dense(one: Row) -> list[str]:
    """What dense MLPs in the storage of the pairs gain, where that is not bf16."""
    alone = one["speedups"].get("storage")
    return [ranged(alone["decode"]), ranged(alone["decode"]["one_launch"])] if alone else ["", ""]


def _gains(one: Row) -> list[str]:
    dense, compressed = (
        variant(one, name)["phases"]["decode"]["published_collectives"]["times_ms"]
        for name in VARIANTS
    )
    ours = one["speedups"]["ours"]
    launched = [variant(one, name)["phases"]["decode"]["one_launch"] for name in VARIANTS]
    slow = [each["published_collectives_ms"] for each in launched]
    return [
        number(variant(one, "dense")["phases"]["decode"]["time_ms"]),
        *(ranged(ours[phase]) for phase in ("prefill", "decode")),
        gain_as_served(one),
        ranged(compared(compressed, dense)),
        ranged(ours["decode"]["one_launch"]),
        one_launch_as_served(one),
        f"{slow[0] / slow[1]:.2f}x",
    ]
