"""`python benchmarks overhead --xla` and `neuronmm doctor` on a machine with torch_xla."""

import json

from benchmarks import overhead
from neuronmm_ops.cli import main
from neuronmm_ops.ops.definitions import SPECS


def test_tracing_is_measured_for_each_op():
    rows = overhead.run_xla(repeats=2, calls=3)
    assert {row["op"] for row in rows} == {op for op, spec in SPECS.items() if not spec.states}
    for row in rows:
        assert row["kernel_us"] > 0
        assert row["op_us"] > 0
        assert row["composite_us"] > 0


def test_doctor_says_how_ops_are_lowered(capsys):
    assert main(["doctor", "--json"]) == 0
    backends = {b["name"]: b for b in json.loads(capsys.readouterr().out)["backends"]}
    assert not backends["xla"]["usable"], "XLA:CPU runs no such call"
    assert backends["xla"]["reason"].startswith("torch_xla 2.9.0; lowered as custom call: ")
