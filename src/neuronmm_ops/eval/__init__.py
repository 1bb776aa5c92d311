"""Accuracy: token perplexity of texts and of the papers' data sets; `tasks` has lm-eval's.

Packages of the extra `eval` are imported when they are needed.
"""

from neuronmm_ops.eval.corpora import perplexities
from neuronmm_ops.eval.perplexity import (
    DEFAULT_SEQLEN,
    DOCUMENT_SEPARATOR,
    PerplexityResult,
    block_length,
    encode_documents,
    token_perplexity,
)
from neuronmm_ops.eval.protocols import PROTOCOLS

__all__ = [
    "DEFAULT_SEQLEN",
    "DOCUMENT_SEPARATOR",
    "PROTOCOLS",
    "PerplexityResult",
    "block_length",
    "encode_documents",
    "perplexities",
    "token_perplexity",
]
