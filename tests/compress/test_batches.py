"""Batches of tensors and of keyword arguments: what models take, and what is counted."""

import pytest
import torch
from torch import nn
from toys import causal_lm, token_batches

from neuronmm_ops import SVDConfig, collect_moments, compress_
from neuronmm_ops.compress.batches import count_tokens, fingerprint, unmasked, wide_rows

SMALL = {"allocation": "uniform", "ratio": 0.3, "block": 8}


def t5() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def bart() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 64))
    }
    config = transformers.BartConfig(vocab_size=64, d_model=32, max_position_embeddings=64, **sizes)
    return transformers.BartForConditionalGeneration(config).eval()


def encoder_decoder_batches(count: int = 5) -> list[dict[str, torch.Tensor]]:
    inputs, targets = token_batches(count), token_batches(count, length=16)
    return [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": other}
        for ids, other in zip(inputs, targets, strict=True)
    ]


def test_a_mapping_is_the_tensor_it_holds():
    model, data = causal_lm(), token_batches(2)
    sides = {"model.layers.1.mlp.down_proj": "input", "model.layers.0.mlp.gate_proj": "input"}
    mappings = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in data]
    expected, actual = (dict(collect_moments(model, sides, b)) for b in (data, mappings))
    for name in sides:
        assert torch.equal(actual[name].matrix, expected[name].matrix)
        assert actual[name].tokens == expected[name].tokens


def test_masked_rows_do_not_count():
    model, (ids,) = causal_lm(), token_batches(1, rows=1)
    name = "model.layers.1.mlp.down_proj"
    # Padding at the end: causal attention hides it from the tokens before.
    mask = torch.ones(1, 40).long()
    mask[:, 32:] = 0
    padded = torch.cat([ids, torch.zeros(1, 8).long()], 1)
    ((_, alone),) = collect_moments(model.double(), {name: "input"}, [ids])
    batch = {"input_ids": padded, "attention_mask": mask}
    ((_, masked),) = collect_moments(model, {name: "input"}, [batch])
    assert masked.tokens == alone.tokens == count_tokens(batch) == 32
    assert (masked.matrix - alone.matrix).norm() < 1e-6 * alone.matrix.norm()


def test_only_activations_by_position_are_masked():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    x = torch.arange(24).reshape(2, 3, 4)
    assert torch.equal(unmasked(x, mask), torch.stack([x[0, 0], x[0, 1], x[1, 0]]))
    # Rows, as a mixture of experts gives to one: B of T features are no positions.
    for other in (x[0], x[:1], x[:, :2], x.reshape(6, 4), torch.ones(2, 3)):
        assert unmasked(other, mask) is other
    assert unmasked(x, None) is x


@pytest.mark.parametrize(
    ("dtype", "wider"),
    [
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ],
)
def test_rows_are_at_least_fp32(dtype, wider):
    x = torch.ones(2, 3, 4, dtype=getattr(torch, dtype))
    rows = wide_rows(x.mT)
    assert (rows.shape, rows.dtype) == ((8, 3), getattr(torch, wider))
    assert wide_rows(x[0, 0]).shape == (1, 4)


@pytest.mark.parametrize(("make", "targets"), [(bart, "mlp"), (t5, ("wi", "q", "k"))])
@pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
def test_an_encoder_decoder_is_calibrated_with_mappings(make, targets):
    model, batches = make(), encoder_decoder_batches()
    report = compress_(model, SVDConfig(**SMALL, targets=targets, method="kfac"), batches)
    assert report.calibration["tokens"] == 5 * (128 + 64)
    assert report.effective_ratio > 0


def test_an_encoder_decoder_without_decoder_inputs_says_what_it_needs():
    with pytest.raises(ValueError, match="decoder inputs too; give calibration batches as dicts"):
        compress_(t5(), SVDConfig(**SMALL, targets="wi"), token_batches(1))


def test_a_batch_with_labels_runs_the_whole_model():
    model = causal_lm()
    (ids,) = token_batches(1)
    heads = []
    model.lm_head.register_forward_hook(lambda *_: heads.append(1))
    batch = {"input_ids": ids, "labels": ids}
    list(collect_moments(model, {"model.layers.0.mlp.up_proj": "input"}, [batch]))
    assert heads


def test_tokens_are_those_that_the_masks_leave():
    ids, mask = torch.zeros(2, 6).long(), torch.tensor([[1] * 6, [1, 1, 0, 0, 0, 0]])
    assert count_tokens(ids) == count_tokens({"input_ids": ids}) == 12
    assert count_tokens({"input_ids": ids, "attention_mask": mask}) == 8
    decoder = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    assert count_tokens({"input_ids": ids, **decoder}) == 20
    assert count_tokens(torch.ones(2, 6, 4)) == count_tokens({"x": torch.ones(2, 6, 4)}) == 12


def test_a_mapping_may_hold_a_scalar():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(16, 32)

        def forward(self, x, scale):
            return self.fc1(x * scale)

    batches = [{"x": torch.randn(200, 16), "scale": torch.tensor(2.0)}]
    report = compress_(Scaled(), SVDConfig(**SMALL, method="kfac"), batches)
    assert report.calibration["sha256"] == fingerprint(batches)
    assert fingerprint(batches) != fingerprint([{**batches[0], "scale": torch.tensor(3.0)}])


def test_fingerprints_of_mappings():
    a, b = torch.arange(6), torch.arange(6) + 1
    batches = [
        {"x": a},
        {"y": a},
        {"x": b},
        {"x": a, "y": b},
        {"x": b, "y": a},
        {"x": a, "n": 1},
        a,
    ]
    assert len({fingerprint([batch]) for batch in batches}) == len(batches)
    assert fingerprint([{"x": a, "y": b}]) == fingerprint([{"y": b, "x": a.clone()}])


@pytest.mark.parametrize("as_mapping", [False, True])
@pytest.mark.parametrize(
    "change", [lambda ids: ids.float(), lambda ids: ids.to(torch.int8), lambda ids: ids[0]]
)
def test_what_cannot_be_token_ids_is_refused(change, as_mapping):
    ids = change(token_batches(1)[0])
    batch = {"input_ids": ids} if as_mapping else ids
    with pytest.raises(ValueError, match=r"must hold token ids \[B, T\] in int64 or int32, got"):
        compress_(causal_lm(), SVDConfig(**SMALL), [batch])
