"""The former name of `engines`, for what was written with it: commands, configs, entry points."""

from neuronmm_ops import engines

__path__ = engines.__path__
