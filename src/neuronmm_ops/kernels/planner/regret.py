"""The choice among arguments whose times are known under every DMA model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Key = TypeVar("Key")


def of_least_regret(times_ms: Mapping[Key, tuple[float, ...]]) -> Key:
    """The key whose worst share over the quickest, of all DMA models, is least; else the first."""
    quickest = [min(times) for times in zip(*times_ms.values(), strict=True)]

    def regret(key: Key) -> float:
        shares = [ms / least for ms, least in zip(times_ms[key], quickest, strict=True)]
        return max(shares)

    return min(times_ms, key=regret)
