"""`eval`: token perplexity of a model on a text."""

import argparse
from typing import Any

from neuronmm_ops.cli.console import show_fields, stderr
from neuronmm_ops.cli.library import transformers_models
from neuronmm_ops.cli.parser import add_command
from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.progress import progress_bars


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description = "token perplexity on a text"
    options = ("model", "--text", "--seqlen", "--dtype", "--device")
    command = add_command(commands, "eval", _evaluate, show_fields, description, *options)
    command.add_argument(
        "--compute",
        help="products of layers in fp8: fp8 rounds activations, too, x does not (default: what "
        "the checkpoint records)",
    )


def _evaluate(options: argparse.Namespace) -> dict[str, Any]:
    hf = transformers_models()
    from neuronmm_ops.compress.record import low_rank_layers, set_compute_
    from neuronmm_ops.eval import encode_documents, token_perplexity

    text = hf.read_text(options.text)
    with stderr.status(f"loading {options.model}"):
        model = hf.load_computing(options.model, options.dtype, options.device)
        if options.compute is not None:
            set_compute_(model, options.compute)
        ids = encode_documents(hf.load_tokenizer(options.model), [text])
    computes = {layer.compute for layer in low_rank_layers(model).values()}
    with progress_bars() as progress:
        result = token_perplexity(model, ids, options.seqlen, progress)
    return {
        "model": options.model,
        "text": str(options.text),
        "ppl_token": result.ppl_token,
        "tokens": result.tokens,
        "seqlen": result.seqlen,
        "dtype": name_of(model.config.dtype),
        "compute_dtype": name_of(model.dtype),
        "compute": "fp8" if "fp8" in computes else "x",
    }
