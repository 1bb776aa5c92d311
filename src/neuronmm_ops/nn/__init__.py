"""Modules that replace `nn.Linear` and gated MLPs, and the replacement itself."""

from neuronmm_ops.nn.compressed_linear import CompressedLinear
from neuronmm_ops.nn.dense_linear import DenseLinear, dense_linear, dense_linears
from neuronmm_ops.nn.fused_decoder import fuse_decoder_, unfuse_
from neuronmm_ops.nn.layout import relayout_
from neuronmm_ops.nn.packed_linear import PackedLinear, pack_
from neuronmm_ops.nn.pair import LinearPair
from neuronmm_ops.nn.stored_linear import StoredLinear
from neuronmm_ops.nn.svd_linear import SVDLinear
from neuronmm_ops.nn.svd_mlp import SVDMLP
from neuronmm_ops.nn.swap import shared_weights, swap_modules_

__all__ = [
    "SVDMLP",
    "CompressedLinear",
    "DenseLinear",
    "LinearPair",
    "PackedLinear",
    "SVDLinear",
    "StoredLinear",
    "dense_linear",
    "dense_linears",
    "fuse_decoder_",
    "pack_",
    "relayout_",
    "shared_weights",
    "swap_modules_",
    "unfuse_",
]
