"""hf.import_published: layouts of others, by shape; what is no pair is refused in one line."""

import pytest
import torch
from hf.others import published
from safetensors.torch import load_file, save_file
from tiny import tiny_ids, tiny_model
from transformers import AutoModelForCausalLM, GPT2Config

from neuronmm_ops import hf, swap_
from neuronmm_ops.errors import CheckpointError, NonFiniteError
from neuronmm_ops.hf.published import LAYOUTS
from neuronmm_ops.manifest import verify


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("layout", "one", "other"), LAYOUTS)
def test_modules_of_every_layout(layout, one, other, swapped, family, tmp_path):
    (tmp_path / "theirs").mkdir()
    wanted = published(tmp_path / "theirs", family, (one, other), swapped=swapped)
    found = hf.import_published(tmp_path / "theirs", tmp_path / "ours")
    assert found["layout"] == layout
    assert (found["layers"], found["ranks"]) == (14, [8])
    verify(tmp_path / "ours")
    model = hf.load(tmp_path / "ours")
    assert torch.equal(model(tiny_ids()).logits, wanted(tiny_ids()).logits)
    vocabularies = [hf.load_tokenizer(tmp_path / name).get_vocab() for name in ("ours", "theirs")]
    assert vocabularies[0] == vocabularies[1]


@pytest.mark.parametrize("endings", [(".u", ".v"), (".U", ".V"), (".A", ".B")])
@pytest.mark.parametrize("swapped", [False, True])
def test_plain_tensors_where_shapes_tell_them_apart(endings, swapped, tmp_path):
    (tmp_path / "theirs").mkdir()
    options = {"module": False, "swapped": swapped}
    wanted = published(tmp_path / "theirs", "llama", endings, **options, square=False)
    hf.import_published(tmp_path / "theirs", tmp_path / "ours")
    found = hf.load(tmp_path / "ours")(tiny_ids()).logits
    assert torch.equal(found, wanted(tiny_ids()).logits)
    published(tmp_path / "theirs", "llama", endings, **options)
    with pytest.raises(CheckpointError, match="fit it two ways; name them as modules"):
        hf.import_published(tmp_path / "theirs", tmp_path / "other")


def test_a_module_that_holds_its_weight_transposed(tmp_path):
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 260, "n_positions": 64}
    model = AutoModelForCausalLM.from_config(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))
    model.config.save_pretrained(tmp_path)
    name = "transformer.h.0.mlp.c_fc"
    u, v = torch.randn(64, 4), torch.randn(4, 256)
    tensors = {n: t.clone() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    del tensors[f"{name}.weight"]
    tensors[f"{name}.A.weight"], tensors[f"{name}.B.weight"] = (
        u.t().contiguous(),
        v.t().contiguous(),
    )
    tensors[f"{name}.B.bias"] = tensors.pop(f"{name}.bias")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    hf.import_published(tmp_path, tmp_path / "ours")
    swap_(model, {name: (u, v)})
    found = hf.load(tmp_path / "ours")(tiny_ids(1, 20)).logits
    assert torch.equal(found, model.eval()(tiny_ids(1, 20)).logits)


def refused(path, words, error=CheckpointError):
    with pytest.raises(error, match=words):
        hf.import_published(path, path.parent / "out")
    assert not (path.parent / "out").exists()


def spoiled(path, change):
    """Write what a change leaves of the tensors."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_what_is_refused(tmp_path):
    path = tmp_path / "theirs"
    path.mkdir()
    up = "model.layers.1.mlp.up"

    def fresh():
        published(path, "qwen2", ("_u_proj", "_v_proj"))

    for change, words in (
        (lambda t: t.pop("model.norm.weight"), "lacks model.norm.weight"),
        (lambda t: t.pop(f"{up}_v_proj.weight"), "lacks model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update({"basis.0": torch.ones(2)}), "holds basis.0, which is no pair's"),
        (
            lambda t: t.update({f"{up}_v_proj.weight": torch.ones(7, 64)}),
            r"takes 64 features to 176, .*up_u_proj.weight \[176, 8\] and .* \[7, 64\] do not fit",
        ),
        (
            lambda t: t.update({f"{up}_proj.weight": torch.ones(176, 64)}),
            "holds model.layers.1.mlp.up_proj.weight and its factors; leave one out",
        ),
        (
            lambda t: t.update({f"{up}_v_proj.weight": torch.ones(8, 64, dtype=torch.int8)}),
            "up_v_proj.weight is I8 .* start from the checkpoint before quantization",
        ),
        (lambda t: t.update({f"{up}_v_proj.bias": torch.ones(8)}), "stands between two factors"),
    ):
        fresh()
        spoiled(path, change)
        refused(path, words)
    (path / "config.json").write_text('{"model_type": "nope"}')
    refused(path, "cannot be loaded: .*; check its config.json")
    fresh()
    spoiled(path, lambda t: t[f"{up}_u_proj.weight"].fill_(torch.inf))
    refused(path, "import the checkpoint in a wider dtype", NonFiniteError)


def test_a_dense_model_a_pickle_and_our_own(tmp_path):
    dense = tmp_path / "dense"
    tiny_model().save_pretrained(dense)
    refused(dense, "holds no pair of factors of a Linear; known are SVD-LLM, NeuronMM: _u_proj")
    (dense / "model.safetensors").rename(dense / "model.pt")
    refused(dense, "model.pt is a pickle, which can run code and is not read")
    refused(dense / "model.pt", "model.pt is a pickle, which can run code and is not read")
    (tmp_path / "theirs").mkdir()
    published(tmp_path / "theirs", "llama", ("_u_proj", "_v_proj"))
    hf.import_published(tmp_path / "theirs", tmp_path / "ours")
    refused(tmp_path / "ours", "is a checkpoint of neuronmm already")
