"""A simulated device whose constants differ from the clock's: `calibrate` finds them."""

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from outcomes import refused

import neuroncore as nc
from neuroncore import hardware
from neuroncore.calibration.cases import cases
from neuroncore.calibration.fit import calibrate
from neuroncore.calibration.measurements import Measurements, Row, write
from neuroncore.hardware import MACHINES, Engine, Throttle
from neuroncore.timing import placer
from neuroncore.uncertainty import UNCERTAINTIES, assuming

LAUNCH_US, NOISE, CLOSE = 15.0, 0.01, 0.05
TRN2 = MACHINES["trn2"]
SLOW = "use", "rest", "idle", "pause"
"""Series whose fit is a search of half a minute."""
NEVER = "hbm"
"""One core's kernel cannot tell."""
GLOBALS = "DMA_START_NS", "DMA_DONE_NS", "HWDGE_NS", "TABLE_LOAD_NS", "PSUM_RESULT_CYCLES"
"""Constants that are no fields of a machine."""


class Device:
    """trn2 at other ends of some uncertainties, each constant times a factor of its own.

    Attributes:
        machine: the hidden one.
        globals: by name, those of `GLOBALS`.
    """

    def __init__(self, *ends, model="transfers", meeting_ns=0.0, **factors):
        assert factors.keys() <= UP.keys()

        def moved(name, value):
            return value * factors.get(name, 1.0)

        self.ends = ends + (("dma",) if TRN2.dma.model != model else ())
        machine = assuming(TRN2, self.ends)
        costs = replace(
            machine.dma,
            interval_ns=moved("interval_ns", machine.dma.interval_ns),
            short_gbps=moved("short_gbps", machine.dma.short_gbps),
            transpose_share=moved("transpose_share", machine.dma.transpose_share),
        )
        throttle = machine.throttle and Throttle(
            *[moved(f"throttle_{n}", v) for n, v in asdict(machine.throttle).items()]
        )
        results = [
            moved(f"{engine.name.lower()}_result_ns", ns)
            for engine, ns in zip(Engine, machine.result_ns, strict=False)
        ]
        self.machine = replace(
            machine,
            dma=costs,
            dma_models=tuple([replace(costs, model=each.model) for each in machine.dma_models]),
            throttle=throttle,
            result_ns=tuple(results),
            dma_engine_gbps=moved("dma_engine_gbps", machine.dma_engine_gbps),
            matmul_overhead_cycles=moved("matmul_overhead_cycles", machine.matmul_overhead_cycles),
            meeting_ns=machine.meeting_ns + meeting_ns,
        )
        self.globals = {name: moved(name, getattr(hardware, name)) for name in GLOBALS}

    @property
    def constants(self):
        """What is to be found."""
        machine, values = self.machine, self.globals
        psum_ns = values["PSUM_RESULT_CYCLES"] / machine.clocks_ghz[Engine.VECTOR]
        start_ns, done_ns = values["DMA_START_NS"], values["DMA_DONE_NS"]
        results = zip(("tensor", "vector", "scalar", "gpsimd"), machine.result_ns, strict=True)
        throttle = asdict(machine.throttle) if machine.throttle else {}
        return {
            "matmul_overhead_cycles": machine.matmul_overhead_cycles,
            **({"interval_ns": machine.dma.interval_ns} if machine.dma.interval_ns else {}),
            "short_gbps": machine.dma.short_gbps,
            "dma_engine_gbps": machine.dma_engine_gbps,
            "transpose_share": machine.dma.transpose_share,
            "dma_start_ns": start_ns,
            "dma_done_ns": done_ns,
            "descriptors_ns": values["HWDGE_NS"],
            "table_load_ns": values["TABLE_LOAD_NS"],
            **{f"{engine}_result_ns": ns for engine, ns in results},
            "psum_result_ns": psum_ns,
            **{f"throttle_{name}": value for name, value in throttle.items()},
            "exchange_ns": start_ns + max(done_ns, machine.meeting_ns),
            "barrier_ns": machine.ns(Engine.GPSIMD, hardware.MIN_CYCLES) + machine.meeting_ns,
        }


UP = {
    "matmul_overhead_cycles": 1.4, "interval_ns": 1.2, "short_gbps": 1.1, "dma_engine_gbps": 1.3,
    "transpose_share": 1.1, "DMA_START_NS": 1.15, "DMA_DONE_NS": 1.4, "HWDGE_NS": 1.25,
    "TABLE_LOAD_NS": 1.1, "PSUM_RESULT_CYCLES": 1.35, "tensor_result_ns": 1.3,
    "vector_result_ns": 1.1, "scalar_result_ns": 1.2, "gpsimd_result_ns": 1.4,
    "throttle_use": 1.15, "throttle_window_ns": 1.3, "throttle_rate": 1.1,
}  # fmt: skip
MIXED = {
    "matmul_overhead_cycles": 1.3, "interval_ns": 0.8, "short_gbps": 0.75, "dma_engine_gbps": 0.9,
    "transpose_share": 0.7, "DMA_START_NS": 0.8, "DMA_DONE_NS": 1.3, "HWDGE_NS": 0.8,
    "TABLE_LOAD_NS": 1.3, "PSUM_RESULT_CYCLES": 1.2, "tensor_result_ns": 0.8,
    "vector_result_ns": 1.2, "scalar_result_ns": 0.7, "gpsimd_result_ns": 0.8,
    "throttle_use": 0.9, "throttle_window_ns": 0.8, "throttle_rate": 1.2,
}  # fmt: skip
DEVICES = {
    "all more": Device(meeting_ns=20.0, **UP),
    "mixed": Device(**MIXED),
    "slow short rows": Device("column-groups", "core-exchange", model="rows", **MIXED),
    "shared queues": Device(
        *("dma-queues", "throttling", "engine-issue", "instruction-order"), **UP
    ),
    "slow issue": Device(
        *("matmul-issue", "core-exchange", "dma-rate", "sbuf-reserve"),
        **{**MIXED, "matmul_overhead_cycles": 0.9, "dma_engine_gbps": 1.0},
    ),
}


def measured(name, left_out=()):
    """What `of_all_series` says of the series that are not left out."""
    series = {case.name: case.series for case in cases(of_all_series(name).target)}
    rows = [row for row in of_all_series(name).rows if series[row.case] not in left_out]
    return replace(of_all_series(name), rows=tuple(rows))


@cache
def of_all_series(name):
    """Times of all cases on a device, with a launch and noise; a target's name is its own clock."""
    device = DEVICES.get(name)
    target, random = (name if device is None else "trn2"), np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        if device is not None:
            patch.setitem(MACHINES, "trn2", device.machine)
            for constant, value in device.globals.items():
                for module in (hardware, placer):
                    if hasattr(module, constant):
                        patch.setattr(module, constant, value)
        rows = []
        for case in cases(target):
            run = nc.simulate(
                case.simulated, *case.operands, **case.arguments, mode="trace", target=target
            )
            us = run.profile.time_ms * 1e3 + LAUNCH_US
            us *= 1 + NOISE * random.standard_normal()
            rows.append(Row(case.name, "measured", us))
    return Measurements(target, {"nki": "0.7.0"}, tuple(rows))


@pytest.fixture
def times():
    return measured("all more", SLOW)


@cache
def calibrated(name, left_out=()):
    return calibrate(measured(name, left_out), Path("times.json"))


@pytest.mark.parametrize("name", DEVICES)
def test_hidden_constants_and_ends_are_found(name):
    device, found = DEVICES[name], calibrated(name)
    assert found.launch_us == pytest.approx(LAUNCH_US, rel=CLOSE)
    after = {each.name: each.after for each in found.constants}
    assert after == pytest.approx(device.constants, rel=CLOSE)
    assert all(each.plus_minus <= CLOSE * each.after for each in found.constants)
    assert not any(each.reason for each in found.constants)
    decided = {each.name: each.decided for each in found.uncertainties}
    right = {
        each.name: "otherwise" if each.name in device.ends else "assumed" for each in UNCERTAINTIES
    }
    right[NEVER] = None
    if not device.machine.dma.interval_ns:  # queues do not matter
        right["dma-queues"] = None
    if device.machine.dma_engine_gbps not in (TRN2.dma_engine_gbps, TRN2.other_dma_engine_gbps):
        decided.pop("dma-rate")
        right.pop("dma-rate")
    assert decided == right


def test_the_hidden_sets_move_every_constant():
    ours = Device().constants
    assert UP.keys() == MIXED.keys()
    assert all(1.1 <= factor <= 1.4 for factor in UP.values())
    up, mixed = DEVICES["all more"].constants, DEVICES["mixed"].constants
    assert up.keys() == mixed.keys() == ours.keys()
    assert all(up[name] > value for name, value in ours.items())
    assert sum([mixed[name] != value for name, value in ours.items()]) == len(ours) - 1  # barriers
    assert {mixed[name] > value for name, value in ours.items()} == {True, False}


def test_what_times_do_not_tell_apart_is_undecided_with_its_partner():
    found = {each.name: each for each in calibrated("mixed", ("overwrites", *SLOW)).constants}
    for name, other in (("dma_start_ns", "dma_done_ns"), ("dma_done_ns", "dma_start_ns")):
        assert found[name].after is found[name].plus_minus is None
        assert found[name].reason == f"times tell it only together with {other}"


def test_what_another_constant_hides_is_undecided_with_its_partner(monkeypatch):
    fast = Device(**{**MIXED, "short_gbps": 1.4, "dma_engine_gbps": 1.1})
    monkeypatch.setitem(DEVICES, "fast short rows", fast)
    found = {each.name: each for each in calibrated("fast short rows", SLOW).constants}
    expected = fast.constants
    assert found["short_gbps"].after is None
    assert (
        found["short_gbps"].reason == "times do not change where it is more: dma_engine_gbps binds"
    )
    for name in ("dma_engine_gbps", "interval_ns"):
        assert found[name].after == pytest.approx(expected[name], rel=CLOSE)


def test_what_was_refused_is_undecided_with_its_reason(times):
    gone = [
        replace(row, status="refused", time_us=None, reason="NCC_EVRF001")
        if row.case.startswith(("columns", "barriers"))
        else row
        for row in times.rows
    ]
    found = calibrate(replace(times, rows=tuple(gone)), Path("times.json"))
    (columns,) = [each for each in found.uncertainties if each.name == "column-groups"]
    assert (columns.decided, columns.reason) == (None, "columns was refused: NCC_EVRF001")
    (barrier,) = [each for each in found.constants if each.name == "barrier_ns"]
    assert (barrier.after, barrier.reason) == (None, "barriers was refused: NCC_EVRF001")


@pytest.mark.parametrize("target", ["trn1", "trn3"])
def test_other_targets_have_their_own_constants(target):
    machine, found = MACHINES[target], calibrated(target, SLOW)
    names = {each.name for each in found.constants}
    assert ("barrier_ns" in names) == machine.has("paired_cores")
    assert ("descriptors_ns" in names) == machine.has("hardware_dge")
    assert ("throttle_rate" in names) == (machine.throttle is not None)
    assert {each.decided for each in found.uncertainties} <= {"assumed", None}


def test_the_command_prints_and_writes_what_it_finds(run, times, tmp_path):
    write(tmp_path / "times.json", times)
    outcome = run("calibrate", tmp_path / "times.json", "-o", tmp_path / "out.json")
    assert (outcome.code, outcome.err) == (0, "")
    for text in ("nki 0.7.0", "A launch costs", "matmul_overhead_cycles", "undecided: one core's"):
        assert text in outcome.out
    document = json.loads((tmp_path / "out.json").read_bytes())
    assert document == {
        "measurements": str(tmp_path / "times.json"),
        **asdict(calibrated("all more", SLOW)),
    }


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text[:-20], "is no JSON document, or is cut off"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "has version 2; this reads 1"),
        (lambda text: text.replace("trn2", "trn9"), "has target 'trn9'; it must be one of"),
        (lambda text: text.replace("trn2", "trn1"), "has cases that trn1 does not have"),
        (lambda text: text.replace("columns", "colums"), "colums/128, colums/16; measure with"),
    ],
)
def test_bad_files_are_refused_in_one_line(run, times, tmp_path, change, problem):
    path = tmp_path / "times.json"
    write(path, times)
    path.write_text(change(path.read_text()))
    refused(run("calibrate", path), problem)


def test_too_few_rows_are_refused(run, times, tmp_path):
    rows = [row for row in times.rows if row.case in ("loads-256/32", "columns/16")]
    write(tmp_path / "times.json", replace(times, rows=tuple(rows)))
    refused(run("calibrate", tmp_path / "times.json"), "has too few rows")
    refused(run("calibrate", tmp_path / "none.json"), "No such file")
