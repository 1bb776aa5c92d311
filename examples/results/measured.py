"""Sections of docs/results.md of what was measured: quality, ops and generation on a CPU."""

from plots import image
from selection import Row, document, method_label, storages
from sources import SHOWN, machine_of, read
from writing import number, table

from neuronmm_ops.measure.cpu import FORWARD

TABLED_RATIOS = (0, 0.2, 0.5)
"""Of the table of storages; the plot has all."""


def quality() -> list[str]:
    """Excess log-perplexity by method and by storage."""
    rows = [row for row in document("methods") or [] if row["method"] != "dense"]
    stored = storages()
    if not rows or not stored:
        return []
    ratios = list(dict.fromkeys(row["ratio"] for row in rows))
    labels = list(dict.fromkeys(map(method_label, rows)))
    of = {(method_label(row), row["ratio"]): row for row in rows}
    methods_table = table(
        ["method", *(f"{ratio:g}" for ratio in ratios)],
        [
            [label, *(excess(of[label, ratio]["excess_log_ppl"]) for ratio in ratios)]
            for label in labels
        ],
    )
    storage_rows = document("storages")
    storages_table = table(
        ["ratio", "storage", "bytes", "excess", "KL, nats"],
        [
            [
                ratio_label(row["ratio"]),
                row["storage"],
                f"{row['bytes'] / row['dense_bytes']:.3f}",
                excess(row["excess_log_ppl"]),
                f"{row['kl']:.5f}",
            ]
            for row in storage_rows
            if row["rounding"] in ("native", "feedback")
            and (row["equal"] != "bytes" and row["ratio"] in TABLED_RATIOS)
        ],
    )
    return [
        "## Quality against bytes",
        "Measured: the demo's model (`make demo`), MLPs compressed, no training afterwards. "
        "*Excess* is the logarithm of the perplexity minus that of the dense model. A model "
        "trained for minutes leaves much of its MLPs unused; real models have larger excesses. "
        "**Narrower MLPs** (`neuronmm prune`) lose less than all of these methods up to ratio 0.4: "
        "[at equal parameters](gallery/divergence.md).",
        image("results-quality.svg", "excess log-perplexity against bytes, by method and storage"),
        "Excess by method and nominal ratio; ranks are whole blocks, so effective ratios differ:",
        methods_table,
        "Dense and `kfac` by storage, at the ranks of bf16, rounded as `compress` does; bytes "
        "are the MLPs', relative to dense bf16:",
        storages_table,
    ]


def excess_share(value: float, ratio: float) -> tuple[float, Row]:
    """An excess over that of SVD-LLM at a ratio, and the row of that."""
    rows = {(method_label(row), row["ratio"]): row for row in document("methods")[1:]}
    baseline = rows["SVD-LLM", ratio]
    return value / baseline["excess_log_ppl"], baseline


def ratio_label(ratio: float) -> str:
    """As the tables have it; dense matrices have none."""
    return f"{ratio:g}" if ratio else "dense"


def excess(value: float) -> str:
    """As the tables have it."""
    return f"{value:.4f}"


def cpu() -> list[str]:
    """The ops' times."""
    cases: dict[tuple[str, str, int], list[Row]] = {}
    for row in forward():
        cases.setdefault((row["op"], row["dtype"], row["M"]), []).append(row)
    if not cases:
        return []
    ranks = next(iter(cases.values()))
    ideals = " and ".join(f"{row['ideal_speedup']:.2f}" for row in ranks)
    return [
        "## Ops on a CPU",
        f"Measured: {machine_of('cpu')}, {ranks[0]['threads']} threads, medians of paired rounds, "
        f"{SHOWN}'s shape. Speed-ups are over the dense layer, both after `nn.pack_`; the ratios "
        f"of parameters are {ideals}. Dense times are of the first rank's rounds.",
        table(
            [
                *("op", "dtype", "M", "dense ms", "packed ms"),
                *(name for row in ranks for name in (f"r {row['r']} ms", "speed-up")),
            ],
            [
                [
                    *(f"`{op}`", dtype, M),
                    *(f"{rows[0][name]:.2f}" for name in ("dense_ms", "packed_dense_ms")),
                    *(f"{row[n]:.2f}" for row in rows for n in ("packed_op_ms", "packed_speedup")),
                ]
                for (op, dtype, M), rows in cases.items()
            ],
        ),
    ]


GPU_TIMES = ("dense", "dense_fp8", "two_gemm", "op", "fp8", "int8", "int4")


def gpu() -> list[str]:
    """The ops' times on a GPU."""
    rows: list[Row] = document("gpu") or []
    if not rows:
        return []
    return [
        "## Ops on a GPU",
        f"Measured: {rows[0]['device']}, bf16 activations, microseconds a call in a CUDA graph "
        "over weights that no cache holds. *Dense fp8* is `torch._scaled_mm` on activations that "
        "are rounded beforehand. *Of GEMMs*: cuBLAS's two products over the op in bf16; *of fp8*: "
        "dense fp8 over the op in fp8. Above 64 tokens the op is the two products, and one byte "
        "loses: factors are widened first. The last rows of the largest shape were not run.",
        table(
            ["op", "K, N, r", "M", *GPU_TIMES, "of GEMMs", "of fp8"],
            [
                [
                    *(f"`{row['op']}`", f"{row['K']}, {row['N']}, {row['r']}", row["M"]),
                    *(f"{row[f'{name}_us']:.1f}" for name in GPU_TIMES),
                    *(f"{row[name]:.2f}" for name in ("of_two_gemm", "of_dense_fp8")),
                ]
                for row in rows
            ],
        ),
    ]


def forward() -> list[Row]:
    """The CPU's rows without gradients."""
    runs = (read("cpu") or {"runs": []})["runs"]
    return [row for run in runs for row in run["document"] if row["pass"] == FORWARD]


def generation() -> list[str]:
    """Tokens per second of Transformers' `generate`."""
    rows: list[Row] = document("generate") or []
    if not rows:
        return []
    return [
        "## Generating on a CPU",
        f"Measured: {machine_of('generate')}, {rows[0]['threads']} threads, "
        f"{rows[0]['compute_dtype']}, Transformers' `generate` with a static cache, a prompt of "
        f"{rows[0]['prompt']} tokens, then {rows[0]['new']} more; speed-ups are medians of paired "
        "rounds, with their range. Python takes most of a step of the small model.",
        table(
            ["model", "compiled", "first token ms", "ms/token", "tokens/s", "decode speed-up"],
            [
                [
                    f"`{row['dir']}`",
                    "yes" if row["compiled"] else "no",
                    *(number(row[name]) for name in ("ttft_ms", "token_ms", "tokens_per_s")),
                    _measured_range(row["speedup"]),
                ]
                for row in rows
                if not row["failed"]
            ],
        ),
    ]


def _measured_range(speedup: Row | None) -> str:
    if speedup is None:
        return ""
    decode = speedup["decode"]
    return f"{decode['median']:.2f} ({decode['low']:.2f} to {decode['high']:.2f})"
