"""`neuroncore compare`: a modelled profile next to a measured one, and what cannot be compared."""

import json
import sys
from typing import Any

import pytest
from outcomes import Run, refused

MEASURED = {
    "total_time": 2e-5,
    "instance_type": "trn2.48xlarge",
    "vector_engine_active_time": 1e-6,
    "hbm_read_bytes": 128 * 1024 * 4,
    "hardware_flops": 0,
    "mfu_estimated_percent": None,
    "spill_save_bytes": float("nan"),  # of no interest here
}
INSTRUCTIONS: dict[str, list[Any]] = {
    "start_ts": [0, 10, 50, 100, 200],
    "end_ts": [40, 30, 90, 120, 900],
    "engine": ["Vector", "Vector", "vector", "Sync", "Vector"],
    "opcode": ["TENSOR_SCALAR", "TENSOR_SCALAR", "TENSOR_SCALAR", "WRITE", "EVENT_SEMAPHORE"],
    "nki_source_location": [
        "/a/kernels.py:21",
        "/a/kernels.py:21",
        '["kernels.py:21", "y.py:1"]',
        "kernels.py:20",
        "k.py:1",
    ],
    "pcore_idx": [0, 1, 0, 0, 0],
    "dma_trigger_start_ts": [None, None, None, 1000, None],
    "dma_trigger_end_ts": [None, None, None, 3000, None],
}


@pytest.fixture(scope="module")
def folder(file, tmp_path_factory):
    """Two profiles of `scale`, one of another kernel, and a measured summary."""
    from neuroncore.cli import main

    folder = tmp_path_factory.mktemp("profiles")
    for name, kernel, target in (
        ("a", "scale", "trn2"),
        ("b", "scale", "trn1"),
        ("c", "in_place", "trn2"),
    ):
        command = ["simulate", f"{file}:{kernel}", "--arg", "x=f32[128,1024]", "--target", target]
        assert main([*command, "--summary", str(folder / f"{name}.json")]) == 0
    (folder / "measured.json").write_text(json.dumps({"neff": MEASURED}))
    return folder


@pytest.fixture
def profile(simulate: Run, file, tmp_path):
    """What `simulate --json` printed of `scale`, and its file."""
    done = simulate(f"{file}:scale", "--arg", "x=f32[128,1024]", "--target", "trn2", "--json")
    (tmp_path / "profile.json").write_text(done.out)
    return tmp_path / "profile.json", done.document()


def fields(found: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {e["name"]: (e["modelled"], e["other"], e["ratio"]) for e in found["fields"]}


def parquet(folder, tables: dict[str, dict[str, list[Any]]]):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    folder.mkdir()
    for name, columns in tables.items():
        write_table(arrow.table(columns), folder / f"{name}.parquet")
    return folder


def measured_tables(**changes: list[Any]) -> dict[str, dict[str, list[Any]]]:
    summary = {name: [value] for name, value in MEASURED.items() if name != "instance_type"}
    return {
        "Metadata": {"instance_type": ["trn2.48xlarge"], "is_simulation": [False]},
        "Summary": summary,
        "Instruction": {**INSTRUCTIONS, **changes},
    }


def test_a_summary_of_a_device(run, profile, folder):
    path, ours = profile
    found = run("compare", path, folder / "measured.json", "--json").document()
    assert (found["kernel"], found["target"], found["other_is_simulation"]) == (
        "scale",
        "trn2",
        False,
    )
    assert found["lines"] == []
    by_name = fields(found)
    assert by_name["total_time"] == (ours["time_ms"] / 1e3, 2e-5, ours["time_ms"] / 1e3 / 2e-5)
    assert by_name["hbm_read_bytes"] == (128 * 1024 * 4, 128 * 1024 * 4, 1.0)
    vector = ours["cores"][0]["engines"][1]["busy_ms"] / 1e3
    assert by_name["vector_engine_active_time"] == (vector, 1e-6, vector / 1e-6)
    assert by_name["vector_engine_instruction_count"] == (2, None, None)
    assert by_name["dma_transfer_count"] == (4, None, None)
    assert "spill_save_bytes" not in by_name
    page = run("compare", path, folder / "measured.json").page()
    assert page.startswith(f"scale on trn2: {path} (modelled) next to")
    assert "No lines to compare" in page
    assert f" {ours['time_ms']:.4g}" in page


def test_a_whole_profile_of_neuron_profile_has_its_summary(run, profile, folder, tmp_path):
    path, _ = profile
    (summary,) = json.loads((folder / "measured.json").read_text()).values()
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps({"summary": [summary], "instruction": [{"label": "Vector"}]}))
    of_summary, of_whole = (
        run("compare", path, other, "--json").document()
        for other in (folder / "measured.json", whole)
    )
    assert fields(of_whole) == fields(of_summary)
    whole.write_text(json.dumps({"summary": [summary, summary]}))
    assert "neither" in run("compare", path, whole).err


def test_a_written_summary_says_what_its_profile_says(run, profile, folder):
    """Both are PROFILE, and either may come second."""
    path, _ = profile
    assert json.loads((folder / "a.json").read_text())["scale"]["is_simulation"] is True
    found = run("compare", folder / "a.json", path, "--json").document()
    assert found["other_is_simulation"] is True
    pairs = fields(found)
    assert len(pairs) == 18
    assert {ratio for _, _, ratio in pairs.values()} == {1.0, None}
    assert all(modelled == other for modelled, other, _ in pairs.values())


def test_lines_of_two_profiles(run, profile):
    path, ours = profile
    found = run("compare", path, path, "--json").document()
    lines = {(e["line"], e["engine"]): e["instructions"]["other"] for e in found["lines"]}
    assert lines == {(19, "DMA"): 2, (20, "VectorE"): 2, (21, "DMA"): 2}
    assert sum(entry["instructions"] for entry in ours["lines"]) == ours["instructions"]
    for entry in found["lines"]:
        assert entry["busy_ms"]["modelled"] == entry["busy_ms"]["other"] > 0


def test_a_directory_of_parquet(run, profile, tmp_path):
    """Intervals are united per core; waits count for nothing, DMAs for DMA and their trigger."""
    path, _ = profile
    found = run(
        "compare", path, parquet(tmp_path / "x=1@latest", measured_tables()), "--json"
    ).document()
    assert fields(found)["total_time"][1] == 2e-5
    lines = {
        (entry["file"], entry["line"], entry["engine"]): entry
        for entry in found["lines"]
        if entry["busy_ms"]["other"] is not None
    }
    times = {key: entry["busy_ms"]["other"] for key, entry in lines.items()}
    assert times == {
        ("kernels.py", 21, "VectorE"): pytest.approx(100e-6),
        ("kernels.py", 20, "SyncE"): pytest.approx(20e-6),
        ("kernels.py", 20, "DMA"): pytest.approx(2000e-6),
    }
    assert lines["kernels.py", 21, "VectorE"]["instructions"]["other"] == 3


def test_a_table_in_parts_and_one_without_lines(run, profile, tmp_path):
    path, _ = profile
    tables = measured_tables()
    tables["Instruction_0"] = tables["Instruction_1"] = tables.pop("Instruction")
    parts = parquet(tmp_path / "parts", tables)
    found = run("compare", path, parts, "--json").document()
    counts = {e["engine"]: e["instructions"]["other"] for e in found["lines"] if e["line"] == 21}
    assert counts["VectorE"] == 6
    bare = parquet(tmp_path / "bare", measured_tables(nki_source_location=[None] * 5))
    assert run("compare", path, bare, "--json").document()["lines"] == []


def test_two_cores(run, simulate, file, tmp_path):
    """Active times are means of the cores, instructions sums."""
    target = tmp_path / "two.json"
    command = (f"{file}:scale", "--arg", "x=f32[128,1024]", "--target", "trn2", "--lnc", 2)
    ours = simulate(*command, "--summary", target, "--json").document()
    (written,) = json.loads(target.read_text()).values()
    assert written["num_physical_cores"] == 2
    mean = sum(core["engines"][1]["busy_ms"] for core in ours["cores"]) / 2e3
    assert written["vector_engine_active_time"] == pytest.approx(mean)
    assert written["vector_engine_instruction_count"] == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"total_time": None}, ["has no total_time", "neuron-explorer"]),
        ({"total_time": 0}, ["total_time 0", "above 0"]),
        ({"total_time": -1.0}, ["total_time -1.0", "not negative"]),
        ({"total_time": float("nan")}, ["total_time nan", "finite"]),
        ({"dma_active_time": float("inf")}, ["dma_active_time inf", "finite"]),
        ({"dma_active_time": 10**400}, ["dma_active_time 1000", "finite"]),
        ({"hbm_read_bytes": "many"}, ["hbm_read_bytes 'many'", "number"]),
        ({"hbm_read_bytes": True}, ["hbm_read_bytes True", "number"]),
        ({"instance_type": "trn1.2xlarge"}, ["different chips: trn2; trn1"]),
        ({"instance_type": "inf2.xlarge"}, ["different chips: trn2; trn1"]),
    ],
)
def test_summaries_that_are_refused(run, folder, tmp_path, change, words):
    (tmp_path / "changed.json").write_text(json.dumps({"neff": {**MEASURED, **change}}))
    refused(run("compare", folder / "a.json", tmp_path / "changed.json"), *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no JSON document, or is cut off"]),
        ('{"neff": {"total_time": 1', ["no JSON document, or is cut off"]),
        ("\xff", ["no JSON document"]),
        ("[" * 100_000, ["no JSON document"]),
        ("[]", ["holds a list"]),
        ("{}", ["neither", "summary-json of one run"]),
        ('{"a": {}, "b": {}}', ["summary-json of one run"]),
        ('{"summary": [{"total_time": 1}, {}]}', ["summary-json of one run"]),
        ('{"modelled": true, "kernels": []}', ["no profile of one kernel", "'cores'", "again"]),
        ('{"modelled": true, "cores": []}', ["lacks 'kernel'"]),
        ('{"modelled": true, "cores": 1}', ["another type"]),
        ('{"modelled": true, "lines": [{"file": 1, "line": 1}]}', ["another type"]),
        ('{"modelled": true, "lines": [{"file": "", "line": 1}]}', ["lacks 'busy_ms'"]),
    ],
)
def test_files_that_are_refused(run, folder, tmp_path, text, words):
    (tmp_path / "other.json").write_text(text, encoding="latin-1")
    refused(run("compare", folder / "a.json", tmp_path / "other.json"), *words)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("a", "b", ["different chips: trn2; trn1"]),
        ("a", "c", ["different kernels: scale; in_place"]),
        ("measured", "a", ["measured.json is measured", "simulated profile first"]),
        ("a", "no", ["no.json", "No such file"]),
    ],
)
def test_pairs_that_are_refused(run, folder, first, second, words):
    refused(run("compare", folder / f"{first}.json", folder / f"{second}.json"), *words)


@pytest.mark.parametrize("factor", [5, 0.2])
def test_another_shape(run, folder, tmp_path, factor):
    flops = 1_000_000_000
    (session,) = json.loads((folder / "a.json").read_text()).values()
    (tmp_path / "a.json").write_text(json.dumps({"a": {**session, "model_flops": flops}}))
    found = {"hardware_flops": flops * factor + 7, "transpose_flops": 7, "model_flops": 0}
    (tmp_path / "b.json").write_text(json.dumps({"b": {**MEASURED, **found}}))
    command = ("compare", tmp_path / "a.json", tmp_path / "b.json")
    refused(run(*command), "different kernels or shapes: 1,000,000,000; ")
    close = {**MEASURED, **found, "hardware_flops": 2 * flops + 7}
    (tmp_path / "b.json").write_text(json.dumps({"b": close}))
    assert fields(run(*command, "--json").document())["model_flops"][2] == 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"Instruction": {"start_ts": [1]}}, ["Instruction.parquet has no column end_ts"]),
        ({"Summary": {"total_time": [1.0, 2.0]}}, ["Summary has 2 rows"]),
        ({"Summary": None}, ["no Summary.parquet"]),
        (measured_tables(end_ts=[40, 5, 90, 120, 900]), ["start_ts 10 and end_ts 5"]),
        (measured_tables(start_ts=[-1, 0, 0, 0, 0]), ["start_ts -1"]),
        (measured_tables(start_ts=["a", "b", "c", "d", "e"]), ["start_ts", "int64"]),
        (measured_tables(opcode=[["a"]] * 5), ["opcode of Instruction must be string"]),
        (measured_tables(nki_source_location=["x.py:1"] * 5), ["kernels: kernels.py; x.py"]),
        ({"Metadata": {"instance_type": ["trn3.48xlarge"]}}, ["different chips: trn2; trn3"]),
    ],
)
def test_directories_that_are_refused(run, profile, tmp_path, change, words):
    tables = {name: t for name, t in {**measured_tables(), **change}.items() if t is not None}
    refused(run("compare", profile[0], parquet(tmp_path / "run", tables)), *words)


def test_parquet_that_is_cut_off_and_pyarrow_that_is_missing(run, profile, tmp_path, monkeypatch):
    folder = parquet(tmp_path / "run", measured_tables())
    path = folder / "Instruction.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    refused(run("compare", profile[0], folder), str(path), "is cut off")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(run("compare", profile[0], folder), "run: pip install 'neuroncore[parquet]'")


def test_a_summary_has_the_tensors_of_the_timeline_page(simulate, file, tmp_path):
    target = tmp_path / "s.json"
    command = (f"{file}:scale", "--arg", "x=f32[128,1024]", "--target", "trn2")
    peak = simulate(*command, "--summary", target, "--json").document()["sbuf_scheduled_bytes"]
    (session,) = json.loads(target.read_text()).values()
    assert session["is_simulation"] is True
    rows = session["SbufAllocation"]
    assert {row["partition"] for row in rows} == {0, 32, 64, 96}
    assert max(row["end_address"] for row in rows) + 1 == peak
    assert all(row["start_ts"] < row["end_ts"] <= session["total_time"] * 1e9 + 1 for row in rows)
    assert session["PsumUsage"] == []


def test_a_summary_is_of_one_run(simulate, file):
    command = ("--arg", "x=f32[128,1024]", "--summary", "a.json", "--sweep", "by=1,2")
    refused(simulate(f"{file}:scale", *command), "--summary takes a single run")
