"""How ops become nodes of the engine's NKI wrapper, while Dynamo traces and without it."""

import sys
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import lite_stand_in
import pytest
import stand_ins
import torch
import vllm_neuron_engine
from tolerances import assert_close_to_oracle
from torch import Tensor

from neuronmm_ops import plan as plans
from neuronmm_ops.engines.vllm_neuron import engine
from neuronmm_ops.engines.vllm_neuron.launch import Kernels, planned
from neuronmm_ops.errors import NkiVersionError
from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.ops.spec import OpSpec

LITE = {"libtorch_neuronx_lite/nki/nki_hop.py": "from lite_stand_in import wrap_nki"}
SHAPES = {
    "xw": ((128, 40),),
    "mlp": ((24, 48), (20, 48), (48, 16)),
    "svd_mlp": ((64, 8), (8, 48), (64, 8), (8, 48), (48, 8), (8, 64)),
}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    with stand_ins.neuron_machine(tmp_path, monkeypatch) as found:
        found.nki()
        found.package("libtorch_neuronx_lite", "2.11.0", LITE)
        found.environment(NEURON_PLATFORM_TARGET_OVERRIDE="trn2")
        lite_stand_in.calls.clear()
        torch._dynamo.reset()
        yield found


@pytest.fixture(autouse=True)
def fresh():
    """Specs as a new process has them: nothing of them has been asked for."""
    for op in SHAPES:
        for name in [n for n, m in vars(OpSpec).items() if isinstance(m, cached_property)]:
            vars(SPECS[op]).pop(name, None)


def always(_: Tensor | str) -> bool:
    return True


def operands(op: str, tokens: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = [(tokens, SHAPES[op][0][0]), *SHAPES[op], *([(tokens, 20)] if op == "mlp" else [])]
    return [torch.randn(shape, generator=made) for shape in shapes]


def close(op: str, result: Tensor, tensors: list[Tensor]) -> None:
    reference = SPECS[op].reference
    oracle = reference(*[tensor.double() for tensor in tensors])
    magnitude = reference(*[tensor.double().abs() for tensor in tensors])
    assert_close_to_oracle(result, oracle, reference(*tensors), magnitude)


@pytest.mark.parametrize("op", SHAPES)
@pytest.mark.parametrize("tokens", [3, 256])
@pytest.mark.parametrize("lnc", [1, 2])
def test_a_launch(machine, op, tokens, lnc):
    machine.environment(NEURON_LOGICAL_NC_CONFIG=str(lnc))
    tensors = operands(op, tokens)
    close(op, Kernels(always).run(op, *tensors), tensors)
    (call,) = lite_stand_in.calls
    assert call.grid == (lnc,), "the wrapper keeps no grid of the kernel's own"


@pytest.mark.parametrize(("tokens", "kernel"), [(1, "xw_decode"), (4096, "xw")])
def test_the_kernel_is_the_plans(machine, tokens, kernel):
    shapes = (((2048,), torch.bfloat16), ((2048, 2048), torch.bfloat16))
    (part,) = planned("xw", tokens, shapes, SPECS["xw"].defaults)
    assert part.kernel == kernel
    assert part.kernel in Kernels(always).callers


def test_a_launch_of_many_tokens_is_several(machine, monkeypatch):
    plan = partial(plans.plan_op, max_instructions=1)
    monkeypatch.setattr(plans, "plan_op", plan)
    tensors = operands("mlp", 300)
    close("mlp", Kernels(always).run("mlp", *tensors), tensors)
    assert len(lite_stand_in.calls) == 3


class Compiler:
    """A backend that is given Dynamo's graph as it is, as the engine's is."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        calls = [node for node in graph.graph.nodes if node.op.startswith("call")]
        self.graphs.append([str(node.target) for node in calls])
        return graph.forward


@pytest.mark.slow
def test_a_graph_has_the_wrappers_nodes_only_and_one_graph_serves_a_bucket(machine):
    run, compiler = Kernels(always).run, Compiler()

    def block(x, w, mlp):
        return run("xw", run("svd_mlp", x, *mlp), w)

    compiled = torch.compile(block, backend=compiler, fullgraph=True)
    _, *mlp = operands("svd_mlp", 1)
    w = torch.randn(64, 8)
    buckets = [operands("svd_mlp", tokens)[0] for tokens in (2, 3, 160)]
    for x in buckets:
        compiled(x, w, mlp)
    assert compiler.graphs == [["contiguous", "lite.kernel"] * 2] * 3
    with torch.compiler.set_stance("fail_on_recompile"):
        for x in buckets:
            low, wide = (x, *mlp), [t.double() for t in (x, *mlp)]
            oracle = SPECS["svd_mlp"].reference(*wide) @ w.double()
            magnitude = SPECS["svd_mlp"].reference(*[t.abs() for t in wide]) @ w.double().abs()
            plain = SPECS["svd_mlp"].reference(*low) @ w
            assert_close_to_oracle(compiled(x, w, mlp), oracle, plain, magnitude)


@pytest.mark.parametrize("op", SHAPES)
def test_without_kernels_a_graph_has_plain_matmuls(op):
    torch._dynamo.reset()
    run, compiler = Kernels(lambda _: False).run, Compiler()
    tensors = operands(op, 3)
    compiled = torch.compile(lambda *given: run(op, *given), backend=compiler, fullgraph=True)
    assert torch.equal(compiled(*tensors), SPECS[op].reference(*tensors))
    (targets,) = compiler.graphs
    assert not [target for target in targets if "neuronmm" in target or "lite" in target]


# --- errors are lines ----------------------------------------------------------------------------


def test_without_nki(tmp_path, monkeypatch):
    with (
        stand_ins.neuron_machine(tmp_path, monkeypatch),
        pytest.raises(ImportError, match=r"need nki and wrap_nki of libtorch_neuronx_lite, .*run"),
    ):
        Kernels(always)


def test_neither_module_has_the_engines_answer(monkeypatch):
    vllm_neuron_engine.install()
    monkeypatch.delitem(sys.modules, "vllm_neuron.utils.neuron_utils")
    expected = r"must be in vllm_neuron\.utils\.neuron_utils or vllm_neuron\.nki\.nki_hop, the inst"
    with pytest.raises(ImportError, match=expected):
        engine.kernel_test()
    vllm_neuron_engine.uninstall()


def test_the_wrapper_of_release_0_21(tmp_path, monkeypatch):
    """It is the engine's own, beside a torch_neuronx that has none."""
    with stand_ins.neuron_machine(tmp_path, monkeypatch) as machine:
        machine.nki()
        machine.package("torch_neuronx", "2.9.0", {"torch_neuronx/__init__.py": ""})
        machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE="trn2")
        lite_stand_in.calls.clear()
        vllm_neuron_engine.install(wrap_nki=lite_stand_in.wrap_nki).runs_kernels = True
        tensors = operands("xw", 3)
        close("xw", Kernels(engine.kernel_test()).run("xw", *tensors), tensors)
        assert len(lite_stand_in.calls) == 1
    vllm_neuron_engine.uninstall()


def test_an_nki_that_is_too_old(tmp_path, monkeypatch):
    with stand_ins.neuron_machine(tmp_path, monkeypatch) as machine:
        machine.nki("0.2.0")
        machine.package("libtorch_neuronx_lite", "2.11.0", LITE)
        with pytest.raises(NkiVersionError, match=r"which nki 0\.2\.0 lacks"):
            Kernels(always)


def test_an_unknown_core(machine, monkeypatch):
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE")
    with pytest.raises(RuntimeError, match="set NEURON_PLATFORM_TARGET_OVERRIDE"):
        Kernels(always)
