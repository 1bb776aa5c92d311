"""`NKIObject`, the base of the classes of kernels, without the rest of `nki.language`."""
# pyright: reportMissingImports=false

from typing import TYPE_CHECKING

__all__ = ["NKIObject"]

if TYPE_CHECKING:
    from neuroncore.nl.objects import NKIObject
else:
    try:
        from nki.language import NKIObject
    except ModuleNotFoundError as error:
        if error.name not in ("nki", "nki.language"):
            raise
        from neuroncore.nl.objects import NKIObject
