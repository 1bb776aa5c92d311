"""`python benchmarks aws`: a clone's kernel next to ours. A stand-in of ours has its signature."""

import json
import os
import sys
from pathlib import Path

import pytest
from commands import run

from benchmarks import aws

ROOT = Path(__file__).parents[2]

MLP = """\
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def mlp(
    hidden, gate, up, down, quantization_type=None, output_dtype=None,
    gate_w_scale=None, up_w_scale=None, down_w_scale=None,
    gate_up_in_scale=None, down_in_scale=None,
):
    out = nl.ndarray(hidden.shape, dtype=hidden.dtype, buffer=nl.shared_hbm)
    if quantization_type is not None:
        assert gate.dtype == "float8_e4m3" and down_in_scale.shape == (128, 1)
    for matrix in (gate, up, down):
        rows, columns = matrix.shape
        for start in range(0, rows, 128):
            tile = nl.ndarray((128, columns), dtype=matrix.dtype)
            nisa.dma_copy(tile, matrix[start : start + 128])
    if nl.program_id(0) == 0:
        nisa.dma_copy(out, hidden)
    return out
"""


LAYERS = """\
import nki.isa as nisa
import nki.language as nl

def transformer_tkg(
    X, W_qkvs, W_outs, W_gates, W_ups, W_downs, W_gamma_qkvs, W_gamma_mlps, K_caches, V_caches,
    RoPE_cos, RoPE_sin, mask_cache, mask_active, position_ids, num_layers, replica_groups,
):
    out = nl.ndarray(X.shape, dtype=X.dtype, buffer=nl.shared_hbm)
    for layer in range(num_layers):
        for matrix in (W_qkvs[layer], W_outs[layer], W_gates[layer], W_ups[layer], W_downs[layer]):
            rows, columns = matrix.shape
            for start in range(128 * nl.program_id(0), rows, 256):
                tile = nl.ndarray((128, columns), dtype=matrix.dtype)
                nisa.dma_copy(tile, matrix[start : start + 128])
    if nl.program_id(0) == 0:
        nisa.dma_copy(out, X)
    return out
"""


# In a process of its own: what imports nki there finds the simulated core's.
CALL = """\
import json, sys
from pathlib import Path
from benchmarks import aws
aws.RANKS, aws.LAYERS = {"Llama-3.2-1B": 8}, (("Llama-3.2-1B", 8),)
aws.PROMPTS = (("Llama-3.2-1B", 8),)
print(json.dumps(aws.run(Path(sys.argv[1]))))
"""


@pytest.mark.slow
def test_a_row_has_both_kernels(tmp_path):
    for name, source in (
        ("core/mlp/mlp", MLP),
        (
            "core/utils/common_types",
            "from enum import Enum\nQuantizationType = Enum('Q', 'STATIC')",
        ),
        ("experimental/transformer/transformer_tkg", LAYERS),
    ):
        path = tmp_path / f"src/nkilib_src/nkilib/{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    one, two, prompt, in_fp8, layer = json.loads(
        run(sys.executable, "-c", CALL, tmp_path, PYTHONPATH=path)
    )
    assert [row["what"] for row in (one, two, layer)] == ["MLP", "MLP", "layer"]
    assert (prompt["what"], in_fp8["what"]) == ("prompt's MLP", "prompt's MLP, fp8")
    # theirs is loads alone here
    assert prompt["aws_ms"] > in_fp8["aws_ms"]
    assert prompt["dense_ms"] > 1.3 * in_fp8["dense_ms"]
    assert (one["lnc"], two["lnc"], one["low_rank_ms"]) == (1, 2, None)
    bytes_ms = 6 * 2048 * 1024 / 2900e6
    assert one["aws_ms"] > bytes_ms / 2
    assert one["dense_ms"] > two["dense_ms"] > bytes_ms / 2
    # theirs is loads alone, of an eighth of q and of the MLP, with k and v of one head
    bytes_ms = 2 * (2048 * (256 + 128 + 3 * 1024) + 256 * 2048) / 2900e6
    assert one["aws_ms"] > layer["aws_ms"] > bytes_ms / 2
    assert layer["dense_ms"] > layer["aws_ms"]


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be a clone of aws-neuron/nki-library"):
        aws.run(tmp_path)
