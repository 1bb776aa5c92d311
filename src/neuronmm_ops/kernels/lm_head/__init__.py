"""The output head: logits and the greatest of each token, on the chip."""
