"""Tiny models that are compressed, for tests of what is done with them."""

import warnings
from pathlib import Path
from typing import Any

from tiny import tiny_ids, tiny_model
from transformers import PreTrainedModel

from neuronmm_ops import CalibrationWarning, CompressionReport, SVDConfig, compress_, hf

TEXT = "The quick brown fox jumps over the lazy dog. 0123456789\n" * 40
CONFIG = SVDConfig(ratio=0.3, block=8)


def compressed(
    family: str = "llama", targets: str = "mlp", method: str = "kfac", **options: Any
) -> tuple[PreTrainedModel, CompressionReport]:
    """Return a model of the family, compressed, and the report of it; options are the model's."""
    model = tiny_model(family, **options)
    config = SVDConfig(ratio=0.3, block=8, targets=targets, method=method, allocation="uniform")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return model, compress_(model, config, [tiny_ids()])


def compress(
    model: Path, output: Path, config: SVDConfig = CONFIG, **options: Any
) -> CompressionReport:
    """Compress a directory by a few blocks of the text."""
    return hf.compress(model, config, TEXT, output, **{"samples": 16, "seqlen": 64, **options})
