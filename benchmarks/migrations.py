"""Files of nki-samples in the Beta dialect: migrated, and their kernels run before and after.

The files are the user's clone; nothing of them is here. Each case has a kernel's arguments and a
reference of our own, in NumPy or torch.
"""

from __future__ import annotations

import ast
import contextlib
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from neuroncore import NkiWarning, as_nki
from neuroncore.dropin import torch_on_cpu
from neuroncore.kernel import Kernel, RunSettings, run
from neuroncore.legacy import as_neuronxcc, jit
from neuroncore.migrate import migrate, read

_PARTS = ("src", "contributed")
_TUTORIALS = "src/nki_samples/tutorials"


@dataclass(frozen=True)
class Ported:
    """A kernel, or a function that launches one, with its arguments and what it should return.

    Attributes:
        name: the function.
        arguments: made of a random generator.
        reference: of the same arguments.
        allowed: the largest error, of the reference's largest value.
        rows: which rows of the output the reference has.
    """

    name: str
    arguments: Callable[[np.random.Generator], tuple[Any, ...]]
    reference: Callable[..., np.ndarray]
    allowed: float = 1e-5
    rows: slice | None = None


def _uniform(*shapes: tuple[int, ...], dtype: Any = np.float32, low: float = -1.0) -> Any:
    def make(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        return tuple(rng.uniform(low, 1, shape).astype(dtype) for shape in shapes)

    return make


def _decaying(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Arguments of a state-space model whose state decays."""
    delta, u, a, b, c = _uniform(*_SCAN, low=0.0)(rng)
    return delta, u, -a, b, c


def _with(make: Any, *values: Any) -> Any:
    return lambda rng: (*make(rng), *values)


def _pooled(x: np.ndarray, k: int) -> np.ndarray:
    c, h, w = x.shape
    return x.astype(np.float32).reshape(c, h // k, k, w // k, k).mean((2, 4))


def _transposed(x: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    return x.reshape(-1, *shape).transpose(0, 2, 1).reshape(x.shape)


def _mamba(
    delta: np.ndarray, u: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray
) -> np.ndarray:
    state = np.zeros((*u.shape[:2], a.shape[1]))
    out = np.zeros(u.shape)
    for t in range(u.shape[2]):
        step = delta[:, :, t, None].astype(np.float64)
        state = np.exp(step * a) * state + step * u[:, :, t, None] * b[:, None, :, t]
        out[:, :, t] = (state * c[:, None, :, t]).sum(2)
    return out


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Of q, k and v [d, n]."""
    scores = q.astype(np.float64).T @ k
    raised = np.exp(scores - scores.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True) @ v.T


def _pipelined(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, _: bool) -> np.ndarray:
    q, k, v = (x.astype(np.float32)[0] for x in (q, k, v))
    return _attention(q[:, _SOME] * scale, k, v.T)[None]


def _maximum(x: np.ndarray, k: int) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(x, (k, k)).max((2, 3))


def _interpolated(mode: str) -> Callable[[np.ndarray], np.ndarray]:
    def reference(x: np.ndarray) -> np.ndarray:
        import torch

        return torch.nn.functional.interpolate(
            torch.from_numpy(x), scale_factor=2, mode=mode
        ).numpy()

    return reference


_LONG = ((1, 128, 16384), (1, 128, 16384), (1, 16384, 128))
_SOME = slice(0, 16384, 128)
_ADDITION = Ported("nki_tensor_add", _uniform((256, 1024), (256, 1024), dtype=np.float16), np.add)
_SCAN = ((1, 256, 512), (1, 256, 512), (256, 4), (1, 4, 512), (1, 4, 512))
_LONGER = _uniform(*((128, 512),) * 3)
_VOLUME = _uniform((2, 70, 7, 5, 6))
CASES = {
    f"{_TUTORIALS}/tensor_addition/tensor_addition_nki_kernels.py": [_ADDITION],
    f"{_TUTORIALS}/tensor_addition/spmd_tensor_addition_nki_kernels.py": [_ADDITION],
    f"{_TUTORIALS}/tensor_addition/spmd_multiple_nc_tensor_addition_nki_kernels.py": [
        Ported("nki_tensor_add_nc2", _ADDITION.arguments, np.add)
    ],
    f"{_TUTORIALS}/average_pool2d/average_pool2d_nki_kernels.py": [
        Ported("tensor_avgpool_kernel", _with(_uniform((2, 6, 6)), 2), _pooled)
    ],
    f"{_TUTORIALS}/transpose2d/transpose2d_nki_kernels.py": [
        Ported("tensor_transpose2D_kernel_", _with(_uniform((5, 12)), (3, 4)), _transposed)
    ],
    f"{_TUTORIALS}/fused_mamba/mamba_nki_kernels.py": [
        Ported(f"mamba_v{i}", _decaying, _mamba) for i in (1, 2, 3)
    ],
    f"{_TUTORIALS}/attention_fwd_performance/attention_kernels.py": [
        *[Ported(f"attn_fwd_v{i}", _uniform(*((128, 128),) * 3), _attention) for i in (1, 2)],
        *[Ported(f"attn_fwd_v{i}", _LONGER, _attention) for i in (3, 4, 5, 6)],
        *[Ported(f"attn_fwd_v{i}", _LONGER, _attention, 1e-2) for i in (7, 8, "8a", 9, 10, 11)],
    ],
    "contributed/matmul.py": [
        Ported("matmul", _uniform((1024, 512), (1024, 2048)), lambda a, b: a.T @ b)
    ],
    "contributed/maxpooling.py": [
        Ported("max_pooling_2d_stride_1", _with(_uniform((140, 33)), 3), _maximum)
    ],
    "contributed/interpolate_bilinear_fwd.py": [
        Ported("interpolate_bilinear_2x_fwd", _uniform((2, 70, 23, 9)), _interpolated("bilinear"))
    ],
    "contributed/interpolate_trilinear_fwd.py": [
        Ported("interpolate_trilinear_2x_fwd", _VOLUME, _interpolated("trilinear"))
    ],
    "contributed/pipelined_attention.py": [
        Ported(
            "flash_fwd",
            _with(_uniform(*_LONG, dtype=ml_dtypes.bfloat16), 0.125, False),
            _pipelined,
            2e-2,
            _SOME,
        )
    ],
    f"{_TUTORIALS}/attention_fwd_performance/test_attention.py": [
        Ported("test_attn_tutorial", lambda _: (), lambda: np.ones(1))  # compares by itself
    ],
}  # fmt: skip
"""By file, its kernels; a file that holds none of its own has a function of the host."""


def run_all(sources: Path, names: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Migrate each file of a clone that imports neuronxcc, and run its cases.

    Yields a row for each kernel: file, kernel, result ("right" or what is not), the largest
    difference of its outputs before and after, the largest error, and the rules of what is left by
    hand in the file. Raises ValueError where there is no such file.
    """
    files = [p for part in _PARTS for p in sorted((sources / part).rglob("*.py"))]
    files = [p for p in files if "neuronxcc" in read(p)]
    if not files:
        raise ValueError(f"{sources} has no file that imports neuronxcc in src or contributed")
    with tempfile.TemporaryDirectory() as folder:
        new, left = Path(folder).resolve(), {}
        for path in files:
            place = new / path.relative_to(sources)
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                text, by_hand = migrate(read(path), path.name)
            except ValueError as error:
                left[path] = str(error)
                continue
            left[path] = ", ".join(sorted({one.rule for one in by_hand}))
            place.write_text(text, encoding="utf-8")
        for path in files:
            file = path.relative_to(sources).as_posix()
            cases = [c for c in CASES.get(file, []) if not names or c.name in names]
            if names and not cases:
                continue
            for case in cases or [None]:
                row = {"file": file, "kernel": case.name if case else "", "result": "no case"}
                row |= {"difference": None, "error": None, "left_by_hand": left[path]}
                yield {**row, **(_compared(case, path, new / file) if case else {})}


def _compared(case: Ported, old: Path, new: Path) -> dict[str, Any]:
    try:
        before = _run(case, old, is_old=True)
        after = _run(case, new, is_old=False)
    except Exception as error:  # what a kernel raises is its result
        last = traceback.extract_tb(error.__traceback__)[-1]
        return {"result": f"{type(error).__name__}: {error} [{Path(last.filename).name}]"[:120]}
    arguments = case.arguments(np.random.default_rng(0))
    expected = np.asarray(case.reference(*arguments), np.float64)
    rows = ... if case.rows is None else (slice(None), case.rows)
    largest = float(np.abs(expected).max())
    difference = float(np.abs(after - before).max()) / largest
    error = float(np.abs(after[rows] - expected).max()) / largest
    is_right = error <= case.allowed and difference <= case.allowed
    if not np.isfinite(error + difference):
        return {"result": "not finite"}
    result = "right" if is_right else "differs"
    return {"result": result, "difference": difference, "error": error}


def _run(case: Ported, path: Path, is_old: bool) -> np.ndarray:
    with _definitions(path) as module, warnings.catch_warnings():
        warnings.simplefilter("ignore", NkiWarning)
        function = getattr(module, case.name)
        arguments = case.arguments(np.random.default_rng(0))
        if case.name == "matmul":  # the file jits it where it calls it
            function = jit(function) if is_old else Kernel(function)
        if case.name == "test_attn_tutorial":
            function("accuracy", module.attn_fwd_v1)
            return np.ones(1)
        if case.name == "flash_fwd":
            arguments = tuple(arguments)
            function = _named(function, ("softmax_scale", "use_causal_mask"), arguments[3:])
            arguments = arguments[:3]
        if isinstance(function, Kernel):
            outputs = run(function, arguments, {}, RunSettings(capacity="warn")).outputs
        else:
            outputs = function(*arguments)
    return np.asarray(outputs, np.float64)


def _named(function: Any, names: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    given = dict(zip(names, values, strict=True))
    return lambda *args: run(function, args, given, RunSettings(capacity="warn")).outputs


@contextlib.contextmanager
def _definitions(path: Path) -> Generator[types.ModuleType]:
    """A file's definitions as a module: what it runs after the last of them is left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    last = max(i for i, n in enumerate(tree.body) if isinstance(n, ast.FunctionDef | ast.ClassDef))
    tree.body = tree.body[: last + 1]
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    modules = set(sys.modules)
    sys.path.insert(0, str(path.parent))
    with as_nki(), torch_on_cpu(), as_neuronxcc():
        try:
            exec(compile(tree, str(path), "exec"), vars(module))  # noqa: S102 - the user's clone
            yield module
        finally:
            sys.path.remove(str(path.parent))
            for name in set(sys.modules) - modules:  # siblings, which have other text next time
                if str(path.parent) in str(getattr(sys.modules[name], "__file__", "")):
                    del sys.modules[name]


def summary(rows: list[dict[str, Any]]) -> str:
    """How many files have right values in every kernel."""
    files: dict[str, bool] = {}
    for row in rows:
        files[row["file"]] = files.get(row["file"], True) and row["result"] == "right"
    kernels = sum(row["result"] == "right" for row in rows)
    right = sum(files.values())
    return f"{right} of {len(files)} files, {kernels} of {len(rows)} kernels right"
