"""A compressed checkpoint as a machine with NxD Inference or optimum-neuron reads it.

They have Transformers 4.57, which takes another rope_theta from a config.json of Transformers 5 and
does not know its tokenizer class. The directory written here is one that they read right; the
weights are the checkpoint's, and the classes of `models` make the engine's tensors of them.
"""

import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from shlex import join
from typing import Any

from neuronmm_ops.checkpoint import TensorHeader, inspect_headers, read_config, weight_files
from neuronmm_ops.compress.record import record_of
from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.engines.nxdi.files import transformers_4_config, write_json, write_others
from neuronmm_ops.engines.nxdi.models import FAMILIES
from neuronmm_ops.engines.nxdi.record import (
    DIVIDE_KEY,
    WINDOW_SEQ_LEN,
    check_heads,
    named_layers,
)
from neuronmm_ops.engines.places import COLUMNS
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.manifest import Origin, check_weights, tensor_hashes, write_manifest
from neuronmm_ops.output import check_target, no_room, replacement, why
from neuronmm_ops.parallel.sharding import DIVIDES, part_width

DTYPES = ("bfloat16", "float16", "float32")
_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True)
class Export:
    """What was exported.

    Attributes:
        output: the directory.
        model_type: its family.
        dtype: in which the engine computes, and to which it casts floats.
        divide: which factors ranks divide, `one` or `both`.
        tp: ranks of the command.
        bytes: of the files with weights.
        low_rank: number of low-rank layers.
        notes: what differs from the checkpoint, and what ranks pad.
        command: the first one to run on the machine with NxD Inference.
    """

    output: str
    model_type: str
    dtype: str
    divide: str
    tp: int
    bytes: int
    low_rank: int
    notes: tuple[str, ...]
    command: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON-compatible dict."""
        return {**asdict(self), "notes": list(self.notes)}


def export(
    source: str | Path,
    output: str | Path,
    tp: int = 1,
    divide: str = "both",
    dtype: str = "auto",
) -> Export:
    """Write a compressed checkpoint for engines on NxD; the whole directory, or nothing.

    Args:
        source: the compressed checkpoint, whose weights are copied.
        output: the directory to write; what an earlier export wrote is replaced, nothing else is.
        tp: ranks that will run it, for the checks, the notes and the command.
        divide: which factors ranks divide, see docs/nxdi.md.
        dtype: `bfloat16`, `float16` or `float32`; `auto` is the checkpoint's.

    Raises:
        CheckpointError: the source cannot be read, does not fit its record, is of a family or has
            low-rank layers that are not taken here.
        ValueError: an option is out of range, or ranks cannot divide the model.
        FileExistsError: the output exists and is no earlier export.
        OSError: it cannot be written.
    """
    source, output = Path(source), Path(output)
    if tp < 1:
        raise ValueError(f"--tp must be at least 1, got {tp}; give the number of NeuronCores")
    if divide not in DIVIDES:
        raise ValueError(f"--divide must be {' or '.join(DIVIDES)}, got {divide!r}")
    if dtype not in (*DTYPES, "auto"):
        raise ValueError(f"--dtype must be auto, {', '.join(DTYPES)}; got {dtype!r}")
    config = read_config(source)
    report, headers = inspect_headers(source)
    model_type = _model_type(config)
    layers = named_layers(report.layers, tp)
    low_rank = [layer for layer in report.layers if layer.r is not None]
    _check_names(headers, low_rank)
    exported_dtype = _dtype_of(headers, dtype)
    changes = _changes(report.layers, layers, headers, exported_dtype, tp)
    notes = (*changes, *_paddings(config, bool(layers), tp, divide))
    written = transformers_4_config(config, exported_dtype) | {
        "quantization_config": record_of(report),
        DIVIDE_KEY: divide,
    }
    is_replaced = _is_export(output)
    size = sum(path.stat().st_size for path in weight_files(source))
    check_target(output, is_replaced, source, size)
    manifest = check_weights(source, values=True) or {}
    try:
        with replacement(output, is_replaced) as directory:
            write_json(directory / "config.json", written)
            write_others(source, directory, config)
            weights = manifest.get("weights_sha256")
            made_of = {"path": str(source.resolve()), "weights_sha256": weights}
            write_manifest(directory, tensor_hashes(directory), Origin("export nxdi", made_of))
    except FileExistsError:
        raise
    except OSError as error:
        free = shutil.disk_usage(next(p for p in output.resolve().parents if p.exists())).free
        raise OSError(f"{why(error)}; {no_room(output, size, free)}") from error
    seq_len = 2 * WINDOW_SEQ_LEN if written.get("sliding_window") else 256
    command = first_command(output, model_type, exported_dtype, tp, seq_len)
    return Export(
        str(output), model_type, exported_dtype, divide, tp, size, len(low_rank), notes, command
    )


def first_command(directory: Path, model_type: str, dtype: str, tp: int, seq_len: int) -> str:
    """Return the first command to run on the machine with NxD Inference."""
    module = "neuronmm_ops.engines.nxdi"
    where = ("--model-path", str(directory), "--compiled-model-path", f"{directory}-compiled")
    sizes = ("--batch-size", "1", "--seq-len", str(seq_len))
    return join(
        [
            *("python", "-m", module, "--model-type", model_type, "--task-type", "causal-lm"),
            *("run", *where, "--torch-dtype", dtype, "--tp-degree", str(tp), *sizes),
            *("--prompt", "The capital of France is"),
        ]
    )


def _model_type(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"model_type must be one of {', '.join(FAMILIES)} for NxD Inference, got "
            f"{model_type!r}; see docs/engines.md for engines that serve it"
        )
    return str(model_type)


def _check_names(headers: Mapping[str, TensorHeader], layers: list[LayerReport]) -> None:
    """Refuse a checkpoint whose tensors have other names than the record's."""
    for layer in layers:
        if f"{layer.name}.u" not in headers:
            raise CheckpointError(
                f"{layer.name}.u is not in the files; load and save the checkpoint with this "
                "version of neuronmm-ops"
            )


def _float_sizes(headers: Mapping[str, TensorHeader]) -> dict[str, int]:
    """Return how many numbers, but scales, each dtype has."""
    sizes: defaultdict[str, int] = defaultdict(int)
    for name, header in headers.items():
        if header.dtype in _NAMES and not name.endswith("_scale"):
            sizes[_NAMES[header.dtype]] += prod(header.shape)
    return sizes


def _dtype_of(headers: Mapping[str, TensorHeader], dtype: str) -> str:
    """Return the dtype asked for; of `auto` the one that most of the floats have."""
    if dtype != "auto":
        return dtype
    sizes = _float_sizes(headers)
    largest = max(_NAMES.values(), key=lambda name: sizes.get(name, 0))
    return largest if largest in DTYPES else "float32"


def _changes(
    layers: tuple[LayerReport, ...],
    served: Mapping[str, LayerReport],
    headers: Mapping[str, TensorHeader],
    dtype: str,
    tp: int,
) -> Iterator[str]:
    """Say what differs from the checkpoint as the engine loads it."""
    whole: defaultdict[str, list[str]] = defaultdict(list)
    for layer in layers:
        as_served = served.get(layer.name.removeprefix("model."))
        if layer.storage is not None and (as_served is None or as_served.storage is None):
            whole[layer.storage].append(layer.name)
    for storage, names in whole.items():
        yield (
            f"{len(names)} in {storage}, first {names[0]}, multiplied out to {dtype} as the engine "
            f"loads them at tp {tp}: no projection of a block, or none that ranks can divide"
        )
    dtypes = sorted(set(_float_sizes(headers)) - {dtype})
    if dtypes:
        yield f"tensors in {' and '.join(dtypes)} are cast to {dtype} as the engine loads them"
    columns = (*COLUMNS["self_attn"], "o_proj")
    if served and not any(name.endswith(columns) for name in served):
        yield (
            "attention is dense: with --fused-qkv --qkv-kernel-enabled --attn-kernel-enabled it "
            "runs in NxD Inference's own kernels, next to the low-rank MLPs"
        )


def _paddings(config: Mapping[str, Any], is_divided: bool, tp: int, divide: str) -> Iterator[str]:
    """Say what ranks pad with zeros as they load; refuse what they cannot."""
    size, heads = int(config["intermediate_size"]), int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    check_heads(heads, kv_heads, tp)
    if size % tp and config.get("mlp_bias"):
        raise CheckpointError(
            f"tp must divide intermediate_size in an MLP with biases, got {size} and tp = {tp}; "
            f"use a tp that divides {size}"
        )
    if size % tp:
        yield f"intermediate_size {size} is padded to {part_width(size, tp) * tp} for tp {tp}"
    if heads % tp:
        yield f"{heads} heads are padded to {part_width(heads, tp) * tp} for tp {tp}"
    if heads != kv_heads < tp:
        yield f"{kv_heads} key/value heads are replicated to {tp}"
    if divide == "one" and tp > 2 and is_divided:
        yield (
            "with --divide one each rank reads one factor of each pair whole, more than its part "
            f"of the dense weight at tp {tp}; --divide both reads a part of both"
        )


def _is_export(directory: Path) -> bool:
    """Say whether an earlier export wrote the directory."""
    try:
        return DIVIDE_KEY in read_config(directory)
    except CheckpointError:
        return False
