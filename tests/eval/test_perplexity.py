"""Token perplexity against a straightforward fp64 computation."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from neuronmm_ops import NonFiniteError, encode_documents, token_perplexity
from neuronmm_ops.eval import block_length

VOCABULARY = 11


class Causal(nn.Module):
    """Logits from a token, its predecessor and its position; the blocks it saw are recorded."""

    def __init__(self, limit: int | None = 64, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(VOCABULARY, VOCABULARY, generator=generator)
        self.table = nn.Parameter(table.to(dtype))
        self.positions = nn.Parameter(torch.randn(64, VOCABULARY, generator=generator).to(dtype))
        self.dropout = nn.Dropout(0.5)
        if limit is not None:
            self.config = SimpleNamespace(max_position_embeddings=limit)
        self.seen: list[Tensor] = []

    def forward(self, ids: Tensor) -> SimpleNamespace:
        assert ids.dim() == 2
        self.seen.append(ids[0].clone())
        previous = ids.roll(1, dims=1).clone()
        previous[:, 0] = 0
        logits = self.table[ids] + 0.5 * self.table[previous] + self.positions[: ids.shape[1]]
        return SimpleNamespace(logits=self.dropout(logits))


def straightforward(model: Causal, ids: Tensor, seqlen: int) -> tuple[float, int]:
    """Sum -log p of one token after another, in fp64."""
    nll, count = 0.0, 0
    for start in range(0, len(ids), seqlen):
        block = ids[start : start + seqlen]
        logits = model(block[None]).logits[0].detach().double()
        for position in range(len(block) - 1):
            row = logits[position]
            nll -= float(row[block[position + 1]] - row.logsumexp(0))
            count += 1
    return math.exp(nll / count), count


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


@given(st.integers(2, 80), st.integers(2, 40), st.integers(0, 100))
@settings(max_examples=30)
def test_it_equals_the_straightforward_computation(count, seqlen, seed):
    model, ids = Causal().eval(), tokens(count, seed)
    expected, predicted = straightforward(model, ids, seqlen)
    result = token_perplexity(model, ids, seqlen)
    assert result.ppl_token == pytest.approx(expected, rel=1e-6)
    assert (result.tokens, result.seqlen) == (predicted, seqlen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_logits_of_any_dtype_are_evaluated_in_fp32(dtype):
    model, ids = Causal(dtype=dtype).eval(), tokens(50)
    expected, _ = straightforward(model, ids, 16)
    assert token_perplexity(model, ids, 16).ppl_token == pytest.approx(expected, rel=1e-6)


class Broken(Causal):
    """Puts a value at one place of one block's logits."""

    def __init__(self, block: int, position: int, value: float, target: Tensor | None) -> None:
        super().__init__()
        self.place = (block, position, value, target)

    def forward(self, ids: Tensor) -> SimpleNamespace:
        result = super().forward(ids)
        block, position, value, target = self.place
        if len(self.seen) == block + 1:
            token = 0 if target is None else int(target)
            result.logits[0, position, token] = value
        return result


@pytest.mark.parametrize("block", [0, 2, 4])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_logits_name_their_block(block, value):
    model = Broken(block, 1, value, None).train()
    with pytest.raises(NonFiniteError, match=f"logits of block {block} must be finite"):
        token_perplexity(model, tokens(35), 8)
    assert model.training


def test_minus_infinity_is_refused_only_at_the_token_that_came():
    ids = tokens(16)
    with pytest.raises(NonFiniteError, match="block 1"):
        token_perplexity(Broken(1, 3, -math.inf, ids[12]), ids, 8)
    # A masked entry of the vocabulary.
    other = (ids[12] + 1) % VOCABULARY
    assert math.isfinite(token_perplexity(Broken(1, 3, -math.inf, other), ids, 8).ppl_token)


def test_dropout_is_off_and_every_training_flag_is_restored():
    model, ids = Causal(), tokens(40)
    expected = token_perplexity(model.eval(), ids, 16)
    model.train()
    assert token_perplexity(model, ids, 16) == expected
    assert [m.training for m in model.modules()] == [True, True]
    model.dropout.eval()
    token_perplexity(model, ids, 16)
    assert [m.training for m in model.modules()] == [True, False]


@pytest.mark.parametrize("shape", [(0,), (1,), (1, 20), (2, 20), ()])
def test_token_ids_are_checked(shape):
    with pytest.raises(ValueError, match=r"at least 2 tokens, got shape \["):
        token_perplexity(Causal(), torch.zeros(shape, dtype=torch.long), 8)


def test_the_limit_of_a_model_in_a_larger_one_is_its_text_s():
    model = Causal(None)
    text_config = SimpleNamespace(max_position_embeddings=16)
    model.config = SimpleNamespace(get_text_config=lambda: text_config)
    assert block_length(model, None) == 16
    with pytest.raises(ValueError, match="limit of 16 tokens, got 17"):
        token_perplexity(model, tokens(20), 17)


def test_default_seqlen():
    assert block_length(Causal(64), None) == 64
    assert block_length(Causal(100_000), None) == 2048
    assert block_length(Causal(None), None) == 2048
    assert token_perplexity(Causal(16), tokens(40)).seqlen == 16


def test_documents_are_joined_without_special_tokens():
    asked = {}

    def tokenizer(text, **options):
        asked.update(text=text, **options)
        return {"input_ids": [ord(c) for c in text]}

    ids = encode_documents(tokenizer, ["ab", "c"])
    assert asked == {"text": "ab\n\nc", "add_special_tokens": False, "verbose": False}
    assert ids.tolist() == [97, 98, 10, 10, 99]
    assert ids.dtype == torch.long
