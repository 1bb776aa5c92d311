"""Kernels that others timed on devices, beside their modelled times.

Stanford's CS149 has an exercise in NKI (github.com/stanford-cs149/asst4-trainium2): vectors are
added, a matrix transposed, a convolution fused with its max-pool. Solutions are public, some with
the times that their authors measured. Another project
(github.com/allenkchau/trainium-kernel-fusion) has attention and MLPs with reports of theirs, and a
search for faster kernels (github.com/ucb-bar/autocomp) each step's source with its time. All are in
the Beta dialect and run interpreted. A measured time has the cost of a launch, `LAUNCH_US`, which
kernels do not have here.
"""

import ast
import csv
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import neuroncore
from benchmarks.nkibench import module_of
from neuroncore.dtypes import dtype_of
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

    @property
    def title(self) -> str:
        """The kernel, or what a search makes faster."""
        if self.step is None:
            return self.kernel
        return Path(self.file).stem.strip("0123456789_").removesuffix("_trace")

    @property
    def name(self) -> str:
        """The title with what the kernel's time depends on."""
        size = " x ".join(map(str, self.shapes[0]))
        constant = ("step", self.step) if self.constant is None else self.constant
        at = "" if constant[1] is None else ", {} {}".format(*constant)
        return f"{self.title}{at}, {size} {self.dtype}"


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
        found = list(_candidates(_text(clones, "autocomp", file)))
        for step in steps:
            us = 1e3 * found[step][1]
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
        clones: a folder with the clones, named by their authors. Their Python is run.
        progress: called with ("trace", done, in all).
        cases: the kernels, instead of `TIMED`, `reported` and `searched`.

    Returns:
        A row each with the fields and the name of a case, and in us with the launch: `modelled_us`,
        `range_us` (all that is not known, and the launch at its ends) and `assumed_us` (by each
        uncertainty that moves it, with its other end); `error` (relative) of the first.

    Raises:
        ValueError: a clone lacks a file.
    """
    rows: list[dict[str, Any]] = []
    cases = cases or (*TIMED, *reported(clones), *searched(clones))
    with as_neuronxcc(), TemporaryDirectory() as folder:
        for case in cases:
            text = _text(clones, case.author, case.file)
            if case.step is not None:
                text = _IMPORTS + list(_candidates(text))[case.step][0]
            if case.constant is not None:
                name, size = case.constant
                text = re.sub(rf"\b{name} = \d+", f"{name} = {size}", text)
            file = Path(folder, f"solution_{len(rows)}.py")
            file.write_text(text)
            kernel = getattr(module_of(file), case.kernel)
            named = {"name": case.name, "title": case.title}
            rows.append(named | case._asdict() | _modelled(case, kernel))
            if progress is not None:
                progress("trace", len(rows), len(cases))
    return rows


def inside(row: dict[str, Any]) -> bool:
    """Whether the measured time lies in the range of all that is not known."""
    low, high = row["range_us"]
    return low <= row["us"] <= high


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """`kernels`, `mean_error`, `median_error`, `worst`, and how many lie `inside` their range."""
    errors = [row["error"] for row in rows]
    return {
        "kernels": len(rows),
        "mean_error": mean(map(abs, errors)),
        "median_error": median(map(abs, errors)),
        "worst": max(errors, key=abs),
        "inside": sum(map(inside, rows)),
    }


def _modelled(case: TimedSolution, kernel: Any) -> dict[str, Any]:
    operands = [neuroncore.TensorSpec(shape, dtype_of(case.dtype)) for shape in case.shapes]
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
