"""The simulator's names and signatures against the documented API of NKI 0.6.0.

`nki_api.json` holds that API: names, kinds, parameters with their defaults (null: required).
"""

import ast
import enum
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

API: dict[str, dict[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("nki_api.json").read_text(encoding="utf-8")
)
MODULES = {
    "nki": "neuroncore",
    "nki.collectives": "neuroncore.collectives",
    "nki.isa": "neuroncore.isa",
    "nki.language": "neuroncore.language",
}
EXTENDED = {"simulate"}  # optional parameters of our own may follow the documented ones


def live(module: str) -> Any:
    return importlib.import_module(MODULES[module])


def named(kind: str) -> list[tuple[str, str]]:
    return [(m, name) for m, names in API.items() for name in names if names[name]["kind"] == kind]


def default_matches(module: str, documented: str, default: Any) -> bool:
    """Return whether a live default is the documented one: a literal, or a name of the module."""
    if documented == "...":
        return True
    try:
        literal = ast.literal_eval(documented)
    except ValueError:
        pass
    else:
        return type(default) is type(literal) and default == literal
    expected: Any = None
    for owner in (live(module), live("nki.language")):  # nki.isa borrows equal and maximum
        expected = owner
        for part in documented.split("."):
            expected = getattr(expected, part, None)
        if expected is not None:
            break
    return expected is not None and (default is expected or default == expected)


def mismatches(module: str, documented: list[list[Any]], function: Any, extended: bool = False):
    """Yield how the parameters of a live function differ from the documented ones."""
    actual = list(inspect.signature(function).parameters.values())
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = [stars.get(p.kind, "") + p.name for p in actual]
    own = [p for p in actual[len(documented) :] if p.default is p.empty and p.kind not in stars]
    if extended and not own:
        names = names[: len(documented)]
    if names != [name for name, _ in documented]:
        yield f"parameters {names}, documented {[name for name, _ in documented]}"
        return
    for parameter, (name, default) in zip(actual, documented, strict=False):
        if default is None:
            if parameter.default is not parameter.empty:
                yield f"{name} has a default, documented as required"
        elif parameter.default is parameter.empty:
            yield f"{name} is required, documented default {default}"
        elif not default_matches(module, default, parameter.default):
            yield f"{name}={parameter.default!r}, documented {default}"


def missing(owner: Any, names: list[str]) -> list[str]:
    return [name for name in names if not hasattr(owner, name)]


@pytest.mark.parametrize("module", MODULES)
def test_every_documented_name_exists(module):
    assert missing(live(module), list(API[module])) == []


@pytest.mark.parametrize(("module", "name"), named("function"))
def test_functions_have_the_documented_parameters(module, name):
    function = getattr(live(module), name)
    documented = API[module][name]["parameters"]
    assert list(mismatches(module, documented, function, name in EXTENDED)) == []


@pytest.mark.parametrize(("module", "name"), named("enum"))
def test_enums_have_the_documented_members(module, name):
    kind = getattr(live(module), name)
    assert issubclass(kind, enum.Enum)
    assert set(API[module][name]["members"]) <= set(kind.__members__)


@pytest.mark.parametrize(("module", "name"), named("class"))
def test_classes_have_the_documented_methods(module, name):
    documented = API[module][name]
    kind = getattr(live(module), name)
    methods = documented.get("methods", {})
    assert isinstance(kind, type)
    assert missing(kind, [*documented.get("attributes", []), *methods]) == []
    for method, parameters in methods.items():
        with_self = [["self", None], *parameters]
        assert list(mismatches(module, with_self, getattr(kind, method))) == [], method


@pytest.mark.parametrize(("module", "name"), named("constant"))
def test_constants_have_the_documented_attributes(module, name):
    constant = getattr(live(module), name)
    assert constant is not None
    # Sizes depend on the target: the class has them, and computes them when asked.
    assert missing(type(constant), API[module][name].get("attributes", [])) == []


def test_a_submodule_does_not_import_the_simulator():
    script = """
import sys
from neuroncore.nl.objects import NKIObject
print(sorted(name for name in sys.modules if name.startswith(("numpy", "torch", "neuroncore"))))
import neuroncore as nc
print([name for name in nc.__all__ if not hasattr(nc, name)], hasattr(nc, "absent"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded, public = done.stdout.splitlines()
    parents = ["neuroncore", "neuroncore.nl"]
    assert ast.literal_eval(loaded) == [*parents, "neuroncore.nl.objects"]
    assert public == "[] False"
