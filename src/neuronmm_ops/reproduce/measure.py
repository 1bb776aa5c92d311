"""What one cell is: the work behind each kind, given the models that it is of."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from neuronmm_ops import hf
from neuronmm_ops.compress import CompressionReport, SVDConfig
from neuronmm_ops.compress.pipeline import check_storage
from neuronmm_ops.compress.targets import select_targets
from neuronmm_ops.eval import encode_documents, perplexities, token_perplexity
from neuronmm_ops.eval.perplexity import block_length
from neuronmm_ops.eval.protocols import CORPORA
from neuronmm_ops.eval.tasks import run_tasks
from neuronmm_ops.hf.loading import local_directory
from neuronmm_ops.manifest import tensor_hashes, weights_sha256
from neuronmm_ops.measure.speed import paired_speed
from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.progress import Update
from neuronmm_ops.reproduce.config import NATIVE, Modelled, Reproduction

# What lm-eval calls the share of questions whose right choice is likelier than every other.
ACCURACY = "acc,none"


def check_methods(asked: Reproduction) -> None:
    """Refuse targets, storages and modelled times that cannot be of this model.

    Raises:
        ValueError: there is one; says which.
    """
    from neuronmm_ops.estimate import model as model_times

    model = hf.load(asked.model.id, device_map="meta")
    if asked.measured is not None:
        block_length(model, asked.measured.prompt + asked.measured.new, least=2)
    combined = product(asked.methods.values(), asked.compress.ratios, asked.compress.storages)
    for method, ratio, storage in combined:
        config = replace(method, ratio=ratio, storage=None if storage == NATIVE else storage)
        linears = select_targets(model, config).linears
        check_storage(config, linears, {name: each.weight.dtype for name, each in linears.items()})
        if asked.modelled is not None:
            model_times.prepared(
                str(local_directory(asked.model.id)), _model_options(asked.modelled, config)
            )


def compress(
    asked: Reproduction, config: SVDConfig, text: str | None, target: Path, progress: Update
) -> dict[str, Any]:
    """Make a compressed checkpoint at `target`."""
    options = asked.compress
    report = hf.compress(
        asked.model.id,
        config,
        text,
        target,
        samples=options.samples,
        seqlen=options.seqlen,
        order=options.order,
        dtype=asked.model.dtype,
        device=asked.model.device,
        force=target.exists(),
        stream=options.stream,
        progress=progress,
    )
    return _sizes(report, target)


def recover(
    asked: Reproduction, base: Path, text: str, target: Path, progress: Update
) -> dict[str, Any]:
    """Train the checkpoint at `base` and write it to `target`; goes on where it was killed."""
    assert asked.recovery is not None
    config = asked.recovery.config
    report = hf.recover(
        base,
        text,
        target,
        config,
        dense=asked.model.id if config.method == "distill" else None,
        device=asked.model.device,
        force=target.exists(),
        progress=progress,
    )
    entry = report.provenance["recovery"][-1]
    names = ("steps", "best_step", "improved", "tokens", "held_out_ppl_before")
    return _sizes(report, target) | {n: entry[n] for n in (*names, "held_out_ppl_after")}


def perplexity(
    asked: Reproduction, model: Any, directory: str | Path, text: str, progress: Update
) -> dict[str, Any]:
    """Take the perplexity on a data set or a text file."""
    tokenizer, seqlen = hf.load_tokenizer(directory), asked.evaluate.seqlen
    if text in CORPORA:
        rows = perplexities(
            model,
            tokenizer,
            [text],
            seqlen=seqlen,
            protocol=asked.evaluate.protocol,
            data=asked.data,
            progress=progress,
        )
        return {**rows[0], "compute_dtype": name_of(model.dtype)}
    ids = encode_documents(tokenizer, [hf.read_text(text)])
    result = token_perplexity(model, ids, seqlen, progress)
    return {**asdict(result), "compute_dtype": name_of(model.dtype)}


def task(
    asked: Reproduction, model: Any, directory: str | Path, name: str, progress: Update
) -> dict[str, Any]:
    """Run one of lm-eval's tasks; `accuracy` is None where it has none."""
    options = asked.evaluate
    document = run_tasks(
        model,
        hf.load_tokenizer(directory),
        [name],
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        batch_size=options.batch_size,
        include_path=options.include,
        progress=progress,
    )
    results: Mapping[str, Any] = document["results"].get(name, {})
    if not results:
        raise ValueError(f"{name} stands for several tasks; name {', '.join(document['results'])}")
    numbers = {k: v for k, v in results.items() if isinstance(v, (int, float))}
    return {"accuracy": numbers.get(ACCURACY), "results": numbers}


def modelled(asked: Reproduction, config: SVDConfig, progress: Update) -> dict[str, Any]:
    """Model the times of a compression and of the dense model, with uniform ranks."""
    from neuronmm_ops.estimate import model as model_times

    assert asked.modelled is not None
    options = _model_options(asked.modelled, config)
    return model_times.run(str(local_directory(asked.model.id)), options, progress)


def _model_options(modelled: Modelled, config: SVDConfig) -> Any:
    from neuronmm_ops.estimate import model as model_times

    return model_times.Options(
        **asdict(modelled),
        ratio=config.ratio,
        storage=config.one_byte,
        targets=config.target_list,
    )


def measured(asked: Reproduction, dense: Any, model: Any, progress: Update) -> dict[str, Any]:
    """Time two models in turn, on the device that they are on."""
    assert asked.measured is not None
    options = asked.measured
    block_length(dense, options.prompt + options.new, least=2)
    # Times do not depend on which tokens they are.
    tokens = torch.arange(options.prompt) % dense.config.get_text_config().vocab_size
    speed = paired_speed(
        dense,
        model,
        tokens,
        decode_tokens=options.new,
        rounds=options.rounds,
        progress=progress,
    )
    phases = ("prefill", "decode", "end_to_end")
    return {
        "speedup": {phase: speed.speedup(phase) for phase in phases},
        "dense_ms": {phase: speed.times[phase].median_ms("dense") for phase in phases},
        "tokens": dict(speed.tokens),
        "compute_dtype": name_of(model.dtype),
    }


def _sizes(report: CompressionReport, directory: Path) -> dict[str, Any]:
    return {
        "ratio": report.ratio,
        "effective_ratio": report.effective_ratio,
        "model_ratio": report.model_ratio,
        "bytes": sum(layer.bytes for layer in report.layers),
        "dense_bytes": sum(layer.dense_bytes for layer in report.layers),
        "dense_layers": sum(layer.dense for layer in report.layers),
        "layers": len(report.layers),
        "weights_sha256": weights_sha256(tensor_hashes(directory)),
    }
