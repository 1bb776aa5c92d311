"""A warning where a compression reaches little of what the names of its targets promise."""

import re
import warnings
from collections.abc import Mapping

from torch import nn

from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.rank import largest_block
from neuronmm_ops.compress.targets import ALL_LINEAR, Selection, output_head, preset_of
from neuronmm_ops.errors import CompressionWarning
from neuronmm_ops.nn.dense_linear import dense_linear
from neuronmm_ops.nn.svd_linear import SVDLinear

# A compression that reaches a smaller share of the promised parameters is warned of.
EXPECTED = 0.5


def warn_of_coverage(
    model: nn.Module,
    config: SVDConfig,
    selection: Selection,
    ranks: Mapping[str, int | None],
    stacklevel: int,
) -> None:
    """Warn when no target gets a rank, or when less than half of what a preset promises does.

    `all-linear` promises every matrix but embeddings and output head (parameters of 2 or 3
    dimensions: experts are often stacked in one), `attention` those of the attention modules,
    `mlp` the others. Names and patterns promise nothing.

    Args:
        model: still dense.
        config: what was asked for.
        selection: the Linears that were found.
        ranks: of the found Linears; None for one that stays dense.
        stacklevel: as in `warnings.warn`, of the caller.
    """
    reached = {f"{name}.weight" for name, rank in ranks.items() if rank is not None}
    message = _little(model, config, selection, reached) if reached else _nothing(config, selection)
    if message:
        warnings.warn(message, CompressionWarning, stacklevel=stacklevel + 1)


def _nothing(config: SVDConfig, selection: Selection) -> str:
    return (
        f"nothing is compressed: at ratio {config.ratio} no rank that is a multiple of "
        f"{config.block} is smaller than any of the {len(selection.linears)} targeted matrices; "
        f"{_remedy(config, selection)}"
    )


def _little(
    model: nn.Module, config: SVDConfig, selection: Selection, reached: set[str]
) -> str | None:
    promised = _promised(model, config)
    total = sum(promised.values())
    share = sum(size for name, size in promised.items() if name in reached) / max(1, total)
    if not promised or share >= EXPECTED:
        return None
    group, members = _largest_group({n: size for n, size in promised.items() if n not in reached})
    module = model.get_submodule(next(iter(members)).rpartition(".")[0])
    linear = dense_linear(module)
    if linear is None:
        reason = f"parameters of {type(module).__name__}, no nn.Linear"
    elif linear in selection.linears.values():
        reason = f"no rank is smaller; {_remedy(config, selection)}"
    else:
        reason = "not among the targets"
    targets = ", ".join(config.target_list)
    return (
        f"targets {targets} reach {share:.1%} of the matrix parameters they stand for; "
        f"the largest group not reached is {group} with {sum(members.values()) / total:.1%} "
        f"({reason})"
    )


def _promised(model: nn.Module, config: SVDConfig) -> dict[str, int]:
    """Return the sizes of the matrices that the presets among the targets promise, by name.

    Matrices are parameters of 2 or 3 dimensions, but for embeddings, the output head, and factors
    that an earlier run has found.
    """
    targets = set(config.target_list)
    head = output_head(model)
    left_out = {
        id(parameter)
        for module in model.modules()
        if module is head or isinstance(module, (nn.Embedding, SVDLinear))
        for parameter in module.parameters()
    }
    return {
        name: parameter.numel()
        for name, parameter in model.named_parameters()
        if targets & {ALL_LINEAR, preset_of(name.rpartition(".")[0])}
        and parameter.dim() in (2, 3)
        and id(parameter) not in left_out
    }


def _largest_group(sizes: Mapping[str, int]) -> tuple[str, dict[str, int]]:
    """The same parameter of all layers, as `model.layers.*.mlp.up_proj.weight`, and its members."""
    groups: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        group = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        groups.setdefault(group, {})[name] = size
    return max(groups.items(), key=lambda item: sum(item[1].values()))


def _remedy(config: SVDConfig, selection: Selection) -> str:
    sizes = [(m.in_features, m.out_features) for m in selection.linears.values()]
    block = largest_block(sizes, config.ratio, config.alpha)
    if block is None:
        return "the matrices are too small for any pair"
    return f"the largest block that fits is {block}"
