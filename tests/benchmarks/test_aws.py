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
def mlp(hidden, gate, up, down):
    out = nl.ndarray(hidden.shape, dtype=hidden.dtype, buffer=nl.shared_hbm)
    for matrix in (gate, up, down):
        rows, columns = matrix.shape
        for start in range(0, rows, 128):
            tile = nl.ndarray((128, columns), dtype=matrix.dtype)
            nisa.dma_copy(tile, matrix[start : start + 128])
    if nl.program_id(0) == 0:
        nisa.dma_copy(out, hidden)
    return out
"""


# In a process of its own: what imports nki there finds the simulated core's.
CALL = """\
import json, sys
from pathlib import Path
from benchmarks import aws
aws.RANKS = {"Llama-3.2-1B": 8}
print(json.dumps(aws.run(Path(sys.argv[1]))))
"""


@pytest.mark.slow
def test_a_row_has_both_kernels(tmp_path):
    folder = tmp_path / "src/nkilib_src/nkilib/core/mlp"
    folder.mkdir(parents=True)
    (folder / "mlp.py").write_text(MLP)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    one, two = json.loads(run(sys.executable, "-c", CALL, tmp_path, PYTHONPATH=path))
    assert (one["lnc"], two["lnc"]) == (1, 2)
    assert (one["H"], one["I"], one["low_rank_ms"]) == (2048, 1024, None)
    bytes_ms = 6 * 2048 * 1024 / 2900e6
    assert one["aws_ms"] > bytes_ms / 2
    assert one["dense_ms"] > two["dense_ms"] > bytes_ms / 2


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be a clone of aws-neuron/nki-library"):
        aws.run(tmp_path)
