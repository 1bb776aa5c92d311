"""The search for the arguments of a prefill kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from neuronmm_ops.kernels.planner.prefill import Blocks, PrefillCosts
from neuronmm_ops.kernels.planner.problem import Plan, Problem
from neuronmm_ops.kernels.planner.timeline import Program, Timeline, sbuf_peak
from neuronmm_ops.kernels.stages.tiling import (
    DOUBLED_FEATURES,
    PARTITIONS,
    PSUM_BANKS,
    STAGED_TILES,
    looped_tokens,
    tiles_in,
)

T = TypeVar("T")
Arguments = tuple[int, ...]
SMALL_WIDTHS = (256, 128, 64, 32, 16)
"""Tokens of a block where none of `Prefill.widths` fits."""
DOUBLED_SHARE = 0.95
"""Of the time of other plans, at most, from which activations are rounded to fp8."""
AHEAD_BYTES = 16384
"""SBUF per partition that is left to loads ahead where x does not stay whole."""


class Prefill(ABC):
    """An op's prefill kernel for one problem.

    Attributes:
        names: of the kernel's arguments that are numbers, `token_block` the first.
        widths: tokens of a block.
        tie_to_traffic: of plans that are equally quick the one that moves least is taken.
        setup_instructions: that a core issues once.
    """

    names: tuple[str, ...]
    widths: tuple[int, ...] = (512, 1024, 2048)
    tie_to_traffic = True
    setup_instructions = 0

    def __init__(self, problem: Problem, layout: str) -> None:
        self.problem, self.costs = problem, PrefillCosts(problem, layout)
        self.tokens = problem.core_tokens[0]
        self.kept = self.costs.kept(0).fills
        contracted = max([rows for rows, _ in problem.matrices])
        self.doubles_rows = (
            problem.doubles_rows and layout == "dma" and contracted <= DOUBLED_FEATURES
        )
        self.room = problem.machine.usable_sbuf_bytes - self.kept

    @abstractmethod
    def stages(self, width: int, arguments: Arguments) -> list[Program]:
        """The kernel for a block of `width` tokens."""

    def doubled(self, width: int, arguments: Arguments) -> list[Program]:
        """The kernel with `double_row`."""
        raise NotImplementedError

    def doubled_choices(self, token_block: int, width: int) -> Iterable[Arguments]:
        """Arguments worth a plan with `double_row`."""
        del token_block, width
        return ()

    @abstractmethod
    def choices(self, token_block: int, width: int) -> Iterable[Arguments]:
        """Arguments worth a plan; the widest block has `width` tokens."""

    def plans(self) -> list[Plan]:
        """The plans that fit of the choices; small blocks where no larger one does."""
        wide = [w for n, w in enumerate(self.widths) if n == 0 or self.widths[n - 1] < self.tokens]
        for blocks in (wide, *[[width] for width in SMALL_WIDTHS]):
            tried = [a for block in blocks for a in self.choices(block, min(block, self.tokens))]
            found = [plan for plan in map(self.plan, tried) if plan]
            if self.doubles_rows:
                tried = [a for b in blocks for a in self.doubled_choices(b, min(b, self.tokens))]
                plans = [self.plan(arguments, double_row=True) for arguments in tried]
                # less is within what these are predicted to
                limit = DOUBLED_SHARE * min([p.time_ms for p in found], default=float("inf"))
                found += [plan for plan in plans if plan and plan.time_ms <= limit]
            if found:
                return found
        return []

    def plan(
        self, arguments: Arguments, device_loop: bool = False, double_row: bool = False
    ) -> Plan | None:
        """What these arguments come to; None where they do not fit.

        With `device_loop` full blocks of tokens are a loop of the device, whose body is issued
        from one copy. Its DMAs' descriptors are made on the way, which hides behind the work. With
        `double_row` activations are rounded to fp8.
        """
        problem, timeline = self.problem, Timeline(self.costs.machine)
        width = min(arguments[0], self.tokens)
        hbm_bytes = sbuf_bytes = 0
        issued = (self.setup_instructions + double_row) * problem.lnc  # and ones
        for core, tokens in enumerate(problem.core_tokens):
            if tokens:
                kept = self.costs.kept(min(PARTITIONS, width, tokens))
                hbm_bytes, issued = hbm_bytes + kept.hbm_bytes, issued + kept.instructions
            for size, times in ((width, tokens // width), (tokens % width, 1)):
                if size == 0 or times == 0:
                    continue
                stages = self.doubled if double_row else self.stages
                programs = stages(size, arguments)
                timeline.room = self.room - max([program.held for program in programs])
                hbm_bytes += times * sum([p.total("hbm_bytes") for p in programs])
                copies = 1 if device_loop and looped_tokens(tokens, size) else times
                issued += copies * sum([p.total("instructions") for p in programs])
                if core == 0:
                    sbuf_bytes = max(sbuf_bytes, sbuf_peak(programs))
                    if sbuf_bytes > self.room:
                        return None
                    timeline.repeat(programs, times)
        blocks: Blocks = dict(zip(self.names, arguments, strict=True))
        blocks |= {"layout": self.costs.layout, "engines": self.costs.engines}
        if double_row:
            blocks["double_row"] = True
        if device_loop:
            blocks["device_loop"] = True
        return Plan(
            problem,
            "prefill",
            problem.op,
            tuple(blocks.items()),
            timeline.end_ns / 1e6,
            hbm_bytes,
            sbuf_bytes + self.kept,
            PSUM_BANKS,
            "PE" if timeline.work_ns >= timeline.transfer_ns else "DMA",
            issued,
            (problem.M,),
        )

    def residents(
        self, K: int, width: int, programs: Callable[[int], Sequence[Program]], parts: int = 1
    ) -> list[int]:
        """How many x^T tiles may stay in SBUF: all, or as many as fit, or fewer to fetch ahead.

        `programs` of so many, whose tiles are [128, width]; several `parts` of tokens want all.
        """
        count = tiles_in(K, PARTITIONS)
        if sbuf_peak(programs(count)) <= self.room:
            return [count]
        left = self.room - sbuf_peak(programs(0))
        if parts > 1 or left < 0:
            return []
        most = min(count - 1, (left - AHEAD_BYTES) // (width * self.costs.item))
        found = {max(0, most), max(0, most) * 5 // 8}
        if self.costs.layout == "pe":
            found = {n - n % STAGED_TILES for n in found}
        return sorted(found - {0}) or [0]

    def quickest(
        self, arguments: Iterable[T], stage: Callable[[T], Program], live: int = 0
    ) -> list[T]:
        """Arguments of a stage that fit beside `live` bytes of SBUF, by its time alone."""
        found: list[tuple[float, T]] = []
        for chosen in arguments:
            program = stage(chosen)
            if sbuf_peak([program], live) <= self.room:
                timeline = Timeline(self.costs.machine)
                timeline.room = self.room
                timeline.repeat([program], 1)
                found.append((timeline.end_ns, chosen))
        return [chosen for _, chosen in sorted(found, key=lambda entry: entry[0])]
