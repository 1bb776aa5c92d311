"""Low-rank factors for a model that is not from Transformers: measure, factorize, choose, swap.

Shows the stages that `compress_` runs, each on its own, with ranks chosen by hand from the exact
loss of every rank.
"""

import torch
from torch import nn

from neuronmm_ops import collect_moments, factorize, swap_

ALLOWED_LOSS = 0.05  # of each layer's output energy


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    # Inputs that live near a 16-dimensional subspace, as activations of trained models do.
    inputs = torch.randn(4096, 16) @ torch.randn(16, 64) + 0.05 * torch.randn(4096, 64)
    expected = model(inputs)

    # "0" has more outputs than inputs, "2" more inputs than outputs: the smaller side is measured.
    factors = {}
    for name, moment in collect_moments(model, {"0": "input", "2": "output"}, [inputs]):
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        factorization = factorize(linear.weight, "swift", moment)
        ranks = range(8, min(linear.weight.shape) + 1, 8)
        rank = next(r for r in ranks if factorization.relative_loss(r) <= ALLOWED_LOSS)
        print(f"layer {name}: rank {rank}, loss {factorization.relative_loss(rank):.4f}")
        factors[name] = factorization.truncate(rank)

    swap_(model, factors)
    error = (model(inputs) - expected).square().sum() / expected.square().sum()
    print(model)
    print(f"relative error of the outputs: {error:.4f}")


if __name__ == "__main__":
    main()
