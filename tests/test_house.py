"""The sizes that `make house` prints stay within their limits once they are."""

import ast
from collections import defaultdict

import house
import pytest

# Still above their limits; a size that meets its limit leaves this list for good.
MISSED = (
    *("lines of src/neuronmm_ops", "lines of neuroncore/src", "lines of tests"),
    "functions of more than 9 parameters",
)

LONG_SIGNATURES = (
    # As NKI documents them.
    *("activate2", "nc_matmul", "range_select", "tensor_scalar", "tensor_scalar_reduce"),
    # Public, and keywords with defaults: `neuroncore.simulate`, `hf.compress`, `plan_attention`.
    *("simulate", "compress", "plan_attention"),
)


@pytest.mark.parametrize("name", [name for name in house.SIZES if name not in MISSED])
def test_a_size_within_its_limit_stays_there(name):
    size, most = house.SIZES[name].measure(), house.SIZES[name].most
    assert 0 < size <= most


def test_parameters_of_all_kinds_are_counted():
    (function,) = ast.parse("def f(self, a, b, /, c, *rest, d=1, **named): ...").body
    assert isinstance(function, ast.FunctionDef)
    assert house.parameters(function.args) == 4


def test_every_number_has_a_line(capsys, monkeypatch):
    monkeypatch.setattr(house, "cpu_seconds", lambda *arguments: 0.6)
    house.main()
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(house.SIZES | house.TIMES)
    assert [line.endswith("missed") for line in shown[-3:]] == [True, True, False]


def test_a_class_name_means_one_thing():
    defined: defaultdict[str, list[str]] = defaultdict(list)
    for path in house.files(*house.SOURCES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                defined[node.name].append(f"{path.relative_to(house.ROOT)}:{node.lineno}")
    assert {name: places for name, places in defined.items() if len(places) > 1} == {}


def test_no_variable_is_called_found():
    """The word says that a search ended, not what came of it."""
    bound: list[str] = []
    for path in house.files(*house.SOURCES):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.arg if isinstance(node, ast.arg) else getattr(node, "id", None)
            if name == "found":
                bound.append(f"{path.relative_to(house.ROOT)}:{node.lineno}")
    assert bound == []


def test_long_signatures_are_those_with_a_reason():
    """Beside those of ops, their kernels and plans, whose arguments are an op's operands."""
    operands = ("src/neuronmm_ops/kernels", "src/neuronmm_ops/ops", "src/neuronmm_ops/plan")
    others = [line for line in house.long_signatures() if not line.startswith(operands)]
    assert sorted(line.split()[1] for line in others) == sorted(LONG_SIGNATURES)
