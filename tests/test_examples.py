"""Every example runs in a process of its own, as a user would start it."""

import itertools
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import run
from tiny import tiny_directory

from neuronmm_ops import SVDConfig, compress_, hf
from neuronmm_ops.cli import main

EXAMPLES = Path(__file__).parents[1] / "examples"
XLA = EXAMPLES / "xla_llama.py"  # runs in tests/xla
FULL_SHAPE = EXAMPLES / "full_shape.py"  # its functions run in tests/benchmarks
COMPRESS_1B = EXAMPLES / "compress_1b.py"  # likewise
SCRIPTS = sorted(set(EXAMPLES.glob("*.py")) - {XLA, FULL_SHAPE, COMPRESS_1B})


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script(script: Path) -> None:
    assert run(sys.executable, script)


@pytest.mark.slow
def test_without_torch_xla_its_example_says_what_to_install() -> None:
    result = subprocess.run([sys.executable, XLA], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == (
        "torch_xla is not installed; run: pip install 'neuronmm-ops[hf,xla]'\n"
    )


@pytest.mark.slow
def test_demo_makes_its_report_and_uses_its_cache(tmp_path: Path) -> None:
    first = run(sys.executable, EXAMPLES / "demo", "--quick", "--out", tmp_path)
    assert "from the cache" not in first
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") + page.count("<img") >= 3
    for method in ("plain", "SVD-LLM", "greedy", "recovered"):
        assert f"<td>{method}</td>" in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "On Trainium (modelled)" in page
    assert "Llama-3.2-1B, 16 layers" in page
    again = run(sys.executable, EXAMPLES / "demo", "--quick", "--out", tmp_path)
    assert "from the cache" in again
    assert "4 points, 4 kept from before" in again
    assert (tmp_path / "report.html").read_text().count("<img") == page.count("<img")


@pytest.mark.slow
def test_a_killed_demo_has_a_page_and_goes_on_at_the_next_point(tmp_path: Path) -> None:
    command = (sys.executable, EXAMPLES / "demo", "--quick", "--out", tmp_path)
    page, deadline = tmp_path / "report.html", time.monotonic() + 300
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        while not page.exists():
            assert running.poll() is None, running.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        running.send_signal(signal.SIGKILL)
    assert "<b>Unfinished</b>: 1 of 4 points" in page.read_text()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "points").glob("*.json")}
    assert kept
    (tmp_path / "points" / ".plain-0.4-killed").write_text("{")  # as a kill while writing leaves
    resumed = run(*command)
    assert f"4 points, {len(kept)} kept from before" in resumed
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert len(list((tmp_path / "points").glob("*.json"))) == 4
    assert "Unfinished" not in page.read_text()


@pytest.mark.slow
def test_a_slow_machine_still_ends_with_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minute passes between any two looks at the clock."""
    monkeypatch.syspath_prepend(EXAMPLES / "demo")
    from demo import __main__ as program

    clock = itertools.count(step=60.0)
    for name in ("time.perf_counter", "neuronmm_ops.recover.training.monotonic"):
        monkeypatch.setattr(name, lambda: next(clock))
    full = program._plan(program._arguments(["--ratios", "0.4"]))
    quick = program._plan(program._arguments(["--quick"]))
    assert full.points == quick.points
    plan = program.replace(quick, recovery_steps=full.recovery_steps)
    monkeypatch.setattr(program, "_plan", lambda _: plan)
    program.main(["--quick", "--out", str(tmp_path / "out")])
    assert "<td>recovered</td>" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.slow
def test_the_demos_command_runs_its_kernel_on_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "demo")
    import trainium

    model = hf.load(tiny_directory(tmp_path / "dense"))
    compress_(model, SVDConfig(ratio=0.5, block=8, method="plain", allocation="uniform"))
    found = trainium.on_trainium(model, 0.5, torch.arange(24), tmp_path, prefill_tokens=24)
    assert [(times.tokens, times.layers) for times in found.times][::2] == [(1, 2), (24, 2)]
    for times in found.times:
        least, greatest = times.speedups
        assert 0 < least <= greatest
        assert times.low_rank_bytes < times.dense_bytes
    fused = found.fused
    assert fused is not None
    assert 0 <= fused.error <= fused.allowed < fused.largest
    assert fused.profile.kernel_name in fused.command
    before = fused.page.read_bytes(), fused.picture.read_text().count("<path")
    fused.page.unlink()
    fused.picture.unlink()
    assert main(shlex.split(fused.command)[1:]) == 0
    assert (fused.page.read_bytes(), fused.picture.read_text().count("<path")) == before


@pytest.mark.slow
def test_the_demo_stops_where_the_kernels_values_are_not_the_ops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "demo")
    import trainium

    model = hf.load(tiny_directory(tmp_path / "dense"))
    compress_(model, SVDConfig(ratio=0.5, block=8, method="plain", allocation="uniform"))
    monkeypatch.setattr(trainium.nm, "svd_mlp", lambda x, *_, activation: x)
    with pytest.raises(RuntimeError, match=r"differs from the CPU's op by .*, more than the"):
        trainium.on_trainium(model, 0.5, torch.arange(24), tmp_path, prefill_tokens=24)
    assert not list(tmp_path.glob("svd_mlp*"))


@pytest.mark.slow
def test_demo_refuses_a_ratio_that_no_rank_meets(tmp_path: Path) -> None:
    command = (sys.executable, EXAMPLES / "demo", "--quick", "--ratios", "0.9", "--out", tmp_path)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == (
        "ratios must be at most 0.667, one block of ranks for every matrix; got 0.9\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_study_prints_its_table_and_writes_rows_and_plot(tmp_path: Path) -> None:
    shown = run(sys.executable, EXAMPLES / "study", "--quick", "--out", tmp_path)
    for word in ("docs", "packages", "code", "kfac", "whiten"):
        assert word in shown
    rows = json.loads((tmp_path / "methods.json").read_text())
    assert {Path(row["text"]).stem for row in rows} == {"docs", "packages", "code"}
    assert len(rows) == 3 * (1 + 2)
    assert all((tmp_path / f"{name}.txt").stat().st_size for name in ("docs", "packages", "code"))
    assert (tmp_path / "methods.png").read_bytes().startswith(b"\x89PNG")
    # No held-out document is among those that calibrate.
    calibration = (tmp_path / "calibration.txt").read_text()
    assert (tmp_path / "docs.txt").read_text()[:400] not in calibration


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_the_demos_muon_is_torchs_in_bfloat16(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "demo")
    import muon

    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    optimizers = (
        muon.Muon([ours], lr=0.1, weight_decay=0.1, dtype=torch.bfloat16),
        torch.optim.Muon(
            [theirs], lr=0.1, ns_steps=muon.ITERATIONS, adjust_lr_fn="match_rms_adamw"
        ),
    )
    for _ in range(3):
        ours.grad = theirs.grad = torch.randn(shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(ours, theirs)
