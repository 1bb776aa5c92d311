"""Times that nki-library's own tests store, next to modelled ones: no constant was fitted to them.

AWS's tests of MLPs and of attention name the cycles that a launch took when they were written
(`tpbSgCyclesSum`), which the published ones compare with nothing. They are the means of runs on a
device, and by the sizes picoseconds on trn2. Which compiler made them is not said.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

import neuroncore
from benchmarks.library import importable, plugin, traced
from neuroncore.dtypes import array_dtype
from neuronmm_ops.compress.calibrate import Progress

TARGET = "trn2"
MOST_INSTRUCTIONS = 2_000
"""Of a launch that has a range: it is scheduled a dozen times for it."""
_TESTS = "test.integration.nkilib.core"
_FLAGS = "gate_bias up_bias down_bias norm_bias"
_FEW = (
    "lnc_degree batch seqlen hidden intermediate dtype quant_dtype quantization_type stored "
    f"norm_type fused_add store_add act_fn_type skip_gate {_FLAGS} "
    "use_tkg_gate_up_proj_column_tiling use_tkg_down_proj_column_tiling "
    "use_tkg_down_proj_optimized_layout"
).split()
_MANY = (
    "lnc_degree batch seqlen hidden intermediate stored rtol norm_type quantization_type "
    f"fused_add store_add skip_gate act_fn_type {_FLAGS}"
).split()
"""What stands in their lists, by the names of the function that makes a kernel's operands."""


class StoredTime(NamedTuple):
    """A launch of a kernel of nki-library whose time its tests give.

    Attributes:
        kernel: "MLP, few tokens", "MLP, many tokens" or "attention, many tokens".
        lnc: cores.
        sizes: which its time depends on most.
        us: as stored.
        operands: makes what the kernel is called with, by name.
    """

    kernel: str
    lnc: int
    sizes: tuple[Any, ...]
    us: float
    operands: Callable[[], dict[str, Any]]


def run(clone: Path, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Trace each launch whose time is stored, once.

    Args:
        clone: of aws-neuron/nki-library; a copy of it is imported.
        progress: called with ("trace", done, in all).

    Returns:
        Rows with `kernel`, `lnc`, `sizes`, `us`, `modelled_us` and its `range_us`, both without a
        launch's constant cost, which stored times have, and `exchanges` between two cores. The
        range is None of more than `MOST_INSTRUCTIONS`.

    Raises:
        ValueError: there is no such source, or none of its tests.
    """
    if not (clone / "test/integration").is_dir():
        raise ValueError(f"{clone} must be a clone of aws-neuron/nki-library with its tests")
    neuroncore.install()
    rows: list[dict[str, Any]] = []
    with importable(clone):
        plugin.stand_in("allpairspy")  # their tests draw cases with it: not those that have times
        cases = measured([*_mlps(), *_attention()])
        for case in cases:
            rows.append(_modelled(case))
            if progress is not None:
                progress("trace", len(rows), len(cases))
    return rows


def measured(cases: list[StoredTime]) -> list[StoredTime]:
    """One case of each kernel, sizes and time.

    What stands at several sizes is a limit and no measurement: left out.
    """
    sizes: dict[tuple[str, float], set[tuple[Any, ...]]] = {}
    for case in cases:
        sizes.setdefault((case.kernel, case.us), set()).add((case.lnc, *case.sizes))
    kept = [case for case in cases if len(sizes[case.kernel, case.us]) == 1]
    return [*{(case.kernel, case.us): case for case in reversed(kept)}.values()][::-1]


def with_launch(rows: list[dict[str, Any]]) -> tuple[float, list[float], list[bool]]:
    """Of launches of one kind: their constant cost in us, errors, and which are in their range.

    As `neuroncore calibrate` does: the cost is the one of least relative error.
    """
    weights = [row["us"] ** -2 for row in rows]
    beyond = [row["us"] - row["modelled_us"] for row in rows]
    launch = sum(w * us for w, us in zip(weights, beyond, strict=True)) / sum(weights)
    errors = [(row["modelled_us"] + launch) / row["us"] - 1 for row in rows]
    ranged = [row for row in rows if row["range_us"]]
    inside = [row["range_us"][0] <= row["us"] - launch <= row["range_us"][1] for row in ranged]
    return launch, errors, inside


def exchange_cost(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """What an exchange of two cores takes beyond the modelled time, in us, and its standard error.

    By least squares of relative errors over the launches of MLPs with few tokens on two cores,
    which exchange two to six times; they have one constant cost besides.
    """
    few = [row for row in rows if (row["kernel"], row["lnc"]) == ("MLP, few tokens", 2)]
    us = np.array([row["us"] for row in few])
    beyond = (us - [row["modelled_us"] for row in few]) / us
    by = np.array([[1, row["exchanges"]] for row in few]) / us[:, None]
    costs = np.linalg.lstsq(by, beyond, rcond=None)[0]
    variance = np.sum((by @ costs - beyond) ** 2) / (len(few) - 2)
    return float(costs[1]), float(np.sqrt(variance * np.linalg.inv(by.T @ by)[1, 1]))


def score_cells(rows: list[dict[str, Any]]) -> list[str]:
    """Of launches of one kind, for tables: launch, mean and worst error, how many in range."""
    launch, errors, inside = with_launch(rows)
    worst = max(errors, key=abs)
    within = f"{sum(inside)}/{len(inside)}"
    return [f"{launch:.0f}", f"{mean(map(abs, errors)):.1%}", f"{worst:+.0%}", within]


def by_kind(rows: list[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The rows by kernel and cores, whose launches cost one constant."""
    kinds: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault((row["kernel"], row["lnc"]), []).append(row)
    return dict(sorted(kinds.items()))


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """`launches`, `mean_error` over kinds, `worst`, how many of `ranged` lie `inside` theirs.

    `whole_error` is that of whole times, launches included, which have no modelled cost.
    """
    kinds = [with_launch(some) for some in by_kind(rows).values()]
    return {
        "launches": len(rows),
        "mean_error": mean(mean(map(abs, errors)) for _, errors, _ in kinds),
        "worst": max((each for _, errors, _ in kinds for each in errors), key=abs),
        "whole_error": mean(
            mean(abs(row["modelled_us"] / row["us"] - 1) for row in some)
            for some in by_kind(rows).values()
        ),
        "inside": sum(sum(inside) for *_, inside in kinds),
        "ranged": sum(len(inside) for *_, inside in kinds),
    }


def _modelled(case: StoredTime) -> dict[str, Any]:
    folder, name = _KERNELS[case.kernel]
    kernel = vars(importlib.import_module(f"nkilib_src.nkilib.core.{folder}"))[name]
    if not isinstance(kernel, neuroncore.Kernel):
        kernel = neuroncore.jit(kernel)
    operands = {n.removesuffix(".must_alias_input"): each for n, each in case.operands().items()}
    profile = traced(
        kernel[case.lnc], target=TARGET, follow="kernels", uninitialised="warn", **operands
    )
    own: dict[str, Any] = {
        "kernel": case.kernel,
        "lnc": case.lnc,
        "sizes": list(case.sizes),
        "us": case.us,
    }
    short = profile.instructions <= MOST_INSTRUCTIONS
    return own | {
        "modelled_us": round(1e3 * profile.time_ms, 2),
        "range_us": [round(1e3 * ms, 2) for ms in profile.time_range_ms] if short else None,
        "exchanges": profile.opcodes.get("sendrecv", 0),
    }


_KERNELS = {
    "MLP, few tokens": ("mlp.mlp", "mlp"),
    "MLP, many tokens": ("mlp.mlp", "mlp"),
    "attention, many tokens": ("attention.attention_cte", "attention_cte"),
}


def _mlps() -> Iterator[StoredTime]:
    make = importlib.import_module(f"{_TESTS}.mlp.test_mlp_common").build_fused_norm_mlp
    for kernel, module, names in (
        ("MLP, few tokens", "test_mlp_tkg", _FEW),
        ("MLP, many tokens", "test_mlp_cte", _MANY),
    ):
        tests = importlib.import_module(f"{_TESTS}.mlp.{module}")
        for values in _lists(tests, len(names)):
            given = dict(zip(names, values, strict=True))
            given.pop("rtol", None)
            stored, kind = given.pop("stored"), given["quantization_type"].name
            if not stored or "MX" in kind:
                continue
            if kernel == "MLP, many tokens":
                is_quantized = kind != "NONE"
                quantized = tests.nl.float8_e4m3 if is_quantized else None
                given |= {"dtype": tests.nl.bfloat16, "quant_dtype": quantized}
                given["is_input_quantized"] = is_quantized
            sizes = given["batch"], given["seqlen"], given["hidden"], given["intermediate"], kind
            own = {**given, "tensor_generator": _zeros}
            yield StoredTime(
                *(kernel, given["lnc_degree"], sizes, stored / 1e6),
                lambda own=own: make(**own),
            )


def _lists(tests: Any, length: int) -> Iterator[list[Any]]:
    """Lists of so many values in the lists of a module."""
    for of_module in vars(tests).values():
        if isinstance(of_module, list):
            yield from [one for one in of_module if isinstance(one, list) and len(one) == length]


def _attention() -> Iterator[StoredTime]:
    tests = importlib.import_module(f"{_TESTS}.attention.test_attention_cte")
    for of_module in vars(tests).values():
        for name, names in [*vars(of_module).items()] if isinstance(of_module, type) else []:
            if not (name.endswith("_unit_params") and "tpbSgCyclesSum" in names):
                continue
            for values in vars(of_module)[name.removesuffix("params") + "perms"]:
                given = dict(zip(names.split(", "), values, strict=True))
                stored = given.pop("tpbSgCyclesSum")
                # of trn2 and of trn3
                stored = stored[0] if isinstance(stored, tuple) else stored
                if stored:
                    yield _attended(tests, given, stored / 1e6)


def _attended(tests: Any, given: dict[str, Any], us: float) -> StoredTime:
    lnc, prior = given.pop("vnc_degree", 1), given.pop("prior_len", None)
    shape = ("bs", "bs_kv", "seqlen_q", "seqlen_kv", "d", "sliding_window")
    sizes = tuple([given.get(name, 0) for name in shape])
    own = {
        "bs_kv": given["bs"],
        "seqlen_kv_prior": prior,
        "is_prefix_caching": prior is not None,
        "prior_used_len": None,
        "sliding_window": 0,
        **dict.fromkeys(("tp_k", "sink", "use_cp", "cp_strided_q_slicing", "cache_softmax"), False),
        **dict.fromkeys(("cp_degree", "cp_rank_id")),
        **given,
    }
    return StoredTime(
        *("attention, many tokens", lnc, (*sizes, prior or 0), us),
        lambda: tests.build_attention_cte_input(**own)[0],
    )


def _zeros(shape: tuple[int, ...], dtype: Any, name: str) -> np.ndarray:
    del name
    return np.zeros(shape, dtype if isinstance(dtype, type) else array_dtype(dtype))
