"""Compress a model that is never whole in memory, and measure the memory that it takes.

The model is a Llama with random weights, written one layer at a time; `--llama-1b` gives it the
shape of Llama-3.2-1B (2.5 GB), and 32 thousand tokens to calibrate on. Then `neuronmm compress
--stream` runs in a process of its own, whose largest resident set is compared with the bound: two
decoder layers and the embeddings in float32, and 1 GiB.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
LLAMA_1B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description="compress, and measure the memory")
    parser.add_argument("--llama-1b", action="store_true", help="hours on two cores, not seconds")
    parser.add_argument("--out", type=Path, help="directory to keep (default: a temporary one)")
    parser.add_argument("compress", nargs="*", help="options for neuronmm compress, after --")
    options = parser.parse_args()
    sizes, tokens, seqlen = (LLAMA_1B, 32768, 2048) if options.llama_1b else (SMALL, 4096, 256)
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.out or Path(temporary)
        model, text = directory / "model", directory / "calibration.txt"
        if not (model / "config.json").exists():
            write_model(model, LlamaConfig(**sizes, tie_word_embeddings=True))
            write_text(text, tokens, sizes["vocab_size"])
        arguments = [
            *("--calibration", text, "--samples", tokens // seqlen, "--seqlen", seqlen),
            *(() if options.llama_1b else ("--block", 8)),
            *options.compress,
        ]
        peak, seconds = measure(model, directory / "small", arguments)
    limit = bound(LlamaConfig(**sizes))
    print(f"peak resident set {peak / GIB:.2f} GiB, bound {limit / GIB:.2f} GiB, {seconds:.0f} s")
    sys.exit(0 if peak <= limit else "the bound is exceeded")


def measure(model: Path, output: Path, arguments: Sequence[object]) -> tuple[int, float]:
    """Compress in a process of its own; return its largest resident set in bytes, and seconds."""
    command = [sys.executable, "-m", "neuronmm_ops_command", "compress", model, "-o", output]
    started = time.monotonic()
    parts = [str(part) for part in (*command, "--stream", "--force", *arguments)]
    subprocess.run(parts, check=True)  # noqa: S603
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024), time.monotonic() - started


def bound(config: LlamaConfig) -> int:
    """Return the bytes that streaming may take: two layers, the embeddings, and 1 GiB."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    return 2 * layer + model.model.embed_tokens.weight.nbytes + GIB


def write_model(directory: Path, config: LlamaConfig) -> None:
    """Write a model with bf16 weights from N(0, 0.02²), a file for each layer, and a tokenizer."""
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        parts.setdefault(".".join(name.split(".")[:3]), []).append(name)
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(parts.values(), start=1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        tensors = {
            name: torch.randn(model.get_parameter(name).shape, generator=generator)
            .mul_(0.02)
            .add_(1 if "norm" in name else 0)
            .to(torch.bfloat16)
            for name in names
        }
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    model.generation_config.save_pretrained(directory)
    words = {f"w{number}": number for number in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)


def write_text(path: Path, tokens: int, vocabulary: int) -> None:
    """Write random words, a token each."""
    numbers = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(1))
    path.write_text(" ".join(f"w{number}" for number in numbers.tolist()))


if __name__ == "__main__":
    main()
