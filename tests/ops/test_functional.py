"""The public functions under torch.compile and torch.export."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from operands import OPS, make, weight_shapes_of
from tolerances import assert_close_to_oracle
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from neuronmm_ops import ops

FACTORS = {op: weight_shapes_of(op) for op in OPS}
X_UP = ("mlp", ops.mlp, ((6, 7), (5, 7), (7, 4)))
CALLS = [(op, getattr(ops, op), shapes) for op, shapes in FACTORS.items()]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A compiler backend that keeps the graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        self.graphs.append(graph)
        return graph.forward

    def targets(self) -> list[object]:
        return [node.target for graph in self.graphs for node in graph.graph.nodes]


@pytest.mark.parametrize("guard", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("op", "function", "shapes"), [*CALLS, X_UP], ids=[*FACTORS, "x_up"])
def test_compiles_to_one_graph_with_the_op_in_it(op, function, shapes, guard):
    factors = [make(shape).requires_grad_() for shape in shapes]
    backend = Counting()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    with guard():
        for lead in ((2, 8), (9, 11)):  # no size of a factor: equal sizes share a symbol
            given = [make((*lead, 6)), *factors]
            if shapes is X_UP[2]:
                given.append(make((*lead, 5)))
            assert torch.equal(compiled(*given), function(*given))
    assert len(backend.graphs) == 1
    assert getattr(torch.ops.neuronmm, op).default in backend.targets()


@pytest.mark.parametrize(("op", "function", "shapes"), CALLS, ids=FACTORS)
@pytest.mark.slow
def test_trains_under_compile_in_one_graph(op, function, shapes):
    factors = [make(shape, torch.float64) for shape in shapes]
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for lead in ((2, 8), (9, 11)):
        inputs = [make((*lead, 6), torch.float64), *factors]
        grads = []
        for run in (function, compiled):
            leaves = [t.clone().requires_grad_() for t in inputs]
            grads.append(torch.autograd.grad(run(*leaves).square().sum(), leaves))
        for eager, graph in zip(*grads, strict=True):
            assert_close_to_oracle(graph, eager, eager)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.slow
def test_inductor_keeps_one_extern_call_an_op_in_one_dynamic_graph():
    module = Everything()
    backend = Counting()
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    traced = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        (first, *_), (code,) = run_and_get_code(compiled, make((4, 6)))
        assert first.shape == (4, 5)
        for op in FACTORS:
            assert code.count(f"torch.ops.neuronmm.{op}.default(") == 1
        with torch.compiler.set_stance("fail_on_recompile"):
            for lead in (9, 17):
                x = make((lead, 6))
                check_outputs(module, x, compiled(x))
        for lead in (4, 9, 17):
            traced(make((lead, 6)))
    assert len(backend.graphs) == 1


class Everything(torch.nn.Module):
    """One call of each op."""

    def __init__(self) -> None:
        super().__init__()
        for op, shapes in FACTORS.items():
            setattr(self, op, torch.nn.ParameterList(make(shape) for shape in shapes))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(getattr(ops, op)(x, *getattr(self, op)) for op in FACTORS)


def check_outputs(module: Everything, x: Tensor, outputs: tuple[Tensor, ...]) -> None:
    oracles = copy.deepcopy(module).double()(x.double())
    for actual, oracle, eager in zip(outputs, oracles, module(x), strict=True):
        assert_close_to_oracle(actual, oracle, eager)


# torch's own TreeSpec, copied by run_decompositions.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.slow
def test_export_keeps_the_ops():
    module, rows = Everything(), torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(module, (make((4, 6)),), dynamic_shapes=({0: rows},))
    for exported in (program, program.run_decompositions()):
        targets = {str(node.target) for node in exported.graph.nodes}
        assert {f"neuronmm.{op}.default" for op in FACTORS} <= targets
        x = make((9, 6))
        check_outputs(module, x, exported.module()(x))
