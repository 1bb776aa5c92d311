"""Finding the factors: calibrate, factorize, swap."""

from neuronmm_ops.compress.calibrate import collect_moments
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.factorization import Factorization, SecondMoment
from neuronmm_ops.compress.factorize import factorize
from neuronmm_ops.compress.pipeline import compress_
from neuronmm_ops.compress.prune import Pruned, prune_
from neuronmm_ops.compress.record import set_compute_, swap_
from neuronmm_ops.compress.report import CompressionReport, LayerReport, LeftDense
from neuronmm_ops.rank import aligned_rank

__all__ = [
    "CompressionReport",
    "Factorization",
    "LayerReport",
    "LeftDense",
    "Pruned",
    "SVDConfig",
    "SecondMoment",
    "aligned_rank",
    "collect_moments",
    "compress_",
    "factorize",
    "prune_",
    "set_compute_",
    "swap_",
]
