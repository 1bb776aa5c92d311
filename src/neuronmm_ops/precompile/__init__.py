"""A model's kernels through NKI's own compiler, on a machine without a Neuron device."""
