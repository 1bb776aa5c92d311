"""The gradient statistics of `collect_gradients`, by one sweep forward and one backward."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from neuronmm_ops.compress.batches import single_rows, wide_rows
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.factorization import Gradient
from neuronmm_ops.compress.gradients import (
    MAX_TOKENS,
    SEED,
    check_loss,
    drawn_label_loss,
    gradient_sums,
)
from neuronmm_ops.hf.streaming.sweep import Sweep
from neuronmm_ops.hf.streaming.work import Work

# Logits that are alive at once: 64 MB of float32, and some copies of them.
MAX_LOGITS = 2**24

Rows = Sequence[tuple[int, Tensor]]  # number in the calibration set, token ids [1, T]


def sweep_gradients(
    sweep: Sweep,
    kinds: Mapping[str, Gradient],
    layer_of: Mapping[str, int],
    batches: Sequence[Tensor],
    work: Work,
    progress: Progress,
) -> None:
    """Write `gradients-I` of every layer from the first with a Linear in `kinds` on.

    Args:
        sweep: of the model.
        kinds: name of the Linear to what to measure, as for `collect_gradients`.
        layer_of: the number of its layer.
        batches: token ids `[B, T]`.
        work: where hidden states and gradients are kept; what is there is not done again.
        progress: told `("gradients", layers done, twice the layers)` after each that was not done.

    Raises:
        NonFiniteError: the loss or a gradient is NaN or Inf.
    """
    first, count = min(layer_of[name] for name in kinds), len(sweep)
    if not all(work.has(f"gradients-{index}") for index in range(first, count)):
        rows = _rows(batches)
        by_labels = "weight" in kinds.values()
        _forward(sweep, rows, work, progress)
        if not work.has(f"upstream-{count}"):
            _start_backward(sweep, rows, work, by_labels)
        tokens = sum(row.shape[1] - by_labels for _, row in rows)
        for index in reversed(range(first, count)):
            if not work.has(f"gradients-{index}"):
                of_layer: dict[str, Gradient] = {n: kinds[n] for n in kinds if layer_of[n] == index}
                _backward(sweep, index, of_layer, tokens, work)
                progress("gradients", 2 * count - index, 2 * count)
    work.drop("upstream")
    work.drop("rows")


def _forward(sweep: Sweep, rows: Rows, work: Work, progress: Progress) -> None:
    """Write the hidden states `rows-I` that enter every layer, and leave the last."""
    with torch.no_grad():
        if not work.has("rows-0"):
            with sweep.with_ends():
                work.save("rows-0", _numbered([sweep.embed(row) for _, row in rows]))
        for index in range(len(sweep)):
            if not work.has(f"rows-{index + 1}"):
                with sweep.running(), sweep.layer(index):
                    states = sweep.states(work.load(f"rows-{index}"))
                    work.save(f"rows-{index + 1}", _numbered([sweep.run(index, x) for x in states]))
                progress("gradients", index + 1, 2 * len(sweep))


def _start_backward(sweep: Sweep, rows: Rows, work: Work, by_labels: bool) -> None:
    """Write the loss's gradient with respect to what leaves the last layer."""
    count = len(sweep)
    states = sweep.states(work.load(f"rows-{count}"))
    with sweep.with_ends():
        gradients = [
            _loss_gradient(sweep, number, row, hidden, by_labels)
            for (number, row), hidden in zip(rows, states, strict=True)
        ]
    work.save(f"upstream-{count}", _numbered(gradients))


def _loss_gradient(
    sweep: Sweep, number: int, ids: Tensor, hidden: Tensor, by_labels: bool
) -> Tensor:
    """Return the gradient of a row's loss with respect to `hidden` `[1, T, H]`."""
    generator = torch.Generator().manual_seed(SEED + number)
    size = max(1, MAX_LOGITS // sweep.vocabulary)
    gradients: list[Tensor] = []
    for start in range(0, ids.shape[1], size):
        part = hidden[:, start : start + size].clone().requires_grad_()
        with torch.enable_grad():
            logits = sweep.logits(part)
            if by_labels:
                labels = ids[0, start + 1 : start + size + 1].to(logits.device)
                rows = wide_rows(logits[0, : len(labels)])
                loss = F.cross_entropy(rows, labels, reduction="sum")
            else:
                # Draws go on where those of the part before have ended.
                loss = drawn_label_loss(logits, is_logits=True, generator=generator)
            check_loss(loss, number)
            (gradient,) = torch.autograd.grad(loss, part)
        gradients.append(gradient)
    return torch.cat(gradients, 1)


def _backward(
    sweep: Sweep, index: int, kinds: Mapping[str, Gradient], tokens: int, work: Work
) -> None:
    """Write a layer's statistics, by names in the model, and the gradient of what enters it."""
    states = sweep.states(work.load(f"rows-{index}"))
    upstream = sweep.states(work.load(f"upstream-{index + 1}"))
    entered: list[Tensor] = []
    with sweep.running(), sweep.layer(index) as layer, gradient_sums(layer, kinds) as sums:
        for hidden, gradient in zip(states, upstream, strict=True):
            entering = hidden.clone().requires_grad_()
            sweep.run(index, entering).backward(gradient)
            assert entering.grad is not None
            entered.append(entering.grad)
        sums.tokens = tokens
        means = sums.means(upstream[0].device)
    work.save(f"upstream-{index}", _numbered(entered))
    # Last: it says that the layer is done.
    work.save(f"gradients-{index}", means)


def _numbered(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"{number:04}": tensor for number, tensor in enumerate(tensors)}


def _rows(batches: Sequence[Tensor]) -> Rows:
    rows = single_rows(batches, MAX_TOKENS)
    return [(number, row) for number, row in rows if isinstance(row, Tensor)]
