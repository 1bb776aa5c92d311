"""A model of two small layers, and how its times are modelled."""

import json

from neuronmm_ops.estimate import model
from neuronmm_ops.estimate.decoder import Decoder
from neuronmm_ops.estimate.linears import linears
from neuronmm_ops.models import ModelShape

TINY = ModelShape("tiny", 256, 512, 2, 4, 2, 64, 1000, tied=True)
H, I, LAYERS, VOCAB = 256, 512, 2, 1000  # noqa: E741
QKV, Q = (4 + 2 * 2) * 64, 4 * 64
RANK = 128  # Eq. 5 at ratio 0.2: floor(1.57) blocks
CONFIG = {
    "hidden_size": H,
    "intermediate_size": I,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
}
SHORT = {"target": "trn2", "prompt": 40, "new": 9}


def write_tiny(path, **changes):
    """Write its config.json, and return the directory."""
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    return str(path)


def run(name, progress=None, **options):
    """The document of a model."""
    return model.run(name, model.Options(**options), progress)


def by_name(rows, key="name"):
    """Rows by their name."""
    return {row[key]: row for row in rows}


def components(document, variant, phase):
    """The components of a variant's phase by name."""
    return by_name(
        by_name(document["variants"])[variant]["phases"][phase]["components"], "component"
    )


def decoder(shape=TINY, **options):
    """A decoder on one core of trn2, dense unless options say otherwise."""
    settings = {"target": "trn2", "lnc": 1, "tp": 1, "batch": 1} | options
    return Decoder.uniform(shape, settings.pop("linears", linears(shape)), **settings)


def shapes_of(launch):
    """Of the operands of a launch that are not left out."""
    return [operand.shape for operand in launch.operands if operand is not None]
