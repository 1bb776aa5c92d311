"""The training loop: a time budget, the best checkpoint, and going on after a kill."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import monotonic

import torch
from torch import Tensor, nn

from neuronmm_ops.errors import NonFiniteError
from neuronmm_ops.progress import Update
from neuronmm_ops.recover.config import RecoverConfig
from neuronmm_ops.recover.data import Windows
from neuronmm_ops.recover.state import (
    Position,
    Snapshot,
    StateFile,
    moments_of,
    restore_moments,
)

WARM_UP = 0.05  # of a phase
EVALUATIONS = 20
# An evaluation, with the writing of the state, comes after at least as many times its own length.
LEAST_BETWEEN = 10
MAX_NORM = 1.0
# Where the held-out loss stays above the start's, the rate was far too high: it is divided by this.
BACK_OFF = 4.0
# The loss of rounded factors rises before it falls: in this share of the budget only a perplexity
# that doubles is too much. Of the demo's model in int4 at 0.4 the KL rises to 1.5x, then goes to
# 0.62x; with the rate divided at once it goes to 0.99x.
PATIENCE = 1 / 3
DOUBLED = math.log(2)
# Tokens of one forward and backward pass; a step adds the gradients of several.
PASS_TOKENS = 2048


@dataclass(frozen=True)
class Outcome:
    """Where a run ended.

    Attributes:
        position: the last one.
        failure: what made it stop early, with the step's number; None where nothing did.
        resumed: whether it went on from a state on disk.
    """

    position: Position
    failure: str | None
    resumed: bool


class Training:
    """A training run over a time budget, or over a number of steps.

    AdamW with a cosine schedule over the elapsed share of the budget, in each phase anew. The
    held-out loss is taken `EVALUATIONS` times, less often where that would take much of the time,
    and the state is written each time. Where that loss stays above the start's, the run goes back
    to the best parameters with a lower rate.

    Args:
        objective: maps token ids `[B, T]` to the loss `[]`.
        evaluate: returns the held-out loss in nats per token; raises NonFiniteError.
        phases: the parameters of each phase by name, which share the budget equally.
        windows: the training data.
        config: budget, rate and seed.
        state: where the state is kept; None keeps none.
        autocast: makes the context of each forward pass.
        is_relative: whether the learning rate is a share of each parameter's root mean square at
            the start, so that it fits factors of any scale.
    """

    def __init__(
        self,
        objective: Callable[[Tensor], Tensor],
        evaluate: Callable[[], float],
        phases: Sequence[Mapping[str, nn.Parameter]],
        windows: Windows,
        config: RecoverConfig,
        state: StateFile | None = None,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        is_relative: bool = False,
    ) -> None:
        self.objective, self.evaluate, self.windows = objective, evaluate, windows
        self.config, self.state, self.autocast = config, state, autocast
        self.phases = phases
        self.parameters = {n: p for phase in phases for n, p in phase.items()}
        self.device = next(iter(self.parameters.values())).device
        groups = [
            {"params": [parameter], "scale": _rms(parameter) if is_relative else 1.0}
            for parameter in self.parameters.values()
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
        self.position = Position()
        self.best: dict[str, Tensor] = {}
        self._began = 0.0

    def run(self, progress: Update | None = None) -> Outcome:
        """Train, and leave the parameters of the lowest held-out loss in place, maybe the start's.

        A run that is killed goes on from the last evaluation.

        Raises:
            CheckpointError: the state on disk is damaged, or of another run.
            NonFiniteError: the model is broken before the first step.
            ValueError: the time budget has no room for a step.
        """
        resumed = self._resume()
        self._began = monotonic() - self.position.elapsed
        if not resumed:
            self.position.start_loss = self.evaluate()
            self._keep_best(self.position.start_loss)
            self.position.evaluation = monotonic() - self._began
        if self._budget() <= 0:
            raise ValueError(
                f"minutes must leave time to train, got {self.config.minutes}: the evaluation of "
                f"the held-out text alone takes {self.position.evaluation:.1f} s"
            )
        failure, due = None, self._next_evaluation()
        while failure is None and self._spent() < self._budget():
            failure = self._step(progress)
            if failure is None and self._spent() >= min(due, self._budget()):
                failure = self._evaluate_and_write()
                due = self._next_evaluation()
        _put(self.parameters, self.best)
        return Outcome(self.position, failure, resumed)

    # --- the budget, in steps where their number is given and otherwise in seconds

    def _spent(self) -> float:
        return self.position.step if self.config.steps else monotonic() - self._began

    def _budget(self) -> float:
        # The last evaluation is within the time.
        return self.config.steps or 60 * self.config.minutes - self.position.evaluation

    def _next_evaluation(self) -> float:
        least = 1.0 if self.config.steps else LEAST_BETWEEN * self.position.evaluation
        return self._spent() + max(least, self._budget() / EVALUATIONS)

    # --- one step

    def _step(self, progress: Update | None) -> str | None:
        """Make a step; return what is wrong with it, None where nothing is."""
        share = self._spent() / self._budget() * len(self.phases)
        index = min(int(share), len(self.phases) - 1)
        self._set_phase(index, self.config.peak_rate * _factor(share - index))
        ids = self.windows.of_step(self.position.step).to(self.device)
        loss = 0.0
        for part in ids.split(max(1, PASS_TOKENS // ids.shape[1])):
            with self.autocast():
                value = self.objective(part) * (len(part) / len(ids))
            value.backward()
            loss += float(value.detach())
        norm = float(nn.utils.clip_grad_norm_(self.phases[index].values(), MAX_NORM))
        step = self.position.step + 1
        for what, number in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(number):
                return f"the {what} of step {step} must be finite, got {number}"
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.position.step = step
        self.position.tokens += ids.numel()
        if progress:
            self._tell(progress, f"step {step}, loss {loss:.4f}")
        return None

    def _tell(self, progress: Update, note: str) -> None:
        total = math.ceil(self._budget())
        done = min(int(self._spent()), total - 1)  # the last evaluation is to come
        best = math.exp(self.position.best_loss)
        progress("recover", done, total, f"{note}, held-out perplexity {best:.4f}")

    def _set_phase(self, index: int, rate: float) -> None:
        for phase in self.phases:
            for parameter in phase.values():
                parameter.requires_grad_(False)
        for parameter in self.phases[index].values():
            parameter.requires_grad_(True)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * self.position.rate * group["scale"]

    # --- evaluation and state

    def _keep_best(self, loss: float) -> None:
        if loss < self.position.best_loss:
            self.position.best_loss, self.position.best_step = loss, self.position.step
            self.best = _copies(self.parameters)

    def _evaluate_and_write(self) -> str | None:
        began = monotonic()
        try:
            loss = self.evaluate()
        except NonFiniteError as error:
            return f"the held-out loss after step {self.position.step} must be finite: {error}"
        self._keep_best(loss)
        is_late = self._spent() >= PATIENCE * self._budget()
        if loss > self.position.start_loss + (0 if is_late else DOUBLED):
            _put(self.parameters, self.best)
            self.optimizer.state.clear()
            self.position.rate /= BACK_OFF
        self.position.elapsed = monotonic() - self._began
        if self.state:
            moments = moments_of(self.optimizer, self.parameters)
            now = _copies(self.parameters)
            self.state.write(Snapshot(self.position, now, self.best, moments))
        self.position.evaluation = monotonic() - began
        return None

    def _resume(self) -> bool:
        snapshot = self.state.read() if self.state else None
        if snapshot is None:
            return False
        self.position, self.best = snapshot.position, snapshot.best
        _put(self.parameters, snapshot.parameters)
        restore_moments(self.optimizer, self.parameters, snapshot.moments)
        return True


def _factor(share: float) -> float:
    """Return the learning rate's share of its peak: a linear warm-up, then half a cosine."""
    return min(1.0, 0.1 + share / WARM_UP) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def _rms(parameter: Tensor) -> float:
    return float(parameter.detach().float().square().mean().sqrt())


def _copies(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()}


@torch.no_grad()
def _put(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
