"""Dense matmul: the honest baseline, and the path of layers kept dense."""
