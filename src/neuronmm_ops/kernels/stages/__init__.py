"""What the NKI kernels share: tile arithmetic, and the stages of prefill and of decode."""
