"""`compress`, `eval`, `generate`, `inspect` and `doctor`."""

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table

from neuronmm_ops.cli.console import COMPACT, progress_bars, show_fields, stderr, stdout
from neuronmm_ops.cli.parser import add_command
from neuronmm_ops.compress.rank import parameter_count


def add(commands: Any) -> None:
    """Add the commands to the parser."""
    command = add_command(
        commands, "compress", _compress, _show_summary, "replace Linears by factors"
    )
    command.add_argument("model", type=Path, metavar="MODEL_DIR")
    command.add_argument("-o", "--output", type=Path, required=True, metavar="OUT")
    command.add_argument(
        "--ratio", type=float, default=0.2, help="fraction of parameters to remove (default 0.2)"
    )
    command.add_argument("--method", default="swift", help="swift (default), whiten or plain")
    command.add_argument("--calibration", type=Path, metavar="FILE.txt")
    command.add_argument(
        "--samples", type=int, default=128, help="calibration blocks (default 128)"
    )
    command.add_argument(
        "--seqlen", type=int, help="tokens in a block (default: 2048, or the model's limit)"
    )
    command.add_argument("--block", type=int, default=128, help="ranks are multiples of it")
    command.add_argument(
        "--targets",
        nargs="+",
        default=["mlp"],
        help="mlp (default), attention, all-linear, module names or regular expressions",
    )
    command.add_argument("--force", action="store_true", help="replace OUT if it exists")

    command = add_command(commands, "eval", _eval, show_fields, "token perplexity on a text")
    command.add_argument("model", type=Path, metavar="DIR")
    command.add_argument("--text", type=Path, required=True, metavar="FILE")
    command.add_argument(
        "--seqlen", type=int, help="tokens in a block (default: 2048, or the model's limit)"
    )

    command = add_command(
        commands, "generate", _generate, _show_text, "continue a prompt, greedily"
    )
    command.add_argument("model", type=Path, metavar="DIR")
    command.add_argument("--prompt", required=True)
    command.add_argument("--max-new-tokens", type=int, default=64, metavar="N")

    command = add_command(
        commands, "inspect", _inspect, _show_summary, "rank and loss of every layer"
    )
    command.add_argument("model", type=Path, metavar="DIR")

    add_command(commands, "doctor", _doctor, _show_doctor, "versions, and which backends work here")


def transformers_models() -> Any:
    """Return `neuronmm_ops.hf`, without progress bars. Raises ImportError that names the extra."""
    try:
        from transformers.utils import logging

        from neuronmm_ops import hf
    except ImportError as error:
        raise ImportError(
            f"{error.name} is not installed; run: pip install 'neuronmm-ops[hf]'"
        ) from error
    # Its progress bars and hints would bury ours; what matters is raised by hf.load.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return hf


def _compress(options: argparse.Namespace) -> dict[str, Any]:
    hf = transformers_models()
    from neuronmm_ops.compress import SVDConfig, compress_
    from neuronmm_ops.eval.perplexity import default_seqlen
    from neuronmm_ops.hf.saving import check_target

    config = SVDConfig(
        ratio=options.ratio,
        block=options.block,
        targets=tuple(options.targets),
        method=options.method,
    )
    check_target(options.output, options.force)
    text = None
    if config.method != "plain":
        if options.calibration is None:
            raise ValueError(
                f"method {config.method} needs --calibration FILE.txt; or use --method plain"
            )
        text = hf.read_text(options.calibration)
    with stderr.status(f"loading {options.model}"):
        model = hf.load(options.model)
        tokenizer = hf.load_tokenizer(options.model)
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(f"{options.model} is compressed or quantized already; start from dense")
    batches = None
    if text is not None:
        seqlen = options.seqlen or default_seqlen(model)
        batches = hf.calibration_batches(tokenizer, text, options.samples, seqlen)
    with progress_bars() as progress:
        report = compress_(model, config, batches, progress)
    with stderr.status(f"writing {options.output}"):
        hf.save(model, options.output, report, tokenizer, options.force)
    return {"output": str(options.output), **_summary(report)}


def _eval(options: argparse.Namespace) -> dict[str, Any]:
    hf = transformers_models()
    from neuronmm_ops.eval import encode_documents, token_perplexity

    text = hf.read_text(options.text)
    with stderr.status(f"loading {options.model}"):
        model = hf.load(options.model)
    ids = encode_documents(hf.load_tokenizer(options.model), [text])
    with progress_bars() as progress:
        result = token_perplexity(model, ids, options.seqlen, progress)
    return {
        "model": str(options.model),
        "text": str(options.text),
        "ppl_token": result.ppl_token,
        "tokens": result.tokens,
        "seqlen": result.seqlen,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _generate(options: argparse.Namespace) -> dict[str, Any]:
    hf = transformers_models()
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    with stderr.status(f"loading {options.model}"):
        model = hf.load(options.model)
        tokenizer = hf.load_tokenizer(options.model)
    inputs = tokenizer(options.prompt, return_tensors="pt", return_token_type_ids=False)
    length = inputs["input_ids"].shape[1]
    if length == 0:
        raise ValueError("--prompt must hold at least one token, got an empty text")
    with stderr.status(f"generating up to {options.max_new_tokens} tokens"):
        output = model.generate(
            **inputs,
            max_new_tokens=options.max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )[0]
    return {
        "model": str(options.model),
        "prompt": options.prompt,
        "text": tokenizer.decode(output[length:], skip_special_tokens=True),
        "new_tokens": len(output) - length,
    }


def _inspect(options: argparse.Namespace) -> dict[str, Any]:
    from neuronmm_ops.compress.checkpoint import inspect_checkpoint

    return _summary(inspect_checkpoint(options.model))


def _doctor(options: argparse.Namespace) -> dict[str, Any]:
    from neuronmm_ops.doctor import diagnose

    return diagnose()


def _summary(report: Any) -> dict[str, Any]:
    """Return the `inspect` document."""
    fields = ("name", "K", "N", "r", "dense", "loss", "bytes")
    return {
        "ratio": report.ratio,
        "effective_ratio": report.effective_ratio,
        "bytes": sum(layer.bytes for layer in report.layers),
        "dense_bytes": sum(layer.dense_bytes for layer in report.layers),
        "layers": [{field: getattr(layer, field) for field in fields} for layer in report.layers],
    }


def _show_summary(document: dict[str, Any]) -> None:
    table = Table(title=document.get("output"), **COMPACT)
    table.add_column("layer", overflow="fold")
    for column in ("K", "N", "rank", "effective", "loss", "MB"):
        table.add_column(column, justify="right", no_wrap=True)
    for layer in document["layers"]:
        K, N, r = layer["K"], layer["N"], layer["r"]
        ratio = 1 - parameter_count(K, N, r) / (K * N)
        rank = "dense" if r is None else str(r)
        cells = (layer["name"], K, N, rank, f"{ratio:.3f}", f"{layer['loss']:.4f}")
        table.add_row(*map(str, cells), f"{layer['bytes'] / 1e6:.3f}")
    stdout.print(table)
    stdout.print(
        f"nominal ratio {document['ratio']:.3f}, effective {document['effective_ratio']:.3f}: "
        f"{document['dense_bytes'] / 1e6:.1f} MB -> {document['bytes'] / 1e6:.1f} MB"
    )


def _show_text(document: dict[str, Any]) -> None:
    print(document["prompt"] + document["text"])


def _show_doctor(document: dict[str, Any]) -> None:
    show_fields(document["versions"])
    table = Table("backend", "usable", "why", **COMPACT)
    for backend in document["backends"]:
        table.add_row(backend["name"], "yes" if backend["usable"] else "no", backend["reason"])
    stdout.print(table)
