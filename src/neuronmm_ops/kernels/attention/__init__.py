"""Causal attention with grouped queries: prefill, and one token with a KV cache."""
