"""`neuronxcc.nki`, the Beta dialect of NKI, interpreted: its kernels run to compare values.

Each call becomes instructions of `nki.isa` on tiles of the simulated core. Of what its compiler
does it has: results that are written where they are assigned, sums in PSUM, copies that two engines
share, tiles renamed, and no load of what SBUF still has.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import sys
import types
from collections.abc import Callable, Generator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from neuroncore import core, isa, language, typing
from neuroncore.kernel import Kernel, RunSettings, run
from neuroncore.legacy import calls
from neuroncore.legacy.indices import Index, IndexGrid
from neuroncore.legacy.renaming import as_values
from neuroncore.legacy.tiles import ParDim, Pending, Tile
from neuroncore.memory.storage import MemoryRegion
from neuroncore.memory.tensor import NkiTensor


class Programs:
    """The programs of a grid, one after the other; they share tensors in shared HBM."""

    def __init__(self, grid: tuple[int, ...]) -> None:
        self.grid, self.place = grid, (0,) * len(grid)
        self._shared: list[Tile] = []
        self._next = 0

    def shared(self, make: Callable[[], Tile]) -> Tile:
        """The program's next tensor in shared HBM: the first program's, for all others."""
        if self._next == len(self._shared):
            self._shared.append(make())
        self._next += 1
        return self._shared[self._next - 1]

    def run(self, body: Callable[[], Any]) -> Any:
        """Run all programs and return the first one's result."""
        results = []
        for place in itertools.product(*[range(max(n, 1)) for n in self.grid]):
            self.place, self._next = place, 0
            results.append(body())
        return results[0] if results else None


def _changed(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_changed(v, kind, change) for v in value)
    return change(value) if isinstance(value, kind) else value


class LegacyKernel(Kernel):
    """A kernel of the Beta dialect; `kernel[4, 2]` is a launch of programs, run on one core."""

    def __init__(self, function: Callable[..., Any], grid: tuple[int, ...] = ()) -> None:
        self.function, self.grid = function, grid

        @functools.wraps(function)
        def launched(*args: Any, **kwargs: Any) -> Any:
            Pending.forget()
            launch = Programs(self.grid)
            core.active("neuronxcc.nki").state["legacy"] = launch
            args = _changed(args, NkiTensor, Tile)
            kwargs = {n: _changed(v, NkiTensor, Tile) for n, v in kwargs.items()}
            result = launch.run(lambda: function(*args, **kwargs))
            on = core.active("neuronxcc.nki")
            as_values(on.trace, on.machine)
            return _changed(result, Tile, lambda t: t.view())

        super().__init__(launched)

    def __getitem__(self, grid: Any) -> LegacyKernel:
        one = copy.copy(self)
        LegacyKernel.__init__(one, self.function, grid if isinstance(grid, tuple) else (grid,))
        return one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it and return its outputs; inside another kernel it is a function."""
        if core.running() is not None:
            return self.function(*args, **kwargs)
        return run(self, args, kwargs, RunSettings(capacity="warn")).outputs


def jit(function: Any = None, **_: Any) -> Any:
    """`nki.jit`, `nki.trace` and `nki.baremetal`, whose options concern the compiler."""
    if function is None:
        return jit
    return function if isinstance(function, LegacyKernel) else LegacyKernel(function)


def _same(function: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator of the compiler, bare or with options, without effect here."""
    return function if callable(function) else _same


def _measured(measure: Any, kernel: Any = None, **options: Any) -> Any:
    if kernel is None:
        return functools.partial(_measured, measure, **options)
    return measure(jit(kernel), **options)


def _launch() -> Programs:
    return core.active("nl.program_id").state["legacy"]


def _language() -> types.ModuleType:
    module = types.ModuleType("neuronxcc.nki.language")
    names = vars(module)
    names |= {n: getattr(language, n) for n in language.__all__}
    for name in language.__all__:
        function = getattr(language, name)
        if getattr(function, "__module__", "") == language.add.__module__ or name in _DIVISIONS:
            kind = calls.binary if function.__code__.co_varnames[1] == "y" else calls.unary
            names[name] = functools.update_wrapper(functools.partial(kind, function), function)
    for name in ("max", "min", "sum", "prod", "all"):
        op = calls.op_of(getattr(language, name)) if name != "all" else language.logical_and
        reduce = functools.partial(calls.reduced, op)
        names[name] = functools.update_wrapper(reduce, getattr(language, name))
    for name in ("softmax", "mean", "var", "rms_norm", "load_transpose2d", "expand_dims"):
        names[name] = functools.partial(_composite, getattr(language, name))
    shared = language.shared_constant
    full = functools.partial(calls.ndarray)
    return _with(
        module,
        par_dim=ParDim,
        ndarray=calls.ndarray,
        zeros=functools.partial(full, value=0),
        ones=functools.partial(full, value=1),
        full=lambda shape, fill_value, dtype, **o: full(shape, dtype, value=fill_value, **o),
        zeros_like=lambda x, dtype=None, **o: full(x.shape, dtype or x.dtype, value=0, **o),
        arange=lambda n: Index(0, {-1: (1, n)}),
        mgrid=type("mgrid", (), {"__getitem__": lambda _, key: IndexGrid(key)})(),
        affine_range=_range, sequential_range=_range, static_range=_range,
        load=calls.load,
        store=calls.store,
        copy=lambda x, dtype=None, mask=None, **_: calls.call(
            "tensor_copy", x, dtype=dtype, mask=mask
        ),
        matmul=calls.matmul,
        transpose=calls.transpose,
        where=calls.where,
        broadcast_to=lambda x, shape, **_: x.broadcast_to(shape),
        loop_reduce=calls.LoopSum,
        shared_constant=lambda array, dtype=None: Tile(shared(_static_cast(array, dtype))),
        shared_identity_matrix=lambda n, dtype=language.uint8: Tile(
            language.shared_identity_matrix(n, dtype)
        ),
        static_cast=_static_cast,
        program_id=lambda axis=0: _launch().place[axis] if _launch().grid else 0,
        num_programs=lambda axes=0: _launch().grid[axes] if _launch().grid else 1,
        program_ndim=lambda: len(_launch().grid),
        nc=int,
        spmd_dim=lambda size, cores=1: size * cores,
        device_print=lambda prefix, x=None, **_: print(prefix, x),
        fp32=types.SimpleNamespace(min=-3.4028235e38, max=3.4028235e38),
    )  # fmt: skip


_DIVISIONS = ("divide", "mod", "fmod")


def _composite(function: Any, *args: Any, mask: Any = None, **kwargs: Any) -> Tile:
    args, kwargs = _changed(args, Tile, lambda t: t.view()), dict(kwargs)
    if "dtype" in kwargs:
        kwargs["dtype"] = calls.dtype_of(kwargs["dtype"])
    return Tile(function(*args, **_changed([kwargs], Tile, lambda t: t.view())[0]))


def _range(*bounds: int, **_: Any) -> range:
    return range(*bounds)


def _static_cast(array: Any, dtype: Any) -> Any:
    return array if dtype is None else array.astype(calls.dtype_of(dtype).numpy)


def _with(module: types.ModuleType, **names: Any) -> types.ModuleType:
    vars(module).update(names)
    return module


@functools.cache
def _modules() -> dict[str, types.ModuleType]:
    from neuroncore import dropin

    made = {"language": _language(), "isa": types.ModuleType("neuronxcc.nki.isa")}
    for name in isa.__all__:
        value = getattr(isa, name)
        is_call = isinstance(value, types.FunctionType) and not name.startswith(("get_", "regi"))
        setattr(made["isa"], name, calls.instruction(name) if is_call else value)
    _with(
        made["isa"],
        affine_select=calls.affine_select,
        iota=calls.iota,
        memset=lambda shape, value, dtype, **_: calls.ndarray(shape, dtype, value=value),
    )
    annotations = {"tensor": typing.tensor, "mutable_tensor": typing.mutable_tensor}
    made["typing"] = _with(types.ModuleType("neuronxcc.nki.typing"), **annotations)
    compiler = made["compiler"] = types.ModuleType("neuronxcc.nki.compiler")
    for name, memory in (("sbuf", MemoryRegion.sbuf), ("psum", MemoryRegion.psum)):
        places = dict.fromkeys(("alloc", "mod_alloc", "auto_alloc"), lambda *_, m=memory, **__: m)
        setattr(compiler, name, types.SimpleNamespace(**places))
    for name in ("skip_middle_end_transformations", "enable_stack_allocator", "no_reorder"):
        setattr(compiler, name, _same)
    nki = _with(
        types.ModuleType("neuronxcc.nki"),
        jit=jit, trace=jit, baremetal=jit, tensor=typing.tensor, **made,
        simulate_kernel=lambda kernel, *args, **kwargs: jit(kernel)(*args, **kwargs),
        benchmark=functools.partial(_measured, dropin.modules()["nki"].benchmark),
        profile=functools.partial(_measured, dropin.modules()["nki"].profile),
    )  # fmt: skip
    top = _with(types.ModuleType("neuronxcc"), nki=nki, __path__=[])
    vars(nki)["__path__"] = []
    return {
        "neuronxcc": top,
        "neuronxcc.nki": nki,
        **{f"{nki.__name__}.{n}": m for n, m in made.items()},
    }


@contextlib.contextmanager
def as_neuronxcc(say: Callable[[str], None] = lambda _: None) -> Generator[None]:
    """Let `neuronxcc.nki` be imported where none is installed; `say` is called when it first is.

    Afterwards its modules are forgotten, and what a kernel's file did to logging is undone.
    """
    finder, disabled = _DialectFinder(say), logging.root.manager.disable
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        logging.disable(disabled)
        sys.meta_path.remove(finder)
        for name in _modules():
            sys.modules.pop(name, None)


class _DialectFinder(MetaPathFinder, Loader):
    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """The module of that name, if it is one of the dialect's."""
        return ModuleSpec(name, self, is_package=True) if name in _modules() else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """The module itself, which is the same for every import."""
        if spec.name == "neuronxcc":
            logging.OFF = logging.CRITICAL + 10  # type: ignore[attr-defined]  # as the compiler does
            self.say(
                "neuronxcc.nki is the Beta dialect, interpreted: times are those of the translated "
                "instructions; `neuroncore migrate` rewrites it"
            )
        return _modules()[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is left to run."""
