"""A model's own compression as its draft: chosen for the tokens per second of the pair."""

from neuronmm_ops.draft.choose import draft

__all__ = ["draft"]
