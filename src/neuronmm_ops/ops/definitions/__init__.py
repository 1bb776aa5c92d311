"""The ops, a page each. A new op is a page here and a folder of its name in `kernels/`."""

from importlib import import_module

from neuronmm_ops.ops.spec import OpSpec

_PAGES = ("xuv", "xw", "mlp", "svd_mlp", "svd_qkv", "attention", "decoder_layer")
SPECS: dict[str, OpSpec] = {name: import_module(f"{__name__}.{name}").SPEC for name in _PAGES}
"""Every op by its name."""
