"""A whole decoder layer of others' on trn3, all layers in one launch: measured and modelled.

github.com/KevGomes1403/nki-moe-megakernel runs the layers of Qwen3-30B-A3B for one token in one
launch on four ranks of two cores. Its README has the time of a layer from a profile. Here a layer
is what the second one adds to a launch of one. The kernel follows nki-library's conventions, and
takes its buffer manager and exchange from it; this package has no such kernel.
"""

import io
import sys
import warnings
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import neuroncore
from neuroncore import TensorSpec
from neuroncore.dtypes import bfloat16, int32

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
    (low, high), (low_of_two, high_of_two) = one.time_range_ms, two.time_range_ms
    first, second = [{o.name: o.time_ms for o in each.uncertainties} for each in (one, two)]
    modelled = 1e3 * (two.time_ms - one.time_ms)
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
        "range_us": [1e3 * (low_of_two - low), 1e3 * (high_of_two - high)],
        "assumed_us": {
            name: 1e3 * (time_ms - first.get(name, one.time_ms)) for name, time_ms in second.items()
        },
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


def _profile(source: Any, layers: int) -> Any:
    shapes = [(1, 1, _HIDDEN), *[shape for shape in _OF_LAYER for _ in range(layers)]]
    specs = [TensorSpec(shape, bfloat16) for shape in (*shapes, (1, _HEAD), (1, _HEAD))]
    kernel = neuroncore.jit(source._build_multilayer_kernel(layers))
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():  # it reports its memory
        warnings.simplefilter("ignore", neuroncore.NkiWarning)
        return neuroncore.simulate(
            kernel[CORES],
            *specs,
            TensorSpec((1, 1), int32),
            target=TARGET,
            mode="trace",
            replica_groups=(tuple(range(RANKS)),),
            ranks=RANKS,
            alike_ranks=True,
            uninitialised="warn",
        ).profile
