"""Transformers models: loading, compressing, saving, and calibration text.

Importing this registers the quantizer `neuronmm`, so that
`AutoModelForCausalLM.from_pretrained(directory)` restores a compressed checkpoint.
"""

from neuronmm_ops.hf.compress import compress
from neuronmm_ops.hf.computing import load_computing, load_packed
from neuronmm_ops.hf.dense import export_dense
from neuronmm_ops.hf.drafts import load_draft
from neuronmm_ops.hf.generate import generate_text
from neuronmm_ops.hf.loading import load, load_tokenizer
from neuronmm_ops.hf.onnx import export_onnx
from neuronmm_ops.hf.pairs import from_pairs, lora_config, to_pairs
from neuronmm_ops.hf.provenance import CompressionRun, read_run
from neuronmm_ops.hf.prune import prune
from neuronmm_ops.hf.published import import_published
from neuronmm_ops.hf.quantize import quantize
from neuronmm_ops.hf.quantizer import NeuronMMConfig, NeuronMMQuantizer
from neuronmm_ops.hf.recover import recover
from neuronmm_ops.hf.saving import save
from neuronmm_ops.hf.simulated import generate_simulated
from neuronmm_ops.hf.text import calibration_batches, read_text

__all__ = [
    "CompressionRun",
    "NeuronMMConfig",
    "NeuronMMQuantizer",
    "calibration_batches",
    "compress",
    "export_dense",
    "export_onnx",
    "from_pairs",
    "generate_simulated",
    "generate_text",
    "import_published",
    "load",
    "load_computing",
    "load_draft",
    "load_packed",
    "load_tokenizer",
    "lora_config",
    "prune",
    "quantize",
    "read_run",
    "read_text",
    "recover",
    "save",
    "to_pairs",
]
