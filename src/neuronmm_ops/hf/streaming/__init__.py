"""Compressing models larger than memory: one decoder layer is there at a time.

Three sweeps over the layers. The first two only for methods that need gradients: hidden states of
the gradient rows forward, their gradients backward. The third runs the calibration set forward,
measures each layer's moments, factors its Linears, and writes them to a work directory, from which
a killed run goes on. Then ranks are allocated by the spectra, and the checkpoint is written.

Where MLPs are to be narrower, a sweep over the dense layers goes before: from then on the
checkpoint is read as if it had such MLPs.
"""
