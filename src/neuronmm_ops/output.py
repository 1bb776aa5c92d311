"""The directory that a checkpoint is written to: what may be replaced, and how it is replaced.

A checkpoint is written to a hidden sibling, `.NAME.HOST.PID.XXXX.tmp`, which is renamed at the end.
A killed run leaves its sibling behind; the next run removes it. What a streamed compression has
done so far is in the sibling `.NAME.stream`, from which the next run goes on.
"""

import ctypes
import errno
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from neuronmm_ops.checkpoint import read_config
from neuronmm_ops.compress.record import is_record
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.processes import is_running

# The files that save_pretrained writes for models and tokenizers.
OURS = re.compile(
    r"(generation_)?config\.json|(compression|manifest)\.json|model(-\d+-of-\d+)?\.safetensors"
    r"|model\.safetensors\.index\.json|tokenizer(_config)?\.json|special_tokens_map\.json"
    r"|added_tokens\.json|vocab\.(json|txt)|merges\.txt|[\w.]+\.model"
    r"|chat_template\.(jinja|json)|additional_chat_templates|(pre)?processor_config\.json"
)

# Of a sibling's name after its prefix: `XXXXXXXX.tmp`, of a later run a process id of more digits.
ROOM_FOR_SUFFIX = 20

_RENAME_EXCHANGE = 2  # of renameat2 in linux/fs.h
_ANY = -1  # a directory's descriptor, which absolute paths do not need


def check_target(
    target: Path, force: bool, source: Path | None = None, needed_bytes: int = 0
) -> None:
    """Refuse a target that must not, or cannot, be written.

    Args:
        target: the directory to write.
        force: replace it where it is a compressed checkpoint and nothing else, or empty.
        source: the directory of the model that is being compressed, never replaced.
        needed_bytes: room that the checkpoint takes.

    Raises:
        FileExistsError: the target exists, and may not be replaced.
        OSError: its parent cannot be written, or has too little room.
    """
    target = _plain(target)
    if os.path.lexists(target):
        problem = _why_kept(target, source)
        if problem:
            raise FileExistsError(f"output {target} exists and {problem}; choose another")
        if not force:
            raise FileExistsError(f"output {target} exists; use --force to replace it")
    parent = next(path for path in target.parents if os.path.lexists(path))
    check_text(target)
    longest = os.pathconf("/", "PC_NAME_MAX") - len(os.fsencode(_prefix(target))) - ROOM_FOR_SUFFIX
    if longest < 0:
        raise OSError(f"output name {target.name:.40}... is {-longest} bytes too long; shorten it")
    check_parent(target, parent)
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise OSError(no_room(target, needed_bytes, free))


def check_parent(target: Path, parent: Path) -> None:
    """Raise OSError where nothing can be written in what is there of a target's path."""
    if not parent.is_dir():
        raise NotADirectoryError(f"output {target} needs a directory, {parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"output {target} cannot be written: no permission in {parent}")


def check_text(target: Path) -> None:
    """Raise ValueError where a path to write is not text in UTF-8, as which safetensors takes it.

    Python reads other bytes of a command line as lone surrogates.
    """
    path = str(target.absolute())
    if path.encode(errors="replace").decode() != path:
        raise ValueError(f"output {path!r} must be text in UTF-8; choose another name")


@contextmanager
def replacement(target: Path, force: bool) -> Generator[Path]:
    """Give a new directory to write into; rename it to `target` where the block succeeds.

    Raises:
        FileExistsError: something has appeared at the target, and force is not given.
    """
    target = _plain(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    _clean(target)
    temporary = _sibling(target, "tmp")
    try:
        yield temporary
        _put_in_place(temporary, target, force)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def work_directory(target: Path) -> Path:
    """Return where a streamed compression keeps what it has done so far."""
    target = _plain(target)
    return target.parent / f".{target.name}.stream"


def no_room(target: Path, needed: int, free: int) -> str:
    """Return the message for a disk with too little room."""
    return (
        f"writing {target} needs {_size(needed)} and the disk has {_size(free)} free; "
        "free some, or choose another place"
    )


def why(error: Exception) -> str:
    """Return the system's words for an error, without its number; otherwise the error's own."""
    return getattr(error, "strerror", None) or str(error)


def _size(count: int) -> str:
    """A number of bytes, for people; of small ones, too, those that differ read differently."""
    return f"{count / 1e9:.3f} GB" if count >= 1e9 else f"{count / 1e6:.3f} MB"


def _plain(target: Path) -> Path:
    """Return the target without `..`, which leads elsewhere once the target has been renamed."""
    if target.name in ("", ".."):
        return target.resolve()
    return target.parent.resolve() / target.name


def _why_kept(target: Path, source: Path | None) -> str | None:
    """Say why what stands at the target must not be replaced; None where it may be."""
    if target.is_symlink():
        return "is a symbolic link"
    if not target.is_dir():
        return "is no directory"
    here = target.resolve()
    if source is not None and source.resolve().is_relative_to(here):
        return "holds the input model"
    foreign = sorted(path.name for path in target.iterdir() if not OURS.fullmatch(path.name))
    if foreign:
        return f"holds files that are not a checkpoint's, first {foreign[0]}"
    if next(target.iterdir(), None) is not None and not _is_compressed(target):
        return "is no compressed checkpoint"
    return None


def _is_compressed(directory: Path) -> bool:
    try:
        return is_record(read_config(directory).get("quantization_config"))
    except CheckpointError:
        return False


def _prefix(target: Path) -> str:
    return f".{target.name}.{socket.gethostname()}.{os.getpid()}."


def _sibling(target: Path, kind: str) -> Path:
    """Make a directory next to the target, named after this process, with the umask's mode."""
    directory = Path(tempfile.mkdtemp(prefix=_prefix(target), suffix=f".{kind}", dir=target.parent))
    directory.rmdir()  # mkdtemp makes it with mode 0700, which no other user can read
    directory.mkdir()
    return directory


def _put_in_place(temporary: Path, target: Path, force: bool) -> None:
    """Rename, keeping an existing target until the new one is there."""
    if force and target.exists():
        if _exchange(temporary, target):  # the caller removes the old one
            return
        old = _sibling(target, "old")
        target.rename(old / target.name)
        try:
            temporary.rename(target)
        except BaseException:
            (old / target.name).rename(target)
            old.rmdir()
            raise
        shutil.rmtree(old)
        return
    try:
        temporary.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise FileExistsError(
            f"output {target} has been written by another run; choose another, or use --force"
        ) from None


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories in one step, so that neither is ever absent; say whether it was done.

    Linux can, on most of its file systems.
    """
    try:
        rename = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    paths = (os.fsencode(one.absolute()), os.fsencode(other.absolute()))
    return rename(_ANY, paths[0], _ANY, paths[1], ctypes.c_uint(_RENAME_EXCHANGE)) == 0


def _clean(target: Path) -> None:
    """Remove what killed runs left next to the target; put back a checkpoint that they renamed."""
    host = re.escape(socket.gethostname())
    left = re.compile(rf"\.{re.escape(target.name)}\.{host}\.(\d+)\.\w+\.(tmp|old)")
    for path in target.parent.iterdir():
        match = left.fullmatch(path.name)
        if match is None or is_running(int(match[1])):
            continue
        if match[2] == "old" and (path / target.name).exists() and not target.exists():
            (path / target.name).rename(target)
        shutil.rmtree(path, ignore_errors=True)
