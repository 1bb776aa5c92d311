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
from neuronmm_ops.storages import STORAGES

EXAMPLES = Path(__file__).parents[1] / "examples"
XLA = EXAMPLES / "xla_llama.py"  # runs in tests/xla
FULL_SHAPE = EXAMPLES / "full_shape.py"  # its functions run in tests/benchmarks
COMPRESS_1B = EXAMPLES / "compress_1b.py"  # likewise
SCRIPTS = sorted(set(EXAMPLES.glob("*.py")) - {XLA, FULL_SHAPE, COMPRESS_1B})


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script(script):
    assert run(sys.executable, script)


@pytest.mark.slow
def test_without_torch_xla_its_example_says_what_to_install():
    result = subprocess.run([sys.executable, XLA], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == (
        "torch_xla is not installed; run: pip install 'neuronmm-ops[hf,xla]'\n"
    )


@pytest.mark.slow
def test_demo_makes_its_report_and_uses_its_cache(tmp_path):
    """Also after a kill: a page is there early, and the next run goes on at the next point."""
    command = (sys.executable, EXAMPLES / "demo", "--quick", "--out", tmp_path)
    report, deadline = tmp_path / "report.html", time.monotonic() + 300
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        while not report.exists():
            assert running.poll() is None, running.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        running.send_signal(signal.SIGKILL)
        shown, _ = running.communicate()
    assert b"from the cache" not in shown
    assert "<b>Unfinished</b>: 1 of 4 points" in report.read_text()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "points").glob("*.json")}
    assert kept
    (tmp_path / "points" / ".plain-0.4-killed").write_text("{")  # as a kill while writing leaves
    assert f"4 points, {len(kept)} kept from before" in run(*command)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert len(list((tmp_path / "points").glob("*.json"))) == 4

    page = report.read_text()
    assert page.count("<svg") + page.count("<img") >= 3
    rivals = [f"dense, {storage}" for storage in STORAGES]
    for method in ("dense", *rivals, "plain", "SVD-LLM", "greedy", "recovered"):
        assert f"<td>{method}</td>" in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "On Trainium (modelled)" in page
    assert "Llama-3.2-1B, 16 layers" in page
    assert "Unfinished" not in page
    again = run(*command)
    assert "from the cache" in again
    assert "4 points, 4 kept from before" in again
    assert report.read_text().count("<img") == page.count("<img")


@pytest.fixture
def program(monkeypatch):
    """The demo in this process."""
    monkeypatch.syspath_prepend(EXAMPLES / "demo")
    from demo import __main__ as program

    return program


@pytest.mark.slow
def test_a_slow_machine_still_ends_with_a_page(program, tmp_path, monkeypatch):
    """A minute passes between any two looks at the clock."""
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


@pytest.fixture
def on_trainium(tmp_path, monkeypatch):
    """Runs the demo's part on Trainium on a tiny model."""
    monkeypatch.syspath_prepend(EXAMPLES / "demo")
    from trainium import on_trainium

    model = hf.load(tiny_directory(tmp_path / "dense"))
    compress_(model, SVDConfig(ratio=0.5, block=8, method="plain", allocation="uniform"))
    # The plans of the large model at this ratio are shipped.
    return lambda: on_trainium(model, 0.2, torch.arange(24), tmp_path, prefill_tokens=128)


@pytest.mark.slow
def test_the_demos_command_runs_its_kernel_on_its_weights(on_trainium):
    found = on_trainium()
    assert [(times.tokens, times.layers) for times in found.times][::2] == [(1, 2), (128, 2)]
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
    on_trainium, tmp_path, monkeypatch
):
    monkeypatch.setattr("trainium.nm.svd_mlp", lambda x, *_, activation: x)
    with pytest.raises(RuntimeError, match=r"differs from the CPU's op by .*, more than the"):
        on_trainium()
    assert not list(tmp_path.glob("svd_mlp*"))


def test_demo_refuses_a_ratio_that_no_rank_meets(program, tmp_path):
    words = r"ratios must be at most 0\.667, one block of ranks for every matrix; got 0\.9\Z"
    with pytest.raises(SystemExit, match=words):
        program.main(["--quick", "--ratios", "0.9", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_study_prints_its_table_and_writes_rows_and_plot(tmp_path):
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
def test_the_demos_muon_is_torchs_in_bfloat16(shape, monkeypatch):
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
