"""`estimate.model` of a compressed checkpoint: its own ranks, storages and dense matrices."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from tiny_model import CONFIG, LAYERS, SHORT, TINY, H, I, by_name, components, run, write_tiny

from neuronmm_ops import SVDConfig
from neuronmm_ops.compress.record import record_of
from neuronmm_ops.compress.report import CompressionReport, LayerReport, NarrowedMLPs
from neuronmm_ops.estimate.ends import ENDS
from neuronmm_ops.estimate.launches import of_op
from neuronmm_ops.estimate.linears import linears, selection
from neuronmm_ops.estimate.ranks import Ranks
from neuronmm_ops.plan.linear import MLP
from neuronmm_ops.storages import matrix_bytes

FP8, INT8 = "float8_e4m3fn", "int8"
M_OF = {"prefill": SHORT["prompt"], "decode": 1}


def matrix(layer, name, r=None, storage=None):
    """What a record says of a Linear of TINY; by hand, for one dense in one byte is a case too."""
    K, N = TINY.projections.get(name, (H, TINY.vocab_size))
    parent = "mlp" if name in MLP else "self_attn"
    name = name if name == "lm_head" else f"model.layers.{layer}.{parent}.{name}"
    shapes = [(K, N)] if r is None else [(K, r), (r, N)]
    size = sum(
        matrix_bytes(shape, 2, storage and {"fp8": FP8}.get(storage, storage)) for shape in shapes
    )
    return LayerReport(name, K, N, r, r is None, None, 0.0, size, 2 * K * N, storage)


UNEVEN = [
    *[matrix(0, name, r) for name, r in zip(MLP, (48, 64, 80), strict=True)],
    *[matrix(0, "q_proj", 32), matrix(0, "o_proj", 16)],
    *[matrix(1, name) for name in MLP],
]
ONE_BYTE = [replace(each, storage="fp8") if each.r else each for each in UNEVEN]
MIXED = [
    *[matrix(0, "gate_proj", 48, "fp8"), matrix(0, "up_proj"), matrix(0, "down_proj", 64, "fp8")],
    *[matrix(1, name, 64, "fp8") for name in MLP],
]


def write(path, layers, narrowed=None, **config):
    """The config.json of a checkpoint with these layers."""
    path.mkdir(exist_ok=True)
    report = CompressionReport(SVDConfig(ratio=0.3), tuple(layers), None, {}, narrowed=narrowed)
    record = record_of(report)
    text = json.dumps(CONFIG | config | {"quantization_config": record})
    (path / "config.json").write_text(text)
    return str(path)


def time_ms(*problems):
    """Of plans of ops `(op, M, matrices, storage)`, one after the other, at each end."""
    on = Ranks(whole=TINY, target="trn2", lnc=1, tp=1)
    machine = ("bfloat16", "trn2", 1)
    each = [of_op(op, M, matrices, *machine, stored) for op, M, matrices, stored in problems]
    found = on.tracer.launches([launch for launches in each for launch in launches])
    return dict(zip(ENDS, found.times_ms, strict=True))


@pytest.mark.parametrize("layers", [UNEVEN, ONE_BYTE])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_component_takes_what_the_plans_of_its_problems_take(tmp_path, layers, phase):
    found = run(write(tmp_path, layers), **SHORT)
    own, M, stored = (
        components(found, "low_rank", phase),
        M_OF[phase],
        FP8 * bool(layers[0].storage),
    )
    pairs = (H, 48), (48, I), (H, 64), (64, I), (I, 80), (80, H)
    dense_mlp, q = ((H, I), (H, I), (I, H)), ((H, 32), (32, 256))
    wanted = {
        "mlp": [("svd_mlp", M, pairs, stored), ("mlp", M, dense_mlp, "")],
        "output": [("xuv", M, ((256, 16), (16, H)), stored), ("xw", M, ((256, H),), "")],
        "qkv": [("xw", M, ((H, 256),), ""), ("xuv", M, q, stored), ("xw", M, ((H, 512),), "")],
    }
    for component, problems in wanted.items():
        assert own[component]["times_ms"] == pytest.approx(time_ms(*problems))
        assert own[component]["launches"] == len(problems)


def test_what_a_checkpoint_permits_is_left_out_unless_it_is_asked_for(tmp_path):
    permitted = [replace(each, compute="fp8") for each in ONE_BYTE if each.storage]
    path = write(tmp_path, permitted)
    note = "activations in fp8, which the checkpoint permits; --compute fp8"
    plain, rounded = (run(path, **SHORT, compute=compute) for compute in (None, "fp8"))
    assert note in plain["left_out"]
    assert note not in rounded["left_out"]
    assert (plain["compute"], rounded["compute"]) == ("x", "fp8")


def test_a_dense_matrix_in_a_storage_is_one_more_case(tmp_path, monkeypatch):
    """A record may not say so yet; what is modelled of one that does is a dense launch in fp8."""
    monkeypatch.setattr(LayerReport, "_checked_storage", lambda self: storage_named(self))
    layers = [matrix(n, "o_proj", None, "fp8") for n in range(LAYERS)]
    layers.append(matrix(0, "lm_head", None, "int8"))
    found = run(write(tmp_path, layers), **SHORT)
    one = by_name(by_name(found["variants"])["low_rank"]["linears"])
    assert (one["o_proj"]["dtype"], one["lm_head"]["dtype"]) == (FP8, INT8)
    assert (found["storage"], found["storage_dense"], found["storage_lm_head"]) == (
        None,
        "fp8",
        "int8",
    )
    times = time_ms(*[("xw", 1, ((256, H),), FP8)] * LAYERS)
    assert components(found, "low_rank", "decode")["output"]["times_ms"] == pytest.approx(times)


def storage_named(layer):
    names = {FP8: "fp8", INT8: "int8", None: None}
    return replace(layer, storage=names[layer.storage])


def test_even_ranks_are_those_of_the_options(tmp_path):
    """The checkpoint and the model whose ranks are uniform, in one storage, take the same time."""
    each = linears(TINY, selection(TINY, ["mlp"]), FP8, ratio=0.2)
    layers = [matrix(n, name, each[name].r, "fp8") for n in range(LAYERS) for name in MLP]
    (tmp_path / "dense").mkdir()
    uniform = run(write_tiny(tmp_path / "dense"), **SHORT, storage="fp8")
    own = run(write(tmp_path / "tiny", layers), **SHORT)
    for variant in ("dense", "low_rank", "dense_one_byte"):
        first, second = (by_name(found["variants"])[variant] for found in (uniform, own))
        assert first == second
    for name in ("ours", "storage", "rank"):
        assert own["speedups"][name] == uniform["speedups"][name]
    assert own["storage"] == "fp8"


def test_dense_is_the_model_before_its_mlps_were_narrowed(tmp_path):
    (tmp_path / "wide").mkdir()
    wide = write_tiny(tmp_path / "wide", intermediate_size=2 * I)
    removed = 3 * H * I * LAYERS
    narrowed = NarrowedMLPs(2 * I, I, removed, 2 * removed)
    found, before = run(write(tmp_path / "tiny", ONE_BYTE, narrowed), **SHORT), run(wide, **SHORT)
    own = by_name(found["variants"])
    assert own["dense"] == by_name(before["variants"])["dense"]
    sizes = {
        name: {(x["K"], x["N"]) for x in own[name]["linears"] if x["name"] in MLP} for name in own
    }
    assert sizes["low_rank"] == {(H, I), (I, H)}
    assert sizes["dense"] == sizes["dense_one_byte"] == {(H, 2 * I), (2 * I, H)}
    listed = sum(layer.dense_bytes for layer in ONE_BYTE)
    assert found["checkpoint"]["dense_matrix_bytes"] == listed + 2 * removed
    with pytest.raises(ValueError, match=r"intermediate_size .*, its record says 8; copy the file"):
        run(write(tmp_path / "odd", ONE_BYTE, replace(narrowed, kept=8)), **SHORT)


def test_what_is_stored_apart_is_launched_apart(tmp_path):
    found = run(write(tmp_path, MIXED), **SHORT)
    # gate, up, their product and down; and one launch of the other layer's MLP
    assert components(found, "low_rank", "decode")["mlp"]["launches"] == 4 + 1
    assert found["checkpoint"]["kinds"] == 2
    rival = by_name(found["variants"])["dense_one_byte"]["linears"]
    assert {(each["name"], each["dtype"]) for each in rival if each["name"] in MLP} == {
        (name, FP8) for name in MLP
    }


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("layers", [UNEVEN, MIXED])
def test_ranks_divide_every_kind_of_layer(tmp_path, layers, tp):
    found = run(write(tmp_path, layers), **SHORT, tp=tp, lnc=2)
    own = by_name(found["variants"])["low_rank"]
    assert sum(each["layers"] for each in own["linears"] if each["name"] == "up_proj") == LAYERS
    for phase in own["phases"].values():
        taken = [each for each in phase["layouts"] if each["taken"]]
        for component in ("qkv", "output", "mlp") if tp > 1 else ():
            rows = [each for each in taken if each["component"] == component]
            assert sum(each["layers"] for each in rows) == LAYERS
            times = sum(each["layers"] * each["launches_ms"] for each in rows)
            (row,) = [each for each in phase["components"] if each["component"] == component]
            assert times == pytest.approx(row["time_ms"])


@pytest.mark.parametrize(("layers", "split"), [(UNEVEN, "over_one_byte"), (ONE_BYTE, "rank")])
def test_the_rivals_are_dense_and_dense_in_one_byte(tmp_path, layers, split):
    found = run(write(tmp_path, layers), **SHORT)
    assert set(found["speedups"]) == {"ours", "storage", split}
    speedups = {name: each["decode"]["middle"] for name, each in found["speedups"].items()}
    assert speedups["ours"] == pytest.approx(speedups["storage"] * speedups[split])
    own = found["checkpoint"]
    assert (own["low_rank"], own["dense"], own["least_rank"], own["greatest_rank"]) == (
        5,
        3,
        16,
        80,
    )
    assert own["matrix_bytes"] == sum(each.bytes for each in layers)
    assert (own["rival_storage"], own["bytes"]) == ("fp8", None)


def test_a_head_of_a_rank_is_two_launches(tmp_path):
    layers = [matrix(0, "lm_head", 64), *ONE_BYTE]
    found = run(write(tmp_path, layers, tie_word_embeddings=False), **SHORT)
    head = components(found, "low_rank", "decode")["lm_head"]
    times = time_ms(("xw", 1, ((H, 64),), ""), ("lm_head", 1, ((64, TINY.vocab_size),), ""))
    assert head["times_ms"] == pytest.approx(times)


def test_progress_counts_equal_layers_once(tmp_path):
    told = []
    run(write(tmp_path, UNEVEN), **SHORT, progress=lambda *step: told.append(step))
    steps = 2 * (3 + 6 + 3)  # parts of dense, of both layers, and of the rival's: two MLPs there
    assert told[-1][1] == told[-1][2] >= steps
    assert [step[1] for step in told] == list(range(1, told[-1][2] + 1))


@pytest.mark.parametrize("names", [["ratio"], ["storage"], ["targets", "storage_dense"]])
def test_nothing_may_be_given_besides(tmp_path, names):
    path = write(tmp_path, UNEVEN)
    values = {"ratio": 0.2, "storage": "fp8", "targets": "mlp", "storage_dense": "int8"}
    listed = ", ".join(name.replace("_", "-") for name in values if name in names)
    words = f"ranks and storages of its own; leave out .*{listed.split(', ')[-1]}"
    with pytest.raises(ValueError, match=words):
        run(path, **SHORT, **{name: values[name] for name in names})
    given = {name: values[name] for name in names} | {"ratio": 0.2}
    assert run(f"{path}/config.json", **SHORT, **given)["checkpoint"] is None


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([replace(UNEVEN[0], name="model.layers.0.mlp.fc1")], "has model.layers.0.mlp.fc1$"),
        (
            [replace(UNEVEN[0], name="model.layers.7.mlp.up_proj")],
            "layers 0 to 1, and lm_head; its",
        ),
        ([replace(UNEVEN[0], K=128)], r"must be \[256, 512\] by the sizes in config.json, its"),
    ],
)
def test_records_that_do_not_fit(tmp_path, layers, words):
    with pytest.raises(ValueError, match=words):
        run(write(tmp_path, layers), **SHORT)


def test_weights_that_are_not_the_record_s(tmp_path):
    path = write(tmp_path, UNEVEN)
    save_file({"model.norm.weight": torch.ones(H)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="config and weights are not of the same checkpoint"):
        run(path, **SHORT)
