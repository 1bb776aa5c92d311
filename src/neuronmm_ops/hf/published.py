"""Low-rank checkpoints that others have published, as checkpoints of this package."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from neuronmm_ops.checkpoint import check_float, read_config, read_headers, weight_files
from neuronmm_ops.compress.record import is_record, swap_
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.hf.loading import check_all_finite, empty_model, load_tokenizer
from neuronmm_ops.hf.saving import save
from neuronmm_ops.nn import dense_linears
from neuronmm_ops.output import check_target

LAYOUTS = (
    ("SVD-LLM, NeuronMM", "_u_proj", "_v_proj"),
    ("ASVD, Dobi-SVD, FlashSVD", ".ALinear", ".BLinear"),
    ("modules A and B", ".A", ".B"),
    ("modules or tensors u and v", ".u", ".v"),
    ("modules or tensors U and V", ".U", ".V"),
    ("nn.Sequential", ".0", ".1"),
)
"""Who names a pair's factors so, and how their names end, before `.weight` of a module.

Which of the two comes first, and which way round it lies, differs within a row: shapes say so.
"""
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")


class FactorNames(NamedTuple):
    """The names of two factors and, if there is one, of the bias after them."""

    one: str
    other: str
    biases: tuple[str, str]


def import_published(source: str | Path, output: str | Path, force: bool = False) -> dict[str, Any]:
    """Write a low-rank checkpoint in another layout as one of this package.

    Args:
        source: a directory with the dense model's config.json, and safetensors in which two factors
            stand for some Linears' weights, named as in `LAYOUTS`; each Linear has one pair.
        output: the directory to write.
        force: replace an existing compressed checkpoint.

    Returns:
        `output`, `layout` by who uses it, `layers` that are pairs, and their `ranks`.

    Raises:
        CheckpointError: it cannot be read, holds no pair, or tensors that are neither a pair nor
            the model's, or a pair whose shapes do not fit its Linear or fit it two ways.
        NonFiniteError: a value is NaN or Inf.
        FileExistsError: the output exists, and may not be replaced.
        OSError: it cannot be written.
    """
    source, output = Path(source), Path(output)
    _refuse_pickles(source)
    if is_record(read_config(source).get("quantization_config")):
        raise CheckpointError(f"{source} is a checkpoint of neuronmm already; copy it as it is")
    check_target(output, force, source)
    files = weight_files(source)
    check_float(read_headers(files))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    check_all_finite(tensors.items(), "import the checkpoint in a wider dtype")
    empty = empty_model(source)
    linears = dense_linears(empty)
    layout, pairs = _pairs_in(source, tensors, linears)
    factors = {
        name: _oriented(name, tensors, pair, linears[name].in_features, linears[name].out_features)
        for name, pair in pairs.items()
    }
    rest = dict(tensors)
    for name, pair in pairs.items():
        for each in (pair.one, pair.other):
            del rest[each]
        for bias in [bias for bias in pair.biases if bias in rest]:
            rest[f"{name}.bias"] = rest.pop(bias)
        if f"{name}.weight" in rest:
            raise CheckpointError(f"{source} holds {name}.weight and its factors; leave one out")
        rest[f"{name}.weight"] = torch.zeros(()).expand_as(linears[name].stored)
    dtype = next(iter(factors.values()))[0].dtype
    model = _loaded(source, empty, rest, dtype)
    swap_(model, factors)
    tokenizer = None
    if (source / "tokenizer_config.json").is_file():
        tokenizer = load_tokenizer(source)
    save(model, output, tokenizer=tokenizer, force=force)
    ranks = sorted({u.shape[1] for u, _ in factors.values()})
    return {"output": str(output), "layout": layout, "layers": len(pairs), "ranks": ranks}


def _refuse_pickles(source: Path) -> None:
    files = [source] if source.is_file() else sorted(source.glob("*")) if source.is_dir() else []
    pickles = [path.name for path in files if path.suffix in PICKLES]
    if pickles and not [path for path in files if path.suffix == ".safetensors"]:
        raise CheckpointError(
            f"{pickles[0]} is a pickle, which can run code and is not read; where you trust it, "
            "write its state dict by safetensors.torch.save_file next to the model's config.json"
        )


def _pairs_in(
    source: Path, tensors: Mapping[str, Tensor], linears: Mapping[str, Any]
) -> tuple[str, dict[str, FactorNames]]:
    """The layout, and the pair of each Linear."""
    for layout, one, other in LAYOUTS:
        pairs = dict(_named(tensors, linears, one, other))
        if pairs:
            return layout, pairs
    known = "; ".join(f"{layout}: {one}, {other}" for layout, one, other in LAYOUTS)
    raise CheckpointError(f"{source} holds no pair of factors of a Linear; known are {known}")


def _named(
    tensors: Mapping[str, Tensor], linears: Mapping[str, Any], one: str, other: str
) -> Iterator[tuple[str, FactorNames]]:
    for name in tensors:
        match = re.fullmatch(rf"(.+){re.escape(one)}(\.weight)?", name)
        if match is None:
            continue
        start, ending = match[1], match[2] or ""
        linear = next((each for each in (start, f"{start}_proj") if each in linears), None)
        if linear is not None and (second := start + other + ending) in tensors:
            yield linear, FactorNames(name, second, (f"{start}{one}.bias", f"{start}{other}.bias"))


def _oriented(
    name: str, tensors: Mapping[str, Tensor], pair: FactorNames, K: int, N: int
) -> tuple[Tensor, Tensor]:
    """u [K, r] and v [r, N] of a pair.

    A module's weight is `[out, in]`; other tensors may be that, or `[in, out]`.
    """
    one, other = tensors[pair.one], tensors[pair.other]
    is_module = pair.one.endswith(".weight")
    fitting: list[tuple[Tensor, Tensor]] = []
    if one.dim() == other.dim() == 2:
        for first, second in ((one, other), (other, one)):
            ways = [(first.t(), second.t()), *([] if is_module else [(first, second)])]
            fitting += [(u, v) for u, v in ways if (u.shape[0], v.shape) == (K, (u.shape[1], N))]
    if len(fitting) != 1:
        shapes = f"{pair.one} {list(one.shape)} and {pair.other} {list(other.shape)}"
        many = "fit it two ways; name them as modules, .weight" if fitting else "do not fit it"
        raise CheckpointError(f"{name} takes {K} features to {N}, {shapes} {many}")
    ((u, v),) = fitting
    bias = pair.biases[0 if u.data_ptr() == one.data_ptr() else 1]
    if bias in tensors:
        raise CheckpointError(f"{bias} stands between two factors, which has no place here")
    return u.contiguous(), v.contiguous()


def _loaded(
    source: Path, empty: Any, tensors: dict[str, Tensor], dtype: torch.dtype
) -> PreTrainedModel:
    """The model of these tensors and no others."""
    model, info = type(empty).from_pretrained(
        None, config=empty.config, state_dict=tensors, dtype=dtype, output_loading_info=True
    )
    missing, more = set(info["missing_keys"]), set(info["unexpected_keys"])
    if missing or more:
        what = f"lacks {min(missing)}" if missing else f"holds {min(more)}, which is no pair's"
        raise CheckpointError(f"{source} {what}; the model of its config.json has other tensors")
    return model
