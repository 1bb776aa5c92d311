"""Compressed Llama and Qwen3 in vLLM-Neuron's stand-ins: the loader and the numbers, on ranks."""

import re
from pathlib import Path
from typing import Any

import pytest
import ranks
import stand_ins
import torch
import vllm_neuron_decoder
import vllm_neuron_engine
from quantized import quantized
from tiny import tiny_ids, tiny_model
from tolerances import assert_close_to_oracle
from torch import Tensor, nn
from vllm_neuron_engine import NeuronConfig
from vllm_neuron_serving import ANSWER, PROMPT, Served, config_of, load, metadata, served

from neuronmm_ops import hf, swap_
from neuronmm_ops.engines.vllm_neuron.factory import NeuronMMForCausalLM
from neuronmm_ops.errors import CheckpointError

MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
IDS = tiny_ids(1, PROMPT + ANSWER)[0]
LITE = {"libtorch_neuronx_lite/nki/nki_hop.py": "from lite_stand_in import wrap_nki"}
RANKS = {"mlp.up_proj": 19, "mlp.down_proj": 13, "self_attn.o_proj": 9}
"""Ranks that neither 2 nor 4 divide; others are 16."""


def write(
    path: Path, family: str, layers: tuple[str, ...], storage: str | None = None, **overrides: Any
) -> Path:
    """Write a checkpoint with these layers of both blocks low rank."""
    model = tiny_model(family, **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # so that layers count beside the residual stream
    factors = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(layers) and "layers" in name:
            r = RANKS.get(".".join(name.split(".")[-2:]), 16)
            weight = module.weight.detach()
            left, values, right = torch.linalg.svd(weight.float().T, full_matrices=False)
            pair = ((left * values)[:, :r].to(weight), right[:r].to(weight))
            factors[name] = pair if storage is None else quantized(*pair, storage)
    swap_(model, factors)
    model.save_pretrained(path)
    return path


def expected(path: Path, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Transformers' logits of the same checkpoint."""
    model = hf.load(path, dtype=dtype)
    with torch.no_grad():
        return model(ids[None]).logits[0]


pytestmark = pytest.mark.usefixtures("vllm_neuron_packages")
CASES = (
    ("llama", MLP),
    ("llama", MLP + ATTENTION),
    ("qwen3", MLP + ATTENTION),
    ("llama", ("mlp.up_proj",)),
    ("llama", ("mlp.gate_proj", "self_attn.o_proj")),
    ("qwen3", ("mlp.down_proj", "self_attn.k_proj")),
    ("llama", MLP + ATTENTION, "fp8"),
    ("qwen3", ("mlp.gate_proj", "mlp.down_proj", "self_attn.o_proj"), "int8"),
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return [write(root / str(i), *case) for i, case in enumerate(CASES)]


def check(paths: list[Path], results: list[list[Served]]) -> None:
    """Compare every rank's logits with those of Transformers, by an oracle in fp64."""
    for i, path in enumerate(paths):
        oracle, low = expected(path, IDS, torch.float64), expected(path, IDS, torch.float32)
        for of_rank in results:
            assert_close_to_oracle(of_rank[i].logits, oracle, low)


def test_logits_are_those_of_transformers(checkpoints):
    check(checkpoints, [served(0, checkpoints, IDS)])


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_logits_of_ranks_are_those_of_transformers(checkpoints, tp):
    check(checkpoints, ranks.run(served, tp, checkpoints, IDS))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16(tmp_path, family):
    path = write(tmp_path, family, MLP + ATTENTION, dtype=torch.bfloat16)
    (made,) = served(0, [path], IDS)
    oracle, low = expected(path, IDS, torch.float64), expected(path, IDS, torch.bfloat16)
    assert made.logits.dtype == torch.bfloat16
    assert_close_to_oracle(made.logits, oracle, low)


def test_one_byte_stays_one_byte(checkpoints):
    vllm_neuron_engine.install(checkpoints[6])
    model = load(checkpoints[6], config_of(checkpoints[6]))
    kept = {name: p.dtype for name, p in model.named_parameters() if p.itemsize == 1}
    block = {f"mlp.{name}_proj.{key}" for name in ("gate", "up", "down") for key in "uv"}
    names = {
        f"model.layers.{i}.{leaf}" for i in range(2) for leaf in {*block, "self_attn.o_proj.v"}
    }
    assert kept == dict.fromkeys(names, torch.float8_e4m3fn)


def test_an_engine_that_casts_one_byte_is_refused(checkpoints, monkeypatch):
    """As a release of its Qwen3 may."""
    given = vllm_neuron_decoder.load_sharded

    def casting(*args):
        return {name: tensor.bfloat16() for name, tensor in given(*args).items()}

    monkeypatch.setattr(vllm_neuron_decoder, "load_sharded", casting)
    vllm_neuron_engine.install(checkpoints[6])
    with pytest.raises(CheckpointError, match=r"is in fp8, the installed vllm-neuron casts it to"):
        load(checkpoints[6], config_of(checkpoints[6]))


@pytest.mark.slow
def test_three_ranks_with_an_inner_size_that_they_do_not_divide(tmp_path):
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    layers = [MLP + ATTENTION, ("mlp.gate_proj",)]
    paths = [write(tmp_path / str(i), "llama", own, **sizes) for i, own in enumerate(layers)]
    check(paths, ranks.run(served, 3, paths, IDS))


@pytest.mark.slow
def test_ranks_hold_parts_of_both_factors_and_add_the_narrow_products(checkpoints):
    served_by = ranks.run(served, 2, checkpoints[1:2], IDS)
    (of_rank,) = served_by[1]
    block = "model.layers.1"
    widths = {f"{block}.self_attn.o_proj_weight": (32, 10), f"{block}.self_attn.o_proj.v": (10, 32)}
    sizes = {"gate": (64, 16, 176), "up": (64, 19, 176), "down": (176, 13, 64)}
    for name, (K, r, N) in sizes.items():
        divided = (K // 2, r) if name == "down" else (K, -(-r // 2))
        rows = r if name == "down" else -(-r // 2) * 2
        widths |= {f"{block}.mlp.{name}_proj.u": divided}
        widths |= {f"{block}.mlp.{name}_proj.v": (rows, N // 2)}
    assert widths.items() <= of_rank.shapes.items()
    assert not [name for name in of_rank.shapes if re.search("(gate|up|down)_proj_weight", name)]

    prefill = [
        ("all_gather", (6, 64)),
        ("reduce_scatter", (12, 10)),
        ("all_gather", (10, 32)),  # o_proj's v
        ("all_gather", (6, 64)),
        ("all_gather", (12, 8 + 10)),
        ("reduce_scatter", (12, 13)),
        ("all_gather", (13, 32)),  # down_proj's v
    ]
    decode = [
        ("all_reduce", (1, 10)),
        ("all_gather", (1, 32)),
        ("all_gather", (1, 8 + 10)),
        ("all_reduce", (1, 13)),
        ("all_gather", (1, 32)),
    ]
    last = [("all_gather", (6, 64))]
    assert of_rank.sent == [*prefill * 2, *last, *decode * 2 * ANSWER]


@pytest.mark.slow
@pytest.mark.parametrize("case", [0, 1, 4])
def test_the_model_is_one_graph_of_the_engines_nodes(checkpoints, case, tmp_path, monkeypatch):
    path, targets = checkpoints[case], []

    def compiler(graph, _):
        targets.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    def tracer(graph, example):
        compiler(graph, example)
        results = graph.graph.output_node().args[0]
        return lambda *_: results

    with stand_ins.neuron_machine(tmp_path, monkeypatch) as machine:
        machine.nki()
        machine.package("libtorch_neuronx_lite", "2.11.0", LITE)
        machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE="trn2")
        vllm_neuron_engine.install(path).runs_kernels = True
        model = load(path, config_of(path))
        compiled = torch.compile(model, backend=compiler, fullgraph=True)
        torch._dynamo.reset()
        positions, known = torch.arange(PROMPT), metadata(2, PROMPT)
        logits = compiled(IDS[:PROMPT], positions, known)

        # Under CPU compile the engine loads constants alone, and traces without weights.
        with torch.device("meta"):
            bare = NeuronMMForCausalLM.from_configs(config_of(path), NeuronConfig())
        bare.load_weights_lite(str(path), torch.device("cpu"), None)
        traced = torch.compile(bare.to("meta"), backend=tracer, fullgraph=True)
        traced(IDS[:PROMPT].to("meta"), positions.to("meta"), known)
    launches = {0: 2, 1: 2 * 2, 4: 2 * 3}[case]  # svd_mlp; and o_proj's v; and u, mlp apart
    nodes, without_weights = targets
    assert nodes == without_weights
    assert nodes.count("lite.kernel") == launches
    assert not [name for name in nodes if "neuronmm" in name]
    oracle = expected(path, IDS, torch.float64)[:PROMPT]
    low = expected(path, IDS, torch.float32)[:PROMPT]
    assert_close_to_oracle(logits, oracle, low)
