"""What a compression does not reach of what the names of its targets promise."""

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn

from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.report import LayerReport, LeftDense
from neuronmm_ops.compress.targets import ALL_LINEAR, Selection, names_in, output_head, preset_of
from neuronmm_ops.errors import CompressionWarning
from neuronmm_ops.nn.compressed_linear import CompressedLinear
from neuronmm_ops.nn.dense_linear import dense_linear
from neuronmm_ops.rank import largest_block

# A compression that reaches a smaller share of the promised parameters is warned of.
EXPECTED = 0.5


def left_dense(
    model: nn.Module, config: SVDConfig, selection: Selection, model_parameters: int
) -> tuple[LeftDense, ...]:
    """Return what the presets among the targets promise and the selection lacks, largest first.

    Args:
        model: still dense.
        config: what was asked for.
        selection: the linear layers that were found.
        model_parameters: of the whole model.
    """
    selected = {f"{name}.weight" for name in (*selection.linears, *selection.kept)}
    promised = _promised(model, config)
    groups = _groups({name: size for name, size in promised.items() if name not in selected})
    left: list[LeftDense] = []
    for name, members in groups.items():
        size = sum(members.values())
        first = next(iter(members))
        reason = _obstacle(model, first) or "not among the targets"
        if first.rpartition(".")[0] in selection.unread:
            reason = "text does not pass it"
        left.append(LeftDense(name, size, size / model_parameters, reason))
    return tuple(sorted(left, key=lambda entry: -entry.parameters))


def still_dense(
    model: nn.Module, left: Iterable[LeftDense], layers: Iterable[LayerReport]
) -> tuple[LeftDense, ...]:
    """Return what an earlier run left dense and no one of the `layers` of a later one is."""
    taken = {f"{layer.name}.weight" for layer in layers}
    groups = _groups({n: p.numel() for n, p in model.named_parameters() if n not in taken})
    still: list[LeftDense] = []
    for entry in left:
        name = next((name for name in names_in(model, entry.name) if name in groups), None)
        if name is not None:
            size = sum(groups[name].values())
            share = entry.share * size / entry.parameters
            still.append(replace(entry, name=name, parameters=size, share=share))
    return tuple(still)


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
    if config.ratio == 0:
        return
    reached = {f"{name}.weight" for name, rank in ranks.items() if rank is not None}
    message = _little(model, config, selection, reached) if reached else _nothing(config, selection)
    if message:
        warnings.warn(message, CompressionWarning, stacklevel=stacklevel + 1)


def _nothing(config: SVDConfig, selection: Selection) -> str:
    what = "gets a rank" if config.one_byte else "is compressed"
    return (
        f"nothing {what}: at ratio {config.ratio} no rank that is a multiple of "
        f"{config.block} is smaller than any of the {len(selection.linears)} targeted matrices; "
        f"{_remedy(config, selection)}"
    )


def _little(
    model: nn.Module, config: SVDConfig, selection: Selection, reached: set[str]
) -> str | None:
    promised = {
        name: size
        for name, size in _promised(model, config).items()
        if name.rpartition(".")[0] not in selection.unread
    }
    total = sum(promised.values())
    share = sum(size for name, size in promised.items() if name in reached) / max(1, total)
    if not promised or share >= EXPECTED:
        return None
    groups = _groups({name: size for name, size in promised.items() if name not in reached})
    group, members = max(groups.items(), key=lambda item: sum(item[1].values()))
    parameter = next(iter(members))
    reason = _obstacle(model, parameter) or "not among the targets"
    if parameter.removesuffix(".weight") in selection.linears:
        reason = f"no rank is smaller; {_remedy(config, selection)}"
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
        if module is head or isinstance(module, (nn.Embedding, CompressedLinear))
        for parameter in module.parameters()
    }
    return {
        name: parameter.numel()
        for name, parameter in model.named_parameters()
        if targets & {ALL_LINEAR, preset_of(name.rpartition(".")[0])}
        and parameter.dim() in (2, 3)
        and not name.endswith("bias")  # of experts, one in a row
        and id(parameter) not in left_out
    }


def _groups(sizes: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the same parameters of all layers, by a name as `layers.*.mlp.up_proj.weight`."""
    groups: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        group = re.sub(r"(?<![^.])\d+(?=\.)", "*", name)
        groups.setdefault(group, {})[name] = size
    return groups


def _obstacle(model: nn.Module, parameter: str) -> str | None:
    """Say why no SVDLinear can take the parameter's place, None where one can."""
    module = model.get_submodule(parameter.rpartition(".")[0])
    kind = type(module).__name__
    if dense_linear(module) is not None:
        return None
    if model.get_parameter(parameter).dim() == 3:
        return f"a stack of matrices in one parameter of {kind}"
    return f"a parameter of {kind}, no nn.Linear"


def _remedy(config: SVDConfig, selection: Selection) -> str:
    sizes = [(m.in_features, m.out_features) for m in selection.linears.values()]
    block = largest_block(sizes, config.ratio, config.alpha)
    if block is None:
        return "the matrices are too small for any pair"
    return f"the largest block that fits is {block}"
