"""`python benchmarks stories`: llama2.c's format read, by its own way to compute."""

import struct

import numpy as np
import pytest
import torch

from benchmarks import stories
from neuronmm_ops import hf

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, CONTEXT = 64, 96, 2, 4, 2, 64
PIECES = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += ["he", "the", " the", *" etha"]
HEAD = HIDDEN // HEADS


def weights(tokens):
    """Random parameters by name, in the order of the file."""
    random = np.random.default_rng(0)
    shapes = {
        "embedding": (abs(tokens), HIDDEN),
        "attention_norm": (LAYERS, HIDDEN),
        "q": (LAYERS, HIDDEN, HIDDEN),
        "k": (LAYERS, KV_HEADS * HEAD, HIDDEN),
        "v": (LAYERS, KV_HEADS * HEAD, HIDDEN),
        "o": (LAYERS, HIDDEN, HIDDEN),
        "mlp_norm": (LAYERS, HIDDEN),
        "gate": (LAYERS, INNER, HIDDEN),
        "down": (LAYERS, HIDDEN, INNER),
        "up": (LAYERS, INNER, HIDDEN),
        "norm": (HIDDEN,),
        "cosines": (CONTEXT, HEAD // 2),
        "sines": (CONTEXT, HEAD // 2),
    }
    if tokens < 0:
        shapes["head"] = (-tokens, HIDDEN)
    return {
        name: random.normal(1 if "norm" in name else 0, 0.1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def normed(x, by):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * by


def turned(x):
    """Pairs of neighbours `[T, heads, HEAD]`, each by its angle."""
    angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(0, HEAD, 2) / HEAD)
    pairs = x[..., ::2] + 1j * x[..., 1::2]
    pairs = pairs * np.exp(1j * angles)[:, None]
    return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)


def logits(ids, w):
    """What llama2.c computes of ids `[T]`, in float64."""
    x, T = w["embedding"][ids].astype(float), len(ids)
    for layer in range(LAYERS):
        of = {name: each[layer] for name, each in w.items() if name not in ("embedding", "norm")}
        h = normed(x, of["attention_norm"])
        q, k, v = (
            (h @ of[name].T).reshape(T, heads, HEAD)
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        q, k, v = turned(q), turned(k).repeat(2, 1), v.repeat(2, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD)
        scores = np.exp(np.where(np.tri(T), scores, -np.inf))
        mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
        x = x + mixed.reshape(T, HIDDEN) @ of["o"].T
        h = normed(x, of["mlp_norm"])
        gate = h @ of["gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ of["up"].T)) @ of["down"].T
    return normed(x, w["norm"]) @ w.get("head", w["embedding"]).T


@pytest.fixture
def clones(tmp_path):
    """The files of both repositories, of a random model; returns how they are written anew."""
    (tmp_path / "DaveBben/data").mkdir(parents=True)
    (tmp_path / "Ahmedessaa").mkdir()
    (tmp_path / stories.HELD_OUT).write_text("the tea the heat that ate the hat\n" * 40)

    def write(tokens=None, pieces=PIECES, cut=0):
        tokens = tokens or len(PIECES)
        sizes = (HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, tokens, CONTEXT)
        data = struct.pack("<7i", *sizes) + b"".join(w.tobytes() for w in weights(tokens).values())
        (tmp_path / stories.WEIGHTS).write_bytes(data[: len(data) - cut])
        encoded = [piece.encode() for piece in pieces]
        told = b"".join(struct.pack("<fi", 0, len(piece)) + piece for piece in encoded)
        (tmp_path / stories.VOCABULARY).write_bytes(struct.pack("<i", 8) + told)
        return tmp_path

    return write


def converted(clones, output):
    stories.convert(clones / stories.WEIGHTS, clones / stories.VOCABULARY, output)


@pytest.mark.parametrize("tokens", [len(PIECES), -len(PIECES)], ids=["tied", "untied"])
def test_logits_are_those_of_its_own_way_to_compute(tokens, clones, tmp_path):
    converted(clones(tokens), tmp_path / "model")
    model, ids = hf.load(tmp_path / "model"), [1, 5, 260, 7, 259, 9, 2]
    with torch.no_grad():
        found = model(torch.tensor([ids])).logits[0]
    expected = torch.from_numpy(logits(ids, weights(tokens))).float()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_text_is_merged_and_what_has_no_piece_is_bytes(clones, tmp_path):
    converted(clones(), tmp_path / "model")
    tokenizer = hf.load_tokenizer(tmp_path / "model")
    ids = tokenizer("the thé")["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens == ["<s>", "▁the", "▁", "t", "h", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the thé"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cut": 4}, "the weights must be .* numbers as their sizes say, got"),
        ({"pieces": [*PIECES[:-1], "the"]}, f"the vocabulary must be of {len(PIECES)} pieces"),
        ({"pieces": PIECES[:-1]}, "must be as long as their sizes say"),
        ({"pieces": [*PIECES, "hat"]}, f"the vocabulary must be of {len(PIECES)} pieces"),
    ],
)
def test_other_files_are_refused(options, words, clones, tmp_path):
    with pytest.raises(ValueError, match=words):
        converted(clones(**options), tmp_path / "model")


def test_it_is_measured_on_held_out_stories_and_on_its_own(clones, monkeypatch):
    told = []

    def measure(directory, texts, calibration, *_, **__):
        told.extend([hf.load(directory).config.vocab_size, texts, calibration])
        return [{"text": name} for name in texts]

    monkeypatch.setattr(stories, "CHARACTERS", 300)
    monkeypatch.setattr(stories, "NEW", 20)
    monkeypatch.setattr(stories, "measure", measure)
    rows = stories.run(clones())
    assert rows == [{"trial": stories.NAME, "text": name} for name in ("held_out", "its own")]
    size, texts, calibration = told
    assert size == len(PIECES)
    assert texts["held_out"].startswith("the tea")
    assert [len(texts["its own"]), len(calibration)] == [300, 1800]
    assert texts["its own"] not in calibration
