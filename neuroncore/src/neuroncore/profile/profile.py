"""`Profile`: what one run of a kernel moved, computed, held and waited for. All times are modelled.

Nothing is computed before it is asked for, so that a profile costs a run nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from neuroncore.collector import no_collection
from neuroncore.hardware import DMA_MODELS, DmaModel, Engine, Machine
from neuroncore.memory.storage import MemoryRegion
from neuroncore.profile import metrics, perfetto, plot, report, timeline, uncertain, what_if
from neuroncore.profile.metrics import (
    CriticalLine,
    EngineUse,
    MemoryPeak,
    RowBucket,
    TensorTraffic,
)
from neuroncore.profile.uncertain import OtherEnd
from neuroncore.profile.what_if import WhatIf
from neuroncore.timing.schedule import schedule
from neuroncore.timing.times import Schedule
from neuroncore.timing.trace import DmaCost, InstructionTemplate
from neuroncore.uncertainty import assuming

if TYPE_CHECKING:
    from neuroncore.core import KernelRun

BOUND_SHARE = 0.6
_LISTED = 16


class Profile:
    """Numbers of one simulated launch. `str(profile)` is a page; all times are modelled.

    Args:
        kernel_name: name of the kernel's function.
        launch: the finished launch, with one trace per core.
        schedule: when its instructions run.
    """

    def __init__(self, kernel_name: str, launch: KernelRun, schedule: Schedule) -> None:
        self.kernel_name = kernel_name
        self.launch = launch
        self.schedule = schedule
        self.machine = schedule.machine
        self.lnc = len(schedule.cores)
        self._times_on = {self.machine: schedule.time_ns / 1e6}

    @property
    def target(self) -> str:
        """trn1, trn2 or trn3."""
        return self.machine.target

    @property
    def model(self) -> str:
        """The cost model: "calibrated", "documented" or "stationary_reuse"."""
        return self.schedule.model

    @property
    def mode(self) -> str:
        """Whether values were computed: "execute" or "trace"."""
        return "execute" if self.launch.execute else "trace"

    # time and limits

    @cached_property
    def time_ms(self) -> float:
        """When the last instruction of the last core ends."""
        return self.schedule.time_ns / 1e6

    @property
    def dma_model(self) -> DmaModel:
        """What small DMAs are taken to cost: one of `hardware.DMA_MODELS`."""
        return self.machine.dma.model

    @cached_property
    def times_ms(self) -> dict[DmaModel, float]:
        """The time under every DMA model; scheduled when asked for."""
        return {model: self._time_on(self.machine.under(model)) for model in DMA_MODELS}

    @property
    def time_low_ms(self) -> float:
        """The least time of all DMA models."""
        return min(self.times_ms.values())

    @property
    def time_high_ms(self) -> float:
        """The greatest."""
        return max(self.times_ms.values())

    @cached_property
    def uncertainties(self) -> tuple[OtherEnd, ...]:
        """The time at the other end of each of `uncertainty.UNCERTAINTIES`, slowest first."""
        return uncertain.other_ends(self.machine, self._time_on)

    @cached_property
    def time_range_ms(self) -> tuple[float, float]:
        """The time with all ends of `uncertainties` that are quicker, and with all slower ones."""
        return uncertain.together(self.machine, self._time_on, self.uncertainties)

    def time_assuming(self, *names: str) -> float:
        """The time at the other ends of some `uncertainties`, ms; ValueError for other names."""
        return self._time_on(assuming(self.machine, names))

    def _time_on(self, machine: Machine) -> float:
        """The launch scheduled once by the costs of another machine, ms."""
        if machine not in self._times_on:
            with no_collection():
                again = schedule(self.launch, self.schedule.model, machine)
            self._times_on[machine] = again.time_ns / 1e6
        return self._times_on[machine]

    @cached_property
    def documented_ms(self) -> float:
        """The same without issue of matmuls and throttling; scheduled when asked for."""
        if self.model == "documented":
            return self.time_ms
        with no_collection():
            return schedule(self.launch, "documented", self.machine).time_ns / 1e6

    @property
    def pe_peak_tflops(self) -> float:
        """bf16 peak of the TensorEs of all cores."""
        return self.machine.pe_peak_tflops * self.lnc

    @property
    def dma_peak_gbps(self) -> float:
        """Peak of the DMA engines of all cores, in GB/s."""
        return self.machine.dma_peak_gbps * self.lnc

    @property
    def tflops(self) -> float:
        """FLOPs over time."""
        return self.flops / self.time_ms / 1e9 if self.time_ms else 0.0

    @property
    def mfu(self) -> float:
        """FLOPs over what TensorE could do in this time, at its bf16 peak for every dtype."""
        return self.tflops / self.pe_peak_tflops

    @property
    def intensity(self) -> float | None:
        """FLOPs per HBM byte; None where no byte moves."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else None

    @property
    def ridge_point(self) -> float:
        """FLOPs per HBM byte at which the bf16 peak and the DMA peak take equally long."""
        return self.pe_peak_tflops * 1e3 / self.dma_peak_gbps

    @property
    def roofline_ms(self) -> float:
        """The longer of FLOPs at the bf16 peak and HBM bytes at the DMA peak: a lower bound."""
        compute_ns = self.flops / self.pe_peak_tflops / 1e3
        return max(compute_ns, self.hbm_bytes / self.dma_peak_gbps) / 1e6

    @property
    def roofline_share(self) -> float:
        """`roofline_ms` over `time_ms`: 1 is as good as it gets."""
        return self.roofline_ms / self.time_ms if self.time_ms else 0.0

    @cached_property
    def bound(self) -> str:
        """What binds: the engine with the largest busy share, on any core, if above 60 %.

        "TensorE", "VectorE", "ScalarE", "GpSimdE", or "DMA" by the busiest of the 16 DMA
        engines. Where none is busy for more than 60 % of the time it is "latency": the kernel
        waits for results, for free memory or for DMAs to start.
        """
        shares = {"DMA": max(max(c.dma_busy_ns) for c in self.schedule.cores) / 1e6}
        for uses in self.engines:
            for use in uses[:-1]:
                shares[use.engine] = max(shares.get(use.engine, 0.0), use.busy_ms)
        engine = max(shares, key=lambda name: shares[name])
        return engine if shares[engine] > BOUND_SHARE * self.time_ms else "latency"

    # what was issued

    @cached_property
    def _templates(self) -> dict[InstructionTemplate, int]:
        templates: Counter[InstructionTemplate] = Counter()
        for core in self.schedule.cores:
            templates.update(map(itemgetter(0), core.issued))
        return templates

    @property
    def instructions(self) -> int:
        """How many instructions all cores ran."""
        return sum(self._templates.values())

    @property
    def stream_instructions(self) -> int:
        """How many a compiler is given: the body of a loop of the device counts once."""
        return sum([len(core.trace.records) for core in self.schedule.cores])

    @cached_property
    def opcodes(self) -> dict[str, int]:
        """Instructions by opcode, most first."""
        counts: Counter[str] = Counter()
        for template, count in self._templates.items():
            counts[template.opcode] += count
        return dict(counts.most_common())

    @cached_property
    def flops(self) -> int:
        """FLOPs of the matmuls, two per multiply-add; transposes count none."""
        return sum(template.flops * count for template, count in self._templates.items())

    # what was moved

    @cached_property
    def tensors(self) -> tuple[TensorTraffic, ...]:
        """Every HBM tensor of the kernel with its traffic, those never touched included."""
        return metrics.traffic(self.schedule)

    @property
    def hbm_read_bytes(self) -> int:
        """Bytes read from HBM."""
        return sum(t.read_bytes for t in self.tensors)

    @property
    def hbm_write_bytes(self) -> int:
        """Bytes written to HBM."""
        return sum(t.write_bytes for t in self.tensors)

    @cached_property
    def hbm_bytes(self) -> int:
        """Bytes read from and written to HBM."""
        return self.hbm_read_bytes + self.hbm_write_bytes

    @cached_property
    def _dmas(self) -> list[tuple[DmaCost, int]]:
        """What each kind of DMA costs, and how many ran."""
        return [(t.dma, count) for t, count in self._templates.items() if t.dma is not None]

    @property
    def dma_count(self) -> int:
        """How many DMAs ran."""
        return sum(count for _, count in self._dmas)

    @property
    def dma_bytes(self) -> int:
        """Bytes that the DMA engines carried; HBM to HBM counts once."""
        return sum(dma.bytes * count for dma, count in self._dmas)

    @property
    def dma_sbuf_bytes(self) -> int:
        """Bytes of them that went from SBUF to SBUF."""
        return sum(dma.bytes * count for dma, count in self._dmas if dma.direction == "sbuf")

    @cached_property
    def dma_rows(self) -> tuple[RowBucket, ...]:
        """Histogram of the contiguous runs that DMAs carried, in powers of two."""
        rows: Counter[int] = Counter()
        moved: Counter[int] = Counter()
        for dma, count in self._dmas:
            bucket = 1 << (dma.run_bytes.bit_length() - 1)
            rows[bucket] += dma.rows * count
            moved[bucket] += dma.bytes * count
        return tuple(RowBucket(size, rows[size], moved[size]) for size in sorted(rows))

    @cached_property
    def dma_efficiency(self) -> float:
        """Bytes carried over what the DMA engines could carry while they were busy."""
        busy_ns = sum(sum(core.dma_busy_ns) for core in self.schedule.cores)
        return self.dma_bytes / (busy_ns * self.machine.dma_engine_gbps) if busy_ns else 0.0

    # who was busy

    @cached_property
    def engines(self) -> tuple[tuple[EngineUse, ...], ...]:
        """For each core: TensorE, VectorE, ScalarE, GpSimdE, and the mean of the DMA engines.

        TensorE includes the fitted overhead of the calibrated model, GpSimdE the descriptors it
        generates for DMAs; waiting for the other core is idle.
        """
        return tuple(metrics.busy(core, self.schedule) for core in self.schedule.cores)

    # what it waited for

    @cached_property
    def dma_active_ms(self) -> float:
        """How long a DMA engine was moving bytes, of the core where it was longest."""
        cores = self.schedule.cores
        return max([metrics.active_ns(core, Engine.DMA) for core in cores]) / 1e6

    @cached_property
    def critical_path(self) -> tuple[CriticalLine, ...]:
        """The chain of waits that ends with the last instruction, by source line, longest first.

        Walked back from the instruction that ends last to the one it waited for last, and so on,
        over to the other core where that one came late to a barrier.
        """
        return metrics.critical_path(self.schedule)

    @cached_property
    def what_if(self) -> tuple[WhatIf, ...]:
        """The launch with each resource free that may bind, fastest first; scheduled when asked.

        TensorE, VectorE, ScalarE, GpSimdE and PSUM eviction without time; the DMA engines without
        time, or at their peak rate; descriptors made before the run; SBUF or PSUM without a limit.
        """
        return what_if.what_if(self.launch, self.schedule)

    @property
    def what_would_help(self) -> str:
        """Which resource binds, by how much, and what to do, in a few sentences."""
        latency_ms = sum(entry.latency_ms for entry in self.critical_path)
        return what_if.summary(self.what_if, self.time_ms, latency_ms)

    # what it held

    @cached_property
    def sbuf(self) -> MemoryPeak:
        """The fullest SBUF of the cores, bytes per partition."""
        return metrics.peak(self.schedule, MemoryRegion.sbuf)

    @cached_property
    def psum(self) -> MemoryPeak:
        """The fullest PSUM of the cores, banks."""
        return metrics.peak(self.schedule, MemoryRegion.psum)

    @property
    def sbuf_peak_bytes(self) -> int:
        """SBUF bytes per partition that are live at once, in program order."""
        return self.sbuf.used

    @property
    def psum_peak_banks(self) -> int:
        """PSUM banks that are live at once, in program order."""
        return self.psum.used

    # how it is shown

    def __str__(self) -> str:
        """The readable page."""
        return report.page(self)

    def __repr__(self) -> str:
        """Kernel, target and time."""
        return f"<Profile of {self.kernel_name} on {self.target}: {self.time_ms:.4g} ms modelled>"

    def save_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace-event file, which ui.perfetto.dev opens."""
        perfetto.save(self, path)

    def save_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write a page of HTML with every instruction in time, which a browser opens offline."""
        timeline.save(self, path)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw timeline and roofline, by matplotlib, in the format of the path's suffix."""
        plot.save(self, path)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain types; names end in their units, and times are modelled.

        Live sets hold the 16 largest tensors. `intensity` is null where no HBM byte moves.
        """
        named = {"limit_ms": "roofline_ms", "limit_share": "roofline_share", "knee": "ridge_point"}
        numbers = (
            *("target", "lnc", "model", "dma_model", "mode"),
            *("time_ms", "time_low_ms", "time_high_ms", "documented_ms", "limit_ms"),
            *("limit_share", "bound", "instructions", "stream_instructions", "opcodes"),
            *("flops", "tflops", "mfu"),
            *("intensity", "knee", "hbm_bytes", "hbm_read_bytes", "hbm_write_bytes"),
        )
        dma = ("count", "active_ms", "bytes", "sbuf_bytes", "efficiency")
        return {
            "modelled": True,
            "kernel": self.kernel_name,
            **{name: getattr(self, named.get(name, name)) for name in numbers},
            "peak": {
                "pe_dtype": "bfloat16",
                "pe_tflops": self.pe_peak_tflops,
                "dma_gbps": self.dma_peak_gbps,
            },
            "tensors": [_plain(t) for t in self.tensors],
            "dma": {
                **{name: getattr(self, f"dma_{name}") for name in dma},
                "rows": [_plain(bucket) for bucket in self.dma_rows],
            },
            "cores": [
                {"core": i, "engines": [_plain(use) for use in uses]}
                for i, uses in enumerate(self.engines)
            ],
            "critical_path": [_plain(entry) for entry in self.critical_path],
            **_peak_document("sbuf", "bytes", self.sbuf),
            **_peak_document("psum", "banks", self.psum),
        }


def _plain(entry: Any) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(entry).items()}


def _peak_document(memory: str, unit: str, peak: MemoryPeak) -> dict[str, Any]:
    return {
        f"{memory}_peak_{unit}": peak.used,
        f"{memory}_limit_{unit}": peak.limit,
        f"{memory}_scheduled_{unit}": peak.scheduled,
        f"{memory}_live": [_plain(t) for t in peak.live[:_LISTED]],
    }
