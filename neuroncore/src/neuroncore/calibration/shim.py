"""`jit`, `nl` and `nisa` of the kernels here: the installed NKI's, else the simulator's."""
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["NkiTensor", "jit", "nisa", "nl"]

if TYPE_CHECKING:
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
