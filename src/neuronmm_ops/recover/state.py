"""The state of a run on disk: one safetensors file, replaced as a whole, JSON in its header."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from neuronmm_ops.compress.batches import fingerprint
from neuronmm_ops.errors import CheckpointError

STATE_FILE = "state.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Position:
    """How far a run has come.

    Attributes:
        step: optimizer steps done.
        elapsed: seconds of training and evaluation, interruptions not counted.
        start_loss: held-out loss at the start, in nats per token.
        best_loss: the lowest held-out loss seen, the start's included.
        best_step: the step after which it was seen; 0 is the start.
        tokens: trained on.
        evaluation: seconds that the last evaluation, and the writing of the state, took.
        rate: share of the schedule's learning rate that is used.
    """

    step: int = 0
    elapsed: float = 0.0
    start_loss: float = float("inf")
    best_loss: float = float("inf")
    best_step: int = 0
    tokens: int = 0
    evaluation: float = 0.0
    rate: float = 1.0


@dataclass
class Snapshot:
    """Everything that a run goes on from: tensors by the parameters' names, on the CPU."""

    position: Position = field(default_factory=Position)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    best: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)


class StateFile:
    """The state in a directory; `run` says whose it is.

    Args:
        directory: made with the first state.
        run: a fingerprint of everything that decides the run.
    """

    def __init__(self, directory: Path, run: str) -> None:
        self.path, self.run = directory / STATE_FILE, run

    def write(self, snapshot: Snapshot) -> None:
        """Put the snapshot in the place of an earlier one: a reader sees one or the other.

        Raises:
            OSError: it cannot be written; the earlier one stays.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"{kind}/{name}": tensor.contiguous()
            for kind in ("parameters", "best", "moments")
            for name, tensor in getattr(snapshot, kind).items()
        }
        metadata = {"run": self.run, "position": json.dumps(asdict(snapshot.position))}
        metadata["sha256"] = fingerprint([{**metadata, **tensors}])
        partial = self.path.with_suffix(".partial")
        try:
            save_file(tensors, partial, metadata)
        except SafetensorError as error:
            needed = sum(tensor.nbytes for tensor in tensors.values())
            raise OSError(
                f"cannot write {self.path}, which needs {needed / 1e9:.3f} GB: {error}; "
                "free some room and go on with the same command"
            ) from None
        os.replace(partial, self.path)

    def read(self) -> Snapshot | None:
        """Return the snapshot, None where there is none.

        Raises:
            CheckpointError: the file is damaged, or of another run.
        """
        if not self.path.exists():
            return None
        remedy = f"to start anew, remove {self.path.parent}"
        snapshot = Snapshot()
        try:
            with safe_open(self.path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("run") != self.run:
                    raise CheckpointError(
                        f"{self.path.parent} holds the state of a run with another model, text or "
                        f"option: go on with the same command as then, or {remedy}"
                    )
                snapshot.position = Position(**json.loads(metadata["position"]))
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                written = metadata.pop("sha256", None)
                if fingerprint([{**metadata, **tensors}]) != written:
                    raise CheckpointError(
                        f"{self.path} is damaged: its values are not what was written; {remedy}"
                    )
                for key, tensor in tensors.items():
                    kind, _, name = key.partition("/")
                    getattr(snapshot, kind)[name] = tensor
        except (SafetensorError, OSError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.path} cannot be read ({error}); {remedy}") from None
        return snapshot

    def remove(self) -> None:
        """Remove the state, and its directory where nothing else is in it."""
        self.path.unlink(missing_ok=True)
        self.path.with_suffix(".partial").unlink(missing_ok=True)
        if self.path.parent.is_dir() and not any(self.path.parent.iterdir()):
            self.path.parent.rmdir()


def moments_of(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return AdamW's state by parameter: `exp_avg`, `exp_avg_sq` and `step`."""
    return {
        f"{key}/{name}": value.detach().cpu().clone()
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_moments(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
) -> None:
    """Give AdamW the state that `moments_of` returned."""
    for key, value in moments.items():
        kind, _, name = key.partition("/")
        parameter = parameters[name]
        place = value.to(parameter.device) if kind in MOMENTS else value
        # In the parameter's order in memory, as AdamW would have made it.
        state = torch.empty_like(parameter).copy_(place) if kind in MOMENTS else place
        optimizer.state[parameter][kind] = state
