"""Gradients of the model's loss with respect to the Linears' outputs: what an error there costs.

The loss is the negative log-likelihood of labels drawn from the model's own distribution, so that
the gradients' second moment is its Fisher information: to second order the divergence between
the model and one with an error in that output. A model without logits is taken for a Gaussian of
variance one around its output. `zero-sum` alone asks for the loss of the true next tokens.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuronmm_ops.compress import workers
from neuronmm_ops.compress.batches import (
    Batch,
    call_model,
    row_mask,
    single_rows,
    unmasked,
    wide_rows,
)
from neuronmm_ops.compress.calibrate import Progress, check_activations
from neuronmm_ops.compress.factorization import Gradient
from neuronmm_ops.compress.running import eval_mode, fast_products
from neuronmm_ops.errors import NonFiniteError

# More tokens hardly change a rank (in trained models of 4 to 11 million parameters), and a row of
# them takes three times what a forward pass does.
MAX_TOKENS = 2048
SEED = 0


def collect_gradients(
    model: nn.Module,
    kinds: Mapping[str, Gradient],
    batches: Sequence[Batch],
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Run the model forward and backward and return each named Linear's gradient statistic.

    No parameter's `.grad` is touched. Rows are run one at a time, at most `MAX_TOKENS` tokens,
    evenly over the batches. Many workers take a share of the rows each, and are given the same
    statistics, of all rows.

    Args:
        model: as `collect_moments` takes it.
        kinds: name of the Linear to what to measure: `scale` `[]`, the mean over tokens and output
            features of g²; `moment` `[N, N]`, the mean over tokens of the outer product; `diagonal`
            `[N]`, its diagonal; `weight` `[N, K]`, the gradient with respect to the weight, per
            token. All fp64.
        batches: as for `collect_moments`.
        progress: told `("gradients", rows done, rows in all)`, of this worker.

    Raises:
        NonFiniteError: the loss or a gradient is NaN or Inf; names the layer.
        ValueError: `weight` was asked of a model without logits, or a Linear has no gradient.
    """
    rows = workers.share(single_rows(batches, MAX_TOKENS))
    generator = torch.Generator()
    with gradient_sums(model, kinds) as sums:
        for done, (index, row) in enumerate(rows, start=1):
            # By row, so that the labels do not depend on who else takes a share of the rows.
            generator.manual_seed(SEED + index)
            if "weight" in kinds.values():
                loss, tokens = next_token_loss(model, row)
            else:
                loss, tokens = _drawn_loss(model, row, generator)
            check_loss(loss, index)
            if loss.requires_grad:  # else it depends on no Linear asked for
                loss.backward()
            sums.tokens += tokens
            if progress:
                progress("gradients", done, len(rows))
    return sums.means(next(model.parameters()).device)


@contextmanager
def gradient_sums(model: nn.Module, kinds: Mapping[str, Gradient]) -> Generator["_Sums"]:
    """Add up, for a block, what backward passes through the frozen model show of its Linears."""
    sums = _Sums(kinds)
    with ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        stack.enter_context(_frozen(model))
        stack.enter_context(fast_products(model))
        stack.enter_context(torch.enable_grad())
        for name in kinds:
            hook = model.get_submodule(name).register_forward_hook(
                sums.hook(name), with_kwargs=True
            )
            stack.callback(hook.remove)
        yield sums


def check_loss(loss: Tensor, index: int) -> None:
    """Raise NonFiniteError where the loss of a calibration row is NaN or Inf."""
    if not torch.isfinite(loss):
        raise NonFiniteError(
            f"the loss of calibration row {index} must be finite, got {float(loss.detach())}; "
            "check the weights, or run in a wider dtype"
        )


class _Sums:
    """Hooks on the outputs of Linears that add up what their gradients show.

    Attributes:
        tokens: of which there are gradients.
    """

    def __init__(self, kinds: Mapping[str, Gradient]) -> None:
        self.tokens = 0
        self._kinds = kinds
        self._totals: dict[str, Tensor] = {}

    def hook(self, name: str) -> Any:
        def record(
            module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor
        ) -> Tensor:
            (x,) = args or kwargs.values()
            check_activations(name, "input", x)
            if not torch.is_grad_enabled():  # as in an indexer, which only chooses tokens
                return output
            # The model is frozen: what the first Linear returns is where gradients end.
            if not output.requires_grad:
                output = output.requires_grad_()
            output = output.clone()  # a model may change it in place
            output.register_hook(lambda g: self._add(name, x.detach(), g))
            return output

        return record

    def means(self, device: torch.device) -> dict[str, Tensor]:
        """Return every statistic per token of all workers; raise ValueError where there is none."""
        tokens = sum(workers.gather(self.tokens))
        totals = workers.sum_names(self._totals, device)
        for name in self._kinds:
            if name not in totals:
                raise ValueError(f"the loss does not depend on {name}; leave it out")
        return {name: totals[name] / max(1, tokens) for name in self._kinds}

    def _add(self, name: str, x: Tensor, gradient: Tensor) -> None:
        g = wide_rows(gradient)
        kind = self._kinds[name]
        if kind == "scale":
            total = g.square().mean(1).sum()
        elif kind == "diagonal":
            total = g.square().sum(0)
        elif kind == "moment":
            total = g.t() @ g
        else:
            total = g.t() @ wide_rows(x)
        if not torch.isfinite(total).all():
            raise NonFiniteError(
                f"{name}: the gradient must be finite, got NaN or Inf during calibration; "
                "run in a wider dtype, or weigh by importance='error'"
            )
        known = self._totals.get(name)
        self._totals[name] = total.double() if known is None else known.add_(total)


def next_token_loss(model: nn.Module, row: Batch) -> tuple[Tensor, int]:
    """Return the summed negative log-likelihood of a row's next tokens, and their number.

    Raises:
        ValueError: the model has no logits, or the row no token ids.
    """
    logits = getattr(call_model(model, row), "logits", None)
    ids = row.get("input_ids") if isinstance(row, Mapping) else row
    if logits is None or ids is None or ids.is_floating_point():
        raise ValueError(
            "method zero-sum and importance perplexity need a causal language model and token ids; "
            "use another"
        )
    labels, mask = ids[:, 1:].clone(), row_mask(model, row)
    if mask is not None:
        labels[~mask[:, 1:]] = -100
    loss = F.cross_entropy(wide_rows(logits[:, :-1]), labels.flatten(), reduction="sum")
    return loss, int((labels >= 0).sum())


def drawn_label_loss(values: Tensor, is_logits: bool, generator: torch.Generator) -> Tensor:
    """Return the summed loss of labels drawn from the model's own distribution.

    Args:
        values: `[..., V]`, logits or any other output.
        is_logits: whether the distribution is categorical, else Gaussian of variance one.
        generator: on the CPU, so that the labels are the same on every device.
    """
    values = wide_rows(values)
    if not is_logits:
        noise = torch.randn(values.shape, generator=generator)
        return (values * noise.to(values)).sum()
    # The first of exponential arrivals at these rates is a draw. From uniform noise of the CPU's
    # generator: the same on every device, and for one part of the tokens after another.
    waits = torch.rand(values.shape, generator=generator).log_().neg_().to(values.device)
    labels = values.detach().softmax(-1).div_(waits).argmax(-1)
    return F.cross_entropy(values, labels, reduction="sum")


def _drawn_loss(model: nn.Module, row: Batch, generator: torch.Generator) -> tuple[Tensor, int]:
    """Return the summed loss of drawn labels of one row, and the number of its tokens."""
    output = call_model(model, row)
    logits = getattr(output, "logits", None)
    values = _tensor_of(output) if logits is None else logits
    values = unmasked(values, row_mask(model, row))
    loss = drawn_label_loss(values, logits is not None, generator)
    return loss, values[..., 0].numel()


def _tensor_of(output: Any) -> Tensor:
    tensor = output if isinstance(output, Tensor) else next(iter(output.values()), None)
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"the model must return a tensor or logits, got {type(output).__name__}; "
            "weigh by importance='error'"
        )
    return tensor


@contextmanager
def _frozen(model: nn.Module) -> Generator[None, None, None]:
    """Let no parameter require a gradient for a block: none is computed for weights."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
