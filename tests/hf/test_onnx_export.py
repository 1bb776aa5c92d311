"""hf.export_onnx: a graph that onnxruntime computes, with two MatMuls a pair."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hf.small import CONFIG, compress
from tiny import tiny_directory

from neuronmm_ops import SVDLinear, hf
from neuronmm_ops.errors import CheckpointError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning"),
]
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


@pytest.mark.parametrize(("family", "storage"), [("llama", None), ("qwen2", "int8")])
def test_onnxruntime_computes_what_the_checkpoint_does(family, storage, tmp_path):
    config = replace(CONFIG, storage=storage)
    compress(tiny_directory(tmp_path / "dense", family), tmp_path / "small", config)
    found = hf.export_onnx(tmp_path / "small", tmp_path / "out")
    path = tmp_path / "out" / "model.onnx"
    onnx.checker.check_model(path, full_check=True)
    graph = onnx.load(path, load_external_data=False)
    assert [(each.domain, each.version) for each in graph.opset_import] == [("", found["opset"])]
    stored = [tensor for tensor in graph.graph.initializer if tensor.external_data]
    assert {
        entry.value for t in stored for entry in t.external_data if entry.key == "location"
    } == {"model.onnx.data"}
    compressed = hf.load(tmp_path / "small", dtype=torch.float32)
    # A pair that is no MatMul of its own would be a weight of its own, [K, N].
    pairs = [m for m in compressed.modules() if isinstance(m, SVDLinear)]
    wanted = Counter(
        size for m in pairs for size in ((m.in_features, m.rank), (m.rank, m.out_features))
    )
    multiplied = {
        name for node in graph.graph.node if node.op_type == "MatMul" for name in node.input
    }
    sizes = Counter(tuple(t.dims) for t in graph.graph.initializer if t.name in multiplied)
    assert pairs
    assert not wanted - sizes
    session = onnxruntime.InferenceSession(path)
    generator = np.random.default_rng(0)
    for shape in ((1, 1), (2, 8), (3, 19)):
        ids = generator.integers(0, 200, shape)
        mask = np.ones_like(ids)
        mask[-1, : shape[1] // 2] = 0  # padded on the left
        (logits,) = session.run(["logits"], {"input_ids": ids, "attention_mask": mask})
        with torch.no_grad():
            expected = compressed(torch.tensor(ids), attention_mask=torch.tensor(mask)).logits
        seen = mask.astype(bool)
        np.testing.assert_allclose(logits[seen], expected.numpy()[seen], rtol=1e-3, atol=1e-4)


def test_what_is_refused(tmp_path):
    dense = tiny_directory(tmp_path / "dense")
    with pytest.raises(CheckpointError, match="is not compressed; use an exporter"):
        hf.export_onnx(dense, tmp_path / "out")
    compress(dense, tmp_path / "small")
    with pytest.raises(FileExistsError, match="exists"):
        hf.export_onnx(tmp_path / "small", dense)
    assert not (tmp_path / "out").exists()
