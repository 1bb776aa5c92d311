"""The directory in which a streamed compression keeps what it has done."""

import json
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from neuronmm_ops.compress.batches import fingerprint
from neuronmm_ops.files import check_regular
from neuronmm_ops.output import why
from neuronmm_ops.processes import locked

STATE = "state.json"
OURS = re.compile(
    r"(state\.json|"
    r"(states|rows|upstream|gradients|layer|again|rounded|paths|drift|wide|narrow)-[\d-]+\.safetensors)(\.tmp)?"
)


class Work:
    """Named sets of tensors in a directory; each is there completely, or not at all.

    The hash of every tensor, with its name, its set's and the run's, is in the file's header and
    compared with what is read: neither damage nor another run's set is taken.

    Args:
        directory: an existing one.
        run: of what all that is kept depends on.
    """

    def __init__(self, directory: Path, run: str) -> None:
        self.directory, self.run = directory, run

    def has(self, name: str) -> bool:
        """Say whether a set has been saved."""
        return self.path(name).exists()

    def path(self, name: str) -> Path:
        """Return the file of a set."""
        return self.directory / f"{name}.safetensors"

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Save a set of tensors.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        temporary = self.directory / f"{name}.safetensors.tmp"
        kept = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
        hashes = {key: self._hash(name, key, tensor) for key, tensor in kept.items()}
        try:
            save_file(kept, temporary, hashes or None)  # of an empty header none can be read
        except SafetensorError as error:
            raise OSError(
                f"{temporary} cannot be written ({error}); free some room and run the same command "
                "again, what is done so far is kept"
            ) from None
        temporary.replace(self.path(name))

    def load(self, name: str, of: str = "") -> dict[str, Tensor]:
        """Return a set, or those of it whose keys begin with `of`, mapped into memory."""
        with self._open(name) as tensors:
            keys = [key for key in tensors.keys() if key.startswith(of)]  # noqa: SIM118
            return {key: self._checked(tensors, name, key) for key in keys}

    def tensor(self, name: str, key: str) -> Tensor:
        """Return one tensor of a set, mapped into memory."""
        with self._open(name) as tensors:
            return self._checked(tensors, name, key)

    def check(self) -> None:
        """Read all that an earlier run has left.

        Raises:
            OSError: a set is damaged, or another run's.
        """
        for path in sorted(self.directory.glob("*.safetensors")):
            if OURS.fullmatch(path.name):
                self.load(path.stem)

    def drop(self, kind: str) -> None:
        """Delete the sets whose names begin with `kind-`."""
        for path in self.directory.glob(f"{kind}-*"):
            if OURS.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete everything of ours, and the directory where nothing else is in it."""
        for path in self.directory.iterdir():
            # The state last: without it what is left would be no work directory any more.
            if OURS.fullmatch(path.name) and path.name != STATE:
                path.unlink(missing_ok=True)
        (self.directory / STATE).unlink(missing_ok=True)
        with suppress(OSError):
            self.directory.rmdir()

    @contextmanager
    def _open(self, name: str) -> Generator[Any]:
        try:
            check_regular(self.path(name))
            with safe_open(self.path(name), framework="pt") as tensors:
                yield tensors
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"{self.path(name)} cannot be read ({why(error)}); remove {self.directory} and "
                "start again"
            ) from None

    def _checked(self, tensors: Any, name: str, key: str) -> Tensor:
        tensor = tensors.get_tensor(key)
        if (tensors.metadata() or {}).get(key) != self._hash(name, key, tensor):
            raise OSError(f"{key} is not what this run has written")
        return tensor

    def _hash(self, name: str, key: str, tensor: Tensor) -> str:
        return fingerprint([{"run": f"{self.run} {name} {key}", "tensor": tensor}])


@contextmanager
def working_in(directory: Path, run: Mapping[str, Any]) -> Generator[Work]:
    """Give the work directory, with what an earlier run of the same has left in it.

    Removed where the block succeeds, or fails before anything was done.

    Args:
        directory: made where it does not exist.
        run: JSON values; all that what is kept depends on.

    Raises:
        ValueError: it is another run's; nothing is deleted.
        OSError: what is kept is damaged; nothing is deleted.
        FileExistsError: it is no work directory.
        BlockingIOError: another run works in it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory):
        _check(directory, run)
        work = Work(directory, json.dumps(run))
        work.check()
        try:
            yield work
        except BaseException:
            if not any(path.suffix == ".safetensors" for path in directory.iterdir()):
                work.remove()
            raise
        work.remove()


def _check(directory: Path, run: Mapping[str, Any]) -> None:
    state = directory / STATE
    if not state.exists():
        foreign = sorted(p.name for p in directory.iterdir() if not OURS.fullmatch(p.name))
        if foreign:
            raise FileExistsError(
                f"{directory} is no work directory of a streamed compression, it holds "
                f"{foreign[0]}; choose another output"
            )
        temporary = directory / f"{STATE}.tmp"
        temporary.write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
        temporary.replace(state)
        return
    try:
        known = json.loads(state.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        known = None
    if known != run:
        known = known if isinstance(known, dict) else {}
        odd = sorted(k for k in {*known, *run} if known.get(k) != run.get(k))
        raise ValueError(
            f"{directory} holds an unfinished compression with another {odd[0]}; repeat that one's "
            "command to finish it, or remove the directory to start over"
        )
