"""Token perplexity, dense or compressed."""

from neuronmm_ops.eval.perplexity import PerplexityResult, encode_documents, token_perplexity

__all__ = ["PerplexityResult", "encode_documents", "token_perplexity"]
