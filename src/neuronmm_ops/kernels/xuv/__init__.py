"""Low-rank matmul."""
