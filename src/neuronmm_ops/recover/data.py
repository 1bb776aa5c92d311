"""The text of a recovery: blocks that are held out, and the windows of each step."""

import torch
from torch import Tensor

HELD_OUT_SHARE = 0.1
# Enough for a steady perplexity; what a long text has beyond them is trained on.
MAX_HELD_OUT_TOKENS = 16384
# Fewer would leave one block to train on, or none.
MIN_BLOCKS = 4


def hold_out(ids: Tensor, seqlen: int) -> tuple[Tensor, Tensor]:
    """Split token ids `[T]` into those to train on and blocks held out, spread over the text.

    Returns:
        `[T - B * seqlen]` and `[B, seqlen]`.

    Raises:
        ValueError: the text is shorter than `MIN_BLOCKS` blocks.
    """
    available = ids.numel() // seqlen
    if available < MIN_BLOCKS:
        raise ValueError(
            f"the text must hold at least {MIN_BLOCKS} blocks of {seqlen} tokens, got "
            f"{ids.numel()} tokens; use a longer text or a smaller seqlen"
        )
    most = max(1, MAX_HELD_OUT_TOKENS // seqlen)
    count = min(most, max(1, round(HELD_OUT_SHARE * available)))
    spread = (2 * torch.arange(count) + 1) * available // (2 * count)
    blocks = ids[: available * seqlen].view(available, seqlen)
    is_kept = torch.ones(available, dtype=torch.bool)
    is_kept[spread] = False
    rest = torch.cat([blocks[is_kept].flatten(), ids[available * seqlen :]])
    return rest, blocks[spread]


class Windows:
    """Windows `[B, seqlen]` of a text, a function of seed and step alone.

    In an epoch every window comes once, in random order; each epoch cuts the text elsewhere.

    Args:
        ids: `[T]`, at least `seqlen`.
        seqlen: tokens in a window.
        batch: windows of a step.
        seed: of the order.
    """

    def __init__(self, ids: Tensor, seqlen: int, batch: int, seed: int) -> None:
        self.ids, self.seqlen, self.seed = ids, seqlen, seed
        self.count = max(1, ids.numel() // seqlen - 1)
        self.batch = min(batch, self.count)

    def of_step(self, step: int) -> Tensor:
        """Return the windows of a step, counted from 0."""
        steps = -(-self.count // self.batch)
        epoch, position = divmod(step, steps)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        room = self.ids.numel() - self.count * self.seqlen
        shift = int(torch.randint(room + 1, (1,), generator=generator))
        order = torch.randperm(self.count, generator=generator)
        # The last batch of an epoch is filled up from its first.
        rows = torch.arange(position * self.batch, (position + 1) * self.batch) % self.count
        cut = self.ids[shift : shift + self.count * self.seqlen].view(self.count, self.seqlen)
        return cut[order[rows]]
