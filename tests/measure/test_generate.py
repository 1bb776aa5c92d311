"""Models that generate in turn: what the rows say, what is timed, and what is refused."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from measured_models import add_token, computed_dtypes
from tiny import tiny_directory, tiny_ids, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, CompileConfig, RwkvConfig

from neuronmm_ops import CheckpointError
from neuronmm_ops.measure import generate, generation, timing
from neuronmm_ops.measure.generation import Alone, Timing
from neuronmm_ops.measure.runner import in_own_process

FIELDS = (
    *("dir", "compiled", "bytes", "prefill_tokens_per_s", "ttft_ms", "token_ms", "tokens_per_s"),
    *("end_to_end_ms", "peak_memory_bytes", "compile_s", "speedup", "rounds", "failed", "prompt"),
    *("new", "batch", "cache", "compute_dtype", "device", "device_name", "threads", "versions"),
)
FEW = {"prompt": 24, "new": 4, "rounds": 2}


@pytest.fixture
def _one_process(monkeypatch):
    """Spare the tests a process for each model."""
    monkeypatch.setattr(generate, "in_own_process", lambda what, function, *a: function(*a))


@pytest.mark.usefixtures("_one_process")
def test_every_row_has_every_field(places):
    told = []
    directories = [places / name for name in ("dense", "a", "b")]
    rows = generate.run(directories, batch=2, **FEW, progress=lambda *event: told.append(event))
    json.dumps(rows, allow_nan=False)
    assert {tuple(row) for row in rows} == {FIELDS}
    assert [row["dir"] for row in rows] == [str(path) for path in directories]
    assert rows[0]["speedup"] is None
    for row in rows:
        assert row["bytes"] == (Path(row["dir"]) / "model.safetensors").stat().st_size
        assert row["prefill_tokens_per_s"] == pytest.approx(2 * 24 * 1e3 / row["ttft_ms"])
        assert row["tokens_per_s"] == pytest.approx(2 * 1e3 / row["token_ms"])
        assert row["end_to_end_ms"] > row["ttft_ms"] > 0
        assert (row["compile_s"], row["failed"], row["compiled"]) == (None, None, False)
        assert (row["compute_dtype"], row["threads"]) == ("float32", 1)
    for row in rows[1:]:
        for ratios in row["speedup"].values():
            assert 0 < ratios["low"] <= ratios["median"] <= ratios["high"]
    events = [("each alone", n, 3) for n in (1, 2, 3)]
    assert told == [*events, *((f"rounds of {d}", n, 2) for d in "ab" for n in (1, 2))]


@pytest.mark.usefixtures("_one_process")
def test_medians_and_ratios_are_of_paired_rounds(places, monkeypatch):
    script = {  # (rank of the first up projection, compiled): what its rounds take
        None: [(8.0, 2.0, 16.0), (8.0, 4.0, 20.0), (16.0, 2.0, 24.0)],
        "pair": [(4.0, 2.0, 12.0), (8.0, 1.0, 10.0), (4.0, 1.0, 8.0)],
    }
    order = []

    def scripted(model, ids: torch.Tensor, new, is_compiled) -> Timing:
        rank = getattr(model.model.layers[0].mlp.gate_proj, "rank", None)
        name = None if rank is None else "pair"
        assert (list(ids.shape), new, is_compiled) == ([1, 24], 4, False)
        order.append(name)
        return Timing(*script[name][order.count(name) - 1])

    monkeypatch.setattr(generate, "timed", scripted)
    dense, small = generate.run([places / "dense", places / "a"], prompt=24, new=4, rounds=3)
    assert order == [None, "pair", "pair", None, None, "pair"]
    assert (dense["ttft_ms"], dense["token_ms"], dense["end_to_end_ms"]) == (8.0, 2.0, 20.0)
    assert (small["ttft_ms"], small["token_ms"], small["end_to_end_ms"]) == (4.0, 1.0, 10.0)
    assert small["speedup"] == {
        "prefill": {"median": 2.0, "low": 1.0, "high": 4.0},
        "decode": {"median": 2.0, "low": 1.0, "high": 4.0},
        "end_to_end": {"median": 2.0, "low": 16 / 12, "high": 3.0},
    }
    assert (dense["rounds"], small["rounds"]) == (3, 3)
    assert dense["tokens_per_s"] == 500.0


@pytest.mark.usefixtures("_one_process")
def test_long_rounds_stop_at_the_limit(places, monkeypatch):
    monkeypatch.setattr(generate, "LIMIT_S", 0.0)
    (row,) = generate.run([places / "dense"], prompt=8, new=2, rounds=20)
    assert (row["rounds"], row["speedup"]) == (timing.MIN_ROUNDS, None)


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_all_compute_in_the_first_models_dtype(dtype, places, tmp_path, monkeypatch):
    computed = computed_dtypes(monkeypatch, generate, "timed")
    tiny_directory(tmp_path / "dense", dtype=dtype)
    rows = generate.run([tmp_path / "dense", places / "a"], **FEW)
    assert {f"torch.{row['compute_dtype']}" for row in rows} == {str(dtype)}
    assert set(computed) == {dtype}


@pytest.mark.slow
@pytest.mark.usefixtures("_one_process")
def test_compiled_models_have_rows_of_their_own(places, monkeypatch):
    # The graph is captured and called as with inductor, whose C++ would take minutes to build.
    torch._dynamo.reset()
    monkeypatch.setattr(
        generation, "CompileConfig", lambda: CompileConfig(backend="eager", mode="default")
    )
    rows = generate.run([places / "dense", places / "a", places / "b"], compile=True, **FEW)
    assert [row["compiled"] for row in rows] == [False, True] * 3
    for row in rows:
        assert row["failed"] is None
        assert (row["compile_s"] is not None) == row["compiled"]
        assert row["rounds"] == (2 if row["speedup"] else 4)  # the first model is in both pairs
    assert [row["speedup"] is None for row in rows] == [True] * 2 + [False] * 4


@pytest.mark.usefixtures("_one_process")
def test_a_failing_compiler_costs_the_compiled_rows_alone(places, monkeypatch):
    def broken(*_, **__) -> None:
        raise RuntimeError("no C++ compiler\nwas found")

    monkeypatch.setattr(torch, "compile", broken)
    rows = generate.run([places / "dense", places / "a"], compile=True, **FEW)
    for row in rows:
        assert (row["ttft_ms"] is None) == row["compiled"] == (row["rounds"] == 0)
        reason = "RuntimeError: no C++ compiler was found" if row["compiled"] else None
        assert row["failed"] == reason
    assert rows[2]["speedup"]["decode"]["median"] > 0
    assert rows[3]["speedup"] is rows[3]["peak_memory_bytes"] is None


def test_a_model_that_is_not_compiled_is_no_compiled_model(places, monkeypatch):
    model = tiny_model()
    ids = tiny_ids(1, 8)
    monkeypatch.setattr(type(model), "get_compiled_call", lambda self, config: self.__call__)
    with pytest.raises(generation.CompileError, match="does not compile LlamaForCausalLM"):
        generation.checked(model, "m", ids, 3, is_compiled=True)
    # torch.compile that leaves all to the interpreter is none either.
    monkeypatch.undo()
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    monkeypatch.setitem(generation.counters, "stats", generation.counters["none yet"])
    found = generation.alone(places / "dense", ids, 3, True, torch.device("cpu"), torch.float32, 1)
    assert found == Alone(None, None, "torch.compile finds no graph to compile", torch.float32)


def test_the_clock_runs_from_the_call_to_the_tokens(monkeypatch):
    model, ids = tiny_model(), tiny_ids(2, 8)
    ticks = iter([10.0, 11.0, 12.5, 13.0, 14.5, 15.5])  # start, prompt, four tokens
    monkeypatch.setattr(generation.time, "perf_counter", lambda: next(ticks))
    timing = generation.timed(model, ids, 4, is_compiled=False)
    assert timing == Timing(ttft_ms=2500.0, token_ms=1000.0, end_to_end_ms=5500.0)
    assert list(ticks) == []


def test_every_sequence_goes_on_to_its_length(monkeypatch):
    model, ids = tiny_model(tied=False), tiny_ids(1, 8)
    whole = model.generate(ids, max_new_tokens=2, do_sample=False)
    assert whole[0, -1] != whole[0, -2]
    own = model.generation_config
    own.eos_token_id = whole[0, -1].item()  # it would end after the second token
    own.do_sample, own.temperature = True, 100.0
    lengths = []
    checked_generate = model.generate

    def spy(*arguments, **options):
        output = checked_generate(*arguments, **options)
        lengths.append(getattr(output, "sequences", output).shape[1])
        return output

    monkeypatch.setattr(model, "generate", spy)
    generation.checked(model, "m", ids, 6)
    generation.timed(model, ids, 6, is_compiled=False)
    assert lengths == [14, 14]
    assert model.generation_config is own


def test_prompts_are_text_of_any_length(places):
    ids = generate._prompts([places / "dense"], 700, 3)
    assert list(ids.shape) == [3, 700]
    assert tiny_tokenizer().decode(ids[0]).startswith(generate.TEXT + "A river")
    assert not torch.equal(ids[0], ids[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": 0}, "prompt must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
    ],
)
def test_bad_numbers(places, options, message):
    with pytest.raises(ValueError, match=message):
        generate.run([places / "dense"], **options)


def test_at_least_one_directory():
    with pytest.raises(ValueError, match="give at least one"):
        generate.run([])


def test_vocabularies_must_be_the_same(copied, places):
    copy = copied("a")
    add_token(copy)
    with pytest.raises(CheckpointError, match=r"a-copy must have .*dense.* in 1 tokens, .*'quick'"):
        generate.run([places / "dense", copy])


@pytest.mark.usefixtures("_one_process")
def test_a_model_without_a_static_cache(tmp_path, monkeypatch):
    config = RwkvConfig(hidden_size=64, num_hidden_layers=2, vocab_size=260, eos_token_id=256)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="RwkvForCausalLM takes no static cache"):
        generate.run([tmp_path], **FEW)
    model = tiny_model()
    monkeypatch.setattr(model, "_prepare_static_cache", pytest.fail)
    monkeypatch.setattr(model, "generate", lambda *_, **__: {}["no such layer"])
    message = "m: LlamaForCausalLM cannot generate with a static cache: KeyError: 'no such layer'"
    with pytest.raises(ValueError, match=message):
        generation.checked(model, "m", tiny_ids(1, 8), 3)


def test_memory_is_of_the_device_or_of_the_process(tmp_path, monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 1)
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t 1024 kB\n")
    monkeypatch.setattr(generation, "STATUS", tmp_path / "status")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {cuda: 12345}.get)
    assert generation._peak_memory_bytes(cpu) == 2048 * 1024
    assert generation._peak_memory_bytes(cuda) == 12345
    monkeypatch.setattr(generation, "STATUS", tmp_path / "of no such system")
    assert generation._peak_memory_bytes(cpu) is None


def test_the_reason_of_a_failure_is_short():
    error = RuntimeError("no\ncompiler\n\nSet TORCHDYNAMO_VERBOSE=1 for more")
    assert generation._reason(error) == "RuntimeError: no compiler"
    assert len(generation._reason(ValueError("x" * 999))) < 220


@pytest.mark.slow
def test_a_process_of_its_own(places):
    assert in_own_process("it", os.getpid) != os.getpid()
    with pytest.raises(ValueError, match="invalid literal") as caught:
        in_own_process("it", int, "x")
    assert "Traceback" in caught.value.__notes__[0]
    with pytest.raises(ChildProcessError, match="it was lost, exit code -6"):
        in_own_process("it", os.abort)
    (row,) = generate.run([places / "dense"], **FEW)
    # more than the interpreter, less than this process can have come to
    assert 50e6 < row["peak_memory_bytes"] < 5e9


@pytest.mark.slow
def test_an_interrupt_ends_the_process(tmp_path):
    """Nobody waits for a model that loads for minutes."""
    timer = threading.Timer(4.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        in_own_process("it", time.sleep, 120)
    assert time.monotonic() - start < 60
    timer.join()


@pytest.mark.usefixtures("_one_process")
def test_a_batch_is_as_large_as_asked(places):
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        generate.run([places / "dense"], prompt=8, new=2, batch=10**10)
