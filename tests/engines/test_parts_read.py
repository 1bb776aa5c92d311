"""Each of 8 ranks reads its part of a checkpoint of 70B's shape and 1/50 of its size, in shards."""

import re
from math import prod
from pathlib import Path

import pytest
import ranks
import vllm_neuron_engine
import vllm_neuron_serving
from nxdi_stand_ins import GROUP, shard_checkpoint
from reading import Read, counted, write_70b_shaped
from test_nxdi_layers import config_of
from torch import nn

from neuronmm_ops import hf
from neuronmm_ops.checkpoint import read_headers, weight_files
from neuronmm_ops.engines.nxdi import causal_lm

pytestmark = pytest.mark.slow
ranks.PRELOADED += ["neuronmm_ops.hf", "reading", "transformers.models.llama.modeling_llama"]

TP = 8
BF16_BYTES = 2
MOST = 1.3
"""Private memory for a byte of a rank's part."""
NORMS = "norm"
# The stand-ins' embeddings and head are whole.
OF_ENGINES = "norm|embed_tokens|lm_head"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_70b_shaped(tmp_path_factory.mktemp("70b") / "model", "50MB")


def part_of(directory: Path, whole: str, of: str = "") -> int:
    """Bytes of a rank's part of the tensors `of`, those of the names `whole` not divided."""
    headers = read_headers(weight_files(directory))
    sizes = {n: BF16_BYTES * prod(h.shape) for n, h in headers.items() if of in n}
    return sum(size if re.search(whole, name) else size // TP for name, size in sizes.items())


def by_transformers(rank: int, directory: Path) -> Read:
    with counted() as found:
        model = hf.load(directory, tp=TP)
    assert isinstance(model, nn.Module)
    return found[0]


def by_vllm_neuron(rank: int, directory: Path) -> Read:
    vllm_neuron_engine.install(directory)
    config = vllm_neuron_serving.config_of(directory)
    with counted() as found:
        model = vllm_neuron_serving.load(directory, config)
    assert isinstance(model, nn.Module)
    return found[0]


def test_by_transformers(checkpoint: Path):
    part = part_of(checkpoint, NORMS)
    assert len(weight_files(checkpoint)) > 40
    for read in ranks.run(by_transformers, TP, checkpoint, timeout_s=300):
        assert read.tensors == part
        assert read.peak <= MOST * part


def test_by_vllm_neuron(checkpoint: Path):
    """Whose queries, keys and values are multiplied out: their u is read whole."""
    part = part_of(checkpoint, rf"{OF_ENGINES}|[qkv]_proj\.u$")
    for read in ranks.run(by_vllm_neuron, TP, checkpoint, timeout_s=300):
        assert read.tensors == part
        assert read.peak <= MOST * part


@pytest.mark.usefixtures("nxd")
def test_by_nxd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The engine divides a whole checkpoint once, and each rank then reads what was made for it."""
    directory = write_70b_shaped(tmp_path / "model", "1GB", num_hidden_layers=2)
    part = part_of(directory, NORMS, of="_proj")
    monkeypatch.setattr(type(GROUP), "size", lambda _: TP)
    config = config_of(directory, {"tp_degree": TP}, neuronmm_divide="both")
    family = causal_lm(config.model_type)
    state = family.get_state_dict(str(directory), config)
    for own in shard_checkpoint(lambda: family._model_cls(config), state, TP):
        assert sum(tensor.nbytes for name, tensor in own.items() if "_proj" in name) == part
