"""Compressed checkpoints on disk, read without Transformers and without reading a weight.

A checkpoint is a Transformers directory whose `quantization_config` entry is
`{"quant_method": "neuronmm", "format_version": 1, ...CompressionReport}` and whose safetensors
hold `<layer>.u` `[K, r]` and `<layer>.v` `[r, N]`, and a `<layer>.weight` `[0]` (see `SVDLinear`).
"""

from neuronmm_ops.checkpoint.directory import inspect_checkpoint, read_config, weight_files
from neuronmm_ops.checkpoint.headers import check_float, check_shapes, read_headers

__all__ = [
    "check_float",
    "check_shapes",
    "inspect_checkpoint",
    "read_config",
    "read_headers",
    "weight_files",
]
