"""vLLM saves the state of each rank, from which each rank then reads its own."""

import os
import shutil
from pathlib import Path

import pytest
from lowrank import PROMPTS, RANKS, TOKENS, greedy, low_rank
from offline import generated

pytestmark = pytest.mark.slow

TWO = {"tensor_parallel_size": 2}
WITHOUT_MLP = {name: r for name, r in RANKS.items() if name[0] in "qvo"}
CHECKPOINTS = {
    "packed": {"attention_bias": True, "mlp_bias": True, "ranks": WITHOUT_MLP},
    "fp8": {"ranks": dict.fromkeys(WITHOUT_MLP, 40), "storage": "fp8", "dense": "fp8"},
}
# Notes who opens which file, in every process.
WATCH = """
import os
import safetensors

original = safetensors.safe_open

def noted(path, *args, **options):
    with open(os.environ["OPENED"], "a") as log:
        print(os.getpid(), path, file=log)
    return original(path, *args, **options)

safetensors.safe_open = noted
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What vLLM gives for each checkpoint: as it is, and from the states of two ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    asked, expected = {}, {}
    for name, options in CHECKPOINTS.items():
        whole, parts = folder / name, folder / f"{name}, parts"
        expected[name] = greedy(low_rank(whole, **options), PROMPTS)
        shutil.copytree(whole, parts, ignore=shutil.ignore_patterns("*.safetensors"))
        asked[name] = {"model": whole, "save": parts, **TWO}
        asked[parts.name] = {"model": parts, "load_format": "sharded_state", **TWO}
    asked["alone"] = {**asked["fp8, parts"], "tensor_parallel_size": 1}
    (folder / "sitecustomize.py").write_text(WATCH)
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    found = generated(asked, PROMPTS, TOKENS, PYTHONPATH=path, OPENED=str(folder / "opened.txt"))
    return folder, expected, found


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_tokens_are_those_of_the_whole_checkpoint(runs, name):
    _, expected, found = runs
    for each in (name, f"{name}, parts"):
        assert found[each].get("tokens") == expected[name], found[each].get("error")


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_each_rank_reads_its_part_alone(runs, name):
    folder, _, _ = runs
    whole = (folder / name / "model.safetensors").stat().st_size
    opened: dict[str, list[Path]] = {}
    for line in (folder / "opened.txt").read_text().splitlines():
        process, _, path = line.partition(" ")
        if Path(path).parent.name == f"{name}, parts":
            opened.setdefault(process, []).append(Path(path))
    parts = {path for (path,) in opened.values()}  # one each
    assert len(parts) == 2 <= len(opened)
    assert all(path.stat().st_size < 0.65 * whole for path in parts)


def test_parts_of_another_number_of_ranks_are_refused(runs):
    _, _, found = runs
    assert "the files are of rank 0 of 2, neuronmm_divide" in found["alone"]["error"]
