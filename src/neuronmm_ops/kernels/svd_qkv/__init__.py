"""Low-rank projections to query, key and value: three pairs of factors that share x."""
