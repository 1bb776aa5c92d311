"""`neuronmm compress`: the options that decide the ranks."""

import json
from pathlib import Path

import pytest
from outcomes import COMPRESS, Run, refused

from neuronmm_ops import SVDConfig, aligned_rank


def test_ranks_are_chosen_as_asked(run: Run, dense: Path, text: Path, tmp_path: Path) -> None:
    config = (
        *("--method", "swift", "--importance", "error", "--budget", "bytes", "--ratio", "0.4"),
        *("--layer-ratio", "down_proj=0.5", "--layer-ratio", "gate_proj=0"),
        *("--layer-ratio", r"model\.layers\.0\..*=0.6:0.9"),
    )
    out = tmp_path / "o"
    outcome = run("compress", dense, "-o", out, "--calibration", text, *COMPRESS, *config, "--json")
    assert outcome.code == 0, outcome.err
    record = json.loads((out / "config.json").read_text())["quantization_config"]["svd_config"]
    expected = SVDConfig(
        ratio=0.4,
        block=8,
        method="swift",
        importance="error",
        budget="bytes",
        layer_ratios={"down_proj": 0.5, "gate_proj": 0, r"model\.layers\.0\..*": (0.6, 0.9)},
    )
    assert record == json.loads(expected.to_json())
    ranks = {layer["name"]: layer["r"] for layer in json.loads(outcome.out)["layers"]}
    both = ("model.layers.0.mlp.", "model.layers.1.mlp.")
    assert [ranks[f"{layer}gate_proj"] for layer in both] == [None, None]
    assert [ranks[f"{layer}down_proj"] for layer in both] == [24, 24]
    # Of 46 ranks that cost what the matrix does: at most 0.4 * 46, and 2 * 0.6 * 46 for both.
    assert ranks["model.layers.0.mlp.up_proj"] in (8, 16)
    assert ranks["model.layers.1.mlp.up_proj"] in (None, 32, 40)


def test_uniform_is_the_papers_rule(run: Run, dense: Path, text: Path, tmp_path: Path) -> None:
    arguments = ("--calibration", text, *COMPRESS, "--allocation", "uniform", "--json")
    outcome = run("compress", dense, "-o", tmp_path / "o", *arguments)
    assert outcome.code == 0, outcome.err
    ranks = {layer["r"] for layer in json.loads(outcome.out)["layers"]}
    assert ranks == {aligned_rank(64, 176, 0.2, block=8)}


def test_plain_with_importance_needs_calibration(run: Run, dense: Path, tmp_path: Path) -> None:
    arguments = ("--method", "plain", "--block", "8", "--importance", "gradient")
    outcome = run("compress", dense, "-o", tmp_path / "o", *arguments)
    refused(outcome, "importance gradient needs --calibration FILE.txt")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--allocation", "fair"), "one of greedy, uniform; got 'fair'"),
        (("--importance", "fame"), "one of gradient, error, perplexity; got 'fame'"),
        (("--budget", "euros"), "one of parameters, bytes, time; got 'euros'"),
        (("--budget", "time"), "budget time needs a target (trn1, trn2 or trn3)"),
        (("--target", "trn2"), "no other budget has one; got budget parameters"),
        (("--budget", "time", "--target", "trn9"), "trn9"),
        (("--budget", "bytes", "--allocation", "uniform"), "uniform knows no budget in bytes"),
        (("--tokens", "0"), "tokens must be a positive integer, got 0"),
        (("--tokens", "many"), "invalid int value: 'many'"),
        (("--layer-ratio", "up_proj"), "PATTERN=R or PATTERN=LO:HI; got 'up_proj'"),
        (("--layer-ratio", "=0.5"), "PATTERN=R or PATTERN=LO:HI; got '=0.5'"),
        (("--layer-ratio", "up_proj=half"), "PATTERN=LO:HI; got 'up_proj=half'"),
        (("--layer-ratio", "up_proj=0.2:"), "PATTERN=LO:HI; got 'up_proj=0.2:'"),
        (("--layer-ratio", "up_proj=1"), "ratio of up_proj must be a number in [0, 1)"),
        (("--layer-ratio", "up_proj=nan"), "ratio of up_proj must be a number in [0, 1)"),
        (("--layer-ratio", "up_proj=0.6:0.2"), "or two such in order; got (0.6, 0.2)"),
        (("--layer-ratio", "(=0.5"), "no regular expression"),
        (("--layer-ratio", "mlp=0:0.3", "--ratio", "0.9"), "no allocation meets the budget"),
    ],
)
def test_bad_arguments(
    run: Run, dense: Path, text: Path, tmp_path: Path, arguments: tuple[str, ...], word: str
) -> None:
    out = tmp_path / "o"
    outcome = run("compress", dense, "-o", out, "--calibration", text, *COMPRESS, *arguments)
    refused(outcome, word)
    assert list(tmp_path.iterdir()) == []
