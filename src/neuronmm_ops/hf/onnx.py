"""A compressed checkpoint as an ONNX graph, in which every pair is two `MatMul`s."""

import contextlib
import io
import logging
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from neuronmm_ops.checkpoint import read_config
from neuronmm_ops.compress.record import compressed_layers, is_record
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.extras import import_extra
from neuronmm_ops.hf.loading import load, load_tokenizer
from neuronmm_ops.hf.pairs import to_pairs
from neuronmm_ops.output import check_target, replacement

OPSET = 20
"""Of torch 2.9 to 2.14's exporter by default."""


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).logits


def export_onnx(source: str | Path, output: str | Path) -> dict[str, Any]:
    """Write a compressed causal LM as `model.onnx`, its weights in `model.onnx.data`.

    Inputs are `input_ids` and `attention_mask`, int64 `[batch, tokens]`, both sizes free; the
    output is `logits`, `[batch, tokens, vocabulary]`. There is no KV cache: for scoring, prefill
    and other compilers. Weights are float32, for ONNX Runtime has few CPU kernels for bfloat16;
    numbers in a storage are widened.

    Args:
        source: the compressed checkpoint, which is loaded whole.
        output: the directory to write; the tokenizer and `config.json` are written there, too.

    Returns:
        `output`, `layers` that are compressed, `opset`, and `bytes` of the weights.

    Raises:
        CheckpointError: the source cannot be read, is not compressed, is no causal language model
            or one that `torch.onnx.export` refuses.
        ImportError: onnx or onnxscript is missing.
        FileExistsError: the output exists.
        OSError: it cannot be written.
    """
    source, output = Path(source), Path(output)
    check_target(output, False, source)
    if not is_record(read_config(source).get("quantization_config")):
        raise CheckpointError(f"{source} is not compressed; use an exporter of the dense model")
    for package in "onnx", "onnxscript":
        import_extra(package, "onnx")
    model: Any = load(source, verify=True, dtype=torch.float32)
    count = len(compressed_layers(model))
    to_pairs(model)
    size = sum(parameter.nbytes for parameter in model.parameters())
    check_target(output, False, source, size)
    with replacement(output, False) as directory:
        _program(model.eval(), source).save(directory / "model.onnx", external_data=True)
        del model.config.quantization_config
        model.config.save_pretrained(directory)
        with contextlib.suppress(CheckpointError):  # it has none
            load_tokenizer(source).save_pretrained(directory)
    return {"output": str(output), "layers": count, "opset": OPSET, "bytes": size}


def _program(model: nn.Module, source: Path) -> Any:
    ids = torch.ones(2, 8, dtype=torch.long)
    free = {0: Dim("batch"), 1: Dim("tokens")}
    with _silent(), torch.no_grad():
        try:
            return torch.onnx.export(
                _Logits(model).eval(),
                (ids, torch.ones_like(ids)),
                input_names=["input_ids", "attention_mask"],
                output_names=["logits"],
                dynamic_shapes=(free, free),
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
        except Exception as error:  # whatever the exporter, or the model under it, raises
            reason = str(error.__cause__ or error).strip().partition("\n")[0]
            raise CheckpointError(
                f"{source}: torch.onnx.export refuses a {type(model).__name__}: {reason}; "
                "export it dense, and convert that by its engine's own tool"
            ) from error


@contextlib.contextmanager
def _silent() -> Generator[None]:
    """Without the exporter's progress, and its warnings of operators that no model here has."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
