"""Many workers find what one finds, whatever their shares are."""

import json
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fleet import run_fleet
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from toys import causal_lm, relative_error, token_batches

from neuronmm_ops import SVDConfig, compress_
from neuronmm_ops.compress import calibrate, workers
from neuronmm_ops.compress.record import compressed_layers
from neuronmm_ops.nn.dense_linear import DenseLinear, dense_linear
from neuronmm_ops.storages import dequantized

SMALL: dict[str, Any] = {"ratio": 0.4, "block": 8}


class Case(NamedTuple):
    config: dict[str, Any]
    batches: Callable[[], list[Any]] = lambda: token_batches(5)
    model: Callable[[], nn.Module] = causal_lm
    moment_bytes: int = calibrate.MAX_MOMENT_BYTES


def masked() -> list[dict[str, Tensor]]:
    """Batches of 1, 2, 3, 4 and 5 rows, each padded after other lengths."""
    batches: list[dict[str, Tensor]] = []
    for rows, ids in enumerate(token_batches(5, rows=6), start=1):
        lengths = torch.arange(rows)[:, None] * 5 + 8
        mask = (torch.arange(ids.shape[1]) < lengths).long()
        batches.append({"input_ids": ids[:rows], "attention_mask": mask})
    return batches


class Switch(nn.Module):
    """Three Linears with one input, of which the last two are called for some batches alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Linear(32, 32)
        self.positive = nn.Linear(32, 32)
        self.negative = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.positive if x[0, 0, 0] > 0 else self.negative
        return self.always(x) + chosen(x)


class Turns(nn.Module):
    """Two Linears with two inputs, called in an order that the batch says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(32, 32)
        self.b = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.a, self.b) if x[0, 0, 0] > 0 else (self.b, self.a)
        return first(x) + second(x * x)


def signed(signs: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randn(2, 200, 32, generator=generator) for _ in signs]
    for batch, sign in zip(batches, signs, strict=True):
        batch[0, 0, 0] = 1.0 if sign == "+" else -1.0
    return batches


WHITEN = {"method": "whiten", "allocation": "uniform", "targets": "all-linear"}
CASES = {
    "default": Case({"targets": "all-linear"}),
    "swift-uniform": Case({"method": "swift", "allocation": "uniform"}),
    "plain": Case({"method": "plain"}),
    "zero-sum": Case({"method": "zero-sum"}),
    "drift": Case({"method": "drift", "targets": "all-linear"}),
    "kfac": Case({"method": "kfac", "targets": "all-linear"}),
    "perplexity": Case({"method": "swift", "importance": "perplexity"}),
    "narrower": Case({"targets": "all-linear", "prune_share": 0.5}),
    "masked": Case({}, masked),
    "masked-drift": Case({"method": "drift"}, masked),
    "one-batch": Case({}, lambda: token_batches(1)),
    "one-batch-drift": Case({"method": "drift"}, lambda: token_batches(1)),
    "deferred": Case({"targets": "all-linear"}, moment_bytes=3 * 8 * 64**2),
    "switch": Case(WHITEN, lambda: signed("+-+--"), Switch),
    # With room for one moment each worker keeps another Linear's in the first pass.
    "turns": Case(WHITEN, lambda: signed("+-+-"), Turns, moment_bytes=8 * 32**2),
    "int8": Case({"targets": "all-linear", "storage": "int8"}),
    "fp8-plain": Case({"method": "plain", "storage": "fp8", "budget": "bytes", "ratio": 0.8}),
    "int8-dense": Case({"ratio": 0, "storage": "int8"}),
    "fp8-drift": Case({"method": "drift", "storage": "fp8"}),
    "bfloat16": Case({"method": "kfac"}, model=lambda: causal_lm().bfloat16()),
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """What two workers write of every case: `INDEX.NAME.safetensors` and `.json`."""
    directory = tmp_path_factory.mktemp("fleet")
    code = "import test_workers; test_workers.work()"
    for outcome in run_fleet(directory, 2, code, directory):
        assert outcome.code == 0, outcome.err
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:calibration has:neuronmm_ops.CalibrationWarning")
def test_two_workers_find_what_one_does(name, fleet):
    expected, report = outcome_of(CASES[name])
    # Sums in another order round a number the other way now and then.
    one_byte = "storage" in CASES[name].config
    tolerance = 5e-2 if one_byte else 1e-2 if name == "bfloat16" else 1e-3
    first = load_file(fleet / f"0.{name}.safetensors")
    assert first.keys() == expected.keys()
    for key, product in expected.items():
        assert relative_error(first[key], product) < tolerance
    if name == "default":
        stages = [json.loads((fleet / f"{i}.{name}.json").read_text())["stages"] for i in range(2)]
        assert stages == [
            {"gradients": 10, "calibrate": 3, "factorize": 7, "drift": 2},
            {"gradients": 10, "calibrate": 2, "factorize": 7, "drift": 2},
        ]
    second = load_file(fleet / f"1.{name}.safetensors")
    assert all(torch.equal(first[key], second[key]) for key in first)
    for index in range(2):
        told = json.loads((fleet / f"{index}.{name}.json").read_text())
        assert told["calibration"] == report["calibration"]
        assert [layer["r"] for layer in told["layers"]] == [x["r"] for x in report["layers"]]
        losses = [layer["loss"] for layer in report["layers"]]
        assert [layer["loss"] for layer in told["layers"]] == pytest.approx(losses, rel=1e-4)


def outcome_of(case: Case) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the products u @ v of what has been compressed, and the report."""
    model, stages = case.model(), dict[str, int]()
    before, calibrate.MAX_MOMENT_BYTES = calibrate.MAX_MOMENT_BYTES, case.moment_bytes
    try:
        config = SVDConfig(**{**SMALL, **case.config})
        report = compress_(
            model, config, case.batches(), lambda stage, _, total: stages.update({stage: total})
        )
    finally:
        calibrate.MAX_MOMENT_BYTES = before
    layers = compressed_layers(model)
    assert layers
    matrices = {
        n: [dequantized(*pair, torch.float32).float() for pair in m.scaled()]
        for n, m in layers.items()
    }
    return {n: reduce(torch.matmul, each).detach().clone() for n, each in matrices.items()}, {
        **report.to_dict(),
        "stages": stages,
    }


def work() -> None:
    """Run every case as one of many workers."""
    dist.init_process_group("gloo")
    assert workers.count() == 1  # a process may work alone
    with workers.together():
        for name, case in CASES.items():
            products, report = outcome_of(case)
            path = f"{sys.argv[1]}/{workers.index()}.{name}"
            save_file(products, f"{path}.safetensors")
            Path(f"{path}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def test_one_worker_is_enough():
    total = torch.ones(3)
    workers.sum_(total)
    assert torch.equal(total, torch.ones(3))
    assert (workers.count(), workers.index()) == (1, 0)
    assert workers.share([1, 2, 3]) == [1, 2, 3]
    assert workers.gather("own") == ["own"]


def test_together_needs_a_process_group():
    with pytest.raises(ValueError, match=r"init_process_group\(\) first"), workers.together():
        pass


def test_the_most_expensive_go_first_to_who_has_least_to_do(monkeypatch):
    monkeypatch.setattr(workers, "count", lambda: 2)
    sizes = {"small": (8, 8), "wide": (8, 16), "large": (16, 16), "also": (8, 8)}
    assert workers.spread({n: linear(K, N) for n, (K, N) in sizes.items()}) == {
        "large": 0,  # 4096
        "wide": 1,  # 1024
        "small": 1,  # 512
        "also": 1,
    }


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=12), st.integers(1, 5))
def test_no_worker_has_more_than_one_matrix_too_much(sizes, count):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "count", lambda: count)
        owners = workers.spread({str(i): linear(K, N) for i, (K, N) in enumerate(sizes)})
    loads = [0] * count
    for i, (K, N) in enumerate(sizes):
        loads[owners[str(i)]] += K * N * min(K, N)
    largest = max((K * N * min(K, N) for K, N in sizes), default=0)
    assert max(loads) - min(loads) <= largest


@given(st.lists(st.integers()), st.integers(1, 5))
def test_every_item_is_somebodys(items, count):
    shares = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "count", lambda: count)
        for index in range(count):
            patch.setattr(workers, "index", lambda index=index: index)
            shares += workers.share(items)
    assert sorted(shares) == sorted(items)


def linear(K: int, N: int) -> DenseLinear:
    found = dense_linear(nn.Linear(K, N))
    assert found is not None
    return found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["kfac", "swift", "whiten", "plain", "zero-sum", "drift"])
@pytest.mark.filterwarnings("ignore:calibration has:neuronmm_ops.CalibrationWarning")
def test_a_cuda_device_finds_what_the_cpu_does(method):
    config = {"method": method, "targets": "all-linear"}
    expected, report = outcome_of(Case(config))
    on_cuda = Case(config, lambda: [b.cuda() for b in token_batches(5)], lambda: causal_lm().cuda())
    found, told = outcome_of(on_cuda)
    assert [x["r"] for x in told["layers"]] == [x["r"] for x in report["layers"]]
    for name, product in expected.items():
        assert found[name].is_cuda
        assert relative_error(found[name].cpu(), product) < 1e-3
