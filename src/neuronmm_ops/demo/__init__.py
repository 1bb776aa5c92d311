"""A small model that ships with the package, two texts, and what compressing it costs and wins.

The model is a Llama of a million parameters, trained by examples/demo/shipped.py. It and the texts
come from the documentation inside Python 3.11, whose licence is LICENSE-PYTHON.txt next to them.
"""

from pathlib import Path

from neuronmm_ops.demo.measure import run

_HERE = Path(__file__).parent
MODEL = _HERE / "model"
"""A Transformers directory."""
CALIBRATION = _HERE / "calibration.txt"
"""A part of what the model was trained on."""
HELD_OUT = _HERE / "held_out.txt"
"""Text that the model was not trained on."""

__all__ = ["CALIBRATION", "HELD_OUT", "MODEL", "run"]
