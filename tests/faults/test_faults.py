"""A sample of the faults that `make faults` tries, all of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import neuronmm_ops


@pytest.mark.slow
def test_a_sample_of_faults_is_refused_in_one_line() -> None:
    source = Path(neuronmm_ops.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, Path(__file__).parent, "--sample", "60", "--seed", "3"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(source)},
    )
    assert result.returncode == 0, result.stdout + result.stderr
