"""Low-rank gated MLP."""
