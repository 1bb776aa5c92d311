"""Layers of a decoder in one launch."""

from neuronmm_ops.kernels.decoder_layer.operands import operands as operands

OUTPUTS = (-1, -1)
"""What the last MLP adds to the stream, and the stream: each as wide as the last weight."""
