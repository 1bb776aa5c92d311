"""The demo's report: one HTML page with its figures inside, readable without network or script."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from figures import dense_speed, draw
from results import BASELINE, OURS, RECOVERED, Results, told_ratio
from trainium import FUSED_TOKENS, LARGE, TARGET, FusedRun, OnTrainium

from neuroncore.files import replacing
from neuronmm_ops.estimate.ends import spread


def write_report(results: Results, path: Path) -> None:
    """Write the page to `path`, whole or not at all: no file next to it is needed to read it."""
    with replacing(path) as temporary:
        temporary.write_text(_page(results, draw(results)), encoding="utf-8")


def _page(results: Results, figures: dict[str, str]) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>neuronmm-ops demo</title>
<style>{CSS}</style>
</head>
<body>
<main>
<h1>A small Llama, compressed</h1>
<p class="lead">{_summary(results)}</p>

<h2>Perplexity</h2>
<div class="single">
{_figure(figures["ppl"], "Perplexity against bytes removed, by method, next to dense storages")}
</div>
<p class="note">Lower is better. <b>plain</b> truncates the SVD of each weight, <b>SVD-LLM</b>
keeps what each layer puts out on calibration text; both give every matrix the rank of NeuronMM's
rule. <b>greedy</b>, the default, weighs output errors by what they do to the model's loss, and
spends one budget of ranks where it avoids most of it. <b>recovered</b> is greedy with its factors
trained towards the dense model ({_text(results.provenance["recovery"])}). <b>dense, fp8</b>,
<b>int8</b> and <b>int4</b> keep every matrix and round it: the rivals to beat.
Token perplexity over non-overlapping blocks of {_text(results.provenance["perplexity block"])}:
the tokenizer and text are this demo's, so the values compare with nothing outside this page. So
short a training leaves more of the MLPs unused than a real model's; expect real ones to lose more
at the same ratio.</p>

{_finished(results, figures)}
<h2>All numbers</h2>
<div class="scroll">{_table(results)}</div>
<p class="note">Nominal ratio: what was asked for. Effective: what ranks in whole blocks of
{results.block} removed. Bytes: of the MLPs, of theirs at two bytes a number. Excess:
the logarithm of the perplexity less that of the dense model's.
Speedups are medians of paired runs;
tokens/s of a compressed model are the dense model's times the speedup.</p>

<h2>Samples</h2>
<p class="note">The same prompt, in bold, and the same seed for every model; temperature 0.7,
top 20.</p>
{_samples(results)}

<h2>Provenance</h2>
<div class="scroll">{_provenance(results.provenance)}</div>
</main>
</body>
</html>
"""


def _finished(results: Results, figures: dict[str, str]) -> str:
    """The sections that need all points; empty until they are there."""
    if results.trainium is None:
        return ""
    return f"""<h2>Speed</h2>
<div class="pair">
{_figure(figures["prefill"], "Tokens per second of prefill, dense and compressed")}
{_figure(figures["decode"], "Tokens per second of decode, dense and compressed")}
</div>
<p class="note">Measured on {_text(results.provenance["CPU"])},
{_text(results.provenance["threads"])} threads, {_text(results.provenance["dtype"])}, batch 1, in
this process; dense and compressed runs alternate and medians are taken. Compressed values are the
dense median times the median speedup of paired runs. Models of equal ranks share one measurement.
A model this small spends much of a step in
Python and in attention, neither of which compression touches: it says little about the speed of a
large one.</p>

<h2>Layers</h2>
<div class="scroll">
{_figure(figures["layers"], "Rank and relative loss of every layer, by projection", wide=True)}
</div>
<p class="note">Method greedy. The loss is the share of the layer's outputs, weighed by the
gradients of the model's loss, that its rank cannot represent on calibration text. A layer that
stays dense has its full rank and no loss.</p>

<h2>On Trainium (modelled)</h2>
{_trainium(results.trainium, figures["trainium"])}
"""


def _summary(results: Results) -> str:
    if results.trainium is None:
        return (
            f"<b>Unfinished</b>: {len(results.points)} of {results.planned} points are measured. "
            "<code>make demo</code> goes on at the next."
        )
    by_key = {(point.method, point.ratio): point for point in results.points}
    ratio = told_ratio(results.points)
    plain, baseline, ours = (by_key[name, ratio] for name in ("plain", BASELINE, OURS))
    rivals = [f"{each.ppl:.1f} in {each.storage} ({each.bytes:.0%})" for each in results.rivals]
    return _text(
        f"With {ours.compression.effective_ratio:.0%} of its MLP parameters removed, the model's "
        f"perplexity goes from {results.dense_ppl:.1f} to {ours.ppl:.1f}. SVD-LLM with one rank "
        f"for all brings it to {baseline.ppl:.1f}, a plain SVD to {plain.ppl:.1f}. "
        + (
            f"Trained towards the dense model afterwards it comes to {recovered.ppl:.1f}."
            if (recovered := by_key.get((RECOVERED, ratio)))
            else "None of them is trained afterwards."
        )
        + f" Rounded instead, all MLPs dense: {', '.join(rivals)} of the bytes."
    )


def _trainium(modelled: OnTrainium, figure: str) -> str:
    ratio = f"{modelled.ratio:.0%}".replace("%", " %")
    rows = [
        (
            f"{times.model}, {times.layers} layers",
            "decode" if times.tokens == 1 else "prefill",
            f"{times.tokens:,}",
            _range(*spread(times.dense_ms)),
            _range(*spread(times.low_rank_ms)),
            "–".join(dict.fromkeys(f"{end:.2f}" for end in times.speedups)),
            f"{times.dense_bytes / 1e6:,.1f}",
            f"{times.low_rank_bytes / 1e6:,.1f}",
            times.bound,
        )
        for times in modelled.times
    ]
    head = (
        *("MLPs of", "phase", "tokens", "dense ms", "compressed ms", "speedup"),
        *("dense MB", "compressed MB", "bound by"),
    )
    return f"""<div class="single">
{_figure(figure, "Modelled time of the MLPs, compressed next to dense")}
</div>
<div class="scroll">{_rows(head, rows)}</div>
<p class="note"><b>Modelled, never run on a device</b>: the kernels traced on the simulated
NeuronCore, one core of {_text(TARGET)}, bfloat16, all MLPs of the model one after the other, and
nothing else of it. Ranges are of all that is not known of its clock, taken to multiply. Dense: the
quicker of one launch an MLP and one a projection. Compressed at a nominal ratio of {ratio}: one
launch an MLP where all three of its projections are low-rank, otherwise one a projection, with the
demo's own ranks, and NeuronMM's rule for {_text(LARGE)}. A layer of this demo's size waits for the
latency of its DMAs whatever its bytes, so low rank wins little there or nothing; one of a
real model waits for bytes in decode and for the matmuls in prefill. Made by <code>make demo</code>;
for other shapes:
<code>neuronmm plan --model {_text(LARGE)} --ratio {modelled.ratio:g}</code>, and
for whole models <code>neuronmm bench model</code>.</p>
{_fused(modelled.fused)}"""


def _fused(run: FusedRun | None) -> str:
    if run is None:
        return """<p class="note">No MLP of this run has three low-rank projections, so none ran as
one kernel.</p>"""
    picture = base64.b64encode(run.picture.read_bytes()).decode()
    gate, up, down = run.ranks
    return f"""<div class="scroll">
{_figure("data:image/svg+xml;base64," + picture, "Timeline and roofline of one kernel", wide=True)}
</div>
<p class="note">The MLP of layer {run.layer} as <b>one kernel</b>, run on the simulated core with
the demo's own weights (ranks {gate}, {up} and {down}) and the activations of at most {FUSED_TOKENS}
held-out tokens. <b>Its values are the CPU's</b>: the greatest difference from
<code>neuronmm::svd_mlp</code> is {run.error:.3g}, of outputs up to {run.largest:.3g};
{run.allowed:.3g} would be roundings. To make the picture again, and a page of it to look
into:</p>
<pre>{_text(run.command)}</pre>"""


def _range(*values: float) -> str:
    """The least and the greatest, once where they print alike."""
    return "–".join(dict.fromkeys(f"{value:.3g}" for value in (min(values), max(values))))


def _table(results: Results) -> str:
    head = (
        "method",
        "nominal ratio",
        "effective ratio",
        "bytes",
        "ranks",
        "perplexity",
        "excess",
        f"× {BASELINE}",
        "prefill tokens/s",
        "speedup",
        "decode tokens/s",
        "speedup",
    )
    prefill = dense_speed(results, "prefill")
    decode = dense_speed(results, "decode")
    rows: list[tuple[str, ...]] = [
        (
            *("dense", "0 %", "0 %", "100 %", "–"),
            *(f"{results.dense_ppl:.2f}", "0", "–"),
            *(f"{prefill:,.0f}", "1.00", f"{decode:,.0f}", "1.00"),
        )
    ]
    for rival in results.rivals:
        quality = f"{rival.ppl:.2f}", f"{results.excess(rival):.4f}"
        share = f"{100 * rival.bytes:.1f} %"
        rows.append((f"dense, {rival.storage}", "0 %", "0 %", share, "–", *quality, *("–",) * 5))
    for point in results.points:
        layers = point.compression.layers
        ranks = sorted({layer.r for layer in layers if layer.r is not None})
        rank_text = "all dense" if not ranks else f"{ranks[0]}"
        if len(ranks) > 1:
            rank_text += f" to {ranks[-1]}"
        if ranks and any(layer.r is None for layer in layers):
            rank_text += " or dense"
        quotient = results.excess_quotient(point)
        rows.append(
            (
                point.method,
                f"{point.ratio:.0%}".replace("%", " %"),
                f"{100 * point.compression.effective_ratio:.1f} %",
                f"{100 - 100 * point.compression.effective_ratio:.1f} %",
                rank_text,
                f"{point.ppl:.2f}",
                f"{results.excess(point):.4f}",
                "–" if quotient is None else f"{quotient:.2f}",
                f"{prefill * point.speed.speedup('prefill'):,.0f}",
                f"{point.speed.speedup('prefill'):.2f}",
                f"{decode * point.speed.speedup('decode'):,.0f}",
                f"{point.speed.speedup('decode'):.2f}",
            )
        )
    return _rows(head, rows)


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>\n" for row in rows
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>\n{body}</tbody></table>"


def _samples(results: Results) -> str:
    title = f"dense, perplexity {results.dense_ppl:.1f}"
    parts = [_sample(title, results.prompt, results.dense_sample)]
    for point in results.points:
        ratio = f"{point.ratio:.0%}".replace("%", " %")
        title = f"{point.method} at {ratio}, perplexity {point.ppl:.1f}"
        parts.append(_sample(title, results.prompt, point.sample))
    return f'<div class="samples">{"".join(parts)}</div>'


def _sample(title: str, prompt: str, continuation: str) -> str:
    return (
        f"<figure><figcaption>{_text(title)}</figcaption>"
        f"<pre><b>{_text(prompt)}</b>{_text(continuation.rstrip())}</pre></figure>"
    )


def _provenance(provenance: dict[str, str]) -> str:
    rows = "".join(
        f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>\n"
        for name, value in provenance.items()
    )
    return f'<table class="facts"><tbody>\n{rows}</tbody></table>'


def _figure(source: str, alt: str, *, wide: bool = False) -> str:
    wide_class = ' class="wide"' if wide else ""
    return f'<img{wide_class} src="{source}" alt="{_text(alt)}">'


def _text(value: object) -> str:
    return html.escape(str(value))


CSS = """
body { margin: 0; background: #fff; color: #222;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 860px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .6rem; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .8rem; padding-top: .9rem; border-top: 1px solid #e1e5ea; }
.lead { font-size: 1.1rem; margin: 0; }
.note { color: #4d5763; font-size: .9rem; }
.single { max-width: 700px; }
.pair { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
img.wide { min-width: 620px; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums;
  width: 100%; }
th, td { padding: .35rem .35rem; text-align: right; border-bottom: 1px solid #e9ecf0; }
td { white-space: nowrap; }
th { font-weight: 600; vertical-align: bottom; line-height: 1.25; }
thead th { border-bottom: 1.5px solid #9aa3ae; }
th:first-child, td:first-child, .facts th, .facts td { text-align: left; }
.facts th { white-space: nowrap; vertical-align: top; width: 1%; padding-right: 1.2rem; }
.facts td { white-space: normal; overflow-wrap: anywhere; }
.samples { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); }
figure { margin: 0; min-width: 0; }
.samples figure:first-child { grid-column: 1 / -1; }
figcaption { font-size: .85rem; font-weight: 600; margin-bottom: .25rem; }
code { font-size: .85em; }
pre { margin: 0; padding: .7rem .8rem; background: #f6f7f9; border-radius: 4px; font-size: .78rem;
  line-height: 1.45; white-space: pre-wrap; overflow-wrap: anywhere; }
"""
