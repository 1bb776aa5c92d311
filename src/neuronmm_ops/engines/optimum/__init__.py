"""Compressed checkpoints in optimum-neuron, whose models are structured as NxD Inference's.

Untested on hardware; see docs/nxdi.md. Importing this imports nothing of optimum.
"""

from importlib import import_module

from neuronmm_ops.engines.nxdi.models import OPTIMUM, causal_lm


def register() -> None:
    """Put low-rank classes in the place of optimum-neuron's own, where it looks a model up.

    Raises:
        ImportError: optimum-neuron is not installed, or its classes are others than those tested.
    """
    models = import_module("optimum.neuron.models.inference.auto_models")
    for model_type in OPTIMUM.families:
        place = models.register_neuron_model_for_inference(model_type, "text-generation")
        place(causal_lm(model_type, OPTIMUM))
