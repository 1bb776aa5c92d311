"""compress --stream: the memory that it takes, measured in a process of its own."""

from pathlib import Path

import pytest
from fleet import run_fleet
from transformers import LlamaConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
MIB = 2**20
MEASURED = """
import re, sys
from pathlib import Path
from neuronmm_ops import SVDConfig, hf

model, text, mode = sys.argv[1:]
config = SVDConfig(ratio=0.3, block=32, targets="q_proj")
hf.compress(model, config, Path(text).read_text(), f"{model}-{mode}", samples=4, seqlen=64,
            dtype="float32", stream=mode == "stream")
# ru_maxrss would be the parent's, where that is larger
print(1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]))
"""


def _peak(model: Path, text: Path, mode: str) -> int:
    (outcome,) = run_fleet(model.with_name("printed"), 1, MEASURED, model, text, mode)
    assert outcome.code == 0, outcome.err
    return int(outcome.out.split()[-1])


@pytest.mark.slow
def test_the_memory_does_not_grow_with_the_number_of_layers(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import larger_than_memory as example

    text = tmp_path / "text.txt"
    example.write_text(text, 512, 4096)
    peaks = {}
    for layers in (2, 24):
        config = LlamaConfig(
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=layers,
            num_attention_heads=8,
            vocab_size=4096,
        )
        example.write_model(tmp_path / f"{layers}", config)
        peaks[layers] = _peak(tmp_path / f"{layers}", text, "stream")
    layer = 4 * (4 * 512**2 + 3 * 512 * 1024)
    # 22 layers more are 220 MiB more in float32.
    assert 22 * layer > 200 * MIB
    assert peaks[24] - peaks[2] < 2 * layer + 40 * MIB
    assert _peak(tmp_path / "24", text, "whole") - peaks[24] > 100 * MIB
    assert peaks[24] <= example.bound(config)
