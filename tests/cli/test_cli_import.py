"""`neuronmm import`."""

from hf.others import published
from outcomes import refused


def test_a_published_checkpoint_is_imported(tmp_path, run):
    (tmp_path / "theirs").mkdir()
    published(tmp_path / "theirs", "llama", ("_u_proj", "_v_proj"))
    page = run("import", tmp_path / "theirs", "-o", tmp_path / "ours").page()
    assert "14 pairs, rank 8, named as by SVD-LLM, NeuronMM" in page
    assert run("inspect", tmp_path / "ours", "--json").document()
    again = run("import", tmp_path / "ours", "-o", tmp_path / "other")
    refused(again, "is a checkpoint of neuronmm already")
