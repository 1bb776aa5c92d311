"""`compress_` into one byte: what is stored, by which methods, and at what ranks."""

import copy

import pytest
import torch
from torch import nn
from toys import causal_lm, token_batches

from neuronmm_ops import SVDConfig, compress_
from neuronmm_ops.compress.allocate import Matrix
from neuronmm_ops.compress.budget import allocate
from neuronmm_ops.compress.methods import METHODS
from neuronmm_ops.compress.record import compressed_layers
from neuronmm_ops.compress.times import time_us
from neuronmm_ops.plan.linear import Linear
from neuronmm_ops.storages import STORAGES, factor_bytes

pytestmark = pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
SMALL = {"ratio": 0.3, "block": 8}


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(token_batches(1)[0]).logits.float()


@pytest.mark.parametrize(
    ("method", "allocation"),
    [*((method, "greedy") for method in METHODS), ("kfac", "uniform"), ("drift", "uniform")],
)
@pytest.mark.parametrize("storage", STORAGES)
def test_every_method_has_the_ranks_of_native_factors(storage, method, allocation):
    options = {**SMALL, "method": method, "allocation": allocation, "targets": "all-linear"}
    native, model = causal_lm(), causal_lm()
    dense = outputs(model)
    expected = compress_(native, SVDConfig(**options), token_batches())
    stages = {}
    report = compress_(
        model,
        SVDConfig(**options, storage=storage),
        token_batches(),
        lambda stage, done, total: stages.update({stage: (done, total)}),
    )
    assert [layer.r for layer in report.layers] == [layer.r for layer in expected.layers]
    layers = compressed_layers(model)
    assert len(layers) == len(report.layers) > sum(layer.dense for layer in report.layers)
    for found in report.layers:
        layer = layers[found.name]
        assert layer.rank == found.r
        assert layer.storage == found.storage == storage
        for matrix, _ in layer.scaled():
            assert matrix.dtype == STORAGES[storage].torch_dtype
        assert found.bytes == sum(tensor.nbytes for tensor in layer.one_byte_tensors())
    if "drift" not in method:
        assert stages["quantize"] == (len(layers), len(layers))
    # Rounding changes the outputs by a fraction of what the truncation does.
    lost, native_lost = (float((outputs(m) - dense).norm()) for m in (model, native))
    assert lost < native_lost * {"int8": 1.05, "fp8": 1.2, "int4": 2.0}[storage]


def test_bf16_is_what_bfloat16_linears_have_anyway():
    native, model = causal_lm().bfloat16(), causal_lm().bfloat16()
    compress_(native, SVDConfig(**SMALL), token_batches())
    compress_(model, SVDConfig(**SMALL, storage="bf16"), token_batches())
    assert torch.equal(outputs(model), outputs(native))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bf16_of_other_linears_is_refused(dtype):
    model = causal_lm().to(dtype)
    before = copy.deepcopy(model.state_dict())
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"^storage bf16 needs Linears in bfloat16, .* {name}; "):
        compress_(model, SVDConfig(**SMALL, storage="bf16"), token_batches())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("storage", STORAGES)
def test_equal_bytes_buy_more_rank(storage):
    model, native = causal_lm().bfloat16(), causal_lm().bfloat16()
    options = {**SMALL, "ratio": 0.6, "budget": "bytes"}
    report = compress_(model, SVDConfig(**options, storage=storage), token_batches())
    expected = compress_(native, SVDConfig(**options), token_batches())
    dense = sum(layer.dense_bytes for layer in report.layers)
    for found in (report, expected):
        assert sum(layer.bytes for layer in found.layers) <= 0.4 * dense
    pairs = zip(report.layers, expected.layers, strict=True)
    assert all((mine.r or mine.K) >= (its.r or 0) for mine, its in pairs)
    assert report.effective_ratio < expected.effective_ratio
    # Half of the bytes is what the storage takes by itself.
    whole = compress_(
        causal_lm().bfloat16(), SVDConfig(**SMALL, budget="bytes", storage=storage), token_batches()
    )
    assert all(layer.dense and layer.storage == storage for layer in whole.layers)


def test_the_stored_dtype_decides_where_the_model_is_held_in_another():
    config = SVDConfig(ratio=0.6, block=8, budget="bytes", storage="int8")
    held, stored = causal_lm(), causal_lm().bfloat16().float()
    names = [n for n, m in stored.named_modules() if isinstance(m, nn.Linear)]
    dtypes = dict.fromkeys(names, torch.bfloat16)
    as_bf16 = compress_(stored, config, token_batches(), dtypes=dtypes)
    as_held = compress_(held, config, token_batches())
    assert sum(x.r or 0 for x in as_held.layers) != sum(x.r or 0 for x in as_bf16.layers)
    refused = SVDConfig(**SMALL, storage="bf16")
    assert compress_(causal_lm(), refused, token_batches(), dtypes=dtypes).layers


def test_a_matrix_counts_bytes_and_scales():
    matrix = Matrix(64, 128, torch.ones(64), itemsize=2, storage="int8")
    assert (matrix.given, matrix.size(None)) == (2 * 64 * 128, 64 * 128 + 4 * 128)
    assert matrix.size(24) == factor_bytes(64, 128, 24, 2, "int8") == 24 * 192 + 4 * (24 + 128)
    assert max(rank for rank in matrix.ranks(8) if rank) == 40
    plain = Matrix(64, 128, torch.ones(64))
    assert max(rank for rank in plain.ranks(8) if rank) == 40


@pytest.mark.slow
def test_a_budget_of_time_knows_the_storage():
    options = {"ratio": 0.3, "budget": "time", "target": "trn2", "method": "swift", "block": 16}
    curve, sizes, ranks = torch.arange(1024, 0, -1).double(), (1024, 2048), {}
    one_byte = {n: each for n, each in STORAGES.items() if each.group is None}  # int4 is slower
    for storage in (None, *one_byte):
        matrices = {"gate": Matrix(*sizes, curve, itemsize=2, storage=storage)}
        config = SVDConfig(**options, storage=storage)
        ranks[storage] = allocate(config, matrices, {"gate": torch.bfloat16})["gate"]
    native = time_us(Linear(*sizes, 512), 1, "bfloat16", "trn2")
    for name, storage in one_byte.items():
        assert time_us(Linear(*sizes, 512, storage.dtype), 1, "bfloat16", "trn2") < native
        dense = time_us(Linear(*sizes, None, storage.dtype), 1, "bfloat16", "trn2")
        assert dense < time_us(Linear(*sizes), 1, "bfloat16", "trn2")
        two_cores = time_us(Linear(*sizes, None, storage.dtype), 1, "bfloat16", "trn2", lnc=2)
        assert two_cores < dense
        assert (ranks[name] or 1024) > ranks[None]
