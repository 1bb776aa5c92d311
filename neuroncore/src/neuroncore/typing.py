"""`nki.typing`: annotations of kernel arguments, `nt.tensor[128, 512]`."""

from __future__ import annotations

from typing import Any


class _Tensor:
    """Subscript with a shape; means the same to the simulator with any shape."""

    def __getitem__(self, shape: Any) -> Any:
        return self


tensor = _Tensor()
mutable_tensor = _Tensor()
