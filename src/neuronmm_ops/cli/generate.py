"""`generate`: continue a prompt, or answer a chat message, greedily."""

import argparse
import time
from typing import Any

from neuroncore.cli.console import stderr
from neuronmm_ops.cli.parser import add_command
from neuronmm_ops.cli.workers import launched
from neuronmm_ops.extras import transformers_models


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description, options = "continue a prompt, greedily", ("model", "--dtype", "--device")
    example = "small --prompt 'The quick' --new-tokens 32"
    command = add_command(
        commands, "generate", _generate, _show, description, *options, example=example
    )
    command.add_argument("--prompt", required=True, help="the text to continue")
    command.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user's message: put it into the tokenizer's chat template",
    )
    command.add_argument(
        "--new-tokens", type=int, default=64, metavar="N", help="new tokens at most (default 64)"
    )
    command.add_argument(
        "--backend",
        choices=("torch", "simulated"),
        default="torch",
        help="simulated: a NeuronCore decodes, with a modelled time",
    )
    command.add_argument(
        "--draft",
        metavar="DRAFT",
        help="a smaller model that proposes tokens; timed with it and without",
    )
    command.add_argument(
        "--tokens-ahead",
        type=int,
        metavar="N",
        help="that the draft proposes, 1 to 8 (default: as the draft's record says, or 3)",
    )


def _generate(options: argparse.Namespace) -> dict[str, Any]:
    hf = transformers_models()
    from neuronmm_ops.hf.drafts import passes_counted
    from neuronmm_ops.ops.backends.cpu import name_of

    if options.new_tokens < 1:
        raise ValueError(f"--new-tokens must be at least 1, got {options.new_tokens}")
    if options.draft is None and options.tokens_ahead is not None:
        raise ValueError("--tokens-ahead is of a draft; give --draft DIR")
    if options.draft and (options.backend == "simulated" or launched() > 1):
        raise ValueError("--draft takes one process and --backend torch")
    if options.backend == "simulated":
        return _simulate(hf, options)
    with stderr.status(f"loading {options.model}"):
        model = hf.load_packed(options.model, options.dtype, options.device, launched())
        tokenizer = hf.load_tokenizer(options.model)
        draft = options.draft and hf.load_draft(
            options.draft, model, options.model, options.tokens_ahead
        )

    def generated(draft: Any = None) -> tuple[str, int, float]:
        start = time.perf_counter()
        arguments = (model, tokenizer, options.prompt, options.new_tokens, options.chat)
        text, new = hf.generate_text(*arguments, draft=draft)
        return text, new, new / (time.perf_counter() - start)

    with stderr.status(f"generating up to {options.new_tokens} tokens"):
        if draft:
            generated(draft)  # what is paid once is paid
        text, new_tokens, speed = generated()
        document = _document(options, text, new_tokens, name_of(model.dtype))
        if draft:
            with passes_counted(model, draft) as counts:
                drafted_text, new_tokens, drafted_speed = generated(draft)
            document["draft"] = {
                "model": options.draft,
                "tokens_ahead": draft.generation_config.num_assistant_tokens,
                "passes": counts[0],
                "drafted": counts[1],
                "accepted": new_tokens - counts[0],
                "tokens_per_s": drafted_speed,
                "tokens_per_s_without": speed,
                "is_same_text": drafted_text == text,
            }
    return document


def _simulate(hf: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Decode on the simulated core, in the checkpoint's dtype unless another is given."""
    from neuronmm_ops.ops.backends.cpu import name_of

    if options.device != "cpu" or launched() > 1:
        raise ValueError(
            "--backend simulated runs in one process on the CPU; leave out --device and torchrun"
        )
    with stderr.status(f"loading {options.model}"):
        model = hf.load(options.model, options.dtype, verify=True)
        tokenizer = hf.load_tokenizer(options.model)
    with stderr.status(f"simulating up to {options.new_tokens} tokens"):
        text, new_tokens, target, launches, times = hf.generate_simulated(
            model, tokenizer, options.prompt, options.new_tokens, options.chat
        )
    modelled = dict(zip(("middle", "low", "high"), times, strict=True))
    document = _document(options, text, new_tokens, name_of(model.dtype))
    document |= {"target": target, "launches": launches}
    return document | {"modelled_us_per_token": modelled}


def _document(
    options: argparse.Namespace, text: str, new_tokens: int, dtype: str
) -> dict[str, Any]:
    return {
        "model": options.model,
        "prompt": options.prompt,
        "chat": options.chat,
        "text": text,
        "new_tokens": new_tokens,
        "compute_dtype": dtype,
    }


def _show(document: dict[str, Any]) -> None:
    print(document["text"] if document["chat"] else document["prompt"] + document["text"])
    times = document.get("modelled_us_per_token")
    if times:
        print(
            f"{document['target']}, modelled: {times['middle']:.1f} us a decoded token "
            f"({times['low']:.1f} to {times['high']:.1f}), "
            f"{len(document['launches'])} launches"
        )
    if draft := document.get("draft"):
        print(
            f"{draft['accepted']} of {draft['drafted']} drafted tokens accepted, "
            f"{draft['tokens_ahead']} ahead, {draft['passes']} passes of the model; "
            f"{draft['tokens_per_s']:.4g} tokens/s, {draft['tokens_per_s_without']:.4g} without"
            + ("" if draft["is_same_text"] else "; other text: products of more tokens round apart")
        )
