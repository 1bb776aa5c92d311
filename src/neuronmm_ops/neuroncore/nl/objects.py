"""`NKIObject`: the base of classes that a kernel may use."""

from __future__ import annotations

from typing import Any


class NKIObject:
    """Base of dataclass-like objects in kernels; keyword arguments become attributes."""

    def __init__(self, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            setattr(self, name, value)
