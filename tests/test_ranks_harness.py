"""The harness of tests that need several ranks: results come back, and errors end the test."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run

pytestmark = pytest.mark.slow


def total(rank: int, given: torch.Tensor) -> torch.Tensor:
    own = given * (rank + 1)
    dist.all_reduce(own)
    return own


def one_fails(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 had enough")
    dist.barrier()


def one_dies(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def waits(rank: int) -> None:
    del rank
    time.sleep(600)


def test_each_rank_returns_its_result():
    results = run(total, 3, torch.tensor([1.0, 2.0]))
    assert [result.tolist() for result in results] == [[6.0, 12.0]] * 3


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (one_fails, "(?s)rank 1 raised .*rank 1 had enough"),
        (one_dies, "rank 1 ended with exit code 7"),
    ],
)
def test_an_error_of_a_rank_ends_the_others(function, words):
    start = time.monotonic()
    with pytest.raises(AssertionError, match=words):
        run(function, 2)
    assert time.monotonic() - start < 60


def test_ranks_are_killed_after_the_timeout():
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] were not done in 3 s"):
        run(waits, 2, timeout_s=3)
