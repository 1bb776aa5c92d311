"""The command `neuronmm`: arguments in, one table or one JSON document out.

Exit codes: 0 done, 2 usage or bad input (one line on stderr), 1 a defect of ours, 130 interrupted.
With `--json` stdout carries one JSON document and nothing else; progress and tables go to stderr.
"""

import argparse
import contextlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from neuronmm_ops import __version__
from neuronmm_ops.compress.rank import parameter_count
from neuronmm_ops.errors import CalibrationWarning

# markup=False: names and messages hold square brackets of their own.
_stdout = Console(markup=False, highlight=False)
_stderr = Console(stderr=True, markup=False, highlight=False)
# So that a layer's name and its numbers fit in 80 columns.
_COMPACT: dict[str, Any] = {"box": SIMPLE, "collapse_padding": True, "pad_edge": False}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; the console script's entry point.

    Args:
        arguments: the command line without the program's name; default `sys.argv`.
    """
    options = _parser().parse_args(arguments)
    try:
        with _our_warnings():
            document = options.run(options)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was written", 130)
    except Exception as error:
        if options.debug:
            raise
        return _fail(*_explain(error))
    if options.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        options.show(document)
    return 0


# --- commands ------------------------------------------------------------------------------------


def _compress(options: argparse.Namespace) -> dict[str, Any]:
    hf = _transformers()
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
    with _stderr.status(f"loading {options.model}"):
        model = hf.load(options.model)
        tokenizer = hf.load_tokenizer(options.model)
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(f"{options.model} is compressed or quantized already; start from dense")
    batches = None
    if text is not None:
        seqlen = options.seqlen or default_seqlen(model)
        batches = hf.calibration_batches(tokenizer, text, options.samples, seqlen)
    with _progress() as progress:
        report = compress_(model, config, batches, progress)
    with _stderr.status(f"writing {options.output}"):
        hf.save(model, options.output, report, tokenizer, options.force)
    return {"output": str(options.output), **_summary(report)}


def _eval(options: argparse.Namespace) -> dict[str, Any]:
    hf = _transformers()
    from neuronmm_ops.eval import encode_documents, token_perplexity

    text = hf.read_text(options.text)
    with _stderr.status(f"loading {options.model}"):
        model = hf.load(options.model)
    ids = encode_documents(hf.load_tokenizer(options.model), [text])
    with _progress() as progress:
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
    hf = _transformers()
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    with _stderr.status(f"loading {options.model}"):
        model = hf.load(options.model)
        tokenizer = hf.load_tokenizer(options.model)
    inputs = tokenizer(options.prompt, return_tensors="pt", return_token_type_ids=False)
    length = inputs["input_ids"].shape[1]
    if length == 0:
        raise ValueError("--prompt must hold at least one token, got an empty text")
    with _stderr.status(f"generating up to {options.max_new_tokens} tokens"):
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


def _bench_cpu(options: argparse.Namespace) -> list[dict[str, Any]]:
    from neuronmm_ops.bench import cpu

    with _progress() as progress:
        return cpu.run(options.shape, tokens=options.tokens, progress=progress)


def _bench_overhead(options: argparse.Namespace) -> list[dict[str, Any]]:
    from neuronmm_ops.bench import overhead

    with _stderr.status("calling tiny ops many times"):
        return overhead.run()


def _bench_methods(options: argparse.Namespace) -> list[dict[str, Any]]:
    hf = _transformers()
    from neuronmm_ops.bench import methods

    text, calibration = hf.read_text(options.text), hf.read_text(options.calibration)
    with _progress() as progress:
        return methods.run(options.model, text, calibration, progress=progress)


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


def _transformers() -> Any:
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


# --- arguments -----------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="neuronmm", description="Low-rank LLMs: compress, evaluate and run them.")
    parser.add_argument("--version", action="version", version=f"neuronmm-ops {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = _command(commands, "compress", _compress, _show_summary, "replace Linears by factors")
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

    command = _command(commands, "eval", _eval, _show_fields, "token perplexity on a text")
    command.add_argument("model", type=Path, metavar="DIR")
    command.add_argument("--text", type=Path, required=True, metavar="FILE")
    command.add_argument(
        "--seqlen", type=int, help="tokens in a block (default: 2048, or the model's limit)"
    )

    command = _command(commands, "generate", _generate, _show_text, "continue a prompt, greedily")
    command.add_argument("model", type=Path, metavar="DIR")
    command.add_argument("--prompt", required=True)
    command.add_argument("--max-new-tokens", type=int, default=64, metavar="N")

    command = _command(commands, "inspect", _inspect, _show_summary, "rank and loss of every layer")
    command.add_argument("model", type=Path, metavar="DIR")

    _command(commands, "doctor", _doctor, _show_doctor, "versions, and which backends work here")

    description = "measure the ops and the methods on this machine"
    bench = commands.add_parser("bench", help=description, description=description)
    benchmarks = bench.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    command = _command(benchmarks, "cpu", _bench_cpu, _show_rows, "ops beside dense layers")
    command.add_argument("--shape", default="Llama-3.2-1B", help="of a model, by name")
    command.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512], metavar="M")
    _command(benchmarks, "overhead", _bench_overhead, _show_rows, "what an op call costs")
    command = _command(
        benchmarks, "methods", _bench_methods, _show_rows, "perplexity by method and ratio"
    )
    command.add_argument("model", type=Path, metavar="DIR")
    command.add_argument("--text", type=Path, required=True, metavar="FILE")
    command.add_argument("--calibration", type=Path, required=True, metavar="FILE")
    return parser


def _command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], Any],
    show: Callable[[Any], None],
    description: str,
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=description, description=description)
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    command.set_defaults(run=run, show=show)
    return command


# --- output --------------------------------------------------------------------------------------


def _show_summary(document: dict[str, Any]) -> None:
    table = Table(title=document.get("output"), **_COMPACT)
    table.add_column("layer", overflow="fold")
    for column in ("K", "N", "rank", "effective", "loss", "MB"):
        table.add_column(column, justify="right", no_wrap=True)
    for layer in document["layers"]:
        K, N, r = layer["K"], layer["N"], layer["r"]
        ratio = 1 - parameter_count(K, N, r) / (K * N)
        rank = "dense" if r is None else str(r)
        cells = (layer["name"], K, N, rank, f"{ratio:.3f}", f"{layer['loss']:.4f}")
        table.add_row(*map(str, cells), f"{layer['bytes'] / 1e6:.3f}")
    _stdout.print(table)
    _stdout.print(
        f"nominal ratio {document['ratio']:.3f}, effective {document['effective_ratio']:.3f}: "
        f"{document['dense_bytes'] / 1e6:.1f} MB -> {document['bytes'] / 1e6:.1f} MB"
    )


def _show_fields(document: dict[str, Any]) -> None:
    for key, value in document.items():
        print(f"{key:12} {value}")


def _show_text(document: dict[str, Any]) -> None:
    print(document["prompt"] + document["text"])


def _show_doctor(document: dict[str, Any]) -> None:
    _show_fields(document["versions"])
    table = Table("backend", "usable", "why", **_COMPACT)
    for backend in document["backends"]:
        table.add_row(backend["name"], "yes" if backend["usable"] else "no", backend["reason"])
    _stdout.print(table)


def _show_rows(rows: list[dict[str, Any]]) -> None:
    """Print what all rows share in one line, the rest as a table."""
    shared = {key for key in rows[0] if len({str(row[key]) for row in rows}) == 1}
    if len(rows) > 1:
        _stdout.print(", ".join(f"{key} {rows[0][key]}" for key in rows[0] if key in shared))
    columns = [key for key in rows[0] if key not in shared or len(rows) == 1]
    table = Table(**_COMPACT)
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        cells = (row[column] for column in columns)
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    _stdout.print(table)


@contextlib.contextmanager
def _progress() -> Generator[Callable[[str, int, int], None], None, None]:
    """Show one bar per stage on stderr, where a person watches."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_stderr, disable=not _stderr.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield update


@contextlib.contextmanager
def _our_warnings() -> Generator[None, None, None]:
    """Show the package's own warnings, a line each, and nobody else's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", CalibrationWarning)
        warnings.showwarning = _show_warning
        yield


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    _stderr.print(f"warning: {_one_line(message)}", soft_wrap=True)


def _fail(message: str, code: int) -> int:
    print(f"neuronmm: {message}", file=sys.stderr)
    return code


def _explain(error: Exception) -> tuple[str, int]:
    """Return one line for the user and the exit code."""
    if _is_out_of_memory(error):
        return (
            "out of memory; use fewer or shorter --samples, --targets with fewer layers, "
            "or a machine with more memory",
            2,
        )
    if isinstance(error, (ValueError, TypeError, OSError, ImportError)):
        return _one_line(error), 2
    return f"internal error: {type(error).__name__}: {_one_line(error)}; see it with --debug", 1


def _is_out_of_memory(error: Exception) -> bool:
    # By its text too: loading wraps what torch raises.
    text = str(error)
    is_told = "out of memory" in text or "can't allocate memory" in text
    return is_told or isinstance(error, MemoryError)


def _one_line(message: object) -> str:
    return re.sub(r"\s+", " ", str(message)).strip()
