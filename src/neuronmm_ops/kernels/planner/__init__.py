"""From shapes, dtype and target to the kernel and blocks that run."""
