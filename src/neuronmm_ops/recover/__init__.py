"""Training that wins back what a truncation lost: losses, schedule, data, resume."""

from neuronmm_ops.recover.config import RecoverConfig
from neuronmm_ops.recover.training import Outcome, Training

__all__ = ["Outcome", "RecoverConfig", "Training"]
