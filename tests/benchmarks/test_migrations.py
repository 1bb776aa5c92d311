"""`python benchmarks migrate`: a clone with kernels of our own in the Beta dialect."""

import pytest

from benchmarks.migrations import run_all, summary

MATMUL = """\
from neuronxcc import nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl


def matmul(a, b):
    out = nl.ndarray((a.shape[1], b.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    for m in nl.affine_range(a.shape[1] // 128):
        for n in nl.affine_range(b.shape[1] // 512):
            acc = nl.zeros((128, 512), dtype=nl.float32, buffer=nl.psum)
            for k in nl.affine_range(a.shape[0] // 128):
                i_k, i_m = nl.mgrid[0:128, 0:128]
                i_n = nl.arange(512)[None, :]
                x = nl.load(a[k * 128 + i_k, m * 128 + i_m])
                acc += nisa.nc_matmul(x, nl.load(b[k * 128 + i_k, n * 512 + i_n]))
            nl.store(out[nl.ds(m * 128, 128), nl.ds(n * 512, 512)], value=acc)
    return out


nki.baremetal()(matmul)(1, 2)
"""


def test_a_clone_is_migrated_and_run(tmp_path):
    (tmp_path / "src").mkdir()
    with pytest.raises(ValueError, match="no file that imports neuronxcc"):
        list(run_all(tmp_path))
    (tmp_path / "contributed").mkdir()
    (tmp_path / "contributed" / "matmul.py").write_text(MATMUL)
    (tmp_path / "contributed" / "maxpooling.py").write_text("import neuronxcc\ndef f(): pass\n")
    (tmp_path / "src" / "other.py").write_text("import neuronxcc.nki as nki\n")
    rows = {row["kernel"]: row for row in run_all(tmp_path)}
    assert rows["matmul"]["result"] == "right"
    assert rows["matmul"]["difference"] == 0
    assert 0 < rows["matmul"]["error"] < 1e-6
    assert rows["max_pooling_2d_stride_1"]["result"].startswith("AttributeError")
    assert rows["max_pooling_2d_stride_1"]["left_by_hand"] == "import"
    assert rows[""]["result"] == "no case"
    assert summary([*rows.values()]) == "1 of 3 files, 1 of 3 kernels right"
