"""Least squares: what is found, and why something is not."""

import numpy as np
import pytest

from neuroncore.calibration.solve import KNOWN, NOISE, LeastSquares, solve

TIMES = np.array([[1.0, 0.0], [1.0, 1.0], [0.5, 1.0], [1.0, 0.5]])


def solved(errors, most=5.0):
    low, high = np.full(2, 0.2), np.full(2, most)
    return solve(LeastSquares(("first", "second"), errors, low, high, free=2), np.ones(2))


def test_constants_and_their_standard_errors_are_found():
    found = solved(lambda values: TIMES @ (values - (1.3, 0.8)))
    assert [each.value for each in found] == pytest.approx([1.3, 0.8])
    expected = NOISE * np.sqrt(np.diag(np.linalg.inv(TIMES.T @ TIMES)))
    assert [each.plus_minus for each in found] == pytest.approx(list(expected), rel=1e-3)
    assert [each.reason for each in found] == ["", ""]


@pytest.mark.parametrize(
    ("errors", "most", "reasons"),
    [
        (
            lambda values: np.full(4, values.sum() - 2.4),
            5.0,
            ["times tell it only together with second", "times tell it only together with first"],
        ),
        (
            lambda values: np.array([max(1 / values) - 1, 1 / values[1] - 1]),
            5.0,
            ["times do not change where it is more: second binds", ""],
        ),
        (lambda values: TIMES @ (0.0, values[1] - 1.1), 5.0, ["no time depends on it", ""]),
        (lambda values: TIMES @ (values - (3.0, 1.0)), 2.0, ["times ask for more or less", None]),
        (
            lambda values: np.array([values[0] - 1, (values[1] - 1) * 0.9 * NOISE / KNOWN]),
            5.0,
            ["", "no time depends on it"],
        ),
    ],
)
def test_what_is_not_decided_says_why(errors, most, reasons):
    found = [each.reason for each in solved(errors, most)]
    for reason, expected in zip(found, reasons, strict=True):
        assert expected is None or reason[: len(expected) or None] == expected


def test_a_search_that_fits_nothing_decides_nothing():
    moves = (lambda values, ratio: values * (ratio, 1.0),)
    misfit = np.array([0.0, 0.0, 0.2, -0.2])
    for off, word in ((0.0, ""), (1.0, "no values fit better than")):
        problem = LeastSquares(
            *(("first", "second"), lambda values, off=off: TIMES @ (values - 1.3) + off * misfit),
            *(np.full(2, 0.2), np.full(2, 5.0), 2, moves),
        )
        assert all(each.reason.startswith(word) for each in solve(problem, np.ones(2)))
        assert all(bool(each.reason) == bool(word) for each in solve(problem, np.ones(2)))
