"""`neuroncore simulate` of kernels that harm, hang or are undefined: told, stopped, contained."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = """\
import os
import sys
import time

import nki
import nki.isa as nisa
import nki.language as nl

def copied(x):
    tile = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(tile, x)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, tile)
    return out

@nki.jit
def half_tile(x):
    tile = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(tile[0:64], x[0:64])
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, tile)  # half
    return out

@nki.jit
def half_output(x, rows=64):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out[0:rows], x[0:rows])
    return out

@nki.jit
def race(x):
    return copied(x)

@nki.jit
def spins(x):
    while True:
        pass

@nki.jit
def catches(x):
    while True:
        try:
            pass
        except Exception:
            pass

@nki.jit
def sleeps(x):
    time.sleep(10**6)

@nki.jit
def issues(x):
    tile = nl.ndarray((128, 1), nl.float32, buffer=nl.sbuf)
    while True:
        nisa.memset(tile, 0.0)

@nki.jit
def allocates(x):
    while True:
        nl.ndarray((128, 2), nl.float32, buffer=nl.sbuf)

@nki.jit
def fills(x):
    return [nl.ndarray((128, 2**16), nl.float32, buffer=nl.private_hbm) for _ in range(99)]

@nki.jit
def raises(x):
    class Away(BaseException):
        pass

    raise Away("gone")

@nki.jit
def closes(x):
    sys.stdout.close()
    sys.stderr.close()
    os.close(1)
    return copied(x)

@nki.jit
def writes(x):
    os.write(1, b"noise")
    print("more noise")
    return copied(x)

@nki.jit
def moves(x):
    os.chdir("/")
    return copied(x)
"""
X = ("--arg", "x=f32[128,4]")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    path = tmp_path_factory.mktemp("harmful") / "harmful.py"
    path.write_text(KERNELS)
    return path


def line_of(text):
    return KERNELS[: KERNELS.index(text)].count("\n") + 1


HALF = line_of("nisa.dma_copy(out, tile)  # half")
STORE = line_of("nisa.dma_copy(out, tile)")


@pytest.mark.parametrize(
    ("kernel", "options", "words", "line"),
    [
        ("half_tile", (), "some elements were never written", HALF),
        ("half_output", (), "some of it was never written", None),
        ("race", ("--lnc", 2), "without core_barrier in between", STORE),
    ],
)
def test_what_the_documentation_leaves_undefined_is_told(
    simulate, kernels, kernel, options, words, line
):
    command = (f"{kernels}:{kernel}", *X, *options)
    shown = simulate(*command)
    assert shown.code == 0
    assert shown.err.startswith("warning: ")
    assert words in shown.err
    assert ("[harmful.py:" in shown.err) == (line is not None)
    as_json = simulate(*command, "--json", "--strict")
    assert as_json.code == 1
    warning = json.loads(as_json.out)["warnings"][0]
    assert words in warning["message"]
    assert (warning["file"], warning["line"]) == (line and "harmful.py", line)


def test_warnings_of_comparisons_and_sweeps(simulate, kernels):
    pair = (f"{kernels}:moves", f"{kernels}:half_tile")
    compared = simulate("--compare", *pair, *X, "--json", "--strict")
    assert compared.code == 1
    counts = [len(kernel["warnings"]) for kernel in json.loads(compared.out)["kernels"]]
    assert counts == [0, 1]
    swept = simulate(f"{kernels}:half_output", *X, "--sweep", "rows=64,128", "--json", "--strict")
    assert swept.code == 1
    points = {p["values"]["rows"]: p["warnings"] for p in json.loads(swept.out)["points"]}
    assert [len(points[rows]) for rows in ("64", "128")] == [1, 0]
    assert simulate(f"{kernels}:moves", *X, "--strict").code == 0


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize(
    ("kernel", "bound", "words", "line"),
    [
        ("spins", ("--max-seconds", 0.2), "more than 0.2 s", "while True:\n        pass"),
        ("catches", ("--max-seconds", 0.2), "more than 0.2 s", "try:"),
        ("issues", ("--max-instructions", 99), "more than 99 instructions", "nisa.memset(tile"),
        ("allocates", ("--max-instructions", 99), "more than 99 tensors", "nl.ndarray((128, 2)"),
        ("fills", ("--max-bytes", 2**26), "more than 67,108,864 bytes", "return [nl.ndarray"),
    ],
)
def test_a_kernel_without_an_end_is_stopped(simulate, kernels, kernel, bound, words, line, lnc):
    done = simulate(f"{kernels}:{kernel}", *X, *bound, "--lnc", lnc)
    assert (done.code, done.out) == (1, "")
    assert done.err.count("\n") == 1
    assert words in done.err
    assert str(bound[0]) in done.err
    # A line of the loop.
    assert any(f"harmful.py:{line_of(line) + n}]" in done.err for n in range(-1, 4)), done.err


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ((), f" [harmful.py:{line_of('time.sleep(')}]"),
        (("--lnc", 2), ""),  # which sleeps on in its own thread
    ],
)
def test_a_kernel_that_sleeps_is_stopped(simulate, kernels, options, end):
    done = simulate(f"{kernels}:sleeps", *X, "--max-seconds", 0.2, *options)
    assert (done.code, done.out) == (1, "")
    assert done.err.endswith(f"(--max-seconds){end}\n")


def test_a_kernel_that_sleeps_in_the_background_is_stopped(simulate, kernels):
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell's `&` has it
    try:
        done = simulate(f"{kernels}:sleeps", *X, "--max-seconds", 0.2)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, handler)
    assert done.code == 1
    assert done.err.endswith(f"(--max-seconds) [harmful.py:{line_of('time.sleep(')}]\n")


@pytest.mark.parametrize("option", ["instructions", "seconds", "bytes"])
def test_a_budget_that_nothing_meets_is_refused(simulate, kernels, option):
    done = simulate(f"{kernels}:moves", *X, f"--max-{option}", "0")
    assert done.code == 2
    assert done.err.startswith(f"neuroncore: budget: {option} must be positive; got 0")


def test_an_exception_of_any_kind_is_one_line(simulate, kernels):
    done = simulate(f"{kernels}:raises", *X)
    place = f"[harmful.py:{line_of('raise Away')}]"
    assert (done.code, done.err) == (1, f"neuroncore: Away: gone {place}\n")


def shell(kernels: Path, kernel: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, whose descriptors the kernel may harm."""
    command = [sys.executable, "-m", "neuroncore", "simulate", f"{kernels}:{kernel}", *X]
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, cwd=kernels.parent, check=False
    )


@pytest.mark.slow
def test_streams_of_the_command_are_not_the_kernels(kernels):
    closed = shell(kernels, "closes")
    assert (closed.returncode, closed.stderr) == (0, "")
    assert closed.stdout.startswith("closes on ")
    written = shell(kernels, "writes", "--json")
    assert json.loads(written.stdout)["warnings"] == []
    assert "noise" in written.stderr
    assert "more noise" in written.stderr


def test_a_kernel_that_moves_away_moves_no_output(simulate, kernels, monkeypatch):
    monkeypatch.chdir(kernels.parent)
    assert simulate(f"{kernels}:moves", *X, "--timeline", "page.html").code == 0
    assert Path(os.getcwd()) == kernels.parent
    page = kernels.parent / "page.html"
    assert page.is_file()
    page.unlink()


@pytest.mark.parametrize("name", ["a.npy", "a.safetensors"])
def test_a_full_disk_is_told_with_the_file(simulate, kernels, monkeypatch, name):
    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    path = kernels.parent / name
    done = simulate(f"{kernels}:moves", *X, "--save", path)
    assert (done.code, done.err) == (2, f"neuroncore: {path}: No space left on device\n")
    assert not list(kernels.parent.glob("*a.*"))
