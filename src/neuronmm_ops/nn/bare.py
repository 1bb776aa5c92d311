"""Whether calling a module is calling its own forward and nothing else."""

from torch import nn


def is_bare(module: nn.Module) -> bool:
    """Say whether nobody hooked into the module or replaced its forward."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__  # accelerate's offloading wraps it
    )
