"""Rotary position embedding of queries and keys, prefill; decode's is in its attention kernel."""
