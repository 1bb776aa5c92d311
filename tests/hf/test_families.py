"""docs/compress.md says what each preset reaches in which family; and every family loads again."""

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from families import tiny_family
from safetensors.torch import save_file
from tiny import tiny_ids
from torch import nn
from transformers import PreTrainedModel

from neuronmm_ops import CheckpointError, LeftDense, SVDConfig, compress_, hf
from neuronmm_ops.checkpoint import inspect_checkpoint
from neuronmm_ops.compress.targets import select_targets

DOCS = Path(__file__).parents[2] / "docs" / "compress.md"


class Row(NamedTuple):
    """The last components of names, as the documentation lists them."""

    mlp: set[str]
    attention: set[str]
    left: set[str]


def _rows() -> dict[str, Row]:
    table = DOCS.read_text(encoding="utf-8").split("| `model_type` |")[1].split("\n\n")[0]
    rows: dict[str, Row] = {}
    for line in table.splitlines()[2:]:
        kinds, *cells = (re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|"))
        rows |= dict.fromkeys(kinds, Row(*map(set, cells)))
    return rows


ROWS = _rows()
# One family of each row is saved and loaded again.
FIRST = list({id(row): kind for kind, row in reversed(ROWS.items())}.values())[::-1]


def _selected(model: nn.Module, target: str) -> dict[str, int]:
    """Return the sizes of the matrices that are selected, by name."""
    try:
        linears = select_targets(model, SVDConfig(targets=target)).linears
    except ValueError:  # none
        return {}
    return {name: linear.weight.numel() for name, linear in linears.items()}


def _matrices(model: PreTrainedModel) -> int:
    """Count the parameters that are matrices, but embeddings, head and biases."""
    outside = {
        id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()
    }
    head = model.get_output_embeddings()
    outside |= {id(p) for p in head.parameters()}
    return sum(
        p.numel()
        for n, p in model.named_parameters()
        if p.dim() > 1 and id(p) not in outside and not n.endswith("bias")
    )


def _compress(model: nn.Module, method: str) -> tuple[LeftDense, ...]:
    config = SVDConfig(
        ratio=0.3, block=8, targets=("mlp", "attention"), method=method, allocation="uniform"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few tokens, and experts left out
        return compress_(model, config, [tiny_ids(4, 16)]).left_dense


@pytest.mark.parametrize("kind", ROWS)
def test_what_the_presets_reach(kind: str) -> None:
    model, row = tiny_family(kind), ROWS[kind]
    mlp, attention = _selected(model, "mlp"), _selected(model, "attention")
    assert {name.rpartition(".")[2] for name in mlp} == row.mlp
    assert {name.rpartition(".")[2] for name in attention} == row.attention
    assert not set(mlp) & set(attention)
    everything = _matrices(model)
    left = _compress(model, "plain")
    assert {".".join(e.name.removesuffix(".weight").split(".")[-2:]) for e in left} == row.left
    assert sum({**mlp, **attention}.values()) + sum(e.parameters for e in left) == everything


LOAD = """
import sys, warnings
from pathlib import Path
import torch
from safetensors.torch import load_file
torch.set_num_threads(1)
from neuronmm_ops import SVDLinear, hf
for directory in map(Path, sys.argv[1:]):
    expected = load_file(directory.with_name(directory.name + ".logits"))
    model = hf.load(directory)
    assert any(isinstance(module, SVDLinear) for module in model.modules()), directory
    with torch.no_grad():
        assert torch.equal(model(expected["ids"]).logits, expected["logits"]), directory
    prompt = expected["ids"][:1, :8]
    tokens = model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(tokens, expected["tokens"]), directory
    print(directory.name)
"""


@pytest.mark.slow
def test_every_family_comes_back_in_a_fresh_process(tmp_path: Path) -> None:
    kinds = [(kind, torch.float32) for kind in FIRST]
    kinds += [(kind, torch.bfloat16) for kind in ("gpt2", "phi3", "falcon")]
    for kind, dtype in kinds:
        model = tiny_family(kind, dtype)
        _compress(model, "swift")
        directory = tmp_path / f"{kind}-{dtype}"
        hf.save(model, directory)
        ids = tiny_ids(2, 16)
        with torch.no_grad():
            logits = model(ids).logits
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        tokens = model.generate(ids[:1, :8], **options)
        expected = {"ids": ids, "logits": logits.contiguous(), "tokens": tokens}
        save_file(expected, directory.with_name(directory.name + ".logits"))
    directories = [tmp_path / f"{kind}-{dtype}" for kind, dtype in kinds]
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, *directories], capture_output=True, text=True
    )
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split() == [directory.name for directory in directories]


def test_a_linear_in_the_place_of_a_conv1d_is_not_saved(tmp_path: Path) -> None:
    """Its square weight would load, transposed."""
    model = tiny_family("gpt2")
    _compress(model, "plain")
    attention = model.get_submodule("transformer.h.0.attn")
    dense = attention.get_submodule("c_proj").to_linear()  # pyright: ignore
    attention.add_module("c_proj", dense)
    assert dense.weight.shape == (64, 64)
    message = r"transformer\.h\.0\.attn\.c_proj is Linear here and Conv1D when loaded"
    with pytest.raises(CheckpointError, match=message):
        hf.save(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_what_the_body_left_dense_is_recorded_by_the_whole_model_s_names(tmp_path: Path) -> None:
    model = tiny_family("mixtral")
    left = _compress(model.base_model, "plain")
    assert left[0].name == "layers.*.mlp.experts.gate_up_proj"
    hf.save(model, tmp_path / "out")
    recorded = inspect_checkpoint(tmp_path / "out").left_dense
    assert [entry.name for entry in recorded] == [f"model.{entry.name}" for entry in left]
    assert [entry.share for entry in recorded] == [entry.share for entry in left]
    # Loading changes nothing of it, and so does saving again.
    hf.save(hf.load(tmp_path / "out"), tmp_path / "again")
    assert inspect_checkpoint(tmp_path / "again").left_dense == recorded
