"""A directory is not replaced unless it is a compressed checkpoint and nothing else."""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny_directory, tiny_model

from neuronmm_ops import SVDConfig, compress_, hf, output
from neuronmm_ops.output import check_target, replacement


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, directory = tiny_model(), tmp_path_factory.mktemp("target") / "out"
    hf.save(model, directory, compress_(model, SVDConfig(block=8, method="plain")))
    return directory


def write(target: Path, name: str, content: str = "", *, force: bool = False) -> None:
    """Put a directory of one file in the target's place."""
    with replacement(target, force=force) as temporary:
        (temporary / name).write_text(content)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def _tree(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("words", "arrange"),
    [
        ("symbolic link", lambda d: ((d / "real").mkdir(), (d / "out").symlink_to(d / "real"))),
        ("symbolic link", lambda d: (d / "out").symlink_to(d / "nowhere")),
        ("is no directory", lambda d: (d / "out").write_text("precious")),
        ("first notes.md", lambda d: ((d / "out").mkdir(), (d / "out/notes.md").touch())),
        ("first models", lambda d: (d / "out/models").mkdir(parents=True)),
        ("no compressed checkpoint", lambda d: tiny_directory(d / "out")),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_what_is_not_ours_is_kept(words, arrange, force, tmp_path):
    arrange(tmp_path)
    before = _tree(tmp_path)
    with pytest.raises(FileExistsError, match=words):
        check_target(tmp_path / "out", force)
    assert _tree(tmp_path) == before


def test_the_input_and_what_is_above_it_are_kept(pristine, tmp_path):
    source = Path(shutil.copytree(pristine, tmp_path / "models" / "llama"))
    for target in (source, source.parent, tmp_path):
        with pytest.raises(FileExistsError, match="holds the input model"):
            check_target(target, force=True, source=source)
    link = tmp_path / "link"
    link.symlink_to(source)
    with pytest.raises(FileExistsError, match="holds the input model"):
        check_target(source, force=True, source=link)
    with pytest.raises(FileExistsError, match="holds the input model"):
        hf.save(hf.load(source), source, force=True)


def test_an_empty_or_compressed_directory_is_replaced_by_force(pristine, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.copytree(pristine, tmp_path / "out")
    for name in ("empty", "out"):
        with pytest.raises(FileExistsError, match="use --force"):
            check_target(tmp_path / name, force=False)
        write(tmp_path / name, "new", force=True)
        assert names(tmp_path / name) == ["new"]
    assert names(tmp_path) == ["empty", "out"]


def test_a_path_through_the_target_itself(pristine, tmp_path):
    """`out/../out` does not exist while `out` is renamed."""
    shutil.copytree(pristine, tmp_path / "out")
    write(tmp_path / "out" / ".." / "out", "new", force=True)
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["new"]


@pytest.mark.parametrize("name", [".", "..", "sub/..", "/"])
def test_a_directory_that_one_is_in_is_kept(name, tmp_path, monkeypatch):
    (tmp_path / "here" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(FileExistsError, match="files that are not a checkpoint's"):
        check_target(Path(name), force=True)


def test_a_second_run_does_not_replace_the_first_one_s_output(tmp_path):
    target = tmp_path / "out"
    with contextlib.ExitStack() as stack:
        late = stack.enter_context(replacement(target, force=False))
        (late / "late").touch()
        with replacement(target, force=False) as early:
            (early / "early").touch()
        with pytest.raises(FileExistsError, match="written by another run"):
            stack.close()
    assert names(target) == ["early"]
    assert names(tmp_path) == ["out"]


WRITING = """
import signal, sys, time
from pathlib import Path
from neuronmm_ops.output import replacement
with replacement(Path(sys.argv[1]), force=True) as temporary:
    (temporary / "half").touch()
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_what_a_killed_run_left_is_removed_and_a_live_run_s_is_not(tmp_path):
    target = tmp_path / "out"
    writing = subprocess.Popen(
        [sys.executable, "-c", WRITING, target], stdout=subprocess.PIPE, text=True
    )
    assert writing.stdout is not None
    assert writing.stdout.readline() == "ready\n"
    write(target, "new")
    assert len(list(tmp_path.glob(".out.*.tmp"))) == 1
    writing.send_signal(signal.SIGKILL)
    writing.communicate()
    write(target, "newer", force=True)
    assert names(tmp_path) == ["out"]


@pytest.mark.slow
def test_a_checkpoint_that_a_killed_run_had_moved_away_comes_back(tmp_path):
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    )
    with replacement(tmp_path / "other", force=False) as sibling:
        name = sibling.name.replace(".other.", ".out.").replace(str(os.getpid()), gone.stdout[:-1])
    old = tmp_path / name.replace(".tmp", ".old") / "out"
    old.mkdir(parents=True)
    (old / "precious").touch()
    with (
        pytest.raises(FileExistsError, match="another run"),
        replacement(tmp_path / "out", force=False) as temporary,
    ):
        (temporary / "new").touch()
    assert (tmp_path / "out" / "precious").exists()
    assert names(tmp_path) == ["other", "out"]


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_files_and_directory_follow_the_umask(umask, tmp_path):
    model = tiny_model()
    report = compress_(model, SVDConfig(block=8, method="plain"))
    before = os.umask(umask)
    try:
        hf.save(model, tmp_path / "out", report)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes == {0o666 & ~umask}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777 & ~umask


def test_a_parent_that_cannot_be_written_is_seen_beforehand(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file"):
        check_target(tmp_path / "file" / "below" / "out", force=False)
    with pytest.raises(OSError, match=r"needs 1000000000.* GB and the disk has"):
        check_target(tmp_path / "a" / "out", force=False, needed_bytes=10**18)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(PermissionError, match="no permission in"):
        check_target(tmp_path / "a" / "out", force=False)
    assert names(tmp_path) == ["file"]


LOOK = """
import os, sys
target, absent, looks = sys.argv[1], 0, 0
print("looking", flush=True)
while not os.path.exists(sys.argv[2]):
    looks += 1
    absent += not os.path.exists(target)
print(looks, absent)
"""


def can_exchange(directory: Path) -> bool:
    pair = (directory / "a", directory / "b")
    for path in pair:
        path.mkdir()
    return output._exchange(*pair)


def test_a_reader_never_sees_the_target_absent(tmp_path):
    if not can_exchange(tmp_path):
        pytest.skip("the system cannot swap two directories")
    target, end = tmp_path / "out", tmp_path / "end"
    write(target, "number", "0", force=True)
    command = (sys.executable, "-c", LOOK, str(target / "number"), str(end))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "looking\n"
        for number in range(1, 300):
            write(target, "number", str(number), force=True)
            assert (target / "number").read_text() == str(number)
        end.touch()
        looks, absent = map(int, reader.stdout.read().split())
    assert looks > 100
    assert absent == 0
    assert names(tmp_path) == ["a", "b", "end", "out"]


def test_where_nothing_can_be_swapped_it_is_renamed(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "_exchange", lambda *_: False)
    for number in "12":
        write(tmp_path / "out", "number", number, force=True)
    assert (tmp_path / "out" / "number").read_text() == "2"
    assert names(tmp_path) == ["out"]
