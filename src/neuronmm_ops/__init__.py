"""Low-rank LLMs with one fused kernel per swapped Linear.

`compress_` finds the factors, `SVDLinear` and `SVDMLP` hold them, and `torch.ops.neuronmm.*` run
them. `neuronmm_ops.hf` saves and loads Transformers models; import it for `from_pretrained`.
"""

from neuronmm_ops.compress import (
    CompressionReport,
    Factorization,
    LayerReport,
    LeftDense,
    SecondMoment,
    SVDConfig,
    aligned_rank,
    collect_moments,
    compress_,
    factorize,
    set_compute_,
    swap_,
)
from neuronmm_ops.errors import (
    CalibrationWarning,
    CheckpointError,
    CompressionWarning,
    NkiVersionError,
    NonFiniteError,
)
from neuronmm_ops.eval import PerplexityResult, encode_documents, token_perplexity
from neuronmm_ops.nn import SVDMLP, SVDLinear
from neuronmm_ops.ops import last_profile, mlp, svd_mlp, svd_qkv, use_impl, xuv, xw

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
    "NonFiniteError",
    "PerplexityResult",
    "SVDConfig",
    "SVDLinear",
    "SecondMoment",
    "__version__",
    "aligned_rank",
    "collect_moments",
    "compress_",
    "encode_documents",
    "factorize",
    "last_profile",
    "mlp",
    "set_compute_",
    "svd_mlp",
    "svd_qkv",
    "swap_",
    "token_perplexity",
    "use_impl",
    "xuv",
    "xw",
]
