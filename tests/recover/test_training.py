"""The loop on a toy: budget, phases, the best checkpoint, resume, and what is not finite."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from neuronmm_ops.errors import CheckpointError, NonFiniteError
from neuronmm_ops.recover import RecoverConfig, Training
from neuronmm_ops.recover import training as module
from neuronmm_ops.recover.data import Windows
from neuronmm_ops.recover.state import StateFile


class Toy:
    """Fits `u v` to a matrix; a loss of its own is the held-out loss."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        # Laid out along the contraction, as an SVDLinear's are.
        self.u = nn.Parameter(torch.randn(3, 6, generator=generator).t())
        self.v = nn.Parameter(torch.randn(4, 3, generator=generator).t())
        self.goal = torch.randn(6, 4, generator=generator)
        self.steps: list[dict[str, bool]] = []

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {"u": self.u, "v": self.v}

    def loss(self, ids: Tensor) -> Tensor:
        self.steps.append({n: p.requires_grad for n, p in self.parameters.items()})
        rows = (ids.flatten() % 6).bincount(minlength=6).float()
        error = (self.u @ self.v - self.goal).square().mean(1)
        return (rows @ error) / rows.sum()

    def held_out(self) -> float:
        return float((self.u @ self.v - self.goal).square().mean().detach())

    def training(self, config: RecoverConfig, **options: Any) -> Training:
        arguments: dict[str, Any] = {
            "objective": self.loss,
            "evaluate": self.held_out,
            "phases": [self.parameters],
            "windows": Windows(torch.arange(500), 5, 4, config.seed),
            "config": config,
        }
        return Training(**{**arguments, **options})


CONFIG = RecoverConfig(steps=30, learning_rate=0.03)


def test_it_trains_and_reports():
    toy = Toy()
    start = toy.held_out()
    told: list[tuple[Any, ...]] = []
    outcome = toy.training(CONFIG).run(lambda *event: told.append(event))
    position = outcome.position
    assert (position.step, position.tokens, outcome.failure) == (30, 30 * 20, None)
    assert position.start_loss == start
    assert position.best_loss == toy.held_out() < 0.9 * start
    assert len(told) == 30
    assert told[0][:3] == ("recover", 1, 30)
    assert told[-1][1] == 29  # the last evaluation is to come
    assert "step 30, loss" in told[-1][3]
    assert "held-out perplexity" in told[-1][3]


def test_the_best_is_left_in_place_at_worst_the_start():
    toy = Toy()
    losses = iter([5.0, 4.0, 3.0, *[6.0] * 100])
    values: list[Tensor] = []

    def evaluate() -> float:
        values.append(toy.u.detach().clone())
        return next(losses)

    outcome = toy.training(CONFIG, evaluate=evaluate).run()
    assert (outcome.position.best_loss, outcome.position.best_step) == (3.0, 4)
    assert torch.equal(toy.u, values[2])

    toy, start = Toy(), Toy().u.detach()
    rising = iter(range(1, 100))
    outcome = toy.training(CONFIG, evaluate=lambda: float(next(rising))).run()
    assert outcome.position.best_step == 0
    assert torch.equal(toy.u, start)


def test_a_rate_that_is_too_high_is_lowered():
    toy = Toy()
    outcome = toy.training(RecoverConfig(steps=100, learning_rate=20.0)).run()
    assert outcome.position.rate in (4.0**-n for n in range(2, 6))
    assert outcome.position.best_loss < 0.8 * outcome.position.start_loss
    assert toy.held_out() == outcome.position.best_loss


@pytest.mark.parametrize(
    ("losses", "rate"),
    [
        ([1.5] * 6 + [0.9] * 14, 1.0),  # rounding's
        ([1.8] + [0.9] * 19, 0.25),  # more than twice the perplexity
        ([0.9] * 10 + [1.1] + [0.9] * 9, 0.25),
    ],
)
def test_a_loss_may_rise_before_it_falls(losses, rate):
    told = iter([1.0, *losses])
    config = RecoverConfig(steps=60, learning_rate=0.01)
    position = Toy().training(config, evaluate=lambda: next(told)).run().position
    assert (position.rate, position.best_loss) == (rate, 0.9)


def test_a_relative_rate_does_not_depend_on_the_scale(monkeypatch):
    monkeypatch.setattr(module, "MAX_NORM", 1e9)  # clipping does
    changes = []
    for scale in (1.0, 2.0**-6):
        toy = Toy()
        toy.u.data *= scale
        toy.v.data /= scale
        before = toy.u.detach() / scale
        toy.training(CONFIG, is_relative=True).run()
        changes.append(toy.u.detach() / scale - before)
    # AdamW's epsilon is what is left of the scale.
    torch.testing.assert_close(changes[0], changes[1], rtol=1e-3, atol=1e-4)


def test_phases_share_the_steps():
    toy = Toy()
    toy.training(CONFIG, phases=[{"u": toy.u}, {"v": toy.v}]).run()
    assert toy.steps == [{"u": True, "v": False}] * 15 + [{"u": False, "v": True}] * 15


def test_gradients_of_several_passes_are_those_of_one(monkeypatch):
    whole, parts = Toy(), Toy()
    whole.training(CONFIG).run()
    monkeypatch.setattr(module, "PASS_TOKENS", 5)
    parts.training(CONFIG).run()
    assert len(parts.steps) == 4 * len(whole.steps)
    torch.testing.assert_close(parts.u, whole.u)


class Killed(BaseException):
    pass


def killed_at(step: int, loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    calls = iter(range(1, 1000))

    def objective(ids: Tensor) -> Tensor:
        if next(calls) == step:
            raise Killed
        return loss(ids)

    return objective


@pytest.mark.parametrize("step", [2, 3, 4, 15, 16, 17, 30])
def test_a_killed_run_ends_as_one_that_was_not(step, tmp_path):
    def phases(toy: Toy) -> list[dict[str, nn.Parameter]]:
        return [{"u": toy.u}, {"v": toy.v}]

    whole = Toy()
    expected = whole.training(CONFIG, phases=phases(whole)).run()
    first, second = Toy(), Toy()
    with pytest.raises(Killed):
        first.training(
            CONFIG,
            objective=killed_at(step, first.loss),
            phases=phases(first),
            state=StateFile(tmp_path / "work", "run"),
        ).run()
    state = StateFile(tmp_path / "work", "run")
    outcome = second.training(CONFIG, phases=phases(second), state=state).run()
    assert outcome.resumed == (step > 2)
    assert torch.equal(second.u, whole.u)
    assert torch.equal(second.v, whole.v)
    for name in ("step", "tokens", "start_loss", "best_loss", "best_step"):
        assert getattr(outcome.position, name) == getattr(expected.position, name), name
    assert len(second.steps) == 30 - 2 * ((step - 1) // 2)
    state.remove()
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_damaged_state_is_refused(cut, tmp_path):
    state = StateFile(tmp_path, "run")
    Toy().training(CONFIG, state=state).run()
    state.path.write_bytes(state.path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match="cannot be read"):
        Toy().training(CONFIG, state=state).run()


@pytest.mark.parametrize("value", [2.5, float("nan")])
def test_a_changed_number_in_the_state_is_refused(value, tmp_path):
    state = StateFile(tmp_path, "run")
    Toy().training(CONFIG, state=state).run()
    with safe_open(state.path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = file.metadata()
    tensors["best/u"].view(-1)[0] = value
    save_file(tensors, state.path, header)
    with pytest.raises(CheckpointError, match="damaged: its values are not what was written"):
        Toy().training(CONFIG, state=state).run()


def test_a_state_that_cannot_be_written(tmp_path):
    state = StateFile(tmp_path, "run")
    state.path.with_suffix(".partial").mkdir()
    with pytest.raises(OSError, match=r"cannot write .*state.safetensors, which needs 0.000 GB"):
        Toy().training(CONFIG, state=state).run()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_at_the_best(value):
    toy = Toy()
    calls = iter(range(1, 100))

    def objective(ids: Tensor) -> Tensor:
        return toy.loss(ids) * (value if next(calls) == 12 else 1.0)

    outcome = toy.training(CONFIG, objective=objective).run()
    assert outcome.failure == f"the loss of step 12 must be finite, got {value}"
    assert outcome.position.best_step == 10
    assert toy.held_out() == outcome.position.best_loss < outcome.position.start_loss


def test_gradients_that_are_not_finite_stop_too():
    toy = Toy()

    def objective(ids: Tensor) -> Tensor:
        return toy.loss(ids) + 0 * (toy.u - toy.u.detach()).square().sum().sqrt()

    outcome = toy.training(CONFIG, objective=objective).run()
    assert outcome.failure == "the gradient norm of step 1 must be finite, got nan"
    assert torch.equal(toy.u, Toy().u)


def test_a_held_out_loss_that_is_not_finite_stops_too():
    toy = Toy()
    calls = iter(range(100))

    def evaluate() -> float:
        if next(calls) == 2:
            raise NonFiniteError("logits of block 0 must be finite")
        return toy.held_out()

    outcome = toy.training(CONFIG, evaluate=evaluate).run()
    assert outcome.failure is not None
    assert outcome.failure.startswith("the held-out loss after step 4 must be finite: logits of")
    assert outcome.position.best_step == 2


class Clock:
    """Time in which an evaluation takes 2 s and a step 1 s."""

    def __init__(self, toy: Toy) -> None:
        self.now, self.toy = 100.0, toy

    def evaluate(self) -> float:
        self.now += 2
        return self.toy.held_out()

    def loss(self, ids: Tensor) -> Tensor:
        self.now += 1
        return self.toy.loss(ids)


def test_a_budget_of_time(monkeypatch):
    toy = Toy()
    clock = Clock(toy)
    monkeypatch.setattr(module, "monotonic", lambda: clock.now)
    rates: list[float] = []

    def objective(ids: Tensor) -> Tensor:
        rates.append(training.optimizer.param_groups[0]["lr"])
        return clock.loss(ids)

    config = RecoverConfig(minutes=2, learning_rate=0.03)
    training = toy.training(config, objective=objective, evaluate=clock.evaluate)
    outcome = training.run()
    assert outcome.position.elapsed == clock.now - 100 == 120
    # Seven evaluations: at the start, every 20 s of training, at the end.
    assert outcome.position.step == 120 - 2 * 7
    peak = rates.index(max(rates))
    assert max(rates) == pytest.approx(0.03, rel=0.05)
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 1e-4


def test_a_budget_shorter_than_an_evaluation(monkeypatch):
    clock = Clock(Toy())
    monkeypatch.setattr(module, "monotonic", lambda: clock.now)
    training = clock.toy.training(RecoverConfig(minutes=0.03), evaluate=clock.evaluate)
    with pytest.raises(ValueError, match=r"minutes must leave time to train, got 0.03: .* 2.0 s"):
        training.run()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora_order": "x"}, "lora_order must be one of sequential, joint; got 'x'"),
        ({"minutes": float("nan")}, "minutes must be"),
        ({"learning_rate": -1}, "learning_rate must be a positive number"),
        ({"hidden_weight": -1}, "hidden_weight must be at least 0"),
        ({"batch_tokens": 0}, "batch_tokens must be at least 1"),
        ({"lora_rank": 0}, "lora_rank must be at least 1"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ValueError, match=words):
        RecoverConfig(**options)
