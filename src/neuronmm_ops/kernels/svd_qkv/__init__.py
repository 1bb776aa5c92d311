"""Low-rank projections to query, key and value: three pairs of factors that share x."""

OUTPUTS = (1, 3, 5)
"""Places of the weights whose products are the result."""
