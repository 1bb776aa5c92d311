"""How vLLM's ranks divide a linear layer, and what they exchange. Imports no vLLM."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from neuronmm_ops.parallel.sharding import Divide, Kind


class ColumnSection(NamedTuple):
    """Output columns that are divided by themselves, such as the heads of the queries.

    Attributes:
        size: columns in the checkpoint.
        parts: among how many ranks they are divided: fewer than all where heads are replicated.
        own: this rank's part.
    """

    size: int
    parts: int
    own: int

    @property
    def width(self) -> int:
        """Columns of one part."""
        return self.size // self.parts


class Shard(NamedTuple):
    """How ranks divide a layer, and which of them this is.

    Attributes:
        kind: `column` or `row`; None where every rank has the whole layer.
        divide: which factors of a pair they divide, `one` or `both`.
        rank: of this process.
        tp: ranks.
    """

    kind: Kind | None
    divide: Divide
    rank: int
    tp: int

    @property
    def gathers(self) -> bool:
        """Whether ranks hold a part of the rank of a column layer's pairs."""
        return self.kind == "column" and self.divide == "both"


def member_sections(
    names: Sequence[str], widths: Sequence[int], replicas: Sequence[int], place: Shard
) -> list[tuple[ColumnSection, ...]]:
    """Return the sections of each member of a layer.

    Args:
        names: of the members.
        widths: columns of this rank's part of each section.
        replicas: how many ranks hold the same part of each section.
        place: where the layer is cut.

    Raises:
        ValueError: the numbers of members and sections do not fit.
    """
    tp, rank = (place.tp, place.rank) if place.kind == "column" else (1, 0)
    sections = [
        ColumnSection(width * tp // copies, tp // copies, rank // copies)
        for width, copies in zip(widths, replicas, strict=True)
    ]
    if len(names) == 1:  # such as Phi-3's qkv_proj, which is one matrix in the checkpoint, too
        return [tuple(sections)]
    if len(names) != len(sections):
        raise ValueError(
            f"a fused layer must have a member for each section, got {', '.join(names)} for "
            f"{len(sections)} sections; leave them dense"
        )
    return [(section,) for section in sections]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors `[..., n]` side by side."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), -1)


def split_gathered(gathered: Tensor, widths: Sequence[int], tp: int) -> list[Tensor]:
    """Take apart what ranks sent side by side.

    Args:
        gathered: `[..., tp * sum(widths)]`, the parts of one rank after those of another.
        widths: of each part.
        tp: ranks.

    Returns:
        `[..., tp * width]` for each width.
    """
    parts = gathered.unflatten(-1, (tp, -1)).split(list(widths), -1)
    return [part.flatten(-2) for part in parts]
