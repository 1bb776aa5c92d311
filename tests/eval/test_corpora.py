"""Perplexity on the papers' data sets: what is read, how it is cut, and what is refused."""

import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from corpus_files import C4, PTB, WIKITEXT, write_arrow, write_c4, write_corpora, write_parquet
from huggingface_hub.errors import LocalEntryNotFoundError
from tiny import tiny_model, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from neuronmm_ops import NonFiniteError
from neuronmm_ops.eval import PROTOCOLS, corpora, perplexities
from neuronmm_ops.eval.corpora import documents_of
from neuronmm_ops.eval.protocols import CORPORA, Recipe

NAMES = ["wikitext2", "ptb", "c4"]
JOINED = {
    "standard": {"wikitext2": "\n\n".join(WIKITEXT), "ptb": " ".join(PTB), "c4": " ".join(C4)},
    "svd-llm": {name: "\n\n".join(t) for name, t in zip(NAMES, (WIKITEXT, PTB, C4), strict=True)},
}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_corpora(tmp_path / "data")


@pytest.fixture
def evaluate(model):
    """Evaluates data sets on the tiny model, unless another."""

    def call(*names, model=model, tokenizer=None, **options):
        return perplexities(model, tokenizer or tiny_tokenizer(), [*names], **options)

    return call


def with_bos(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    backend = tokenizer.backend_tokenizer
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=True,
        bos_token="<end>",  # noqa: S106
        eos_token="<end>",  # noqa: S106
    )


def straightforward(model, ids: list[int], seqlen: int) -> tuple[float, int]:
    """Mean in fp64 over the predicted tokens of whole blocks."""
    nll, count = 0.0, 0
    for start in range(0, len(ids) - seqlen + 1, seqlen):
        block = torch.tensor(ids[start : start + seqlen])
        with torch.no_grad():
            log_p = model(block[None]).logits[0].double().log_softmax(-1)
        nll -= float(log_p[:-1].gather(1, block[1:, None]).sum())
        count += seqlen - 1
    return math.exp(nll / count), count


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_it_equals_the_straightforward_computation(evaluate, model, data, protocol, bos):
    tokenizer = with_bos(tiny_tokenizer()) if bos else tiny_tokenizer()
    rows = evaluate(*NAMES, tokenizer=tokenizer, seqlen=53, protocol=protocol, data=data)
    assert [row["dataset"] for row in rows] == NAMES
    for row in rows:
        text = JOINED[protocol][row["dataset"]]
        ids = tiny_tokenizer()(text)["input_ids"]
        expected, count = straightforward(model, [256] * bos + ids, 53)
        assert (len(ids) + bos) % 53  # a tail is dropped
        assert row["ppl_token"] == pytest.approx(expected, rel=1e-6)
        assert (row["tokens"], row["blocks"], row["seqlen"]) == (count, count // 52, 53)
        assert (row["bos"], row["protocol"]) == (bos, protocol)
        assert Path(row["file"]).is_file()
    assert len({row["fingerprint"] for row in rows}) == 3


def test_the_protocols_are_those_of_their_sources():
    # IST-DASLab/sparsegpt datautils.py; AIoT-MLSys-Lab/SVD-LLM utils/data_utils.py.
    assert PROTOCOLS["standard"] == {
        "wikitext2": Recipe("\n\n"),
        "ptb": Recipe(" "),
        "c4": Recipe(" ", 1100, 256),
    }
    assert PROTOCOLS["svd-llm"]["c4"] == Recipe("\n\n", 2000, None)
    assert {corpus.split for corpus in CORPORA.values()} == {"test", "validation"}
    assert CORPORA["c4"].file == "en/c4-validation.00000-of-00008.json.gz"


def test_as_many_documents_and_blocks_as_the_protocol_says(evaluate, model, data, monkeypatch):
    monkeypatch.setitem(PROTOCOLS["standard"], "c4", Recipe(" ", documents=40, blocks=5))
    (row,) = evaluate("c4", seqlen=64, data=data)
    assert (row["documents"], row["blocks"], row["tokens"]) == (40, 5, 5 * 63)
    ids = tiny_tokenizer()(" ".join(C4[:40]))["input_ids"][: 5 * 64]
    assert row["ppl_token"] == pytest.approx(straightforward(model, ids, 64)[0], rel=1e-6)


def test_the_default_block_is_the_smaller_of_2048_and_the_model_s_limit(evaluate, data):
    (row,) = evaluate("c4", data=data)
    assert row["seqlen"] == 128
    with pytest.raises(ValueError, match="limit of 128 tokens, got 129"):
        evaluate("c4", seqlen=129, data=data)


@pytest.mark.parametrize(
    ("name", "file"),
    [(name, file) for name, corpus in CORPORA.items() for file in corpus.local_files],
)
def test_a_directory_may_hold_a_file_under_its_other_names(tmp_path, name, file):
    texts, corpus = {"wikitext2": WIKITEXT, "ptb": PTB, "c4": C4}[name], CORPORA[name]
    path = tmp_path / file
    if file.endswith(".parquet"):
        write_parquet(path, corpus.column, [*texts])
    elif file.endswith(".arrow"):
        write_arrow(path, corpus.column, texts)
    elif file.endswith(".txt"):  # lines of the original PTB begin and end with a space
        path.write_text("".join(f" {text} \n" for text in texts))
    else:
        write_c4(path, texts)
    assert documents_of(name, corpus, tmp_path) == (texts, path)
    assert documents_of(name, corpus, tmp_path, count=7)[0] == texts[:7]


def test_the_hub_s_cache_is_enough(evaluate, caches):
    for corpus, texts in ((CORPORA["wikitext2"], WIKITEXT), (CORPORA["ptb"], PTB)):
        repo = caches / f"datasets--{corpus.repo.replace('/', '--')}"
        ref = repo / "refs" / corpus.revision
        ref.parent.mkdir(parents=True)
        ref.write_text("0" * 40)
        write_parquet(repo / "snapshots" / ("0" * 40) / corpus.file, corpus.column, [*texts])
    rows = evaluate("wikitext2", "ptb", seqlen=48)
    assert [row["documents"] for row in rows] == [len(WIKITEXT), len(PTB)]
    assert all(str(caches) in row["file"] for row in rows)


def test_what_is_not_cached_is_downloaded(evaluate, data, monkeypatch):
    calls = []

    def download(repo: str, file: str, **options: object) -> str:
        calls.append((repo, file, options))
        if options.get("local_files_only"):
            raise LocalEntryNotFoundError("not cached")
        return str(data / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    (row,) = evaluate("ptb")
    assert row["documents"] == len(PTB)
    place = ("ptb-text-only/ptb_text_only", "penn_treebank/test/0000.parquet")
    options = {"repo_type": "dataset", "revision": "refs/convert/parquet"}
    assert calls == [(*place, {"local_files_only": True, **options}), (*place, options)]


def test_any_error_of_the_network_is_one_line(evaluate, monkeypatch):
    def download(*_: object, **__: object) -> str:
        raise RuntimeError("the proxy says no\nand more")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(ValueError, match=r"\(the proxy says no\); place its") as caught:
        evaluate("c4")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_offline_names_the_data_set_and_the_file_to_place(evaluate, tmp_path, name):
    corpus = CORPORA[name]
    with pytest.raises(ValueError, match="neither cached nor to be had") as caught:
        evaluate(name)
    assert all(word in str(caught.value) for word in (corpus.repo, corpus.file, "--data-dir DIR"))
    with pytest.raises(ValueError, match=r"has no file of .*; place one there as") as caught:
        evaluate(name, data=tmp_path)
    assert all(word in str(caught.value) for word in (corpus.file, *corpus.local_files))


@pytest.mark.parametrize(
    ("name", "file", "content", "reason"),
    [
        ("wikitext2", "wikitext2.parquet", b"PAR1 and so on", "Parquet"),
        ("wikitext2", "wikitext2.arrow", b"nothing of the kind", ""),
        ("ptb", "ptb.parquet", b"", "0 bytes"),
        ("ptb", "ptb.test.txt", b"caf\xe9 \n", "utf-8"),
        ("c4", "c4-validation.00000-of-00008.json.gz", b"no gzip", "gzip"),
        ("c4", "c4-validation.00000-of-00008.json", b'{"text": "a"}\n{"te', "JSON"),
        ("c4", "c4-validation.00000-of-00008.json", b'{"url": "a"}\n', "column 'text'"),
        ("c4", "c4-validation.00000-of-00008.json", b'{"text": 7}\n', "row 0 has no text"),
        ("ptb", "ptb.test.txt", b" \n \n", "has no text"),
        ("ptb", "ptb.test.txt", b"", ""),
    ],
)
def test_bad_files_are_named(evaluate, tmp_path, capfd, name, file, content, reason):
    (tmp_path / file).write_bytes(content)
    filters = list(warnings.filters)
    with pytest.raises(ValueError, match=rf"{name}: {tmp_path / file} .*{reason}") as caught:
        evaluate(name, seqlen=8, data=tmp_path)
    assert "\n" not in str(caught.value)
    assert list(warnings.filters) == filters  # also while somebody holds the error
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("column", "texts", "message"),
    [
        ("text", ["a", None], "row 1 has no text in a column 'text'"),
        ("sentence", ["a"], "row 0 has no text in a column 'text'"),
        ("text", [], r"malformed or empty .*; place the test split there"),
    ],
)
def test_a_null_and_a_wrong_column_are_refused(tmp_path, column, texts, message):
    write_parquet(tmp_path / "wikitext2.parquet", column, texts)
    with pytest.raises(ValueError, match=message):
        documents_of("wikitext2", CORPORA["wikitext2"], tmp_path)


def test_a_text_shorter_than_a_block_is_refused(evaluate, tmp_path):
    (tmp_path / "ptb.test.txt").write_text("a b\n")
    with pytest.raises(ValueError, match=r"ptb: the text must hold .* block of 128 tokens, got 3"):
        evaluate("ptb", data=tmp_path)


@pytest.mark.parametrize(
    ("names", "protocol", "message"),
    [
        (["wikitext"], "standard", "unknown data set 'wikitext'; nearest are wikitext2"),
        (["imagenet"], "standard", "known are wikitext2, ptb, c4"),
        (["ptb"], "svdllm", "unknown protocol 'svdllm'; nearest are svd-llm"),
        ([], "standard", "give at least one data set of wikitext2, ptb, c4"),
    ],
)
def test_unknown_names(evaluate, names, protocol, message):
    with pytest.raises(ValueError, match=message):
        evaluate(*names, protocol=protocol)


def test_a_bos_that_the_tokenizer_s_config_promises_must_be_there(evaluate, data, tmp_path):
    folder = tmp_path / "tokenizer"
    tiny_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True}))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"must begin with BOS, .* add_bos_token; got bos_tok"):
        evaluate("ptb", tokenizer=tokenizer, data=data)


def test_non_finite_logits_name_the_data_set(evaluate, data):
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[3] = math.nan
    with pytest.raises(NonFiniteError, match="ptb: logits of block 0 must be finite"):
        evaluate("ptb", model=model, data=data)


def test_progress_names_the_data_set(evaluate, data):
    told = []
    evaluate("ptb", seqlen=100, data=data, progress=lambda *call: told.append(call))
    assert told[:2] == [("read ptb", 0, 1), ("read ptb", 1, 1)]
    blocks = len(told) - 2
    assert told[2:] == [("evaluate ptb", done, blocks) for done in range(1, blocks + 1)]
    assert blocks > 5


def test_no_cache_is_written(evaluate, data, monkeypatch):
    nowhere = "/proc/nowhere"  # no directory can be made there
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", nowhere)
    assert len(evaluate(*NAMES, seqlen=64, data=data)) == 3


def test_nothing_is_evaluated_before_all_texts_are_read(evaluate, data, monkeypatch):
    (data / CORPORA["c4"].file).unlink()
    monkeypatch.setattr(corpora, "token_perplexity", lambda *_: pytest.fail("was evaluated"))
    with pytest.raises(ValueError, match="allenai/c4"):
        evaluate("ptb", "c4", data=data)
