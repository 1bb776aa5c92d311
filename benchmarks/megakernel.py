"""A whole decoder layer of others' on trn3, all layers in one launch: measured and modelled.

github.com/KevGomes1403/nki-moe-megakernel runs the layers of Qwen3-30B-A3B for one token in one
launch on four ranks of two cores. Its README has the time of a layer from a profile. Here a layer
is what the second one adds to a launch of one. The kernel follows nki-library's conventions, and
takes its buffer manager and exchange from it; this package has no such kernel.
"""

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import neuroncore
from benchmarks.library import traced
from neuroncore import TensorSpec
from neuroncore.dtypes import bfloat16, int32
from neuroncore.hardware import Machine
from neuroncore.profile.uncertain import other_ends, together
from neuroncore.timing.schedule import schedule

CLONE = "nki-moe-megakernel"
"""The folder of its clone, at 621932e."""
TARGET, CORES, RANKS = "trn3", 2, 4
MEASURED_US = 134.47
_HIDDEN, _HEAD, _HEADS, _EXPERTS, _INNER, _TOKENS = 2048, 128, 8 * 128, 128, 192, 640
_OF_LAYER = (
    # q, k, v, output
    *((_HEADS, _HIDDEN), (_HEAD, _HIDDEN), (_HEAD, _HIDDEN), (_HEADS, _HIDDEN)),
    # norms of the heads, and of the layer; router, experts, caches
    *((_HEAD,), (_HEAD,), (_HIDDEN,), (1, _HIDDEN), (_HIDDEN, _EXPERTS)),
    *((_EXPERTS, _HIDDEN, 2 * _INNER), (_EXPERTS, _INNER, _HIDDEN)),
    *((1, 1, _TOKENS, _HEAD), (1, 1, _TOKENS, _HEAD)),
)


def is_at_hand(clones: Path) -> bool:
    """Whether the clone is among these."""
    return (clones / CLONE).is_dir()


def row(clones: Path) -> dict[str, Any]:
    """A row of `course.run`, without the cost of a launch; nki-library must be importable.

    Raises:
        ValueError: the clone has no such kernel, or it needs what is missing.
    """
    source = _source(clones / CLONE)
    one, two = [_profile(source, layers) for layers in (1, 2)]

    @cache
    def added_us(machine: Machine) -> float:
        return (
            schedule(two.launch, machine=machine).time_ns
            - schedule(one.launch, machine=machine).time_ns
        ) / 1e3

    ends = other_ends(two.machine, added_us)
    modelled = added_us(two.machine)
    return {
        "name": "qwen3_moe, a layer in a launch",
        "title": "qwen3_moe",
        "at": "layer, 4 ranks",
        "author": "KevGomes1403",
        "target": TARGET,
        "us": MEASURED_US,
        "dtype": "bfloat16",
        "shapes": [(1, 1, _HIDDEN)],
        "constant": None,
        "modelled_us": modelled,
        "range_us": list(together(two.machine, added_us, ends)),
        "assumed_us": {end.name: end.time_ms for end in ends},
        "error": modelled / MEASURED_US - 1,
    }


def _source(clone: Path) -> Any:
    name = "megakernels.qwen3_moe.transformer_qwen"
    sys.path.insert(0, str(clone))
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{clone} must have the module {name}, and nki-library must lie next to it: {error}"
        ) from error
    finally:
        sys.path.remove(str(clone))


def _profile(source: Any, layers: int) -> neuroncore.Profile:
    shapes = [(1, 1, _HIDDEN), *[shape for shape in _OF_LAYER for _ in range(layers)]]
    specs = [TensorSpec(shape, bfloat16) for shape in (*shapes, (1, _HEAD), (1, _HEAD))]
    kernel = neuroncore.jit(source._build_multilayer_kernel(layers))
    return traced(
        kernel[CORES],
        *specs,
        TensorSpec((1, 1), int32),
        target=TARGET,
        replica_groups=(tuple(range(RANKS)),),
        ranks=RANKS,
        alike_ranks=True,
        uninitialised="warn",
    )
