"""How models are run: in eval mode, and in no dtype that is slow here."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn

from neuronmm_ops.ops.backends.cpu import WideProducts, compute_dtype


def fast_products(model: nn.Module) -> AbstractContextManager[object]:
    """Return what to run the model in, so that no product is of a dtype that is slow here."""
    parameters = model.parameters()
    is_slow = any(compute_dtype(p.dtype, p.device) != p.dtype for p in parameters)
    return WideProducts() if is_slow else nullcontext()


@contextmanager
def eval_mode(model: nn.Module) -> Generator[None, None, None]:
    """Put every module in eval mode for a block, then each back as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
