"""Profiles of kernels small enough to be worked out by hand; the page, JSON and picture of each."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from profiled import documented, halves, idle, many, matmuls, profile_of, tile

import neuroncore as nc
import neuroncore.isa as nisa
import neuroncore.language as nl
from neuroncore.memory.storage import MemoryRegion
from neuroncore.profile import metrics, report

# Trainium2, documented model, in ns.
DMA_X = 8 * 256 / 21  # 128 partitions on 16 engines, runs of less than 4 KiB
DMA = 8 * 1024 / 21
MATMUL = 512 / 2.4
COPY = 512 / 0.96
TIME = (1300 + DMA_X + DMA + 305) + (MATMUL + 164) + (COPY + 135 / 0.96) + (1300 + DMA)
PE_PEAK = 2 * 128 * 128 * 2.4e9
DMA_PEAK = 368e9
FLOPS = 2 * 128 * 128 * 512
BYTES = {"x": 128 * 128 * 2, "w": 128 * 512 * 2, "y": 128 * 512 * 2}
SECTIONS = ("Engines", "HBM traffic", "DMA", "Critical path", "On-chip memory")


def one_tile(x, w):
    y = nl.ndarray((128, 512), x.dtype, buffer=nl.shared_hbm, name="y")
    a = nl.ndarray((128, 128), x.dtype, name="a")
    b = nl.ndarray((128, 512), w.dtype, name="b")
    nisa.dma_copy(a, x)
    nisa.dma_copy(b, w)
    total = nl.ndarray((128, 512), nl.float32, buffer=nl.psum, name="total")
    nisa.nc_matmul(total, a, b)
    out = nl.ndarray((128, 512), x.dtype, name="out")
    nisa.tensor_copy(out, total)
    nisa.dma_copy(y, out)
    return y


@pytest.fixture(scope="module")
def profile() -> nc.Profile:
    return documented(one_tile, (128, 128), (128, 512))


def test_what_is_moved_and_computed_is_exact(profile):
    traffic = {t.name: (t.read_bytes, t.write_bytes) for t in profile.tensors}
    assert traffic == {"x": (BYTES["x"], 0), "w": (BYTES["w"], 0), "y": (0, BYTES["y"])}
    assert profile.hbm_read_bytes == BYTES["x"] + BYTES["w"]
    assert profile.hbm_write_bytes == BYTES["y"]
    assert profile.hbm_bytes == profile.dma_bytes == sum(BYTES.values())
    assert (profile.dma_count, profile.dma_sbuf_bytes) == (3, 0)
    buckets = [(bucket.row_bytes, bucket.rows, bucket.bytes) for bucket in profile.dma_rows]
    assert buckets == [(256, 128, BYTES["x"]), (1024, 256, BYTES["w"] + BYTES["y"])]
    assert profile.dma_efficiency == pytest.approx(21 / 23)
    assert profile.flops == FLOPS
    assert profile.opcodes == {"dma_copy": 3, "nc_matmul": 1, "tensor_copy": 1}
    assert profile.instructions == 5


def test_time_and_busy_engines(profile):
    assert profile.time_ms * 1e6 == pytest.approx(TIME)
    ((*engines,),) = profile.engines
    busy = {use.engine: use.busy_ms * 1e6 for use in engines}
    expected = {"TensorE": MATMUL, "VectorE": COPY, "ScalarE": 0, "GpSimdE": 0}
    expected["DMA"] = DMA_X + 2 * DMA
    assert busy == pytest.approx(expected)
    for use in engines:
        assert use.busy_ms + use.idle_ms == pytest.approx(profile.time_ms)
        assert use.share == pytest.approx(use.busy_ms / profile.time_ms)


def test_roofline(profile):
    assert profile.intensity == pytest.approx(FLOPS / sum(BYTES.values()))
    assert profile.ridge_point == pytest.approx(PE_PEAK / DMA_PEAK)
    assert profile.roofline_ms == pytest.approx(sum(BYTES.values()) / DMA_PEAK * 1e3)
    assert profile.roofline_share == pytest.approx(profile.roofline_ms / profile.time_ms)
    assert profile.mfu == pytest.approx(FLOPS / (TIME * 1e-9) / PE_PEAK)
    assert profile.tflops == pytest.approx(FLOPS / TIME / 1e3)


def test_what_binds(profile):
    assert DMA_X + 2 * DMA < 0.6 * TIME
    assert profile.bound == "latency"

    def copies(x):
        y = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        for i in range(32):
            a = tile(x)
            nisa.dma_copy(a, x[128 * i : 128 * (i + 1), :])
            nisa.dma_copy(y[128 * i : 128 * (i + 1), :], a)
        return y

    assert documented(copies, (4096, 512)).bound == "DMA"
    assert documented(matmuls, (128, 512)).bound == "TensorE"


def test_the_critical_path_makes_the_whole_time(profile):
    path = profile.critical_path
    assert sum(entry.time_ms for entry in path) == pytest.approx(profile.time_ms)
    steps = {entry.text: entry for entry in path}
    load, multiply = steps["nisa.dma_copy(b, w)"], steps["nisa.nc_matmul(total, a, b)"]
    assert (load.wait, multiply.wait) == ("DMA engines", "data")
    assert (load.steps, multiply.steps) == (1, 1)
    assert load.time_ms * 1e6 == pytest.approx(DMA)
    copy = steps["nisa.tensor_copy(out, total)"]
    assert copy.latency_ms * 1e6 == pytest.approx(164)
    assert copy.time_ms * 1e6 == pytest.approx(COPY + 164)
    assert copy.file == Path(__file__).name
    assert [entry.time_ms for entry in path] == sorted((e.time_ms for e in path), reverse=True)


def test_statements_of_several_lines_are_read_to_their_end(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text("f(\n    a[\n        0],\n    b,\n)\ng(1)\nh(" + "\n1," * 40 + ")\n")
    assert metrics.statement(str(file), 1) == "f(a[0], b,)"
    assert metrics.statement(str(file), 6) == "g(1)"
    assert metrics.statement(str(file), 7).count("1,") == 11
    assert metrics.statement(str(tmp_path / "no.py"), 1) == ""


def test_memory_at_its_fullest(profile):
    assert (profile.sbuf.used, profile.sbuf.limit) == (1280, 212_984)
    assert [(t.name, t.size) for t in profile.sbuf.live] == [("b", 1024), ("a", 256)]
    assert profile.sbuf.scheduled == 1280
    assert (profile.psum_peak_banks, profile.psum.limit, profile.psum.scheduled) == (1, 8, 1)
    assert [t.name for t in profile.psum.live] == ["total"]


def test_the_schedule_holds_more_than_the_program_order():
    def loads(x):
        for i in range(8):
            a, b = tile(x), tile(x)
            nisa.dma_copy(a, x[128 * i : 128 * (i + 1), :])
            nisa.tensor_copy(b, a)
        return x

    found = documented(loads, (1024, 512)).sbuf
    assert found.used == 2048
    assert found.used <= found.scheduled <= found.limit


def test_held_counts_what_begins_and_ends_at_once_together(profile):
    (core,) = profile.schedule.cores
    for memory in (MemoryRegion.sbuf, MemoryRegion.psum):
        sizes = [size for _, size in metrics.occupancy(core, memory)]
        assert min(sizes) >= 0
        assert sizes[-1] == 0


def test_covered_is_the_union():
    start, end = np.array([0.0, 1.0, 2.0, 10.0]), np.array([5.0, 3.0, 6.0, 11.0])
    assert metrics.covered(start, end) == 7.0
    assert metrics.covered(start[:0], end[:0]) == 0.0


def test_a_kernel_without_instructions():
    empty = documented(idle, (128, 128))
    assert (empty.time_ms, empty.mfu, empty.roofline_share, empty.intensity) == (0, 0, 0, None)
    assert (empty.bound, empty.critical_path, empty.instructions) == ("latency", (), 0)
    (tensor,) = empty.tensors
    assert (tensor.name, tensor.read_bytes, tensor.write_bytes) == ("x", 0, 0)
    assert "no HBM traffic" in str(empty)
    json.dumps(empty.to_json(), allow_nan=False)


def test_software_descriptors_are_work_of_gpsimd():
    def load(x):
        a = tile(x)
        nisa.dma_copy(a, x, dge_mode=nisa.dge_mode.swdge)
        return x

    engines = {use.engine: use.busy_ms for use in documented(load, (128, 512)).engines[0]}
    assert engines["GpSimdE"] * 1e6 == pytest.approx(128 / 1.2)


def test_two_cores():
    one = 128 * 512 * 2
    both = documented(halves[2], (128, 1024))
    assert both.lnc == 2
    traffic = {t.name: (t.read_bytes, t.write_bytes) for t in both.tensors}
    assert traffic == {"x": (2 * one, 0), "y": (0, 2 * one)}
    assert both.dma_peak_gbps == pytest.approx(2 * 368)
    assert both.dma_sbuf_bytes == 2 * one
    vector = [{use.engine: use.busy_ms for use in uses}["VectorE"] for uses in both.engines]
    assert vector[0] > 0 == vector[1]
    assert both.time_ms * 1e6 == max(max(core.end) for core in both.schedule.cores)
    assert sum(entry.time_ms for entry in both.critical_path) == pytest.approx(both.time_ms)
    slow = [e for e in both.critical_path if e.opcode == "tensor_scalar"]
    assert sum(e.steps for e in slow) == 20
    assert {e.core for e in slow} == {0}
    assert "2 cores" in str(both)


def test_json_is_plain_and_complete(profile):
    document = profile.to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["modelled"] is True
    names = "time_ms bound instructions hbm_bytes mfu sbuf_peak_bytes psum_peak_banks"
    for name in names.split():
        assert document[name] == getattr(profile, name), name
    roofline = (profile.roofline_ms, profile.roofline_share, profile.ridge_point)
    assert (document["limit_ms"], document["limit_share"], document["knee"]) == roofline
    assert document["tensors"][0] == {
        "name": "x", "shape": [128, 128], "dtype": "bfloat16", "memory": "shared_hbm",
        "read_bytes": BYTES["x"], "write_bytes": 0,
    }  # fmt: skip
    assert document["cores"][0]["engines"][0]["engine"] == "TensorE"
    assert document["sbuf_live"][0]["name"] == "b"


def test_the_page_warns_of_too_many_instructions(profile, monkeypatch):
    monkeypatch.setattr(report, "MOST_INSTRUCTIONS", profile.instructions)
    assert "compile for long" not in str(profile)
    monkeypatch.setattr(report, "MOST_INSTRUCTIONS", profile.instructions - 1)
    assert "compile for long; split tokens" in str(profile)


@pytest.mark.parametrize("lnc", [1, 2])
def test_the_page(profile, lnc):
    page = str(profile if lnc == 1 else documented(halves[2], (128, 1024)))
    for section in SECTIONS:
        assert f"\n\n{section}" in page, section
    assert max(map(len, page.splitlines())) <= 100
    for line in page.splitlines():
        if " ms" in line:  # a time or the header of a column of times
            table = line.lstrip().startswith(("core", "ms "))
            assert "modelled" in line or table, line
    assert page.count("modelled") >= 6


def test_long_file_names_leave_the_source_its_column(profile, monkeypatch):
    lines = profile.critical_path
    name = "a_very_long_name_of_a_kernel_that_somebody_wrote.py"
    one = [dataclasses.replace(entry, file=name) for entry in lines]
    two = [one[0], *(dataclasses.replace(e, file="other_" + name) for e in one[1:])]
    for path in (one, two):
        monkeypatch.setitem(vars(profile), "critical_path", tuple(path))
        page = str(profile)
        for entry in path:
            assert entry.text[:20] in page
        assert max(map(len, page.splitlines())) <= 100
    assert f"in {name}" not in page
    assert "a_very…te.py:" in page


def test_a_profile_costs_nothing_until_it_is_asked():
    fresh = documented(one_tile, (128, 128), (128, 512))
    assert not {"flops", "tensors", "critical_path", "engines", "time_ms"} & set(vars(fresh))
    assert repr(fresh).endswith("ms modelled>")


PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("kernel", "columns", "name", "begin"),
    [(many, 512, "picture", PNG), (halves[2], 1024, "a.png", PNG), (idle, 512, "a.svg", b"<?xml")],
    ids=["a long trace", "two cores", "none"],
)
def test_plot(tmp_path, kernel, columns, name, begin):
    documented(kernel, (128, columns)).plot(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begin)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_documented_time_is_without_the_fitted_overhead():
    calibrated, plain = (
        of(matmuls, (128, 512), assume="throttling") for of in (profile_of, documented)
    )
    assert calibrated.documented_ms == plain.time_ms == plain.documented_ms
    extra_ms = 64 * calibrated.machine.matmul_overhead_ns / 1e6
    assert calibrated.time_ms - calibrated.documented_ms == pytest.approx(extra_ms)
    assert calibrated.to_json()["documented_ms"] == plain.time_ms
    assert "by the documented costs alone" in str(calibrated)
