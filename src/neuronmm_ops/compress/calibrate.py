"""Second moments of activations: products in fp32 on the device, summed in fp64.

Linears that are always given the same tensor (gate and up; q, k and v) share one moment.
"""

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from neuronmm_ops.compress import workers
from neuronmm_ops.compress.batches import (
    Batch,
    call_model,
    check_batches,
    row_mask,
    takes,
    unmasked,
    wide,
    wide_rows,
)
from neuronmm_ops.compress.factorization import SecondMoment, Side
from neuronmm_ops.compress.layers import LayerStack, hindrance
from neuronmm_ops.compress.running import eval_mode, fast_products
from neuronmm_ops.errors import CalibrationWarning, NonFiniteError
from neuronmm_ops.nn.dense_linear import DenseLinear, as_dense_linear, dense_linear

# The moments of one pass over the calibration data take at most this much memory.
MAX_MOMENT_BYTES = 4 * 2**30
# With fewer tokens for each input feature, second moments are mostly noise (users of similar
# packages report perplexities in the thousands from 8 samples).
TOKENS_PER_FEATURE = 10

Progress = Callable[[str, int, int], None]  # stage, done, total


def collect_moments(
    model: nn.Module,
    sides: Mapping[str, Side],
    batches: Sequence[Batch],
    progress: Progress | None = None,
) -> Iterator[tuple[str, SecondMoment]]:
    """Run the model over the batches and yield each named Linear's moment.

    The model runs in eval mode without gradients. Where moments would take more than
    `MAX_MOMENT_BYTES`, a decoder's layers run one by one, and the hidden states of all batches are
    held; other models run once for every so many bytes. Use each before taking the next. Linears
    with the same input are given the same object. Many workers take a share of the batches each,
    and are given the same moments, summed over all. Products in a dtype that the CPU multiplies
    slowly are computed in fp32.

    Args:
        model: called as `model(batch)` or `model(**batch)`; of a Transformers model only the body
            runs where it takes what the batches bring.
        sides: name of the Linear to the side to measure.
        batches: token ids `[B, T]`, or mappings of the model's arguments; any number of them.
            Rows of `[B, T, K]` activations whose `attention_mask` is 0 do not count, but in an
            encoder-decoder, where an activation does not say to which mask it belongs.
        progress: told `("calibrate", batches done, batches in all)`, of this worker.

    Raises:
        NonFiniteError: an activation is NaN or Inf; names the layer.
        ValueError: there are no batches, one is too long for the model or has a token id outside
            its embedding, an encoder-decoder was given one tensor, or a Linear was never called.
        TypeError: a batch is neither a tensor nor a mapping.
    """
    check_batches(model, batches)
    if not sides:
        return
    shared = workers.share(batches)
    stack = _stack(model, sides, batches)
    if stack is None:
        body = _body(model, sides, batches)
        yield from _in_passes(model, sides, shared, lambda i: call_model(body, shared[i]), progress)
        return
    with _running(model):
        states = [stack.first_input(batch) for batch in shared]
    depth = stack.depth_of(sides)
    for index in range(depth):
        inside: dict[str, Side] = {n: s for n, s in sides.items() if stack.index_of(n) == index}
        entering = list(states)

        def run(at: int, index: int = index, entering: list[Tensor] = entering) -> None:
            states[at] = stack.run(index, shared[at], entering[at])

        def tell(stage: str, done: int, total: int, index: int = index) -> None:
            assert progress
            progress(stage, min(done, len(shared)) + index * len(shared), depth * len(shared))

        yield from _in_passes(model, inside, shared, run, tell if progress else None)


def _in_passes(
    model: nn.Module,
    sides: Mapping[str, Side],
    batches: Sequence[Batch],
    run: Callable[[int], object],
    progress: Progress | None,
) -> Iterator[tuple[str, SecondMoment]]:
    """Yield the moments of the Linears that `run` calls, given the index of a batch."""
    asked = waiting = list(sides)
    passes = 0
    while waiting or not passes:
        recorder = _MomentHooks(model, {name: sides[name] for name in asked})
        with recorder, _running(model):
            for index, batch in enumerate(batches):
                recorder.mask = row_mask(model, batch)
                run(index)
                recorder.flush()
                if progress:
                    done = 1 + index + passes * len(batches)
                    to_come = _passes(model, sides, recorder.deferred)
                    progress("calibrate", done, (passes + 1 + to_come) * len(batches))
        moments, deferred = _of_all_workers(model, recorder, asked)
        for name in asked:
            if name in moments:
                yield name, moments.pop(name)
            elif name not in deferred:
                raise ValueError(f"{name} was not called during calibration; leave it out")
        left = [name for name in waiting if name in deferred or name not in asked]
        # Workers that met different Linears may each have deferred what others kept. For the
        # moment of one Linear there is always room.
        asked = left if len(left) < len(waiting) else left[:1]
        waiting, passes = left, passes + 1


@contextmanager
def _running(model: nn.Module) -> Generator[None]:
    with eval_mode(model), torch.no_grad(), fast_products(model):
        yield


def _stack(
    model: nn.Module, sides: Mapping[str, Side], batches: Sequence[Batch]
) -> LayerStack | None:
    """Return the model's layers where they are to be run one by one: moments need many passes."""
    if _passes(model, sides, set(sides)) < 2:
        return None
    try:
        stack = LayerStack(model)
    except ValueError:
        return None
    if any(stack.index_of(name) is None for name in sides):
        return None
    return None if hindrance(model, [], batches) else stack


def moments_or_none(
    model: nn.Module,
    sides: Mapping[str, Side],
    names: Iterable[str],
    batches: Sequence[Batch],
    progress: Progress | None = None,
) -> Iterator[tuple[str, SecondMoment | None]]:
    """Yield what `collect_moments` does; where no side is to be measured, None for each name."""
    if sides:
        yield from collect_moments(model, sides, batches, progress)
    else:
        yield from ((name, None) for name in names)


def warn_if_few(tokens: int, linears: Mapping[str, DenseLinear], stacklevel: int) -> None:
    """Warn where there are too few calibration tokens for the widest layer."""
    name, widest = max(linears.items(), key=lambda item: item[1].in_features)
    needed = TOKENS_PER_FEATURE * widest.in_features
    if tokens < needed:
        warnings.warn(
            f"calibration has {tokens} tokens, fewer than {TOKENS_PER_FEATURE}*K = {needed} of "
            f"{name}; the result may fit noise, use more text",
            CalibrationWarning,
            stacklevel=stacklevel,
        )


class _Product(NamedTuple):
    """X.T @ X of one tensor, and the Linears of which it is the product."""

    x: Tensor
    version: int
    matrix: Tensor
    tokens: int
    side: Side
    names: list[str]


class _MomentHooks:
    """Forward hooks that add to the moments, alive for a `with` block.

    Attributes:
        moments: by name, of the Linears called so far; one object where all inputs were the same.
        deferred: names for which there was no room in this pass.
        mask: `[B, T]`, which rows of `[B, T, ...]` activations count; None for all.
    """

    def __init__(self, model: nn.Module, sides: Mapping[str, Side]) -> None:
        self.moments: dict[str, SecondMoment] = {}
        self.deferred: set[str] = set()
        self.mask: Tensor | None = None
        self._model = model
        self._sides = sides
        self._handles: list[Any] = []
        self._last: _Product | None = None

    def __enter__(self) -> "_MomentHooks":
        for name, side in self._sides.items():
            hook = partial(self._record, name, side)
            module = self._model.get_submodule(name)
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def side(self, name: str) -> Side:
        """Return the side that is measured of a Linear."""
        return self._sides[name]

    def flush(self) -> None:
        """Add the last product to the moments of its Linears."""
        if self._last is not None:
            self._add(self._last)
            self._last = None

    def _record(
        self,
        name: str,
        side: Side,
        module: nn.Module,
        args: tuple[Tensor, ...],
        kwargs: dict[str, Tensor],
        output: Tensor,
    ) -> None:
        """Take what one call of a Linear shows: a forward hook once name and side are bound."""
        if name in self.deferred:
            return
        if side == "input":
            (x,) = args or kwargs.values()
        else:
            bias = as_dense_linear(module).bias
            x = output if bias is None else wide(output) - wide(bias)
        # Adding a residual in place changes a tensor's version; inference tensors have none.
        version = -1 if x.is_inference() else x._version
        last = self._last
        if last and last.x is x and last.side == side and last.version == version >= 0:
            if name not in last.names:
                last.names.append(name)
                return
            matrix, tokens = last.matrix, last.tokens
        else:
            matrix, tokens = self._gram(name, side, x)
        self.flush()
        self._last = _Product(x, version, matrix, tokens, side, [name])

    def _gram(self, name: str, side: Side, x: Tensor) -> tuple[Tensor, int]:
        """Return `X.T @ X` and the number of rows X."""
        rows = wide_rows(unmasked(x, self.mask))
        product = rows.t() @ rows
        # A column with a NaN or Inf makes its element of the diagonal one.
        check_activations(name, side, product.diagonal())
        return product, rows.shape[0]

    def _add(self, product: _Product) -> None:
        """Add to the moments of the product's Linears, which part from others without it."""
        for old in {id(m): m for m in map(self.moments.get, product.names)}.values():
            members = [name for name in product.names if self.moments.get(name) is old]
            owners = [name for name, moment in self.moments.items() if moment is old]
            if old is not None and len(owners) == len(members):
                old.add(product.matrix, product.tokens)
                continue
            if not self._has_room(len(product.matrix)):
                self.deferred.update(members)
                for name in members:
                    self.moments.pop(name, None)
                continue
            if old is None:
                zeros = torch.zeros_like(product.matrix, dtype=torch.float64)
                new = SecondMoment(product.side, zeros)
            else:
                new = SecondMoment(product.side, old.matrix.clone(), old.tokens)
            new.add(product.matrix, product.tokens)
            self.moments.update(dict.fromkeys(members, new))

    def _has_room(self, size: int) -> bool:
        resident = {id(moment): moment.matrix.nbytes for moment in self.moments.values()}
        return not resident or sum(resident.values()) + _bytes(size) <= MAX_MOMENT_BYTES


def _of_all_workers(
    model: nn.Module, recorder: _MomentHooks, asked: Sequence[str]
) -> tuple[dict[str, SecondMoment], set[str]]:
    """Return the moments summed over all workers, and the names that any of them deferred."""
    if workers.count() == 1:
        return recorder.moments, recorder.deferred
    deferred = set[str]().union(*workers.gather(recorder.deferred))
    known = {name: (id(moment), moment.tokens) for name, moment in recorder.moments.items()}
    by_worker = workers.gather(known)
    # Linears share a moment if they do on every worker; one may not have met them at all.
    groups: dict[tuple[int | None, ...], list[str]] = {}
    for name in asked:
        key = tuple(part[name][0] if name in part else None for part in by_worker)
        if name not in deferred and any(key):
            groups.setdefault(key, []).append(name)
    local: dict[str, Tensor] = {}
    for first, *_ in groups.values():
        if first in recorder.moments:
            matrix = recorder.moments[first].matrix
            local[first] = matrix.clone() if any(matrix is m for m in local.values()) else matrix
    recorder.moments.clear()
    summed = workers.sum_names(local, next(model.parameters()).device)
    moments: dict[str, SecondMoment] = {}
    for names in groups.values():
        first = names[0]
        tokens = sum(part[first][1] for part in by_worker if first in part)
        moment = SecondMoment(recorder.side(first), summed[first], tokens)
        moments.update(dict.fromkeys(names, moment))
    return moments, deferred


def check_activations(name: str, side: Side, values: Tensor) -> None:
    """Raise NonFiniteError with the Linear's name where an activation is NaN or Inf."""
    if not torch.isfinite(values).all():
        raise NonFiniteError(
            f"{name}: {side} activations must be finite, got NaN or Inf "
            "during calibration; check the weights, or run in a wider dtype"
        )


def _bytes(size: int) -> int:
    return 8 * size**2


def _passes(model: nn.Module, sides: Mapping[str, Side], names: set[str]) -> int:
    """Return in how many passes these moments fit at most: what they will share is not known."""
    passes = used = 0
    for name in (name for name in sides if name in names):
        module: Any = model.get_submodule(name)
        linear = dense_linear(module) or module  # a pair has its sizes itself
        size = _bytes(linear.in_features if sides[name] == "input" else linear.out_features)
        if passes == 0 or used + size > MAX_MOMENT_BYTES:
            passes, used = passes + 1, 0
        used += size
    return passes


def _body(model: nn.Module, sides: Mapping[str, Side], batches: Sequence[Batch]) -> nn.Module:
    """Return Transformers' base model when every Linear is in it: no logits are needed."""
    body = getattr(model, "base_model", None)
    if not isinstance(body, nn.Module) or not takes(body, batches):
        return model
    inside = set(body.modules())
    return body if all(model.get_submodule(name) in inside for name in sides) else model
