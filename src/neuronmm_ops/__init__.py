"""Low-rank LLMs with one fused kernel per swapped Linear.

`compress_` finds the factors, `SVDLinear` and `SVDMLP` hold them, and `torch.ops.neuronmm.*` run
them. `neuronmm_ops.hf` saves and loads Transformers models.

The names below are imported when they are first used, so that the command line starts without
torch. As soon as this package and torch are both imported, in either
order, the ops are registered; with Transformers, `from_pretrained` restores compressed checkpoints.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from neuronmm_ops.import_hooks import after_import

if TYPE_CHECKING:
    from neuronmm_ops.compress import (
        CompressionReport,
        Factorization,
        LayerReport,
        LeftDense,
        Pruned,
        SecondMoment,
        SVDConfig,
        aligned_rank,
        collect_moments,
        compress_,
        factorize,
        prune_,
        set_compute_,
        swap_,
    )
    from neuronmm_ops.errors import (
        CalibrationWarning,
        CheckpointError,
        CompressionWarning,
        NkiVersionError,
        NkiVersionWarning,
        NonFiniteError,
    )
    from neuronmm_ops.eval import PerplexityResult, encode_documents, token_perplexity
    from neuronmm_ops.nn import SVDMLP, StoredLinear, SVDLinear, fuse_decoder_, unfuse_
    from neuronmm_ops.ops import (
        attention,
        decoder_layer,
        last_profile,
        mlp,
        svd_mlp,
        svd_qkv,
        use_impl,
        xuv,
        xw,
    )

__version__ = "0.1.0"

__all__ = [
    "SVDMLP",
    "CalibrationWarning",
    "CheckpointError",
    "CompressionReport",
    "CompressionWarning",
    "Factorization",
    "LayerReport",
    "LeftDense",
    "NkiVersionError",
    "NkiVersionWarning",
    "NonFiniteError",
    "PerplexityResult",
    "Pruned",
    "SVDConfig",
    "SVDLinear",
    "SecondMoment",
    "StoredLinear",
    "__version__",
    "aligned_rank",
    "attention",
    "collect_moments",
    "compress_",
    "decoder_layer",
    "encode_documents",
    "factorize",
    "fuse_decoder_",
    "last_profile",
    "mlp",
    "prune_",
    "set_compute_",
    "svd_mlp",
    "svd_qkv",
    "swap_",
    "token_perplexity",
    "unfuse_",
    "use_impl",
    "xuv",
    "xw",
]

_MODULES = ("errors", "ops", "nn", "compress", "eval", "kernels")
"""A name is in one of them, looked for from below: what comes later imports what comes before."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in __all__:
        for home in _MODULES:
            module = import_module(f"{__name__}.{home}")
            if hasattr(module, name):
                value = globals()[name] = getattr(module, name)
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


after_import("torch", lambda: import_module(f"{__name__}.ops"))


class _Config:
    """Stands for `hf.NeuronMMConfig` in Transformers' table until a checkpoint needs `hf`."""

    @staticmethod
    def from_dict(record: dict[str, Any]) -> Any:
        from neuronmm_ops.extras import import_extra

        return import_extra(f"{__name__}.hf", "hf").NeuronMMConfig.from_dict(record)


def _register_config() -> None:
    method = import_module(f"{__name__}.compress.record").QUANT_METHOD
    auto: Any = sys.modules["transformers.quantizers.auto"]
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method] = _Config


after_import("transformers.quantizers.auto", _register_config)
