"""Compressed checkpoints in NxD Inference (neuronx-distributed-inference), on Trainium and Inf2.

Untested on hardware; see docs/nxdi.md. Importing this imports nothing of NxD.
"""

from neuronmm_ops.engines.nxdi.export import Export, export
from neuronmm_ops.engines.nxdi.models import causal_lm, register

__all__ = ["Export", "causal_lm", "export", "register"]
