"""Dense gated MLP in one launch: what the low-rank one is measured against."""
