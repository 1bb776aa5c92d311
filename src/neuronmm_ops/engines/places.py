"""How an engine's ranks divide a layer, and what they exchange. Imports no engine."""

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.parallel.sharding import Divide, Kind, part_width

# A decoder block's projections, by the module that has them.
COLUMNS = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
ROWS = {"self_attn": "o_proj", "mlp": "down_proj"}


_NAME = re.compile(r"(?:model\.)?(layers\.\d+\.(?:self_attn\.[qkvo]|mlp\.(?:gate|up|down))_proj)")


def name_in_model(layer: LayerReport, engine: str) -> str | None:
    """Return the name of a block's projection, such as `layers.0.mlp.up_proj`; None for others.

    Raises:
        CheckpointError: another layer is low-rank.
    """
    match = _NAME.fullmatch(layer.name)
    if layer.r is not None and match is None:
        raise CheckpointError(
            f"{engine} takes low-rank projections of attention and MLP, got {layer.name}; compress "
            "again with --targets all-linear or mlp"
        )
    return match and match[1]


class EngineRanks(Protocol):
    """The ranks of a model: an engine's group, and what it exchanges by."""

    @property
    def size(self) -> int:
        """How many they are."""
        ...

    @property
    def own_tokens(self) -> bool:
        """Whether each has its own tokens outside of the block."""
        ...

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the ranks' tensors."""
        ...

    def add(self, x: Tensor) -> Tensor:
        """Add the ranks' tensors `[..., n]`; each is given its tokens of the sum, or all."""
        ...


class ColumnSection(NamedTuple):
    """Output columns that are divided by themselves, such as the heads of the queries.

    Attributes:
        size: columns in the checkpoint.
        parts: among how many ranks they are divided: fewer than all where heads are replicated.
    """

    size: int
    parts: int

    @property
    def width(self) -> int:
        """Columns of one part, those of zeros included."""
        return part_width(self.size, self.parts)

    def own(self, rank: int, tp: int) -> slice:
        """Return a rank's columns."""
        start = rank * self.parts // tp * self.width
        return slice(min(start, self.size), min(start + self.width, self.size))


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
    tp = place.tp if place.kind == "column" else 1
    sections = [
        ColumnSection(width * tp // copies, tp // copies)
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
