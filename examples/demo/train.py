"""Train the demo's dense model: a small Llama with grouped-query attention, in two to four minutes.

The number of steps is fixed, never the wall time, and every random choice is seeded, so that the
same machine trains the same model again. The result is an ordinary Transformers directory.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from corpus import Corpus
from muon import Muon
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from neuronmm_ops.ops.backends.cpu import compute_dtype
from neuronmm_ops.progress import progress_bars

END_OF_TEXT = "<|endoftext|>"
RECORD = "training.json"


@dataclass(frozen=True)
class TrainConfig:
    """Everything, apart from the text, that decides the trained weights."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 1024
    num_hidden_layers: int = 3
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    context: int = 512
    batch: int = 8
    seq_len: int = 256
    steps: int = 350
    matrix_lr: float = 1e-2
    lr: float = 5e-3
    warmup: int = 10
    weight_decay: float = 0.1
    seed: int = 0


# A few seconds in all, for the test suite; the numbers it yields mean nothing.
QUICK = TrainConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    context=64,
    seq_len=64,
    steps=20,
    warmup=4,
)


def trained(config: TrainConfig, corpus: Corpus, directory: Path, console: Console) -> bool:
    """Make sure that `directory` holds the model of this configuration and corpus.

    Returns:
        Whether it had to be trained: `False` when the directory already held it.
    """
    key = _cache_key(config, corpus)
    if _is_cached(directory, key):
        return False
    console.print("Training the tokenizer …")
    tokenizer = train_tokenizer(config, corpus)
    torch.manual_seed(config.seed)
    model = _new_model(config, tokenizer)
    console.print(
        f"Training the model: {config.steps} steps, matmuls in {dtype_name(training_dtype())} …"
    )
    train_model(model, tokenizer, config, corpus)
    record = {"key": key, "config": asdict(config), "corpus": corpus.fingerprint}
    _save(model, tokenizer, directory, record)
    return True


def train_tokenizer(config: TrainConfig, corpus: Corpus) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of the training documents: no text is out of its vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.train, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=config.context,
    )


def train_model(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    config: TrainConfig,
    corpus: Corpus,
) -> None:
    """Train in place: linear warmup, then linear decay."""
    dtype = training_dtype()
    tokens = torch.tensor(tokenizer("\n\n".join(corpus.train), verbose=False)["input_ids"])
    optimizers = _optimizers(model, config, dtype)
    schedules = [LambdaLR(each, lambda step: _lr_factor(step, config)) for each in optimizers]
    batches = _batches(tokens, config)
    model.train()
    with progress_bars() as progress:
        for step in range(config.steps):
            inputs = next(batches)
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                logits = model(input_ids=inputs[:, :-1], use_cache=False).logits
            loss = cross_entropy(logits.float().flatten(0, 1), inputs[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
            model.zero_grad()
            progress("train", step + 1, config.steps, f"loss {loss.item():.2f}")
    model.eval()


def training_dtype() -> torch.dtype:
    """In which the weights, kept in fp32, are multiplied: bf16 where that is the faster."""
    return compute_dtype(torch.bfloat16)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _new_model(config: TrainConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    end_of_text = tokenizer.backend_tokenizer.token_to_id(END_OF_TEXT)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            max_position_embeddings=config.context,
            tie_word_embeddings=True,
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
        )
    )
    # Every block begins as the identity: with the linear decay, 100 steps end at 180, not 230.
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(parameter)
    return model


def _optimizers(
    model: LlamaForCausalLM, config: TrainConfig, dtype: torch.dtype
) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for the rest.

    In so few steps it matters: 100 of them end at perplexity 330 with AdamW alone, at 230 so.
    """
    embedding = model.model.embed_tokens.weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    muon = Muon(matrices, lr=config.matrix_lr, weight_decay=config.weight_decay, dtype=dtype)
    adamw = torch.optim.AdamW(
        [*vectors, embedding], lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    return [muon, adamw]


def _lr_factor(step: int, config: TrainConfig) -> float:
    if step < config.warmup:
        return (step + 1) / config.warmup
    return (config.steps - step) / max(1, config.steps - config.warmup)


def _batches(tokens: torch.Tensor, config: TrainConfig) -> Iterator[torch.Tensor]:
    """Windows of `seq_len + 1` tokens, each token once an epoch, cut elsewhere in each epoch."""
    generator = torch.Generator().manual_seed(config.seed)
    window = config.seq_len + 1
    while True:
        shift = int(torch.randint(window, (1,), generator=generator))
        count = (len(tokens) - shift) // window
        windows = tokens[shift : shift + count * window].view(count, window)
        order = torch.randperm(count, generator=generator)
        for start in range(0, count - config.batch + 1, config.batch):
            yield windows[order[start : start + config.batch]]


def _cache_key(config: TrainConfig, corpus: Corpus) -> str:
    text = json.dumps([asdict(config), corpus.fingerprint], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_cached(directory: Path, key: str) -> bool:
    needed = ("config.json", "model.safetensors", "tokenizer.json", RECORD)
    if not all((directory / name).is_file() for name in needed):
        return False
    try:
        return json.loads((directory / RECORD).read_text(encoding="utf-8"))["key"] == key
    except (ValueError, KeyError, TypeError):
        return False


def _save(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    directory: Path,
    record: Mapping[str, object],
) -> None:
    """Write a sibling directory and rename it: an interrupted run leaves no half-written cache."""
    partial = directory.with_name(directory.name + ".partial")
    for stale in (partial, directory):
        if stale.exists():
            shutil.rmtree(stale)
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    partial.rename(directory)
