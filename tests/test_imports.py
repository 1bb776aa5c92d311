"""Who imports whom, and that the core needs no optional package."""

import ast
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from commands import one_worker, run
from tiny import tiny_model

import neuroncore
import neuronmm_ops
from neuronmm_ops import SVDConfig, compress_
from neuronmm_ops.ops.definitions import SPECS

ROOT = Path(neuronmm_ops.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

# A file may import from the layers below its own. The package root re-exports the core.
# precompile, measure, estimate, hf, recover and eval are one storey; between themselves they
# import in this order.
LAYERS = (
    *("__main__", "cli", "device", "demo", "draft", "reproduce", "doctor", "integrations"),
    "engines",
    *("precompile", "measure", "estimate", "hf", "recover", "eval"),
    *("output", "manifest", "checkpoint", "compress", "parallel", "nn", "ops", "plan", "kernels"),
    *("models", "rank", "progress", "processes", "files", "errors", "extras"),
    *("import_hooks", "storages"),
)
RANK = {name: rank for rank, name in enumerate(reversed(LAYERS))}
ROOT_MAY_IMPORT = {"compress", "errors", "eval", "extras", "import_hooks", "nn", "ops"}

USES_TRANSFORMERS = {"hf", "cli", "device", "draft", "measure"}
LAZY_IN_OPS = {"transformers", "accelerate", "torch_xla", "nki", "torch_neuronx", "neuronxcc"}
ENGINES = ("vllm", "vllm_neuron", "neuronx_distributed", "neuronx_distributed_inference")
OPTIONAL = (
    *("transformers", "accelerate", "peft", "psutil", "matplotlib", "tokenizers", "scipy"),
    *("datasets", "lm_eval", "torch_xla", "nki", *ENGINES),
)


def layer_of(path: Path) -> str:
    """Return the layer of a file, `__init__` for the package root."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def imports_of(path: Path, module_level: bool = False) -> list[str]:
    """Return the dotted names that a file imports; only those run at import time if asked."""
    names: list[str] = []
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if module_level and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        pending.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}:{node.lineno}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def packages_of(path: Path, module_level: bool = False) -> set[str]:
    return {name.split(".")[0] for name in imports_of(path, module_level)}


def imported_layers(path: Path) -> set[str]:
    """Return the layers of this package that a file imports, anywhere in it."""
    parts = [name.split(".") for name in imports_of(path)]
    return {p[1] if len(p) > 1 else "__init__" for p in parts if p[0] == "neuronmm_ops"}


def test_imports_point_downwards():
    upwards: list[str] = []
    for path in MODULES:
        layer, imported = layer_of(path), imported_layers(path)
        if layer == "__init__":
            assert imported <= ROOT_MAY_IMPORT
            continue
        assert layer in RANK, f"{layer} has no place in the layers; give it one in this test"
        # The root imports the core; a module below it that imports the root runs in circles.
        others = sorted(imported - {layer})
        above = [name for name in others if RANK.get(name, RANK["eval"]) >= RANK[layer]]
        upwards += [f"{path.relative_to(ROOT)} may not import {name}" for name in above]
    assert not upwards


def in_layers(*layers: str) -> list[Path]:
    return [path for path in MODULES if layer_of(path) in layers]


def test_packages_are_known_to_few():
    others = [path for path in MODULES if layer_of(path) not in USES_TRANSFORMERS]
    transformers = {"transformers", "accelerate", "tokenizers", "peft"}
    assert [path for path in others if packages_of(path) & transformers] == []
    engines = [path for path in in_layers("engines") if path.parent.name != "engines"]
    others = [path for path in MODULES if path not in engines]
    assert [path for path in others if packages_of(path) & set(ENGINES)] == []
    # Backends are imported when an op is called.
    ops = in_layers("ops")
    assert [path for path in ops if packages_of(path, module_level=True) & LAZY_IN_OPS] == []


def test_the_simulator_and_the_kernels_know_no_torch():
    simulator = sorted(Path(neuroncore.__file__).parent.rglob("*.py"))
    below = [*simulator, *in_layers("kernels")]
    assert [path for path in below if "torch" in packages_of(path)] == []
    assert [path for path in simulator if "neuronmm_ops" in packages_of(path)] == []


def fresh(script: str) -> str:
    """Run a script in a new interpreter and return what it prints."""
    return run(sys.executable, "-W", "error", "-c", script)


def run_blocked(script: str) -> str:
    """Run a script in a new interpreter in which no optional package can be imported."""
    blocker = f"""
import importlib.abc, sys

OPTIONAL = {OPTIONAL!r}

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OPTIONAL:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)

sys.meta_path.insert(0, Blocked())
import torch
torch.set_num_threads(1)
"""
    return fresh(blocker + script)


@pytest.mark.slow
def test_the_core_works_without_any_optional_package():
    output = run_blocked(
        """
try:
    import nki
except ModuleNotFoundError as error:
    assert "(blocked)" in str(error)
else:
    raise AssertionError("nothing is blocked")
import neuronmm_ops as nm
for module in (nm, nm.ops, nm.nn, nm.compress, nm.eval):
    assert all(hasattr(module, name) for name in module.__all__)

x, u, v = torch.randn(5, 8), torch.randn(8, 4), torch.randn(4, 6)
assert nm.xuv(x, u, v).shape == (5, 6)
with torch.no_grad():
    assert nm.xw(x, u).shape == (5, 4)

model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
config = nm.SVDConfig(ratio=0.5, block=8, targets="all-linear", method="kfac")
report = nm.compress_(model, config, [torch.randn(700, 32)])
assert all(type(model[i]) is nm.SVDLinear for i in (0, 2))
assert model(torch.randn(3, 32)).shape == (3, 32)
print([layer.r for layer in report.layers])
import numpy as np
from neuroncore.nl.operators import ACTIVATION
assert ACTIVATION["gelu"].apply(np.zeros(3, np.float32)).tolist() == [0, 0, 0]
print([name for name in OPTIONAL if name in sys.modules])
"""
    )
    assert output.splitlines() == ["[8, 8]", "[]"]


def test_the_public_surface_is_sorted_and_documented():
    names = neuronmm_ops.__all__
    assert names == sorted(set(names), key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    undocumented = [
        n for n in names if n != "__version__" and not (getattr(neuronmm_ops, n).__doc__ or "")
    ]
    assert not undocumented


def declared_names() -> dict[str, str]:
    """Return what type checkers are told of the root's names: the module that each comes from."""
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def test_the_lazy_names_are_those_that_type_checkers_see():
    declared = declared_names()
    assert {*declared, "__version__"} == set(neuronmm_ops.__all__) <= set(dir(neuronmm_ops))
    for name, module in declared.items():
        assert getattr(neuronmm_ops, name) is getattr(import_module(module), name)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        neuronmm_ops.no_such_name  # noqa: B018


@pytest.mark.parametrize("module", ["neuronmm_ops", "neuroncore"])
def test_importing_needs_no_torch(module):
    heavy = {"torch", "numpy", "rich"}
    assert fresh(f"import {module}, sys; print({heavy} & set(sys.modules))") == "set()\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    ["import neuronmm_ops, torch", "import torch, neuronmm_ops", "from neuronmm_ops import *"],
)
def test_the_ops_are_registered_in_either_order_of_imports(imports):
    script = f"""
{imports}
import pkgutil, sys, torch
print(torch.ops.neuronmm.xuv(torch.ones(1, 2), torch.ones(2, 3), torch.ones(3, 1)).item())
print("compress_" in globals() or "neuronmm_ops.compress" in sys.modules)
print(torch.__loader__ is torch.__spec__.loader, type(torch.__loader__).__module__)
print([finder for finder in sys.meta_path if getattr(finder, "package", "") == "torch"])
"""
    output = fresh(script).splitlines()
    assert output == ["6.0", str("*" in imports), "True _frozen_importlib_external", "[]"]


@pytest.mark.slow
def test_the_plain_import_restores_checkpoints_divided_or_names_the_extra(tmp_path, monkeypatch):
    """On one rank of one, without `neuronmm_ops.hf` in the caller's imports."""
    model = tiny_model()
    compress_(model, SVDConfig(ratio=0.3, block=8, method="plain"))
    model.save_pretrained(tmp_path)
    for name, value in one_worker().items():
        monkeypatch.setenv(name, value)
    load = f"""
import neuronmm_ops, warnings
from transformers import AutoModelForCausalLM
warnings.simplefilter("ignore")
def load(**options):
    model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, **options)
    return type(model.model.layers[0].mlp.gate_proj).__name__
"""
    assert fresh(load + "print(load(), load(tp_plan='auto'))") == "SVDLinear SVDLinear\n"
    missing = "import sys; sys.modules['psutil'] = None"
    refused = "\ntry: load()\nexcept ImportError as error: print(error)"
    words = "psutil is not installed; run: pip install 'neuronmm-ops[hf]'\n"
    assert fresh(missing + load + refused) == words


@pytest.mark.slow
def test_looking_for_torch_registers_nothing_and_a_failed_import_can_be_repeated():
    output = fresh(
        """
import importlib.util, sys
import neuroncore
import neuronmm_ops
print(importlib.util.find_spec("torch").name, "torch" in sys.modules)

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.version":
            raise ImportError("refused")

sys.meta_path.insert(0, Refused())
try:
    import torch
except ImportError as error:
    print(error)
del sys.meta_path[0]
print([name for name in sys.modules if name.startswith("neuronmm_ops.")])
"""
    )
    assert output.splitlines() == ["torch False", "refused", "['neuronmm_ops.import_hooks']"]


def test_what_serves_every_op_names_none():
    """A branch on an op's name is a kind that `OpSpec` or a kernel's folder lacks."""
    shared = [*(ROOT / "plan").glob("*.py"), *(ROOT / "ops/backends").glob("*.py")]
    shared += [ROOT / f"kernels/{name}.py" for name in ("problem", "knobs", "simulated")]
    shared += [ROOT / f"ops/{name}.py" for name in ("spec", "register")]
    named = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.value}"
        for path in [*shared, ROOT / "parallel/distributed_ops.py"]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in SPECS
    ]
    assert not named
