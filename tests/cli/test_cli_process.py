"""The command as a process: signals, pipes, full disks."""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from outcomes import COMPRESS, SCRIPT, interrupt, process
from safetensors.torch import load_file

pytestmark = pytest.mark.slow  # each starts a process that imports torch


def test_a_reader_that_leaves_is_no_error():
    """As in `neuronmm doctor | true`: the pipe is closed before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    assert process(*SCRIPT, "doctor", stdout=writer) == (141, "", "")
    os.close(writer)


def test_a_full_device_is_one_line():
    with open("/dev/full", "w") as full:
        outcome = process(*SCRIPT, "doctor", stdout=full)
    assert outcome == (2, "", "neuronmm: cannot write to stdout: No space left on device\n")


IMPORTING = """
import os, runpy, signal, sys

class Interrupted:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupted())
sys.argv[1:] = ["doctor"]
runpy.run_module("neuronmm_ops_command", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["neuronmm_ops.cli.compress", "torch", "torch._C"])
def test_ctrl_c_during_the_imports_is_one_line(module):
    outcome = process(sys.executable, "-c", IMPORTING.format(module=module))
    assert outcome == (130, "", "neuronmm: interrupted\n")


def test_interrupted(run, dense, text, tmp_path, monkeypatch):
    monkeypatch.setattr("neuronmm_ops.hf.compress", interrupt)
    outcome = run("compress", dense, "-o", tmp_path / "o", "--calibration", text, *COMPRESS)
    assert outcome == (130, "", "neuronmm: interrupted\n")


def test_sigterm_while_writing_cleans_up(run, dense, text, tmp_path, monkeypatch):
    from neuronmm_ops.hf import saving

    def half(self: object, directory: Path, **_: object) -> None:
        (Path(directory) / "model.safetensors").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)

    monkeypatch.setattr(saving, "_save_pretrained", half)
    before = signal.getsignal(signal.SIGTERM)
    outcome = run("compress", dense, "-o", tmp_path / "o", "--calibration", text, *COMPRESS)
    assert outcome == (143, "", "neuronmm: terminated\n")
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


LIMITED = """
import resource, sys
from neuronmm_ops.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, 100 << 10))
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_disk_leaves_nothing(forked, dense, text, tmp_path):
    """A real write that fails: the process may not make a file larger than 100 KiB."""
    out = tmp_path / "o"
    arguments = ("compress", dense, "-o", out, "--calibration", text, *COMPRESS)
    outcome = forked(LIMITED, *arguments)
    assert outcome.code == 2, outcome.err
    assert "Traceback" not in outcome.err
    last = outcome.err.strip().splitlines()[-1]
    assert last.startswith("neuronmm: ")
    assert "B free" in last
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from neuronmm_ops.cli import main
from neuronmm_ops.hf import saving

def half(self, directory, **_):
    (directory / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

saving._save_pretrained = half
main(sys.argv[1:])
"""


def test_a_killed_run_leaves_no_half_checkpoint(run, forked, dense, text, tmp_path):
    out = tmp_path / "o"
    arguments = ("compress", dense, "-o", out, "--calibration", text, *COMPRESS)
    outcome = forked(KILLED, *arguments)
    assert outcome.code == -signal.SIGKILL
    assert not out.exists()
    assert run(*arguments).code == 0
    assert load_file(out / "model.safetensors")


@pytest.mark.slow
def test_tests_pass_in_the_background_and_below_other_names():
    """A shell has SIGINT ignored by what it starts in the background."""
    tests = ("test_cli_process.py::test_ctrl_c_during_the_imports_is_one_line[torch]",
             "test_cli_compress.py::test_a_stream_s_document_is_the_same_as_without")  # fmt: skip
    command = (sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--basetemp")
    with tempfile.TemporaryDirectory() as place:
        # A line of 80 columns ends inside the last name of one output, and not of the other.
        place = f"{place}/{'n' * (34 - len(place))}"
        outcome = process(
            *("bash", "-c", 'trap "" INT; exec "$@"', "bash", *command, place),
            *(Path(__file__).with_name(name) for name in tests),
        )
    assert (outcome.code, "2 passed" in outcome.out) == (0, True), outcome.out
