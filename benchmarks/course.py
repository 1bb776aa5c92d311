"""Kernels that others timed on devices, next to their modelled times.

Stanford's CS149 has an exercise in NKI (github.com/stanford-cs149/asst4-trainium2): vectors are
added, a matrix transposed, a convolution fused with its max-pool. Solutions are public, some with
the times that their authors measured. Another project
(github.com/allenkchau/trainium-kernel-fusion) has attention and MLPs with reports of theirs, and a
search for faster kernels (github.com/ucb-bar/autocomp) each step's source with its time: all in the
Beta dialect, run interpreted. Decode kernels of a whole model
(github.com/KevGomes1403/nki-moe-megakernel) come with reports, too. A measured time has the cost of
a launch, `LAUNCH_US`, which kernels do not have here.
"""

import ast
import csv
import re
from collections.abc import Iterator
from contextlib import nullcontext
from math import sqrt
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple

import neuroncore
from benchmarks import megakernel
from benchmarks.library import importable
from benchmarks.nkibench import module_of
from neuroncore import as_nki
from neuroncore.dtypes import dtype_of
from neuroncore.kernel import Kernel
from neuroncore.legacy import as_neuronxcc
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.estimate.served import LAUNCH_US


class TimedSolution(NamedTuple):
    """A kernel that its author timed.

    Attributes:
        author: of the clone, whose folder has this name.
        file: of the kernel in the clone.
        kernel: its name.
        us: as measured, with the launch: p99 or p50 of `nki.benchmark`, or a profile's whole time.
        dtype: of all tensors.
        shapes: of the tensors that it takes.
        constant: a name that the kernel sets, and the number that was measured.
        step: of a search, whose file has the kernels of all of them.
        lnc: cores.
        others: of the tensors that have another dtype, by number.
    """

    author: str
    file: str
    kernel: str
    target: str
    us: float
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    constant: tuple[str, int] | None = None
    step: int | None = None
    lnc: int = 1
    others: tuple[tuple[int, str], ...] = ()

    @property
    def title(self) -> str:
        """The kernel, or what is made faster."""
        if self.author == _FUSED:
            return self.file.split("/")[1]
        if self.step is None:
            return self.kernel
        return Path(self.file).stem.strip("0123456789_").removesuffix("_trace")

    @property
    def name(self) -> str:
        """The title with what the kernel's time depends on."""
        size = " x ".join(map(str, self.shapes[0]))
        at = f"{self.at}, " if self.at else ""
        return f"{self.title}, {at}{size} {self.dtype}"

    @property
    def at(self) -> str:
        """What else its time depends on."""
        if self.constant is not None:
            return "{} {}".format(*self.constant)
        if self.step is not None:
            return f"step {self.step}"
        if self.author == _FUSED:
            version = Path(self.file).stem.removeprefix("kernel_")
            return version + (f", {self.lnc} cores" if self.lnc > 1 else "")
        return ""


_FUSED = "KevGomes1403"
_CONVOLVED = (1, 256, 224, 224), (256, 256, 3, 3), (256,)
_CONVOLVED_SMALL = (1, 256, 32, 16), (256, 256, 3, 3), (256,)


def _added(author: str, target: str, times: dict[tuple[str, int, int], float]) -> tuple[Any, ...]:
    constants = {"tiled": "ROW_CHUNK", "stream": "FREE_DIM"}
    return tuple(
        TimedSolution(
            author, "part1/kernels.py", f"vector_add_{name}", target, us, "float32", ((n,),) * 2,
            (constants[name], size),
        )
        for (name, size, n), us in times.items()
    )  # fmt: skip


_HIDDEN, _HEADS, _HEAD, _CACHE = 2048, 8 * 128, 128, (1, 1, 640, 128)
_EXPERTS, _INNER = 128, 192
_OPERANDS: dict[str, tuple[str, Any, Any]] = {
    # hidden, q, k, v, output, two norms, the caches, cos, sin, position
    "attn_tkg/agents": (
        "",
        ((1, 1, _HIDDEN), (_HEADS, _HIDDEN), (_HEAD, _HIDDEN), (_HEAD, _HIDDEN), (_HEADS, _HIDDEN),
         (_HEAD,), (_HEAD,), _CACHE, _CACHE, (1, _HEAD), (1, _HEAD), (1, 1)),
        ((11, "int32"),),
    ),
    # hidden, norm, router, gate and up, its scales, down, its scales
    "moe_fused_tkg/quantized": (
        "qwen3_moe_fused_tkg",
        ((1, 1, _HIDDEN), (1, _HIDDEN), (_HIDDEN, _EXPERTS), (_EXPERTS, _HIDDEN, 2 * _INNER),
         (_EXPERTS, 2 * _INNER), (_EXPERTS, _INNER, _HIDDEN), (_EXPERTS, _HIDDEN)),
        ((3, "int8"), (4, "float32"), (5, "int8"), (6, "float32")),
    ),
    "moe_fused_tkg/versions": (
        "qwen3_moe_fused_tkg",
        ((1, 1, _HIDDEN), (1, _HIDDEN), (_HIDDEN, _EXPERTS), (_EXPERTS, _HIDDEN, 2 * _INNER),
         (_EXPERTS, _INNER, _HIDDEN)),
        (),
    ),
}  # fmt: skip
"""Of a folder: the kernel, "" for the file's last one, shapes, and which are not in bfloat16."""


def _fused(folder: str, target: str, lnc: int, times: dict[str, float]) -> tuple[Any, ...]:
    kernel, shapes, others = _OPERANDS[folder]
    return tuple(
        TimedSolution(
            _FUSED, f"kernels/{folder}/{name}.py", kernel, target, us, "bfloat16", shapes, lnc=lnc,
            others=others,
        )
        for name, us in times.items()
    )  # fmt: skip


TIMED: tuple[TimedSolution, ...] = (
    # its writeup.md, at d155261
    *_added("xaviergonzalez", "trn2", {
        ("tiled", 1, 25_600): 37_318, ("tiled", 128, 25_600): 378,
        ("stream", 2, 25_600): 186, ("stream", 200, 25_600): 15,
        ("stream", 2_000, 256_000): 28, ("stream", 1_000, 256_000): 26,
    }),
    TimedSolution(
        "xaviergonzalez", "part1/kernels.py", "matrix_transpose", "trn2", 86, "float32",
        ((1024, 1024),),
    ),
    *(
        TimedSolution(
            "xaviergonzalez", "part2/conv2d.py", "fused_conv2d_maxpool", "trn2", us, dtype,
            _CONVOLVED,
        )
        for dtype, us in (("float16", 824), ("float32", 3_832))
    ),
    # profiles in its part2/profile, at fecd8c8
    *(
        TimedSolution(
            "chenhzhu", "part2/conv2d.py", "fused_conv2d_maxpool", "trn2", us, "float16", shapes
        )
        for shapes, us in ((_CONVOLVED, 790), (_CONVOLVED_SMALL, 47.18))
    ),
    # a comment in the file, at e17b72e
    TimedSolution(
        "rishic3", "part1/kernels.py", "matrix_transpose_improved", "trn2", 836, "float32",
        ((4096, 4096),),
    ),
    # its solution.md, at 8a1d41c; its convolution transposes weights where it uses them, which a
    # compiler does once
    *_added("robertpare17", "trn1", {
        ("tiled", 1, 25_600): 27_404, ("tiled", 128, 25_600): 206,
        ("stream", 2, 25_600): 53, ("stream", 200, 25_600): 19,
        ("stream", 2_000, 256_000): 34, ("stream", 1_000, 256_000): 29,
    }),
    # its OPTIMIZATION_LOG.md and PROFILING.md, at 90c3c94: whole times of profiles
    *_fused("attn_tkg/agents", "trn2", 1, {
        "v10a": 91.84, "v12a": 88.08, "v12b": 93.42, "v12e": 65.33, "v13_planA": 64.01,
        "v13_planB": 61.43, "v13_planC": 64.15, "v13_BC": 59.47,
    }),
    *_fused("moe_fused_tkg/quantized", "trn2", 2, {"v6a": 125.62, "v7": 120.44, "v12i": 90.54}),
    *_fused("moe_fused_tkg/quantized", "trn3", 2, {"v12i": 88.96, "v14a": 88.06, "v14b": 137.52}),
    *_fused("moe_fused_tkg/versions", "trn2", 2, {"kernel_v28f": 98.15}),
)  # fmt: skip
"""None was seen before the clock was fitted."""
_SEARCHED: dict[str, tuple[str, tuple[tuple[int, ...], ...], tuple[int, ...]]] = {
    "2_gemm": ("bfloat16", ((8192, 4096), (8192, 8192)), (0, 1, 2, 3, 4, 5)),
    "3_mamba": (
        "float32",
        ((1, 256, 2048),) * 2 + ((256, 16),) + ((1, 16, 2048),) * 2,
        (0, 2, 3, 6),
    ),
    "4_attention": ("bfloat16", ((128, 4096),) * 3, (0, 1, 2, 3, 4, 5, 6, 7)),
    "5_sd_attention": ("float32", ((4096, 64),) * 3, (0, 1, 2, 5, 6)),
}
"""Of a file: dtype, shapes, and the steps that run here. Others do not compile, or need copies and
transposes that the dialect's compiler added. A convolution is left out, of which that compiler made
one instruction of 4 to 128: `cases.published` has it, by the counts of its profiles."""
_IMPORTS = """
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import neuronxcc.nki.typing as nt
from neuronxcc.nki.language import par_dim
import numpy as np
"""
_REPORTS = "profiling/reports"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def reported(clones: Path) -> Iterator[TimedSolution]:
    """The kernels that allenkchau's reports time, p50, at d709ddf; those of one launch."""
    author = "allenkchau"
    reports = clones / author / _REPORTS
    for row in _rows(reports / "latency_throughput_20260307T073830Z.csv"):
        shape = 128, int(row["seqlen"])
        file, us = f"kernels/{row['kernel']}/attention.py", float(row["p50_us"])
        name, dtype = f"{row['kernel']}_attention", _DTYPES[row["dtype"]]
        yield TimedSolution(author, file, name, "trn2", us, dtype, (shape,) * 3)
    for row in _rows(reports / "mlp_latency_throughput_20260310T172309Z.csv"):
        m, k, n = map(int, row["config"].split("x"))
        if (name := row["kernel"]) != "baseline":
            shapes, us = ((k, m), (k, n), (1, n)), float(row["p50_us"])
            name = name.replace("fused_", "fused_mlp_")
            dtype = _DTYPES[row["dtype"]]
            yield TimedSolution(author, "kernels/fused/mlp.py", name, "trn2", us, dtype, shapes)


def searched(clones: Path) -> Iterator[TimedSolution]:
    """The steps of ucb-bar/autocomp's searches, the slowest of 10 runs on a trn1.2xlarge.

    At dd26a565.
    """
    for name, (dtype, shapes, steps) in _SEARCHED.items():
        file = f"examples/trn-tutorial/{name}_trace.py"
        candidates = list(_candidates(_text(clones, "autocomp", file)))
        for step in steps:
            us = 1e3 * candidates[step][1]
            yield TimedSolution("autocomp", file, "test", "trn1", us, dtype, shapes, step=step)


def _candidates(trace: str) -> Iterator[tuple[str, float]]:
    """The code and the time in ms of each step, the first one first; nothing of it is run."""
    (statement,) = ast.parse(trace).body
    steps: list[dict[str, ast.expr]] = []
    node = getattr(statement, "value", None)
    while isinstance(node, ast.Call):
        steps.append({each.arg: each.value for each in node.keywords if each.arg})
        node = steps[-1]["parent"]
    for fields in reversed(steps):
        yield ast.literal_eval(fields["code"]), ast.literal_eval(fields["score"])


def _text(clones: Path, author: str, file: str) -> str:
    source = clones / author / file
    if not source.is_file():
        raise ValueError(f"{clones} must have a clone named {author}: no {source}")
    return source.read_text()


def _rows(table: Path) -> list[dict[str, str]]:
    if not table.is_file():
        raise ValueError(f"there is no {table}; clone its repository into a folder of that name")
    with table.open(newline="") as lines:
        return list(csv.DictReader(lines))


def run(
    clones: Path, progress: Progress | None = None, cases: tuple[TimedSolution, ...] = ()
) -> list[dict[str, Any]]:
    """Trace each kernel with a measured time.

    Args:
        clones: a folder with the clones, named by their authors, and nki-library. Their Python is
            run.
        progress: called with ("trace", done, in all).
        cases: the kernels, instead of `TIMED`, `reported`, `searched` and, where its clone is
            at hand, the layer of `megakernel`.

    Returns:
        A row each with the fields and the name of a case, and in us with the launch: `modelled_us`,
        `range_us` (all that is not known, and the launch at its ends) and `assumed_us` (by each
        uncertainty that moves it, with its other end); `error` (relative) of the first. The
        layer has no launch.

    Raises:
        ValueError: a clone lacks a file.
    """
    rows: list[dict[str, Any]] = []
    has_layer = not cases and megakernel.is_at_hand(clones)
    cases = cases or (*TIMED, *reported(clones), *searched(clones))
    library = clones / "nki-library"
    nkilib = importable(library) if library.is_dir() else nullcontext()
    with as_nki(), as_neuronxcc(), TemporaryDirectory() as folder, nkilib:
        for case in cases:
            text = _text(clones, case.author, case.file)
            if case.step is not None:
                text = _IMPORTS + list(_candidates(text))[case.step][0]
            if case.constant is not None:
                name, size = case.constant
                text = re.sub(rf"\b{name} = \d+", f"{name} = {size}", text)
            file = Path(folder, f"solution_{len(rows)}.py")
            file.write_text(text)
            kernel = _kernel(module_of(file), case)
            named = {"name": case.name, "title": case.title, "at": case.at}
            rows.append(named | case._asdict() | _modelled(case, kernel))
            if progress is not None:
                progress("trace", len(rows), len(cases) + has_layer)
        if has_layer:
            rows.append(megakernel.row(clones))
            if progress is not None:
                progress("trace", len(rows), len(rows))
    return rows


def _kernel(module: ModuleType, case: TimedSolution) -> Any:
    """The kernel by its name, or the last one that the file defines."""
    name = case.kernel or [n for n, v in vars(module).items() if isinstance(v, Kernel)][-1]
    kernel = getattr(module, name)
    return kernel if case.lnc == 1 else kernel[case.lnc]


def inside(row: dict[str, Any]) -> bool:
    """Whether the measured time lies in the range of all that is not known."""
    low, high = row["range_us"]
    return low <= row["us"] <= high


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """`kernels`, `mean_error`, `median_error`, `worst`, and how many lie `inside` their range.

    `mean_error_between` is that of the geometric mean of both orders of instructions.
    """
    errors = [row["error"] for row in rows]
    between = [
        sqrt(row["modelled_us"] * row["assumed_us"]["instruction-order"]) / row["us"] - 1
        for row in rows
    ]
    return {
        "kernels": len(rows),
        "mean_error": mean(map(abs, errors)),
        "mean_error_between": mean(map(abs, between)),
        "median_error": median(map(abs, errors)),
        "worst": max(errors, key=abs),
        "inside": sum(map(inside, rows)),
    }


def _modelled(case: TimedSolution, kernel: Any) -> dict[str, Any]:
    dtypes = dict.fromkeys(range(len(case.shapes)), case.dtype) | dict(case.others)
    operands = [
        neuroncore.TensorSpec(shape, dtype_of(dtypes[i])) for i, shape in enumerate(case.shapes)
    ]
    profile = neuroncore.simulate(
        kernel, *operands, target=case.target, mode="trace", capacity="warn"
    ).profile
    low, high = profile.time_range_ms
    modelled = 1e3 * profile.time_ms + LAUNCH_US.middle
    return {
        "modelled_us": modelled,
        "range_us": [1e3 * low + LAUNCH_US.low, 1e3 * high + LAUNCH_US.high],
        "assumed_us": {
            other.name: 1e3 * other.time_ms + LAUNCH_US.middle for other in profile.uncertainties
        },
        "error": modelled / case.us - 1,
    }
