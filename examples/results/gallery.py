"""docs/gallery: a page per model of the registry, and an index, from shapes and data sets."""

from collections.abc import Iterator
from typing import Any

from divergence import divergence_page
from modelled import setting_rows
from residuals import residuals_page
from selection import Row, document, models
from sources import PROMPT, RATIOS, TARGET, datasets, end_parameters, parameters, ranks
from writing import MARK, count, number, page, span, table

from neuronmm_ops.models import SHAPES, ModelShape
from neuronmm_ops.rank import aligned_rank, parameter_count
from neuronmm_ops.storages import STORAGES, factor_bytes

MLP = ("gate_proj", "up_proj", "down_proj")
ORGANIZATIONS = {"Llama": "meta-llama", "Qwen3": "Qwen", "Mistral": "mistralai"}
"""On the Hugging Face Hub, by how the models' names begin."""
STREAMED_FROM = 6e9
"""Parameters from which a bf16 model takes more memory than many a machine has."""
PLANNED_RATIO = 0.2


def gallery() -> dict[str, str]:
    """The pages by their files' names."""
    pages = {f"{shape.name}.md": model_page(shape) for shape in SHAPES.values()}
    quality = {"divergence.md": divergence_page(), "residuals.md": residuals_page()}
    return {"index.md": index_page(), **quality, **pages}


def index_page() -> str:
    """A line a model."""
    rows = [
        [
            f"[{shape.name}]({shape.name}.md)",
            shape.layers,
            f"{shape.hidden_size} x {shape.intermediate_size}",
            count(parameters(shape)),
            f"{2 * parameters(shape) / 2**30:.2f}",
            f"{weight_bytes(shape, PLANNED_RATIO, 'fp8', tuple(shape.projections)) / 2**30:.2f}",
            _plan_speedup(shape, 1),
            _plan_speedup(shape, PROMPT),
        ]
        for shape in SHAPES.values()
    ]
    return page(
        MARK,
        "# Models",
        "What compression gives each model of the registry: ranks, kernels, times and bytes. "
        "Times are modelled. No model was downloaded or compressed for its page; measure quality "
        "with `neuronmm eval`. [Results](../results.md) has measurements.",
        table(
            [
                *("model", "layers", "hidden x MLP", "parameters", "bf16 GiB"),
                f"GiB at ratio {PLANNED_RATIO}, fp8, all-linear",
                f"MLP, decode, ratio {PLANNED_RATIO}",
                f"MLP, prefill {PROMPT}",
            ],
            rows,
        ),
        "The last two columns: one launch of `svd_mlp` against three dense launches in bf16 on "
        f"one {TARGET} core, modelled, as a range over the DMA models.",
    )


def model_page(shape: ModelShape) -> str:
    """One model's page."""
    return page(
        MARK,
        f"# {shape.name}",
        table(
            ["hidden", "MLP", "layers", "heads", "KV heads", "head", "vocabulary", "output head"],
            [
                [
                    *(shape.hidden_size, shape.intermediate_size, shape.layers, shape.heads),
                    *(shape.kv_heads, shape.head_dim, f"{shape.vocab_size:,}"),
                    "the embedding" if shape.tied else "its own",
                ]
            ],
        ),
        f"{count(parameters(shape))} parameters in matrices.",
        "## Compress it",
        "```bash\n" + "\n".join(commands(shape)) + "\n```",
        "Calibrate on a megabyte or more of text like the model's input. "
        "[Compress a model](../compress.md) has every option.",
        "## Ranks",
        "NeuronMM's rule in blocks of 128, by ratio. `compress` spends the same budget where it "
        "avoids most loss, so its ranks differ between layers.",
        table(["projection", "K", "N", *(f"{ratio:g}" for ratio in RATIOS)], _ranks(shape)),
        "## Memory of the weights",
        "GiB of all matrices, with embedding and output head in bf16:",
        table(
            ["compressed", "storage", *(f"ratio {ratio:g}" for ratio in RATIOS)],
            _memory(shape),
        ),
        f"Dense in bf16: {2 * parameters(shape) / 2**30:.2f} GiB.",
        *_plans(shape),
        *_times(shape),
    )


def hub_id(shape: ModelShape) -> str:
    """The model's name on the Hugging Face Hub."""
    (organization,) = (
        owner for begins, owner in ORGANIZATIONS.items() if shape.name.startswith(begins)
    )
    return f"{organization}/{shape.name}"


def commands(shape: ModelShape) -> list[str]:
    """How to compress it: in bf16, and with all Linears of its layers in one byte."""
    stream = " --stream" if parameters(shape) >= STREAMED_FROM else ""
    begin = f"neuronmm compress {hub_id(shape)}{stream} --calibration text.txt --ratio 0.2"
    out = shape.name.lower()
    return [
        f"{begin} -o {out}-0.2",
        f"{begin} --storage fp8 --targets all-linear -o {out}-0.2-fp8",
    ]


def weight_bytes(
    shape: ModelShape, ratio: float, storage: str | None, targets: tuple[str, ...]
) -> int:
    """Bytes of all matrices with those of `targets` low-rank where that is smaller."""
    layer = 0
    for name, (K, N) in shape.projections.items():
        r = aligned_rank(K, N, ratio) if name in targets else None
        layer += 2 * K * N if r is None else factor_bytes(K, N, r, 2, storage)
    return shape.layers * layer + 2 * end_parameters(shape)


def _ranks(shape: ModelShape) -> Iterator[list[object]]:
    for name, (K, N) in shape.projections.items():
        ranks = [aligned_rank(K, N, ratio) for ratio in RATIOS]
        cells = [
            "dense" if r is None else f"{r} (-{1 - parameter_count(K, N, r) / (K * N):.0%})"
            for r in ranks
        ]
        yield [f"`{name}`", K, N, *cells]


def _memory(shape: ModelShape) -> Iterator[list[object]]:
    targets = {"mlp": MLP, "all-linear": tuple(shape.projections)}
    for label, names in targets.items():
        for storage in (None, "/".join(STORAGES)):
            stored = next(iter(STORAGES)) if storage else None
            sizes = [weight_bytes(shape, ratio, stored, names) / 2**30 for ratio in RATIOS]
            yield [label, storage or "bf16", *(f"{size:.2f}" for size in sizes)]


# --- modelled


def _plan_rows(shape: ModelShape, ratio: float) -> list[Row]:
    dataset = datasets()[f"plan_{shape.name}"]
    return document(dataset.name, dataset.commands[RATIOS.index(ratio)]) or []


def _plan_speedup(shape: ModelShape, tokens: int) -> str:
    rows = _plan_rows(shape, PLANNED_RATIO)
    speedups = [row for row in rows if (row["projection"], row["M"]) == ("mlp", tokens)]
    return span(speedups[0]["speedup_low"], speedups[0]["speedup_high"]) if speedups else ""


def _plans(shape: ModelShape) -> list[str]:
    if not _plan_rows(shape, PLANNED_RATIO):
        return []
    command = datasets()[f"plan_{shape.name}"].commands[RATIOS.index(PLANNED_RATIO)]
    head = ("M", "projection", "r", "kernel", "ms", "dense ms", "speed-up", "MB moved", "bound by")
    mlps = [
        [f"{ratio:g}", *cells]
        for ratio in RATIOS
        for row in _plan_rows(shape, ratio)
        if row["projection"] == "mlp"
        for cells in [_plan_cells(row)]
    ]
    return [
        "## Kernel plans",
        f"Modelled: one {TARGET} core, bf16, a layer's projections at ratio {PLANNED_RATIO}, alone "
        "and (`mlp`) in one launch against three dense ones. Speed-ups are ranges over the DMA "
        "models; below 1, low rank does not pay.",
        table(head, [_plan_cells(row) for row in _plan_rows(shape, PLANNED_RATIO)]),
        "The MLP in one launch, by ratio:",
        table(("ratio", *head), mlps),
        f"```bash\n{command}\n```",
    ]


def _plan_cells(row: Row) -> list[str]:
    return [
        *(str(row["M"]), row["projection"], str(row["r"] or "dense"), row["form"]),
        *(f"{row[name]:.4g}" for name in ("time_ms", "dense_ms")),
        span(row["speedup_low"], row["speedup_high"]),
        *(f"{row['hbm_bytes'] / 1e6:.1f}", row["bound"]),
    ]


def _cores(shape: ModelShape) -> str:
    tp = ranks(shape)
    return f"one {TARGET} core" if tp == 1 else f"{tp} {TARGET} cores (tensor parallel)"


def _times(shape: ModelShape) -> list[str]:
    documents: list[dict[str, Any]] = models(shape.name)
    if not documents:
        return []
    command = "\n".join(datasets()[f"model_{shape.name}"].commands)
    first = documents[0]
    dense = {row["name"]: row for row in first["variants"]}["dense"]
    prefill, decode = (dense["phases"][phase]["time_ms"] for phase in ("prefill", "decode"))
    return [
        "## The whole model",
        f"Modelled: {_cores(shape)}, batch {first['batch']}, a prompt of "
        f"{first['prompt']} tokens, {first['new']} more. Our best dense bf16 kernels: prefill "
        f"{number(prefill)} ms, {number(decode)} ms per token, {number(dense['tokens_per_s'])} "
        "tokens/s. Speed-ups over that, with the range of all that is not known:",
        setting_rows(documents),
        f"```bash\n{command}\n```",
    ]
