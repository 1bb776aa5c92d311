"""Compressed checkpoints that several processes load and run together, as one process does."""

import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from causal_lms import FAMILIES as OTHERS
from quantized import swap_quantized_
from ranks import PRELOADED, run
from stored import assert_same_bits, config_of, edit_tensors
from tiny import tiny_ids, tiny_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from neuronmm_ops import SVDConfig, SVDLinear, compress_, hf, swap_
from neuronmm_ops.hf import loading, quantizer, tensor_parallel
from neuronmm_ops.parallel import ShardedMLP
from neuronmm_ops.parallel.sharding import matrix_dims, pair_dims, part

pytestmark = pytest.mark.slow
PRELOADED += ["neuronmm_ops.hf", "tiny", "transformers.models.llama.modeling_llama"]

GATED = ("gate_proj", "up_proj", "down_proj")
KV_HEADS = 2  # of the tiny models
ALL = (*GATED, "q_proj", "k_proj", "v_proj", "o_proj")
GENERATE = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 256}


def swapped(model: PreTrainedModel, *ends: str, rank: int = 8) -> PreTrainedModel:
    """Swap the Linears whose names end so for their truncated SVD."""
    named = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    layers = {n: SVDLinear.from_linear(m, rank) for n, m in named.items() if n.endswith(ends)}
    swap_(model, {name: (layer.u, layer.v) for name, layer in layers.items()})
    return model


def with_biases(model: PreTrainedModel) -> PreTrainedModel:
    """Give biases, which are zero at first, values."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
    return model


def phi3() -> PreTrainedModel:
    """A model whose plan gathers results, and cuts inputs that are whole."""
    import transformers

    kind, options = OTHERS["phi3"]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, kind)(**options)).eval()


def stored(storage: str, **config: Any) -> PreTrainedModel:
    """A model of pairs, dense layers and a head in a storage."""
    model = tiny_model("qwen2", tied=False, **config)
    names = (
        *(f"model.layers.0.mlp.{name}" for name in GATED),
        "k_proj",
        "model.layers.1.self_attn.o_proj",
    )
    options = {
        "targets": "all-linear",
        "method": "plain",
        "block": 8,
        "layer_ratios": dict.fromkeys(names, 0),
    }
    compress_(model, SVDConfig(ratio=0.4, storage=storage, head_storage=storage, **options))
    return with_biases(model)


WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
}  # two groups of 128 a rank, at least


# A rank that 2 divides and 4 does not, one that neither does, I that 4 does not divide.
MODELS: dict[str, Callable[[], Any]] = {
    "llama, MLP": lambda: swapped(tiny_model(), *GATED, rank=6),
    "llama, all": lambda: swapped(tiny_model(tied=False), *ALL),
    "llama, odd": lambda: swapped(tiny_model(intermediate_size=171), *ALL, rank=3),
    "qwen2": lambda: swapped(with_biases(tiny_model("qwen2")), *ALL),
    "qwen3": lambda: swapped(tiny_model("qwen3"), *ALL),
    "mistral, mixed": lambda: swapped(
        tiny_model("mistral"), "0.mlp.gate_proj", "1.mlp.down_proj", "0.self_attn.k_proj"
    ),
    "gemma2": lambda: swapped(tiny_model("gemma2"), *GATED),
    "llama, fp8": lambda: swap_quantized_(tiny_model(), "fp8", *ALL),
    "llama, int8": lambda: swap_quantized_(tiny_model(), "int8", *GATED),
    "stored, fp8": lambda: stored("fp8"),
    "stored, int8": lambda: stored("int8", intermediate_size=171),
    "stored, int4": lambda: stored("int4", **WIDE),
    "phi3": lambda: swapped(phi3(), "qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}
# What four ranks divide otherwise than two: the ranks, I, or the key/value heads.
ON_FOUR = ("llama, MLP", "llama, all", "llama, odd", "qwen2", "llama, fp8", "stored, fp8", "phi3")


class Found(NamedTuple):
    """What a process computes with a model, and what it holds of it."""

    logits: Tensor
    tokens: Tensor
    held: dict[str, int]
    fused: int


def found_in(model: Any) -> Found:
    ids = tiny_ids(2, 12)
    with torch.no_grad():
        logits = model(ids).logits
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **GENERATE)
    held = {name: len(local(t).flatten()) for name, t in model.state_dict().items()}
    fused = sum(isinstance(module, ShardedMLP) for module in model.modules())
    return Found(logits, tokens, held, fused)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def load_divided(directory: Path, plan: Any = "auto") -> Any:
    config = DistributedConfig(tp_plan=plan)
    return AutoModelForCausalLM.from_pretrained(directory, distributed_config=config)


def load_all(rank: int, root: Path, out: Path, names: Iterable[str]) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for name in names:
        model = load_divided(root / name)
        found[name] = found_in(model)
        model.save_pretrained(out / name)
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    directory = tmp_path_factory.mktemp("compressed")
    for name, build in MODELS.items():
        hf.save(build(), directory / name)
    return directory


@pytest.fixture(scope="module")
def single(root):
    return {name: found_in(hf.load(root / name)) for name in MODELS}


@pytest.fixture(scope="module", params=[2, 4])
def divided(request, root, tmp_path_factory):
    """What each rank found, by name, and where they saved it."""
    out = tmp_path_factory.mktemp(f"tp{request.param}")
    names = tuple(MODELS) if request.param == 2 else ON_FOUR
    ranks = run(load_all, request.param, root, out, names, timeout_s=400)
    return out, {name: [rank[name] for rank in ranks] for name in names}


def test_ranks_compute_what_one_process_computes(single, divided):
    for name, ranks in divided[1].items():
        for rank in ranks:
            torch.testing.assert_close(
                rank.logits, single[name].logits, rtol=1e-4, atol=2e-6, msg=name
            )
            assert torch.equal(rank.tokens, single[name].tokens), name


def cut_dim(key: str, shape: torch.Size) -> int | None:
    """Return the dimension in which ranks divide a tensor of the model."""
    owner, _, leaf = key.rpartition(".")
    kind = "row" if owner.endswith(("down_proj", "o_proj")) else "column"
    if not owner.endswith(("proj", "lm_head", "embed_tokens")) or shape == (0,):
        return None
    if leaf == "weight":
        return 1 if kind == "row" else 0
    storage = "int4" if leaf.endswith("scale") and len(shape) == 2 else "int8"
    return {**pair_dims(kind, "both", storage), **matrix_dims(kind, storage)}[leaf]


def expected_parts(key: str, shape: torch.Size, tp: int) -> list[int]:
    """Return how many elements of a tensor each rank holds."""
    dim, size = cut_dim(key, shape), shape.numel()
    if dim is None:
        return [size] * tp
    if tp > KV_HEADS and re.search(r"\.[kv]_proj\.(v|v_scale|w|w_scale|bias|weight)$", key):
        return [size // KV_HEADS] * tp
    parts = [part(shape[dim], rank, tp, key, padded=True) for rank in range(tp)]
    return [(own.stop - own.start) * size // shape[dim] for own in parts]


def test_a_rank_holds_its_parts_alone(root, divided):
    for name, found in divided[1].items():
        ranks, whole = [rank.held for rank in found], hf.load(root / name).state_dict()
        for key, tensor in whole.items():
            expected = expected_parts(key, tensor.shape, len(ranks))
            assert [held[key] for held in ranks] == expected, (name, key)
        assert all(set(held) == set(whole) for held in ranks)
        total = sum(tensor.numel() for tensor in whole.values())
        assert max(sum(held.values()) for held in ranks) < 1.15 * total / len(ranks), name


def test_what_ranks_save_is_the_checkpoint(root, divided):
    out, found = divided
    for name in found:
        state, expected = hf.load(out / name).state_dict(), hf.load(root / name).state_dict()
        assert list(state) == list(expected)
        assert_same_bits(state, expected)
        assert config_of(out / name) == config_of(root / name)


def test_gate_and_up_share_an_exchange(divided):
    for name, ranks in divided[1].items():
        fused = {"mistral, mixed": 0, "phi3": 0}.get(name, 1 if "stored" in name else 2)
        assert [rank.fused for rank in ranks] == [fused] * len(ranks), name


# --- other layouts, gradients, and what is refused


def on_two_ranks(rank: int, root: Path, out: Path) -> dict[str, Any]:
    """Do what takes processes, once for all tests: starting them takes seconds."""
    found: dict[str, Any] = {}
    rules = [f"model.layers.*.mlp.{name}" for name in GATED]
    styles = ["lowrank_colwise_one"] * 2 + ["lowrank_rowwise_one"]
    one = load_divided(root / "llama, MLP", dict(zip(rules, styles, strict=True)))
    found["one"] = found_in(one)
    with pytest.raises(ValueError, match="divided") as error:
        hf.save(one, out / "refused")
    found["save"] = str(error.value)
    for name in ("llama, all", "qwen2"):
        model = load_divided(root / name)
        ids = tiny_ids(2, 12)
        model(ids, labels=ids).loss.backward()
        found[f"{name}, gradients"] = {n: whole(p.grad) for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match="divided") as error:
        hf.to_pairs(one)
    found["pairs"] = str(error.value)
    every = load_divided(root / "llama, all")
    with CommDebugMode() as sent, torch.no_grad():
        every(tiny_ids(1, 1))
    found["sent"] = {str(op): count for op, count in sent.get_comm_counts().items()}
    found["cast"] = found_in(hf.load_computing(out / "bfloat16", "float32", tp=2))
    dense = {rule: style.split("_")[1] for rule, style in zip(rules, styles, strict=True)}
    found["dense style"] = refusal(root / "llama, MLP", dense)
    for case, (source, _, _) in BROKEN.items():
        found[case] = refusal(out / case, 2 if source == "dense" else "auto")
    return found


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def refusal(directory: Path, plan: Any = "auto") -> str:
    """Return how loading by a plan fails; by a number of ranks, how `hf.load` does."""
    try:
        hf.load(directory, tp=plan) if isinstance(plan, int) else load_divided(directory, plan)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


GATE, DOWN = "model.layers.1.mlp.gate_proj", "model.layers.0.mlp.down_proj"
Q, NORM = "model.layers.1.self_attn.q_proj", "model.norm"


def ruined(name: str, value: float = torch.nan) -> Callable[[dict[str, Tensor]], Any]:
    """The edit of a tensor's last value."""
    return lambda tensors: tensors[name].view(-1)[-1:].fill_(value)


BROKEN: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any], str]] = {
    "no v": ("llama, MLP", lambda t: t.pop(f"{GATE}.v"), f"{GATE}.v: config.json asks for"),
    "other rank": (
        "llama, MLP",
        lambda t: t.update({f"{DOWN}.u": t[f"{DOWN}.u"][:, :-1].clone()}),
        f"{DOWN}.u: config.json asks for [176, 6], the file has [176, 5]",
    ),
    "wrong dtype": (
        "llama, fp8",
        lambda t: t.update({f"{GATE}.u": t[f"{GATE}.u"].float()}),
        f"{GATE}.u: config.json asks for F8_E4M3",
    ),
    "nan": ("llama, MLP", ruined(f"{GATE}.v"), f"{GATE}.v must be finite"),
    "scale": ("llama, fp8", ruined(f"{GATE}.u_scale", -1), f"{GATE}: u_scale must be"),
    "dense scale": ("stored, fp8", ruined(f"{DOWN}.w_scale", -1), f"{DOWN}: w_scale must be"),
    **{
        f"nan in {name} of {source}": (
            source,
            ruined(f"{name}.weight"),
            f"{name}.weight must be finite",
        )
        for source in ("llama, MLP", "dense")
        for name in (NORM, Q)  # which every rank holds, and which ranks divide
    },
}


@pytest.fixture(scope="module")
def two(root, tmp_path_factory):
    out = tmp_path_factory.mktemp("two")
    tiny_model().save_pretrained(out / "dense")
    for case, (source, change, _) in BROKEN.items():
        shutil.copytree((out if source == "dense" else root) / source, out / case)
        edit_tensors(out / case, change)
    hf.save(swapped(tiny_model(dtype=torch.bfloat16), *ALL), out / "bfloat16")
    return run(on_two_ranks, 2, root, out, timeout_s=400)


def test_a_plan_may_divide_one_factor(single, two):
    expected = single["llama, MLP"]
    for rank in two:
        torch.testing.assert_close(rank["one"].logits, expected.logits, rtol=1e-4, atol=2e-6)
        held = rank["one"].held
        assert (held[f"{DOWN}.u"], held[f"{DOWN}.v"]) == (88 * 6, 6 * 64)
        assert (held[f"{GATE}.u"], held[f"{GATE}.v"]) == (64 * 6, 6 * 88)


@pytest.mark.parametrize("name", ["llama, all", "qwen2"])
def test_gradients_are_those_of_one_process(name, root, two):
    model = AutoModelForCausalLM.from_pretrained(root / name)
    ids = tiny_ids(2, 12)
    model(ids, labels=ids).loss.backward()
    for rank in two:
        for key, parameter in model.named_parameters():
            found = rank[f"{name}, gradients"][key]
            torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_refused_on_all_ranks(case, two):
    messages = [rank[case] for rank in two]
    assert any(BROKEN[case][2] in message for message in messages), messages
    for message in messages:
        assert message.startswith(("CheckpointError: ", "NonFiniteError: "))
        assert "\n" not in message


def test_no_more_is_sent_than_the_layout_says(two):
    """Of two layers q, k, v, gate with up, o and down; of the embedding and the head."""
    for rank in two:
        sent = rank["sent"]
        gathers = sum(count for op, count in sent.items() if "gather" in op)
        assert (gathers, sum(sent.values()) - gathers) == (2 * 6 + 1, 2 * 2 + 1), sent


def test_a_divided_model_is_cast_to_compute(two, tmp_path):
    hf.save(swapped(tiny_model(dtype=torch.bfloat16), *ALL), tmp_path / "bfloat16")
    expected = found_in(hf.load_computing(tmp_path / "bfloat16", "float32"))
    for rank in two:
        assert rank["cast"].logits.dtype == torch.float32
        torch.testing.assert_close(rank["cast"].logits, expected.logits, rtol=1e-4, atol=2e-6)


def test_a_style_of_dense_layers_is_refused(two):
    for rank in two:
        assert rank["dense style"].startswith("ValueError: tp_plan gives model.layers.0.mlp.")
        assert "lowrank_colwise" in rank["dense style"]


def test_a_divided_model_is_saved_by_save_pretrained(two):
    for rank in two:
        assert "save_pretrained" in rank["save"]
        assert "load it in one process" in rank["pairs"]


def on_three_ranks(rank: int, root: Path, six: Path) -> tuple[str, Found]:
    return refusal(root / "llama, MLP"), found_in(load_divided(six))


def test_three_ranks(root, tmp_path):
    """tp = 3 divides neither I nor the ranks nor, in one model, the heads."""
    config = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    hf.save(swapped(tiny_model(**config), *ALL, rank=10), tmp_path / "six")
    expected = found_in(hf.load(tmp_path / "six"))
    for message, found in run(on_three_ranks, 3, root, tmp_path / "six"):
        assert message == (
            "ValueError: tp must divide the heads, got 4 heads and tp = 3; use a tp that divides 4"
        )
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=2e-6)
        assert torch.equal(found.tokens, expected.tokens)


def test_one_process_needs_no_group(root, single):
    with torch.no_grad():
        logits = load_divided(root / "qwen3")(tiny_ids(2, 12)).logits
    assert torch.equal(logits, single["qwen3"].logits)


@pytest.mark.parametrize("other", ["fsdp_size", "pp_size"])
def test_other_divisions_beside_it_are_refused(other, root):
    model = hf.load(root / "qwen3")
    model.config.distributed_config = DistributedConfig.from_dict({"tp_size": 2, other: 2})
    with pytest.raises(ValueError, match=f"^tp must be the only division .*, got {other} = 2;"):
        tensor_parallel.plan_(model)


def test_a_style_that_packs_is_refused(root):
    model = hf.load(root / "qwen3")
    model.config.distributed_config = DistributedConfig(tp_size=2)
    model.tp_plan = {"model.layers.*.mlp.gate_proj": "packed_colwise"}
    with pytest.raises(
        ValueError, match=r"gives model\.layers\.\*\.mlp\.gate_proj 'packed_colwise'"
    ):
        tensor_parallel.plan_(model)
    model.tp_plan = {"model.layers.*.mlp.gate_proj": "all_reduce"}  # leaves parameters whole
    tensor_parallel.plan_(model)
    assert model.tp_plan == {"model.layers.*.mlp.gate_proj": "all_reduce"}


def test_an_older_transformers_is_named(monkeypatch, root):
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    monkeypatch.setattr(quantizer, "is_divided", lambda model: True)
    message = r"needs transformers>=5\.16, got 5\..*; run: pip"
    with pytest.raises(ImportError, match=message):
        AutoModelForCausalLM.from_pretrained(root / "llama, MLP")
    with pytest.raises(ImportError, match=message):
        hf.load(root / "llama, MLP", tp=2)
