"""The readable page of a profile, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from neuroncore.profile.metrics import MemoryPeak

if TYPE_CHECKING:
    from neuroncore.profile.profile import Profile

WIDTH = 100
_TENSORS = 12
_LINES = 10
_FILE = 12
_LIVE = 6
_BAR = 24
MOST_INSTRUCTIONS = 500_000
"""The compiler unrolls loops. Reported of it: over 30 minutes and 30 GB for a chain of kernels of
32K tokens (aws-neuron-sdk issue 1374); such a kernel here has about 511,000 instructions."""


def page(profile: Profile) -> str:
    """Time and roofline, engines, traffic, critical path and memory, each with a title."""
    sections = (_summary, _engines, _traffic, _dma, _critical, _memory)
    text = "\n\n".join("\n".join(_fit(section(profile))) for section in sections)
    return text.replace("\xa0", " ")


def what_would_help(p: Profile) -> str:
    """A section of its own: it schedules the launch again for each line."""
    rows = [
        (
            milliseconds(entry.time_ms),
            f"{entry.speedup:.2f}x" if entry.speedup else "",
            entry.resource,
            f"if {entry.freed}",
        )
        for entry in p.what_if
    ]
    header = ("ms", "speed", "<resource", "<")
    lines = ["What would help (ms modelled, with that resource free)"]
    lines += table(header, rows) if rows else []
    lines += ["  " + line for line in textwrap.wrap(p.what_would_help, WIDTH - 2)]
    return "\n".join(_fit(lines))


def what_is_uncertain(p: Profile) -> str:
    """A section of its own: it schedules the launch again for each line."""
    rows = [
        (milliseconds(end.time_ms), f"{end.time_ms / p.time_ms - 1:+.1%}", end.name, end.otherwise)
        for end in p.uncertainties
        if p.time_ms
    ]
    low, high = [milliseconds(ms) for ms in p.time_range_ms]
    lines = ["What is not known (ms modelled, with the other end of each)"]
    lines += table(("ms", "change", "<name", "<if"), rows) if rows else []
    lines.append(f"  All together: {low} to {high} ms modelled. --assume NAME gives a whole page.")
    return "\n".join(_fit(lines))


def _fit(lines: Iterable[str]) -> list[str]:
    return [clip(line.rstrip(), WIDTH) for line in lines]


def clip(text: str, width: int) -> str:
    """`text`, or its beginning and an ellipsis where it is longer than `width`."""
    return text if len(text) <= width else text[: width - 1] + "…"


def clip_middle(text: str, width: int) -> str:
    """`text`, or its beginning and end around an ellipsis where it is longer than `width`."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return text[: width - 1 - end] + "…" + text[len(text) - end :]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of aligned columns; a header that begins with `<` makes its column left-aligned."""
    cells = [[title.removeprefix("<") for title in header], *[list(row) for row in rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = [title.startswith("<") for title in header]
    return [
        "  "
        + "  ".join(
            [
                c.ljust(w) if to_left else c.rjust(w)
                for c, w, to_left in zip(row, widths, left, strict=True)
            ]
        )
        for row in cells
    ]


def milliseconds(ms: float) -> str:
    """Four decimals below a second, fewer above."""
    return f"{ms:,.4f}" if ms < 1000 else f"{ms:,.1f}"


def quantity(value: float, unit: str) -> str:
    """A large number with a decimal prefix: 12.3 MB, 45.6 GFLOP."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 1000:
            return f"{value:.4g} {prefix}{unit}"
        value /= 1000
    return f"{value:,.4g} P{unit}"


def _shape(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _summary(p: Profile) -> list[str]:
    cores = "1 core" if p.lnc == 1 else f"{p.lnc} cores"
    flops_ms = milliseconds(p.flops / p.pe_peak_tflops / 1e9)
    bytes_ms = milliseconds(p.hbm_bytes / p.dma_peak_gbps / 1e6)
    roofline = f"{milliseconds(p.roofline_ms)} ms modelled ({p.roofline_share:.1%} of the time)"
    bound = f"{p.bound}, the busiest engine"
    if p.bound == "latency":
        bound = "latency: no engine is busy for more than 60 % of the time"
    documented = ""
    if p.time_low_ms < p.time_high_ms:
        low, high = milliseconds(p.time_low_ms), milliseconds(p.time_high_ms)
        documented = f"; {low} to {high} under the DMA models"
    if p.model == "calibrated":
        documented += f"; {milliseconds(p.documented_ms)} by the documented costs alone"
    reached = f"{p.tflops:,.2f} TFLOP/s modelled, MFU {p.mfu:.1%} of the bf16 peak"
    # a no-break space keeps a count with its opcode
    opcodes = ", ".join([f"{count:,}\xa0{opcode}" for opcode, count in p.opcodes.items()])
    issued = textwrap.wrap(f"{p.instructions:,}: {opcodes}", WIDTH - 18)
    if p.stream_instructions < p.instructions:
        issued.append(f"{p.stream_instructions:,} as compiled: bodies of loops count once")
    if p.stream_instructions > MOST_INSTRUCTIONS:
        issued.append(f"more than {MOST_INSTRUCTIONS:,} in a launch compile for long; split tokens")
    intensity = "no HBM traffic"
    if p.intensity is not None:
        ridge = f"the ridge point is at {p.ridge_point:,.1f}"
        intensity = f"{p.intensity:,.1f} FLOP per HBM byte; {ridge}"
    rows = [
        ("time", f"{milliseconds(p.time_ms)} ms modelled{documented}"),
        ("roofline", f"{roofline}: FLOPs {flops_ms}, HBM {bytes_ms}"),
        ("bound by", bound),
        ("FLOPs", f"{quantity(p.flops, 'FLOP')}; {reached} of {p.pe_peak_tflops:,.1f}"),
        ("intensity", intensity),
        *zip(("instructions", *[""] * len(issued)), issued, strict=False),
    ]
    title = f"{p.kernel_name} on {p.target}, {cores}, {p.model} model, {p.mode} mode"
    return [title, "=" * 60, *table(("<", "<"), rows)[1:]]


def _engines(p: Profile) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for core, uses in enumerate(p.engines):
        for use in uses:
            full = min(_BAR, round(use.share * _BAR))
            times = milliseconds(use.busy_ms), milliseconds(use.idle_ms), f"{use.share:.1%}"
            rows.append((str(core), use.engine, *times, "█" * full + "·" * (_BAR - full)))
    header = ("core", "<engine", "busy ms", "idle ms", "share", "<")
    active = milliseconds(p.dma_active_ms)
    title = f"Engines (modelled; DMA is the mean of 16 engines, any moves for {active} ms)"
    return [title, *table(header, rows)]


def _traffic(p: Profile) -> list[str]:
    shown = sorted(p.tensors, key=lambda t: -(t.read_bytes + t.write_bytes))
    listed = [
        (clip(t.name, 24), clip(_shape(t.shape, t.dtype), 30), t.read_bytes, t.write_bytes)
        for t in shown[:_TENSORS]
    ]
    if len(shown) > _TENSORS:
        rest = shown[_TENSORS:]
        read, written = sum(t.read_bytes for t in rest), sum(t.write_bytes for t in rest)
        listed.append((f"{len(rest)} more", "", read, written))
    listed.append(("total", "", p.hbm_read_bytes, p.hbm_write_bytes))
    rows = [(name, shape, f"{read:,}", f"{written:,}") for name, shape, read, written in listed]
    return [
        f"HBM traffic: {p.hbm_bytes:,} bytes",
        *table(("<tensor", "<shape", "read bytes", "written bytes"), rows),
    ]


def _dma(p: Profile) -> list[str]:
    title = f"DMA: {p.dma_count:,} transfers, {p.dma_bytes:,} bytes"
    if p.dma_sbuf_bytes:
        title += f", {p.dma_sbuf_bytes:,} of them within SBUF"
    if not p.dma_rows:
        return [title]
    rows: list[tuple[str, ...]] = []
    for bucket in p.dma_rows:
        sizes = f"{bucket.row_bytes:,} to {2 * bucket.row_bytes - 1:,}"
        share = f"{bucket.bytes / p.dma_bytes:.1%}"
        rows.append((sizes, f"{bucket.rows:,}", f"{bucket.bytes:,}", share))
    return [
        title,
        f"  efficiency {p.dma_efficiency:.1%} (modelled): of what the busy engines could carry",
        *table(("bytes in a row", "rows", "bytes", "share"), rows),
    ]


def _critical(p: Profile) -> list[str]:
    lines = p.critical_path
    files = sorted({entry.file for entry in lines})
    # of one file the title says the name; of several each line, short enough for its text
    place = "line {line}" if len(files) == 1 else "{file}:{line}"
    rows = [
        (
            milliseconds(entry.time_ms),
            f"{entry.time_ms / p.time_ms:.1%}" if p.time_ms else "",
            milliseconds(entry.latency_ms),
            f"{entry.steps:,}",
            *((str(entry.core),) if p.lnc > 1 else ()),
            entry.wait,
            entry.opcode,
            place.format(file=clip_middle(entry.file, _FILE), line=entry.line),
            entry.text,
        )
        for entry in lines[:_LINES]
    ]
    core = ("core",) if p.lnc > 1 else ()
    header = ("ms", "share", "latency", "steps", *core, "<waited for", "<opcode", "<line", "<")
    where = f" in {clip_middle(files[0], WIDTH - 40)}" if len(files) == 1 else ""
    shown = [f"Critical path{where} (ms modelled)", *table(header, rows)]
    if len(lines) > _LINES:
        rest = sum(entry.time_ms for entry in lines[_LINES:])
        shown.append(
            f"  and {len(lines) - _LINES} more lines with {milliseconds(rest)} ms (modelled)"
        )
    return shown


def _memory(p: Profile) -> list[str]:
    shown = ["On-chip memory at its fullest, in program order"]
    for name, unit, peak in (("SBUF", "bytes per partition", p.sbuf), ("PSUM", "banks", p.psum)):
        shown.append(
            f"  {name}  {peak.used:,} of {peak.limit:,} {unit} ({peak.used / peak.limit:.1%}); "
            f"{peak.scheduled:,} in the modelled schedule"
        )
        shown += _live(peak)
    return shown


def _live(peak: MemoryPeak) -> list[str]:
    """The live set, tensors of the same line, shape and dtype together."""
    groups: dict[tuple[int, str], list[int]] = {}
    names: dict[tuple[int, str], str] = {}
    for t in peak.live:
        key = (t.line, _shape(t.shape, t.dtype))
        names.setdefault(key, t.name)
        groups.setdefault(key, []).append(t.size)
    order = sorted(groups, key=lambda key: -sum(groups[key]))
    rows: list[tuple[str, ...]] = []
    for key in order[:_LIVE]:
        line = f"line {key[0]}" if key[0] else ""
        size, count = f"{sum(groups[key]):,}", f"{len(groups[key])} ×"
        rows.append((size, count, clip(key[1], 34), clip(names[key], 24), line))
    lines = ["    " + line for line in table((">", ">", "<", "<", "<"), rows)[1:]]
    if len(order) > _LIVE:
        rest = sum(sum(groups[key]) for key in order[_LIVE:])
        lines.append(f"      and {len(order) - _LIVE} more kinds with {rest:,}")
    return lines
