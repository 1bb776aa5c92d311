"""The Perfetto file of a profile: valid, named, and free of overlaps."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import profiled
import pytest
from profiled import keeps_the_old_file, profile_of, psum, tile, tiles

import neuroncore as nc
import neuroncore.isa as nisa


def quarters(x):
    """Four matmuls at a time in quarters of the PE array."""
    a = tile(x)
    nisa.dma_copy(a, x)
    for _ in range(4):
        for i in range(2):
            for j in range(2):
                rows, at = a[64 * i : 64 * i + 64], (64 * i, 64 * j)
                part = psum()[64 * j : 64 * j + 64, :]
                options = {"tile_position": at, "tile_size": (64, 64)}
                nisa.nc_matmul(part, rows[:, 0:64], rows, **options)
    return x


def saved(profile: nc.Profile, path: Path) -> dict[str, Any]:
    profile.save_perfetto(path)
    assert [found.name for found in path.parent.iterdir()] == [path.name]
    return json.loads(path.read_text())


def names_of(events: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    return {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name"
    }


def check_tracks(events: list[dict[str, Any]]) -> None:
    """Starts rise and nothing overlaps on a track, and every track has a name before its events."""
    named = set()
    until: dict[tuple[int, int], float] = defaultdict(float)
    for e in events:
        key = (e["pid"], e.get("tid", 0))
        if e["ph"] == "M":
            named.add(key)
        elif e["ph"] == "X":
            assert key in named
            assert e["ts"] >= until[key] - 1e-6
            assert e["dur"] >= 0
            until[key] = e["ts"] + e["dur"]


@pytest.fixture(scope="module")
def one_core():
    return profile_of(tiles, (128, 128), (128, 2048))


def test_events_are_the_instructions(one_core, tmp_path):
    document = saved(one_core, tmp_path / "trace.json")
    assert document["otherData"]["modelled"] is True
    events = document["traceEvents"]
    check_tracks(events)
    complete = [e for e in events if e["ph"] == "X"]
    assert sorted(e["args"]["instruction"] for e in complete) == list(range(17))
    assert [e["ts"] for e in complete] == sorted(e["ts"] for e in complete)
    (core,) = one_core.schedule.cores
    for e in complete:
        i = e["args"]["instruction"]
        assert e["ts"] == pytest.approx(core.start[i] / 1e3, abs=1e-6)
        assert e["dur"] == pytest.approx((core.end[i] - core.start[i]) / 1e3, abs=1e-6)


def test_tracks_are_engines_and_queues(one_core, tmp_path):
    events = saved(one_core, tmp_path / "trace.json")["traceEvents"]
    queues = set(one_core.schedule.cores[0].queue.values())
    tracks = {name.partition(" (")[0] for name in names_of(events).values()}
    assert tracks == {"TensorE", "VectorE", *queues}
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == ["core 0 of tiles on trn2 (modelled)"]


def test_arguments_name_operands_lines_and_waits(one_core, tmp_path):
    events = saved(one_core, tmp_path / "trace.json")["traceEvents"]
    matmul = next(e for e in events if e["name"] == "nc_matmul")["args"]
    assert matmul["opcode"] == "nc_matmul"
    assert matmul["reads"] == ["a", 'the "right" tile']
    assert len(matmul["writes"]) == 1
    assert matmul["flops"] == 2 * 128 * 128 * 512
    file, line = matmul["source"].split(":")
    assert file == Path(profiled.__file__).name
    source = Path(profiled.__file__).read_text().splitlines()
    assert source[int(line) - 1].strip() == "nisa.nc_matmul(total, a, b)"
    assert (matmul["waited_for"], matmul["waited_for_instruction"]) == ("data", 1)
    load = next(e for e in events if e["name"] == "dma_copy")["args"]
    assert (load["bytes"], load["row_bytes"]) == (128 * 128 * 2, 256)
    assert load["waited_for"] == "nothing"


def test_counters_begin_and_end_empty(one_core, tmp_path):
    events = saved(one_core, tmp_path / "trace.json")["traceEvents"]
    for name, unit, most in (
        ("SBUF bytes per partition", "bytes", one_core.sbuf.scheduled),
        ("PSUM banks", "banks", one_core.psum.scheduled),
    ):
        counted = [(e["ts"], e["args"][unit]) for e in events if e["name"] == name]
        assert counted == sorted(counted, key=lambda entry: entry[0])
        assert max(size for _, size in counted) == most
        assert counted[-1][1] == 0


def test_a_track_for_each_tensor_name(one_core, tmp_path):
    events = saved(one_core, tmp_path / "trace.json")["traceEvents"]
    lives = defaultdict(list)
    for e in events:
        if e["ph"] in "be":
            lives[e["cat"], e["id"]].append(e)
    assert all([e["ph"] for e in life] == ["b", "e"] for life in lives.values())
    assert all(begin["ts"] <= end["ts"] for begin, end in lives.values())
    names = {(cat, life[0]["name"]) for (cat, _), life in lives.items()}
    on_chip = {"a", 'the "right" tile', "tile()"}
    assert names == {*(("SBUF tensors", name) for name in on_chip), ("PSUM tensors", "psum()")}
    assert sum(cat == "PSUM tensors" for cat, _ in lives) == 4


def test_a_process_per_core(tmp_path):
    profile = profile_of(tiles[2], (128, 256), (128, 2048))
    events = saved(profile, tmp_path / "t.json")["traceEvents"]
    check_tracks(events)
    assert {e["pid"] for e in events} == {0, 1}
    per_core = [sum(e["ph"] == "X" and e["pid"] == pid for e in events) for pid in (0, 1)]
    assert per_core == [9, 9]


def test_matmuls_that_run_together_get_tracks_of_their_own(tmp_path):
    profile = profile_of(quarters, (128, 512))
    events = saved(profile, tmp_path / "t.json")["traceEvents"]
    check_tracks(events)
    names = [name for name in names_of(events).values() if name.startswith("TensorE")]
    assert names[:2] == ["TensorE", "TensorE (2)"]
    busy_ms = sum(e["dur"] for e in events if e["name"] == "nc_matmul") / 1e3
    assert profile.engines[0][0].busy_ms < busy_ms


def test_a_failed_write_leaves_the_old_file(one_core, tmp_path):
    keeps_the_old_file(one_core.save_perfetto, tmp_path, ("neuroncore.profile.perfetto._counters",))


def check_event(e: dict[str, Any]) -> None:
    """The rules of the Trace Event Format for the phases that are written.

    (Google, "Trace Event Format", sections Common fields, Complete, Counter, Async and Metadata;
    ui.perfetto.dev drops or misplaces what breaks them.)
    """
    assert isinstance(e["name"], str)
    assert e["name"]
    assert type(e["pid"]) is int
    if e["ph"] == "X":
        assert set(e) == {"ph", "pid", "tid", "ts", "dur", "name", "args"}
        assert type(e["tid"]) is int
        assert type(e["ts"]) is float
        assert type(e["dur"]) is float
        assert min(e["ts"], e["dur"]) >= 0
        assert isinstance(e["args"], dict)
    elif e["ph"] == "C":
        assert set(e) == {"ph", "pid", "ts", "name", "args"}
        assert e["ts"] >= 0
        assert e["args"]
        assert all(type(value) in (int, float) for value in e["args"].values())
    elif e["ph"] in "be":
        assert set(e) == {"ph", "cat", "id", "pid", "ts", "name", "args"}
        assert e["ts"] >= 0
    else:
        assert (e["ph"], set(e)) == ("M", {"ph", "pid", "tid", "name", "args"})
        fields = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}
        assert set(e["args"]) == {fields[e["name"]]}
        text = e["name"] != "thread_sort_index"
        assert type(e["args"][fields[e["name"]]]) is (str if text else int)


@pytest.mark.parametrize("cores", [1, 2])
def test_the_file_obeys_the_trace_event_format(cores, tmp_path):
    profile = profile_of(tiles[cores], (128, 256), (128, 2048))
    document = saved(profile, tmp_path / "trace.json")
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    for e in document["traceEvents"]:
        check_event(e)
    check_tracks(document["traceEvents"])
