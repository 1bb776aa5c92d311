"""A model that others trained until nothing more was learned: stories260K, in Transformers' format.

A. Karpathy trained it for llama2.c on TinyStories (arXiv 2305.07759): a Llama of 260 thousand
parameters, which spares nothing. Weights and vocabulary are in llama2.c's format, little endian.
Where the files are, of which this repository has none:

* github.com/DaveBben/esp32-llm, 934dab4d: `data/stories260K.bin` and `data/tok512.bin`;
* github.com/Ahmedessaa/My-AI_Tasks, 2ad67fcb: `TinyStories-valid.txt`, of the stories that the
  model was not trained on.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.divergence import BASELINE, CHARACTERS, DEFAULT, measure
from neuronmm_ops import hf
from neuronmm_ops.compress import SVDConfig
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.eval import DOCUMENT_SEPARATOR

NAME = "stories260K"
WEIGHTS, VOCABULARY = "DaveBben/data/stories260K.bin", "DaveBben/data/tok512.bin"
HELD_OUT = "Ahmedessaa/TinyStories-valid.txt"
RATIOS = (0.2, 0.4, 0.6)
CANDIDATES = (BASELINE, DEFAULT, SVDConfig(method="whiten"), SVDConfig(method="kfac"))
UNKNOWN, BEGIN, END = range(3)
SPECIAL = ("<unk>", "<s>", "</s>")
SEED = 0
"""Of the model's own text, which it is calibrated on."""
BATCH, NEW = 64, 400
"""Stories of its own that are written together, and tokens of each at most."""


def run(clones: Path, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Return the rows of `divergence.measure`, with `trial` before them.

    Args:
        clones: a folder with the files above, in folders named by the repositories' owners.
        progress: as `measure` takes it.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: it is not what its name says.
    """
    with TemporaryDirectory() as folder:
        convert(clones / WEIGHTS, clones / VOCABULARY, Path(folder))
        calibration, own = own_texts(Path(folder), (6 * CHARACTERS, CHARACTERS))
        held_out = (clones / HELD_OUT).read_text(encoding="utf-8")[:CHARACTERS]
        texts = {"held_out": held_out, "its own": own}
        rows = measure(folder, texts, calibration, RATIOS, CANDIDATES, progress=progress)
    return [{"trial": NAME, **row} for row in rows]


def convert(weights: Path, vocabulary: Path, output: Path) -> None:
    """Write a model of llama2.c's first format as a Transformers directory.

    Raises:
        ValueError: a file has more or less than its sizes say.
    """
    try:
        model = _model(weights.read_bytes())
        tokenizer = _tokenizer(vocabulary.read_bytes(), model.config)
    except struct.error as error:
        raise ValueError(
            f"{weights} and {vocabulary} must be as long as their sizes say; {error}"
        ) from None
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def own_texts(directory: Path, characters: tuple[int, ...]) -> list[str]:
    """Return texts of so many characters each, of stories that a model writes at temperature 1."""
    model: Any = hf.load_computing(directory, "float32")
    tokenizer = hf.load_tokenizer(directory)
    torch.manual_seed(SEED)
    text = ""
    while len(text) < sum(characters):
        begin = torch.full((BATCH, 1), BEGIN)
        rows = model.generate(
            begin,
            attention_mask=torch.ones_like(begin),
            max_new_tokens=NEW,
            do_sample=True,
            top_k=0,
            pad_token_id=END,
            eos_token_id=[BEGIN, END],
        )
        stories = tokenizer.batch_decode(rows, skip_special_tokens=True)
        text += "".join(story.strip() + DOCUMENT_SEPARATOR for story in stories)
    ends = [sum(characters[: index + 1]) for index in range(len(characters))]
    return [text[end - size : end] for size, end in zip(characters, ends, strict=True)]


def _model(data: bytes) -> LlamaForCausalLM:
    hidden, inner, layers, heads, kv_heads, tokens, context = struct.unpack_from("<7i", data)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=abs(tokens),
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tokens > 0,  # of a head of its own the number is negative
        bos_token_id=BEGIN,
        eos_token_id=END,
    )
    model: Any = LlamaForCausalLM(config).eval()
    numbers = torch.frombuffer(bytearray(data[28:]), dtype=torch.float32)
    # Behind the last norm are the angles of the positions, cosines and sines.
    angles = context * (hidden // heads)
    sizes = [parameter.numel() for parameter in _in_order(model)]
    head = 0 if tokens > 0 else hidden * -tokens
    if len(numbers) != sum(sizes) + angles + head:
        raise ValueError(
            f"the weights must be {sum(sizes) + angles + head:,} numbers as their sizes say, got "
            f"{len(numbers):,}; use a file of llama2.c's first format"
        )
    with torch.no_grad():
        parts = numbers[: sum(sizes)].split(sizes)
        for parameter, part in zip(_in_order(model), parts, strict=True):
            parameter.copy_(part.view_as(parameter))
        if head:
            model.lm_head.weight.copy_(numbers[-head:].view_as(model.lm_head.weight))
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.copy_(_halves(projection.weight, hidden // heads))
    return model


def _in_order(model: Any) -> Iterator[Tensor]:
    """The parameters but for the head, in the file's order: all layers' of a name together."""
    layers = model.model.layers
    yield model.model.embed_tokens.weight
    for name in (
        "input_layernorm",
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        "post_attention_layernorm",
        *(f"mlp.{name}_proj" for name in ("gate", "down", "up")),
    ):
        for layer in layers:
            yield layer.get_submodule(name).weight
    yield model.model.norm.weight


def _halves(weight: Tensor, head: int) -> Tensor:
    """The rows `[heads * head, H]` of pairs that turn together: a half apart, not neighbours."""
    return weight.unflatten(0, (-1, head // 2, 2)).transpose(1, 2).flatten(0, 2)


def _tokenizer(data: bytes, config: LlamaConfig) -> PreTrainedTokenizerFast:
    """SentencePiece's merges, of the pieces in their order: the first are merged first."""
    pieces = {piece: index for index, piece in enumerate(SPECIAL)}
    at = 4  # behind the longest piece's length
    for index in range(config.vocab_size):
        _, size = struct.unpack_from("<fi", data, at)
        if index > END:
            pieces[data[at + 8 : at + 8 + size].decode().replace(" ", "▁")] = index
        at += 8 + size
    if at != len(data) or len(pieces) != config.vocab_size:
        raise ValueError(
            f"the vocabulary must be of {config.vocab_size} pieces, as the weights say; "
            f"got {len(pieces)} in {at} of {len(data)} bytes"
        )
    merges = [
        (piece[:cut], piece[cut:])
        for piece, index in pieces.items()
        if index > END and not piece.startswith("<0x")
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    unknown, begin, end = SPECIAL
    bpe = models.BPE(vocab=pieces, merges=merges, unk_token=unknown, byte_fallback=True)
    made = Tokenizer(bpe)
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, BEGIN)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=begin,
        eos_token=end,
        unk_token=unknown,
        model_max_length=config.max_position_embeddings,
    )
