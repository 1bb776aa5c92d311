"""A coarse matrix with a low-rank correction, beside dense ones of as many bytes."""

import json

import pytest

from benchmarks import residuals
from benchmarks.divergence import TRIALS

POINTS = ((0.5, 1e-5), (0.25, 1e-2), (0.125, 1.0), (0.51, 1e-4))


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.1, None),
        (0.125, 1.0),
        (0.1875, 0.1),
        (0.375, (1e-2 * 1e-5) ** 0.5),
        (0.5, 1e-5),
        (0.9, 1e-5),
    ],
)
def test_the_best_dense_at_the_same_bytes(share, expected):
    """What is larger and worse than another is no part of it."""
    found = residuals.best_of(POINTS, share)
    assert found == (expected if expected is None else pytest.approx(expected))


@pytest.fixture(scope="module")
def rows():
    few = {"ranks": (16,), "ratios": (0.4,), "shares": (0.4, 0.24), "widths": (0.2,)}
    return residuals.measure(TRIALS["converged"], characters=3000, **few)


def of(rows, **labels):
    (found,) = (row for row in rows if labels.items() <= row.items())
    return found


def test_dense_is_better_at_the_same_bytes(rows):
    """Of ways to spend bytes on a matrix, a low-rank correction is none."""
    others = [row for row in rows if row["kind"] in ("residual", "pair")]
    assert len(others) == 3 * 2 + 2
    assert min(row["quotient"] for row in others) > 1.5
    assert max(row["bytes"] for row in others) < 0.5


def test_the_own_choice_is_within_its_budget_and_below_pairs_alone(rows):
    many, few = (row for row in rows if row["kind"] == "auto" and not row["width"])
    assert [many["bytes"], few["bytes"]] == pytest.approx([0.4, 0.24], rel=0.03)
    assert many["kl"] < few["kl"] < of(rows, kind="pair", storage="int4")["kl"]


def test_narrower_mlps_in_the_budget_are_nearer_than_any_dense_storage_of_its_bytes(rows):
    (narrower,) = (row for row in rows if row["width"] and row["ratio"] > 0.7)
    assert narrower["bytes"] == pytest.approx(0.24, rel=0.03)
    assert narrower["quotient"] < 0.8


@pytest.mark.parametrize("storage", ["int2", "int3", "int4"])
def test_a_correction_repairs_and_turns_repair_more(rows, storage):
    dense = of(rows, kind="dense", storage=storage, group=128)
    once, by_turns = (
        of(rows, kind="residual", storage=storage, rounds=rounds) for rounds in residuals.ROUNDS
    )
    assert by_turns["kl"] < once["kl"] < dense["kl"]
    assert dense["bytes"] < once["bytes"] == by_turns["bytes"]


def test_the_table(run, rows, monkeypatch):
    monkeypatch.setattr(residuals, "run", lambda progress: [{"trial": "one", **r} for r in rows])
    assert json.loads(run("residuals", "--json").out)[0]["trial"] == "one"
    shown = run("residuals").out
    for label in (
        "dense int4 g128",
        "int3 g128 + rank 16, 4 rounds",
        "pair int8, ratio 0.4",
        "auto storage, ratio 0.76",
        "auto storage, ratio 0.76, narrower 0.2",
    ):
        assert label in shown
