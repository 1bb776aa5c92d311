"""The output head: logits and the greatest of each token, on the chip."""

RESULT_BYTES = 8
"""Of a token: an id and a logit."""
