"""`jit`, `nl`, `nisa` and `ncc`: of the real `nki` where it is installed, else of the simulator.

The only import of either in this room, so that a kernel's source is the same on both.
"""
# pyright: reportMissingImports=false

from typing import TYPE_CHECKING

__all__ = ["NkiTensor", "jit", "ncc", "nisa", "nl"]

if TYPE_CHECKING:
    from neuroncore import collectives as ncc
    from neuroncore import isa as nisa
    from neuroncore import jit
    from neuroncore import language as nl
    from neuroncore.memory.tensor import NkiTensor
else:
    try:
        import nki.isa as nisa
        import nki.language as nl
        from nki import jit

        NkiTensor = nl.ndarray
    except ModuleNotFoundError as error:
        if error.name not in ("nki", "nki.isa", "nki.language"):
            raise
        from neuroncore import isa as nisa
        from neuroncore import jit
        from neuroncore import language as nl
        from neuroncore.memory.tensor import NkiTensor
    try:
        import nki.collectives as ncc
    except ModuleNotFoundError as error:  # kernels of one rank need none
        if error.name not in ("nki", "nki.collectives"):
            raise
        from neuroncore import collectives as ncc
