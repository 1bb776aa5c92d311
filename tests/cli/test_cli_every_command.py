"""Each command once, on a tiny model: what `make floors` runs."""

import argparse
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hf.others import published
from outcomes import COMPRESS, shorten_held_out
from reproductions import workplace
from scale_kernels import KERNELS

from neuronmm_ops.cli import parser

ROOT = Path(__file__).parents[2]
# In this order: later commands read what earlier ones write.
COMPRESSED = f"-o small --calibration text.txt {shlex.join(COMPRESS)} --ratio 0.3"
COMMANDS = (
    "doctor",
    "device-check -o checked --minutes 0.1 --simulated",
    "demo --quick",
    f"compress dense {COMPRESSED}",
    f"compress dense {COMPRESSED} --stream --storage int8 --force",
    f"compress dense {COMPRESSED} --method plain --force",
    "prune dense -o narrow --ratio 0.2 --block 8 --calibration text.txt --seqlen 64 --samples 8",
    "inspect small",
    "verify small",
    "recover small -o distilled --data text.txt --seqlen 64 --steps 3",
    "recover small -o adapted --data text.txt --seqlen 64 --steps 3 --method lora",
    "quantize distilled -o rounded --storage int8 --calibration text.txt --seqlen 64 --samples 4",
    "eval distilled --text text.txt --seqlen 64",
    "compare adapted distilled --text text.txt --seqlen 64 --plot compare.png",
    "draft dense -o draft --text text.txt --tokens-ahead 1",
    "generate distilled --prompt The --new-tokens 3",
    "export nxdi distilled -o exported --tp 2",
    "export dense distilled -o multiplied",
    "import theirs -o imported",
    "reproduce paper.toml -o reproduced",
    "simulate scales.py:scale --arg x=f32[128,512] --plot profile.png --timeline timeline.html",
    "lint matmul.py",
    "plan --model Llama-3.2-1B --tokens 1",
    "bench model --model Llama-3.2-1B --prompt-tokens 128 --new-tokens 2",
    "bench cpu --model Qwen3-0.6B --tokens 1",
    "bench generate distilled --prompt-tokens 16 --new-tokens 2 --rounds 1",
)


def names_of(command: argparse.ArgumentParser, prefix: str = "") -> Iterator[str]:
    """Each command below a parser, by the words that call it."""
    groups = [a for a in command._actions if isinstance(a, argparse._SubParsersAction)]
    if not groups:
        yield prefix.strip()
    for group in groups:
        for name, child in group.choices.items():
            yield from names_of(child, f"{prefix} {name}")


def test_no_command_is_left_out():
    called = tuple(f"{command} " for command in COMMANDS)
    # They need NKI and onnx, which have tests of their own: precompile, hf/test_onnx_export.
    for name in set(names_of(parser())) - {"compile", "export onnx"}:
        assert any(command.startswith(f"{name} ") for command in called), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folder")
    workplace(path)
    shutil.copy(ROOT / "examples" / "kernels" / "matmul.py", path)
    (path / "scales.py").write_text(KERNELS)
    (path / "theirs").mkdir()
    published(path / "theirs", "llama", ("_u_proj", "_v_proj"))
    return path


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of other versions than those that are developed with
@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_prints_one_document(command, folder, monkeypatch, run):
    monkeypatch.chdir(folder)
    if command.startswith("demo"):
        shorten_held_out(folder / "texts", monkeypatch)
    # Of weights that exceed the caches of a large machine, random numbers take half a minute.
    monkeypatch.setattr("neuronmm_ops.measure.cpu.copies_for", lambda size: 1)
    assert run(*shlex.split(command), "--json").document()
