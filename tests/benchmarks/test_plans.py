"""`make plans` keeps what a change of the kernels leaves unchanged, and searches the rest."""

import json

import pytest

from benchmarks import plans
from neuronmm_ops.kernels.problem import Problem
from neuronmm_ops.plan import cache

PROBLEMS = [Problem("xw", 8, ((256, 512),)), Problem("xuv", 200, ((512, 128), (128, 640)))]
KEYS = [plans._key(problem) for problem in PROBLEMS]


@pytest.fixture
def searched(tmp_path, monkeypatch):
    """What was searched since, with two plans shipped of kernels that are no longer these."""
    found = []
    search = plans.find_plan

    def find_plan(problem, *arguments, **options):
        found.append(problem)
        return search(problem, *arguments, **options)

    monkeypatch.setattr(cache, "SHIPPED", tmp_path / "plans.json")
    monkeypatch.setattr(plans, "problems", lambda: iter(PROBLEMS))
    monkeypatch.setattr(plans, "find_plan", find_plan)
    cache.shipped.cache_clear()
    monkeypatch.setattr(cache, "fingerprint", lambda: "before")
    plans.main([])
    assert found == PROBLEMS
    found.clear()
    cache.shipped.cache_clear()
    monkeypatch.setattr(cache, "fingerprint", lambda: "now")
    yield found
    cache.shipped.cache_clear()


def document():
    return json.loads(cache.SHIPPED.read_text())


def test_plans_that_take_as_long_as_before_are_kept(searched):
    before = document()["plans"]
    plans.main([])
    assert searched == []
    assert document() == {"source": "now", "plans": before}


@pytest.mark.parametrize(
    "change", [{"times_ms": [1e-9, 1e-9]}, {"kernel": "gone"}, {"blocks": {"gone": 1}}]
)
def test_plans_that_changed_are_searched(searched, change):
    before = document()["plans"]
    changed = {**before, KEYS[1]: {**before[KEYS[1]], **change}}
    cache.SHIPPED.write_text(json.dumps({"source": "before", "plans": changed}))
    plans.main([])
    assert searched == PROBLEMS[1:]
    assert document() == {"source": "now", "plans": before}


def test_an_interrupted_run_goes_on(searched):
    plans.main([])
    (only, *_), source = document()["plans"].items(), document()["source"]
    cache.SHIPPED.write_text(json.dumps({"source": source, "plans": dict([only])}))
    cache.shipped.cache_clear()
    plans.main([])
    assert searched == PROBLEMS[1:]


def test_all_are_searched_anew(searched):
    plans.main(["--anew"])
    assert searched == PROBLEMS


def test_every_shape_of_every_model_is_shipped():
    _, shipped = cache.shipped()
    assert {plans._key(problem) for problem in plans.problems()} <= shipped.keys()
