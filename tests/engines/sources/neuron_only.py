"""Stand-ins for packages that come as wheels for Neuron alone, so that engines' sources import.

Each module has every name that it is asked for: a class that is a decorator, a base class and a
callable alike, and computes nothing. What an engine computes on a CPU passes them by.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import torch

NEURON_ONLY = ("torch_xla", "torch_neuronx", "neuronxcc", "nki", "nkilib", "libneuronxla")
# Values that engines compute with.
_KNOWN = {
    "__version__": "2.9.0",
    "REDUCE_SUM": "sum",
    "REDUCE_MAX": "max",
    "REDUCE_MIN": "min",
    "get_platform_target": lambda: "trn1",
}


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        return _attribute(cls, name)

    def __getitem__(cls, item: Any) -> Any:
        return cls


def anything(name: str) -> Any:
    """Return a class that stands for whatever it is asked for."""

    def decorate(self: Any, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not options else self

    def make(cls: Any, *args: Any, **options: Any) -> Any:
        return decorate(object.__new__(cls), *args, **options)

    members = {"__new__": make, "__init__": lambda *_, **__: None, "__call__": decorate}
    members |= {"__getattr__": _attribute, "__getitem__": lambda self, _: self}
    return _Anything(name, (), members)


def _attribute(owner: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return anything(name)


class _Module(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name not in _KNOWN and name.startswith("__"):
            raise AttributeError(name)
        value = _KNOWN[name] if name in _KNOWN else anything(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(name == own or name.startswith(f"{own}.") for own in self.packages):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def install(*packages: str) -> None:
    """Make `import` find stand-ins of the Neuron-only packages, and of more."""
    sys.meta_path.insert(0, _Finder((*NEURON_ONLY, *packages)))
    torch.classes.neuron = anything("neuron")  # pyright: ignore


def bare_package(name: str, folder: str) -> None:
    """Make a package's modules importable without its `__init__`, which imports too much."""
    package = types.ModuleType(name)
    package.__path__ = [folder]
    sys.modules[name] = package
