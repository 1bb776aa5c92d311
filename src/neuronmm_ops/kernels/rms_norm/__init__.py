"""RMSNorm of tokens, with the residual added before."""
