"""Where the public sources of the engines are; `python checkouts.py DIR` checks what is in DIR.

Prints the git commands that make what is missing in DIR. Nothing is downloaded here.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Checkout:
    """A folder of DIR, and what it holds.

    Attributes:
        folder: its name.
        repository: on GitHub.
        commit: the whole hash.
        version: as the package says it.
    """

    folder: str
    repository: str
    commit: str
    version: str

    def commands(self, directory: Path) -> str:
        """The git commands that make it."""
        target = directory / self.folder
        return (
            f"git clone https://github.com/{self.repository} {target} && "
            f"git -C {target} checkout --detach {self.commit}"
        )

    def problem(self, directory: Path) -> str | None:
        """Why the folder is not this commit; None where it is."""
        path = directory / self.folder
        if not (path / ".git").exists():
            return f"{path} must be a git checkout of {self.repository}, there is none"
        head = _git(path, "rev-parse", "HEAD").strip()
        if head != self.commit:
            return f"{path} must be at {self.commit[:12]}, got {head[:12] or 'no commit'}"
        changed = _git(path, "diff", "--name-only", "HEAD").split()
        return f"{path} must be unchanged, {changed[0]} is not" if changed else None


def _git(path: Path, *arguments: str) -> str:
    command = ("git", "-C", str(path), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


CHECKOUTS = {
    checkout.folder: checkout
    for checkout in (
        Checkout(
            "nxd",
            "aws-neuron/neuronx-distributed",
            "fbac349b61a3adbb123c2983835af692840ff62f",
            "0.18.0",
        ),
        Checkout(
            "nxdi",
            "aws-neuron/neuronx-distributed-inference",
            "4bcdc54bf3b6ccdad490e5cd0680a3dc95270b8e",
            "0.9.0",
        ),
        Checkout(
            "optimum-neuron",
            "huggingface/optimum-neuron",
            "213224e6aae42e570b88b3a5e6f2716112823469",
            "0.4.6.dev4",
        ),
        Checkout(
            "vllm-neuron-0.2",
            "vllm-project/vllm-neuron",
            "a5ef7c88c3e4e44bea9af9051d8fb113588c0a21",
            "0.2.0",
        ),
    )
}


def missing(directory: Path, folders: tuple[str, ...] = tuple(CHECKOUTS)) -> list[str]:
    """What is wrong with the checkouts of some folders."""
    return [found for name in folders if (found := CHECKOUTS[name].problem(directory))]


def main() -> None:
    """Say what is missing, and how to get it."""
    directory = Path(sys.argv[1])
    for checkout in CHECKOUTS.values():
        problem = checkout.problem(directory)
        print(f"# {checkout.folder}: {problem or 'as wanted'}")
        if problem:
            print(checkout.commands(directory))


if __name__ == "__main__":
    main()
