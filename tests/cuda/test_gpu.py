"""What runs on an NVIDIA GPU, and nowhere else: skipped on other machines."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from operands import PLAIN, magnitude_of, make
from tiny import tiny_model
from tolerances import assert_close_to_oracle
from torch import Tensor, nn

import neuronmm_ops as nm
from neuronmm_ops import SVDConfig, hf, ops
from neuronmm_ops.cli import main
from neuronmm_ops.nn import SVDMLP, SVDLinear, relayout_
from neuronmm_ops.nn.nearest import nearest
from neuronmm_ops.ops import cuda
from neuronmm_ops.storages import STORAGES, dequantized

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # of torch itself: its compiler's imports, its profiler, the first product of a thread
    pytest.mark.filterwarnings("default::DeprecationWarning", "default:.*(cuBLAS|CUDA Graph)"),
]
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
COMPRESS = ("--block", "8", "--seqlen", "64", "--samples", "32")


def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Return a graph of a call, and the tensor that a replay writes."""
    with torch.no_grad():
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()
    return graph, result


@pytest.mark.parametrize("op", list(cuda.KERNELS))
@pytest.mark.parametrize(("M", "is_taken"), [(1, True), (64, True), (65, False)])
def test_graphs_of_few_tokens_have_the_kernels(op, M, is_taken, monkeypatch):
    launched = []
    run = cuda.KERNELS[op]
    monkeypatch.setitem(cuda.KERNELS, op, lambda *given: (launched.append(op), run(*given))[1])
    module = SVDLinear(64, 96, 16) if op == "xuv" else SVDMLP(64, 96, (16, 24, 16))
    module = relayout_(module).to("cuda", torch.bfloat16)
    x = torch.randn(M, 64, device="cuda", dtype=torch.bfloat16)
    graph, result = captured(lambda: module(x))
    assert launched == [op, op] * is_taken  # compiled, and captured
    x.copy_(torch.randn_like(x))
    graph.replay()
    with torch.no_grad():
        expected = module(x)
    assert len(launched) == 2 * is_taken  # a call outside of graphs
    gap = (result - expected).abs().max()
    assert gap <= 3 * torch.finfo(torch.bfloat16).eps * expected.abs().max()


def test_wrong_operands_are_refused():
    u, v = torch.ones(64, 16, device="cuda").half(), torch.ones(17, 40, device="cuda").half()
    with pytest.raises(ValueError, match="last dimension of u must equal first dimension of v"):
        ops.xuv(torch.ones(2, 64, device="cuda").half(), u, v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("M", [1, 7, 300])
def test_values_and_gradients(M, dtype):
    leaves = [make(shape, dtype, device="cuda") for shape in ((M, 64), (64, 24), (24, 40), (40,))]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    actual, oracle = ops.xuv(*leaves), PLAIN["xuv"](*exact)
    low = [leaf.detach().requires_grad_() for leaf in leaves]
    plain = PLAIN["xuv"](*low)
    assert_close_to_oracle(actual, oracle, plain, magnitude_of("xuv", *exact))
    seed = torch.ones_like(oracle)
    for got, want, beside in zip(
        torch.autograd.grad(actual, leaves, seed.to(dtype)),
        torch.autograd.grad(oracle, exact, seed),
        torch.autograd.grad(plain, low, seed.to(dtype)),
        strict=True,
    ):
        assert_close_to_oracle(got, want, beside, want.abs().max().expand_as(want))


def test_opcheck():
    tensors = [
        make(shape, torch.bfloat16, device="cuda") for shape in ((3, 64), (64, 24), (24, 40))
    ]
    torch.library.opcheck(torch.ops.neuronmm.xuv.default, tuple(tensors), test_utils=CHECKS)


@pytest.mark.parametrize("storage", [None, "fp8", "int8", "int4"])
def test_compiled_modules_have_the_values_of_calls(storage):
    module = SVDMLP(64, 96, (16, 16, 16), storage=storage)
    if storage is None:
        module = module.bfloat16()
    module = relayout_(module).cuda()
    x = torch.randn(3, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = module(x)
        compiled = torch.compile(module, fullgraph=True, mode="reduce-overhead")
        for _ in range(3):  # warmed up, captured, replayed
            gap = (compiled(x).float() - expected.float()).abs().max()
            assert gap <= 3 * torch.finfo(torch.bfloat16).eps * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("storage", ["fp8", "int8", "int4"])
def test_stored_factors_are_never_widened_to_fp32(storage, dtype):
    K = N = 2048
    w, scale = (each.cuda() for each in nearest(torch.randn(K, N) / K**0.5, STORAGES[storage]))
    exact, bias = dequantized(w, scale, torch.float64), torch.ones(N, device="cuda", dtype=dtype)
    for M in (1, 64, 65, 512):
        x = torch.randn(M, K, device="cuda", dtype=dtype)
        ops.xuv(x, w, w, bias, scale, scale)  # brings cuBLAS's workspace
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = ops.xuv(x, w, w, bias, scale, scale)
        peak = torch.cuda.max_memory_allocated() - before
        # a matrix in the dtype of x at a time, of int4 its bytes beside, and sums in fp32
        assert peak <= 3 * K * N + 16 * M * N + 2**21
        oracle = (x.double() @ exact) @ exact + 1
        assert (y - oracle).norm() <= 2 * torch.finfo(dtype).eps * oracle.norm()


def test_float16_sums_do_not_overflow_before_the_scale():
    w = torch.full((2048, 64), 127, dtype=torch.int8, device="cuda")
    scale = torch.full((64,), 1e-4, device="cuda")
    x = torch.ones(100, 2048, dtype=torch.float16, device="cuda")
    torch.testing.assert_close(ops.xw(x, w, None, scale), torch.full_like(x[:, :64], 26.0))


def test_autocast_and_training():
    layer = SVDLinear(64, 40, 16).cuda()
    x = torch.randn(5, 64, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("storage", [None, "fp8", "int8", "int4"])
def test_a_model_compressed_there_is_the_model_compressed_here(tmp_path, storage):
    texts = torch.randint(0, 255, (32, 64))
    outputs = []
    for device in ("cpu", "cuda"):
        model = tiny_model().to(device)
        config = SVDConfig(ratio=0.3, block=8, storage=storage)
        nm.compress_(model, config, [{"input_ids": row[None].to(device)} for row in texts])
        hf.save(model, tmp_path / device)
        with torch.no_grad():
            outputs.append(model(input_ids=texts[:2].to(device)).logits.cpu())
    gap = (outputs[0] - outputs[1]).abs().max()
    # rounding and sums in another order may choose another neighbour in one byte
    assert gap <= (1e-3 if storage is None else 5e-2) * outputs[0].abs().max()
    loaded = hf.load(tmp_path / "cuda").cuda()
    with torch.no_grad():
        again = loaded(input_ids=texts[:2].cuda()).logits.cpu()
    torch.testing.assert_close(again, outputs[1])


def test_commands(tmp_path, dense: Path, text: Path, capsys):
    there = ("--device", "cuda")
    out = str(tmp_path / "out")
    command = ["compress", str(dense), "-o", out, "--calibration", str(text), "--ratio", "0.3"]
    assert main([*command, *COMPRESS, *there]) == 0
    recover = ["recover", out, "--dense", str(dense), "-o", str(tmp_path / "recovered")]
    options = ("--data", str(text), "--steps", "3", "--seqlen", "64")
    assert main([*recover, *options, *there]) == 0
    capsys.readouterr()
    losses = []
    for device in ("cuda", "cpu"):
        evaluate = ["eval", out, "--text", str(text), "--seqlen", "64", "--json"]
        assert main([*evaluate, "--device", device]) == 0
        losses.append(json.loads(capsys.readouterr().out)["ppl_token"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    speed = ["bench", "generate", str(dense), out, "--prompt", "16", "--new", "8", "--json"]
    assert main([*speed, *there, "--compile"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 4
    assert {row["device_name"] for row in rows} == {torch.cuda.get_device_name()}
    assert [row["failed"] for row in rows] == [None] * 4


def test_generated_tokens_are_those_of_the_cpu(dense: Path):
    ids = torch.arange(16)[None]
    tokens = []
    for device in ("cpu", "cuda"):
        model = hf.load(dense).to(device)
        nm.compress_(model, SVDConfig(ratio=0.3, block=8, method="plain"))
        assert sum(
            isinstance(module, nn.Module) and hasattr(module, "u") for module in model.modules()
        )
        tokens.append(model.generate(ids.to(device), max_new_tokens=24, do_sample=False).cpu())
    assert torch.equal(*tokens)
