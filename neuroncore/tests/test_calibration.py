"""A simulated device whose constants differ from the clock's: `calibrate` finds them."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from outcomes import refused

import neuroncore as nc
from neuroncore import hardware
from neuroncore.calibration.cases import cases
from neuroncore.calibration.fit import calibrate
from neuroncore.calibration.measurements import Measurements, Row, write
from neuroncore.hardware import DMA_DONE_NS, DMA_START_NS, MACHINES, PSUM_RESULT_CYCLES
from neuroncore.timing import placer
from neuroncore.uncertainty import UNCERTAINTIES, assuming

LAUNCH_US, NOISE = 15.0, 0.01
TRN2 = MACHINES["trn2"]
NEVER = "hbm"
"""One core's kernel cannot tell."""


def hidden(
    *ends, model="transfers", short=16.0, rate=0.6, results=(120.0, 130.0, 350.0), **changes
):
    """trn2 at the named ends, with other constants."""
    ends += ("dma",) if TRN2.dma.model != model else ()
    machine = assuming(TRN2, ends)
    costs = replace(machine.dma, short_gbps=short, transpose_share=0.7)
    costs = replace(costs, interval_ns=costs.interval_ns and 700.0)
    throttle = machine.throttle and replace(machine.throttle, rate=rate)
    results = (*results, TRN2.result_ns[3])
    models = tuple([replace(costs, model=other.model) for other in machine.dma_models])
    machine = replace(
        machine, dma=costs, dma_models=models, throttle=throttle, result_ns=results, **changes
    )
    return ends, machine


DEVICES = {
    "as assumed": hidden(matmul_overhead_cycles=18.0, dma_engine_gbps=21.0),
    "slow short rows": hidden(
        "column-groups", "core-exchange", model="rows", matmul_overhead_cycles=14.0
    ),
    "shared queues": hidden(
        *("dma-queues", "throttling"), short=18.0, dma_engine_gbps=26.0,
        matmul_overhead_cycles=15.0,
    ),
    "slow issue": hidden(
        *("matmul-issue", "core-exchange"), rate=0.4, matmul_overhead_cycles=46.0,
        results=(180.0, 90.0, 260.0), meeting_ns=1100.0,
    ),
}  # fmt: skip


def measured(machine, start_ns=1500.0, table_ns=1000.0, psum_cycles=170, target="trn2"):
    """Times of all cases on a machine, with a launch and noise."""
    random = np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MACHINES, target, machine)
        patch.setattr(placer, "DMA_START_NS", start_ns)
        patch.setattr(placer, "TABLE_LOAD_NS", table_ns)
        patch.setattr(hardware, "PSUM_RESULT_CYCLES", psum_cycles)
        rows = []
        for case in cases(target):
            run = nc.simulate(
                case.simulated, *case.operands, **case.arguments, mode="trace", target=target
            )
            us = run.profile.time_ms * 1e3 + LAUNCH_US
            rows.append(Row(case.name, "measured", us * (1 + NOISE * random.standard_normal())))
    return Measurements(target, {"nki": "0.7.0"}, tuple(rows))


def constants_of(machine, start_ns=1500.0, table_ns=1000.0, psum_cycles=170):
    """What is to be found."""
    return {
        "matmul_overhead_cycles": machine.matmul_overhead_cycles,
        "short_gbps": machine.dma.short_gbps,
        "dma_engine_gbps": machine.dma_engine_gbps,
        "transpose_share": machine.dma.transpose_share,
        "round_trip_ns": start_ns + DMA_DONE_NS,
        "vector_result_ns": machine.result_ns[1],
        "psum_result_ns": psum_cycles / machine.clocks_ghz[1],
        "scalar_result_ns": machine.result_ns[2],
        "table_load_ns": table_ns,
        "tensor_result_ns": machine.result_ns[0],
        "barrier_ns": hardware.MIN_CYCLES / machine.clocks_ghz[3] + machine.meeting_ns,
        "exchange_ns": start_ns + max(DMA_DONE_NS, machine.meeting_ns),
        **({"interval_ns": machine.dma.interval_ns} if machine.dma.interval_ns else {}),
        **({"throttle_rate": machine.throttle.rate} if machine.throttle else {}),
    }


@pytest.fixture(scope="module")
def times():
    return measured(DEVICES["as assumed"][1])


@pytest.mark.parametrize("name", DEVICES)
def test_hidden_constants_and_ends_are_found(name):
    ends, machine = DEVICES[name]
    found = calibrate(measured(machine), Path("times.json"))
    assert found.launch_us == pytest.approx(LAUNCH_US, rel=0.05)
    expected = constants_of(machine)
    after = {each.name: each.after for each in found.constants}
    assert after == pytest.approx(expected, rel=0.05)
    assert all(each.plus_minus < 0.06 * each.after for each in found.constants)
    decided = {each.name: each.decided for each in found.uncertainties}
    right = {each.name: "otherwise" if each.name in ends else "assumed" for each in UNCERTAINTIES}
    right[NEVER] = None
    if not machine.dma.interval_ns:  # queues do not matter
        right["dma-queues"] = None
    assert decided == right


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
    assert barrier.after is barrier.plus_minus is None


@pytest.mark.parametrize("target", ["trn1", "trn3"])
def test_other_targets_have_their_own_constants(target):
    machine = MACHINES[target]
    start, table = DMA_START_NS, hardware.TABLE_LOAD_NS
    found = calibrate(measured(machine, start, table, PSUM_RESULT_CYCLES, target), Path("x"))
    names = {each.name for each in found.constants}
    assert ("barrier_ns" in names) == machine.has("paired_cores")
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
        **asdict(calibrate(times, Path("times.json"))),
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
