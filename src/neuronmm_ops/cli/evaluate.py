"""`eval`: accuracy of a model: perplexity on texts and the papers' data sets, lm-eval's tasks."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neuroncore.cli.console import show_fields, show_table, stderr, stdout
from neuronmm_ops.cli.parser import add_command, chosen
from neuronmm_ops.cli.workers import launched
from neuronmm_ops.extras import transformers_models
from neuronmm_ops.progress import Update, progress_bars


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description = "perplexity on texts and data sets, accuracy on tasks"
    options = ("--seqlen", "--dtype", "--device")
    example = "small --text test.txt --ppl wikitext2"
    command = add_command(
        commands, "eval", _evaluate, _show, description, *options, example=example
    )
    # "?" so that the model may stand behind `--text FILE...` too.
    command.add_argument(
        "model", nargs="?", metavar="MODEL", help="a Transformers directory, or a hub id"
    )
    command.add_argument(
        "--text",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="perplexity of these whole texts",
    )
    command.add_argument(
        "--ppl",
        type=_names,
        default=[],
        metavar="NAME,...",
        help="perplexity on the papers' data sets: wikitext2, ptb, c4",
    )
    command.add_argument(
        "--protocol",
        default="standard",
        help="how --ppl joins and splits texts: standard (GPTQ's --new-eval and "
        "SparseGPT's, default) or svd-llm",
    )
    command.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="directory of --ppl's files, instead of the hub",
    )
    command.add_argument(
        "--tasks",
        type=_names,
        default=[],
        metavar="NAME,...",
        help="tasks of lm-eval's harness, such as arc_easy,piqa",
    )
    command.add_argument(
        "--num-fewshot", type=int, metavar="N", help="examples before a question (default: task's)"
    )
    command.add_argument("--limit", type=int, metavar="N", help="documents per task")
    command.add_argument(
        "--batch-size", type=int, default=1, metavar="N", help="batch size of the tasks (default 1)"
    )
    command.add_argument(
        "--include-path",
        type=Path,
        metavar="DIR",
        help="search this directory for task files first; they are code: "
        "!function and templates in them run",
    )
    command.add_argument(
        "--compute",
        help="fp8 layers: fp8 also rounds activations, x does not (default: what"
        " the checkpoint records)",
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _evaluate(options: argparse.Namespace) -> dict[str, Any]:
    source, files = _model_and_texts(options)
    if not (files or options.ppl or options.tasks):
        raise ValueError("give what to evaluate on: --text FILE..., --ppl NAME,... or --tasks ...")
    if options.tasks and launched() > 1:
        raise ValueError("--tasks runs in one process; start it without torchrun, or use --text")
    hf = transformers_models()
    from neuronmm_ops.compress.record import compressed_layers, set_compute_
    from neuronmm_ops.ops.backends.cpu import name_of

    texts = {str(file): hf.read_text(file) for file in files}
    with stderr.status(f"loading {source}"):
        model = hf.load_computing(source, options.dtype, options.device, launched())
        if options.compute is not None:
            set_compute_(model, options.compute)
        tokenizer = hf.load_tokenizer(source)
    computes = {layer.compute for layer in compressed_layers(model).values()}
    with progress_bars() as progress:
        perplexities = _perplexities(model, tokenizer, texts, options, progress)
        tasks = _tasks(model, tokenizer, options, progress)
    measured: dict[str, Any] = {"perplexities": perplexities} if perplexities else {}
    if tasks:
        measured["tasks"] = tasks
    if len(texts) == 1 and not (options.ppl or options.tasks):
        measured = perplexities[0]
    return {
        "model": source,
        **measured,
        "dtype": name_of(model.config.dtype),
        "compute_dtype": name_of(model.dtype),
        "compute": "fp8" if "fp8" in computes else "x",
    }


def _model_and_texts(options: argparse.Namespace) -> tuple[str, list[Path]]:
    if options.model is not None:
        return options.model, options.text
    if len(options.text) < 2:
        raise ValueError("give the MODEL to evaluate: a directory, or a hub id")
    *files, model = options.text
    return str(model), files


def _perplexities(
    model: Any, tokenizer: Any, texts: dict[str, str], options: argparse.Namespace, progress: Update
) -> list[dict[str, Any]]:
    from neuronmm_ops import eval as accuracy

    rows: list[dict[str, Any]] = []
    if options.ppl:
        rows = accuracy.perplexities(
            model,
            tokenizer,
            options.ppl,
            seqlen=options.seqlen,
            protocol=options.protocol,
            data=options.data_dir,
            progress=progress,
        )
    for name, text in texts.items():
        ids = accuracy.encode_documents(tokenizer, [text])
        result = accuracy.token_perplexity(model, ids, options.seqlen, progress)
        rows.append({"text": name, **asdict(result)})
    return rows


def _tasks(
    model: Any, tokenizer: Any, options: argparse.Namespace, progress: Update
) -> dict[str, Any] | None:
    if not options.tasks:
        return None
    from neuronmm_ops.eval.tasks import run_tasks

    return run_tasks(
        model,
        tokenizer,
        options.tasks,
        **chosen(options, "num_fewshot", "limit", "batch_size", "include_path"),
        progress=progress,
    )


def _show(document: dict[str, Any]) -> None:
    if "text" in document:
        show_fields(document)
        return
    from neuronmm_ops.eval.tasks import task_rows

    if "perplexities" in document:
        columns = ["perplexity on", "token ppl", "tokens", "seqlen", "BOS", "protocol"]
        rows = [_perplexity_cells(row) for row in document["perplexities"]]
        show_table(columns, rows, left=["perplexity on"])
    if "tasks" in document:
        columns = ["task", "shots", "n", "metric", "value", "stderr"]
        rows = [_task_cells(row) for row in task_rows(document["tasks"])]
        show_table(columns, rows, left=["task", "metric"])
        cut = document["tasks"]["config"]["truncated_requests"]
        if cut:
            stdout.print(f"{cut} contexts were longer than the model's limit and cut on the left")
    show_fields({key: document[key] for key in ("model", "dtype", "compute_dtype", "compute")})


def _perplexity_cells(row: dict[str, Any]) -> list[object]:
    if "text" in row:
        name, bos, protocol = row["text"], "no", "whole text"
    else:
        name, bos, protocol = row["dataset"], "yes" if row["bos"] else "no", row["protocol"]
    return [name, f"{row['ppl_token']:.4f}", row["tokens"], row["seqlen"], bos, protocol]


def _task_cells(row: dict[str, Any]) -> list[object]:
    metric = row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"
    stderr_cell = "" if row["stderr"] is None else f"{row['stderr']:.4f}"
    value = f"{row['value']:.4f}" if isinstance(row["value"], float) else row["value"]
    return [row["task"], row["n_shot"], row["samples"], metric, value, stderr_cell]
