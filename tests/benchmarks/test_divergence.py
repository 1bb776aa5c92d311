"""On the model on which compression hurts: what is claimed of the default there, and of itself."""

import pytest

from benchmarks import divergence
from benchmarks.facts import FactTables
from neuronmm_ops import SVDConfig

CONVERGED = divergence.TRIALS["converged"]
FIELDS = (
    *("method", "allocation", "importance", "prune_share", "ratio", "effective_ratio", "bytes"),
    *("text", "tokens"),
    *("dense_ce", "ce", "ce_error", "kl", "kl_error", "kl_quotient"),
)


def measured(ratios, candidates):
    """On 4,000 tokens."""
    texts = {path.stem: path.read_text()[:15_000] for path in CONVERGED.texts}
    calibration = CONVERGED.calibration.read_text()
    return divergence.measure(CONVERGED.model, texts, calibration, ratios, candidates)


@pytest.fixture(scope="module")
def rows():
    """The baseline and the default."""
    return measured((0.2, 0.6), divergence.CANDIDATES[:2])


def of(rows, method, ratio):
    return next(row for row in rows if (row["method"], row["ratio"]) == (method, ratio))


def test_the_model_is_converged(rows):
    """What it does not predict is chance: whom or what the next line is about."""
    row, facts = of(rows, "dense int8", 0.0), FactTables()
    text = CONVERGED.texts[0].read_text()[:15_000]
    chance = sum(facts.entropy(domain(line)) for line in text.split("\n\n"))
    assert row["dense_ce"] * row["tokens"] < 1.2 * chance


def domain(line):
    return "roads" if line.startswith("from") else "people"


@pytest.mark.parametrize("ratio", [0.2, 0.6])
def test_the_default_is_never_worse_than_svd_llm(rows, ratio):
    ours, theirs = (of(rows, method, ratio) for method in ("kfac-drift", "whiten"))
    assert ours["effective_ratio"] >= theirs["effective_ratio"]
    assert ours["kl"] < theirs["kl"]
    assert ours["kl_quotient"] == pytest.approx(ours["kl"] / theirs["kl"])


def test_compression_hurts(rows):
    assert of(rows, "whiten", 0.2)["ce"] - of(rows, "whiten", 0.2)["dense_ce"] > 0.3


def test_where_much_is_removed_errors_are_to_be_followed(rows):
    """There `kfac` is worse than SVD-LLM, and the same metric with drift is not."""
    found = [*rows, *measured((0.6,), (divergence.BASELINE, SVDConfig(method="kfac")))]
    assert of(found, "kfac-drift", 0.6)["kl"] < 0.9 * of(found, "whiten", 0.6)["kl"]
    assert of(found, "kfac-drift", 0.6)["kl"] < 0.8 * of(found, "kfac", 0.6)["kl"]


@pytest.mark.parametrize(
    ("method", "ratio"),
    [("pruned", 0.2), *(("pruned 0.75, then kfac-drift", ratio) for ratio in (0.2, 0.6))],
)
def test_narrower_mlps_are_the_stronger_competitor(rows, method, ratio):
    """They are named beside the default; alone they cannot reach much more than their share."""
    theirs, ours = of(rows, method, ratio), of(rows, "kfac-drift", ratio)
    assert theirs["effective_ratio"] >= of(rows, "whiten", ratio)["effective_ratio"] - 1e-9
    assert theirs["bytes"] == 1 - theirs["effective_ratio"]
    assert 0 < theirs["kl"] < 0.9 * ours["kl"]


@pytest.mark.parametrize(("ratio", "bar"), [(0.2, 0.6), (0.6, 0.8)])
def test_what_is_compared_is_far_from_svd_llm(rows, ratio, bar):
    assert of(rows, divergence.COMPARED, ratio)["kl_quotient"] < bar


def test_rows_say_what_they_are_of(rows):
    assert {tuple(row) for row in rows} == {FIELDS}
    assert len(rows) == 2 + 2 * (2 + 4)
    for storage in ("int8", "fp8"):
        row = of(rows, f"dense {storage}", 0.0)
        assert row["bytes"] == pytest.approx(0.51, abs=0.02)
        assert 0 < row["kl"] < of(rows, "whiten", 0.6)["kl"]


def test_facts_are_those_of_the_seed():
    first, second = (FactTables().documents("people", 3, 1) for _ in range(2))
    assert first == second != FactTables().documents("people", 3, 2)
