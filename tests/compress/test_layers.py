"""LayerStack: layers run one by one give what the model's own forward gives."""

import pytest
import torch
from causal_lms import MODELS, family_model
from tiny import tiny_ids
from torch import Tensor

from neuronmm_ops.compress.layers import LayerStack


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("by", ["ids", "embeddings"])
def test_layers_run_one_by_one_are_the_model(kind, by):
    model, ids = family_model(kind), tiny_ids(2, 24)
    stack = LayerStack(model)
    assert len(stack) == model.config.num_hidden_layers
    with torch.no_grad():
        expected = model(ids).logits
        hidden = stack.first_input(ids)
        # What enters the model then says nothing but how long it is.
        embedding = model.get_input_embeddings().weight
        assert isinstance(embedding, Tensor)
        batch = (
            ids if by == "ids" else {"inputs_embeds": torch.zeros(*ids.shape, embedding.shape[1])}
        )
        for index in range(len(stack)):
            before = hidden.clone()
            hidden = stack.run(index, batch, hidden)
            assert not torch.equal(hidden, before)
        torch.testing.assert_close(stack.finish(batch, hidden).logits, expected)
        torch.testing.assert_close(model(ids).logits, expected)  # the model is left as it was


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="Sequential has no list of layers"):
        LayerStack(torch.nn.Sequential(torch.nn.Linear(2, 2)))
