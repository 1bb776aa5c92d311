"""What arrives for a group of PSUM tiles: ns, and SBUF in bytes per partition, all modelled."""

from __future__ import annotations

from typing import NamedTuple


class Loads(NamedTuple):
    """What arrives for one group of PSUM tiles.

    Attributes:
        ns: DMA time.
        head_ns: of it, until the first contraction tile is there.
        work_ns: of TensorE to transpose it.
        wait_ns: until a transposed tile is in SBUF; TensorE goes on with the tile before it.
        transposed: tiles that TensorE transposes.
        fills: SBUF it takes; `passing` of it are tiles used once, `window` of those at a time.
        hbm_bytes: moved.
        instructions: issued.
        transfers: of these, DMAs.
        queue: their queue.
        last: contraction tiles that the last DMA brings.
    """

    ns: float = 0.0
    head_ns: float = 0.0
    work_ns: float = 0.0
    fills: int = 0
    passing: int = 0
    window: int = 0
    hbm_bytes: int = 0
    instructions: int = 0
    transfers: int = 0
    queue: str = "x"
    last: int = 1
    wait_ns: float = 0.0
    transposed: int = 0

    def exposed_ns(self, work_ns: float) -> float:
        """What TensorE waits for transposed tiles, each of which it multiplies for `work_ns`.

        It waits for the first, then for every other one: two are on the way.
        """
        if not self.transposed:
            return 0.0
        each = self.work_ns / self.transposed
        others = (self.transposed - 1) / 2 * max(0.0, self.wait_ns - each - work_ns)
        return max(0.0, self.wait_ns - each * (self.transposed > 1)) + others


NOTHING = Loads()
