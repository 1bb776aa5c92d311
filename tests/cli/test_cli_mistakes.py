"""Mistakes on the command line are one line of every command, and nothing is written."""

import json
import shlex
import shutil

import pytest
from outcomes import COMPRESS, TEXT, refused
from tiny_model import CONFIG

TEXTS = {"empty": b"", "binary": b"\x00\x01\x02", "latin": b"\xff\xfe", "short": b"Too short."}
TEXTS |= {"text.txt": TEXT.encode(), "other/text.txt": TEXT.encode()}
TEXTS |= {"tiny/config.json": json.dumps(CONFIG).encode()}
TEXTS |= {"data/ptb.test.txt": b" no it was n't black monday \n" * 30}

# By the command that they are added to: arguments, and words of the line.
MISTAKES: dict[str, list[tuple[str, ...]]] = {
    "": [("", "COMMAND"), ("export", "ENGINE"), ("bench", "BENCHMARK")],
    f"compress dense -o out --calibration text.txt {shlex.join(COMPRESS)}": [
        ("--ratio 0", "ratio must be in (0, 1)"),
        ("--ratio much", "invalid float value"),
        ("--block 12", "multiple of 8, got 12"),
        ("--targets no_such_proj", "match no nn.Linear"),
        ("--targets lm_head", "shares its weight with model.embed_tokens"),
        ("--samples 0", "at least 1"),
        ("--seqlen -3", "seqlen must be between 1 and the model's limit of 128 tokens"),
        ("--seqlen 0", "limit of 128 tokens, got 0"),
        ("--calibration /no/such/file", "/no/such/file"),
        ("--calibration empty", "empty"),
        ("--calibration binary", "binary"),
        ("--calibration latin", "UTF-8"),
        ("--calibration short", "one block"),
        ("--calibration-order tail", "invalid choice: 'tail'"),
        ("--dtype float7", "invalid choice: 'float7'"),
        ("--device toaster", "device must be cpu, cuda or another of torch's"),
        ("--device xpu", "device xpu is not available here"),
        ("--device meta", "device meta is not available here"),
        ("--max-shard-size five", "a size such as 5GB"),
        ("--max-shard-size 0GB", "a size such as 5GB"),
        ("--storage fp4", "storage must be one of bf16, fp8, int8"),
        ("--storage bf16 --stream", "storage bf16 needs Linears in bfloat16"),
        ("--frobnicate", "neuronmm compress: unrecognized arguments: --frobnicate (see"),
        ("--sequence-len 64", "unrecognized arguments: --sequence-len 64", "did you mean --seqlen"),
        ("--order head", "did you mean --calibration-order?"),
        ("--rati 0.5", "unrecognized arguments: --rati 0.5", "did you mean --ratio"),
        ("--budget time --target trn9", "trn9"),
        ("--tokens many", "M or M:WEIGHT,M:WEIGHT; got 'many'"),
        ("--tokens 1:0.8,2048", "M or M:WEIGHT,M:WEIGHT; got '1:0.8,2048'"),
        ("--tokens 1:nan", "each with a positive weight"),
        ("--tokens 1:0.8,8:0.2", "budget time alone has tokens"),
        ("--layer-ratio up_proj", "PATTERN=R or PATTERN=LO:HI; got 'up_proj'"),
        ("--layer-ratio =0.5", "PATTERN=R or PATTERN=LO:HI; got '=0.5'"),
        ("--layer-ratio up_proj=half", "PATTERN=LO:HI; got 'up_proj=half'"),
        ("--layer-ratio up_proj=0.2:", "PATTERN=LO:HI; got 'up_proj=0.2:'"),
        ("--layer-ratio up_proj=1", "ratio of up_proj must be a number in [0, 1)"),
        ("--layer-ratio up_proj=0.6:0.2", "or two such in order; got (0.6, 0.2)"),
        ("--layer-ratio (=0.5", "no regular expression"),
        ("--layer-ratio mlp=0:0.3 --ratio 0.9", "no allocation meets the budget"),
    ],
    "compress": [
        ("-o out --method plain", "MODEL is needed", "--from"),
        ("dense -o out", "needs --calibration", "plain"),
        (
            "dense -o out --method plain --block 8 --importance gradient",
            "gradient needs --calibration",
        ),
        ("dense -o there --calibration text.txt --block 8 --seqlen 64", "exists", "--force"),
        ("small -o out --method plain --block 8", "is compressed or quantized already"),
        ("--from missing.json -o out", "missing.json"),
        ("--from small -o out", "small"),
        ("--from small/model.safetensors -o out", "small/model.safetensors"),
    ],
    "eval dense": [
        ("", "--text FILE", "--ppl", "--tasks"),
        ("--text text.txt --seqlen 0", "between 2 and the model's limit of 128 tokens, got 0"),
        ("--text /no/such/file", "cannot read text /no/such/file"),
        ("--text text.txt --device cuda:77", "cuda"),
        ("--text text.txt --dtype int8", "invalid choice: 'int8'"),
        ("--ppl ,", "give what to evaluate on"),
        ("--ppl wikitext", "unknown data set 'wikitext'", "wikitext2"),
        ("--ppl ptb --protocol gptq", "unknown protocol 'gptq'", "standard"),
        ("--ppl ptb", "ptb-text-only/ptb_text_only", "penn_treebank/test/0000.parquet"),
        ("--ppl ptb --data-dir data --seqlen 129", "limit of 128"),
        ("--tasks quiz --include-path nowhere", "include_path", "nowhere"),
        ("--tasks quiz --batch-size x", "--batch-size"),
    ],
    "eval": [("--text text.txt", "give the MODEL"), ("--ppl ptb", "give the MODEL")],
    "compare": [
        ("small", "--text"),
        ("--text text.txt", "DIR"),
        ("small small --text text.txt", "names that differ, got small 2 times"),
        ("small --text text.txt --text other/text.txt", "differ, got text.txt 2 times"),
        ("dense --text text.txt", "is not a compressed checkpoint"),
        ("small --text text.txt --dense nowhere", "is no directory"),
        ("small --text text.txt --plot a.docx", "a plot ends in one of"),
        ("small --text text.txt --plot no/a.png", "is no directory"),
    ],
    "generate dense": [
        ("--prompt ''", "at least one token"),
        (f"--prompt {'x' * 100}", "at most the model's limit of 128 tokens, got 100 and 64"),
        ("--prompt x --new-tokens 0", "--new-tokens must be at least 1"),
        ("--chat --prompt Hi", "no chat template"),
    ],
    "recover -o out --seqlen 32": [
        ("small --data short", "the text must hold at least 4 blocks of 32 tokens, got 10"),
        ("small --data nowhere.txt", "cannot read text"),
        ("dense --data text.txt", "is not compressed", "neuronmm compress"),
        ("nowhere --data text.txt", "is no directory"),
        ("small --data text.txt --method magic", "must be one of distill, lora; got 'magic'"),
        ("small --data text.txt --steps 0", "steps must be at least 1, got 0"),
        ("small --data text.txt --minutes 1 --steps 2", "--minutes and --steps", "give one"),
        ("small --data text.txt --minutes -1", "minutes must be a positive number, got -1.0"),
        ("small --data text.txt --steps 1 --dense nowhere", "--dense", "is not here"),
        ("small --data text.txt --steps 1 -o text.txt/out", "needs a directory"),
    ],
    "export nxdi": [
        ("dense -o out", "is not a compressed checkpoint"),
        ("nowhere -o out", "is no directory"),
        ("small -o out --tp 0", "--tp must be at least 1"),
        ("small -o small", "holds the input model"),
        ("small -o dense", "exists"),
    ],
    "export tpu": [("small -o out", "invalid choice: 'tpu'")],
    "verify dense": [("", "has no manifest.json to verify it by; load it and save it")],
    "plan --model": [
        ("gpt-7", "model must be a directory"),
        ("Qwen3-8B --ratio 1.5", "--ratio must be between 0 and 1"),
        ("Qwen3-8B --tokens 1,x", "--tokens must be numbers of at least 1"),
        ("Qwen3-8B --target trn9", "target must be one of trn1"),
        ("Llama-3.2-1B --tp 0", "got 0, use one of 1, 2, 4, 8, 16, 32"),
        ("Llama-3.2-1B --tp 3", "got 3, use one of 1, 2, 4, 8, 16, 32"),
        ("Llama-3.2-1B --tp -8", "got -8, use one of 1, 2, 4, 8, 16, 32"),
    ],
    "bench model --prompt-tokens 40 --target trn2 --model tiny": [
        ("--model GPT-5", "model must be a directory", "got 'GPT-5'"),
        ("--model Llama-3.1-70B --lnc 2", "does not fit at tp 1", "greater tp"),
        ("--tp 3", "tp must divide", "got 3, use one of 1, 2, 4"),
        ("--tp x", "--tp must be numbers of at least 1, such as 8,32; got 'x'"),
        ("--tp 2,0", "--tp must be numbers of at least 1"),
        ("--tp 2,3", "tp must divide", "got 3, use one of 1, 2, 4"),
        ("--new-tokens 1", "new must be at least 2"),
    ],
    "bench cpu": [
        ("--model GPT-9", "GPT-9", "Llama-3.2-1B"),
        ("--tokens 0", "at least 1"),
        ("--tokens many", "at least 1"),
    ],
    "bench generate": [
        ("", "DIR"),
        ("dense --new-tokens 1", "new must be at least 2, got 1"),
        ("dense --prompt-tokens many", "invalid int value"),
        ("dense nowhere", "nowhere is no directory"),
        ("dense --device cuda:99", "device cuda"),
    ],
}
CASES = [(f"{command} {rest}", words) for command in MISTAKES for rest, *words in MISTAKES[command]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, dense, small):
    """A directory with the files that the lines name."""
    path = tmp_path_factory.mktemp("mistakes")
    for name, content in TEXTS.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    (path / "there").mkdir()
    shutil.copytree(dense, path / "dense")
    shutil.copytree(small, path / "small")
    return path


@pytest.mark.parametrize(("line", "words"), CASES)
def test_a_mistake_is_one_line(line, words, folder, run, monkeypatch, request):
    if "--ppl" in line or "--tasks" in line:
        request.getfixturevalue("caches")
    monkeypatch.chdir(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    refused(run(*shlex.split(line)), *words)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
