"""The hour on a device, on simulated ones: what is kept, bounded and compared."""

import json
import os
import time
from dataclasses import dataclass, replace

import pytest
import stand_ins
import torch
from stand_ins import DirectKernel
from torch.utils._pytree import tree_leaves

from neuroncore.calibration import measurements
from neuronmm_ops import kernels
from neuronmm_ops.device import layer, model, page, predictions, programme, run, runners
from neuronmm_ops.device.record import Finding, Record
from neuronmm_ops.device.runners import NeuronDevice, SimulatedDevice
from neuronmm_ops.device.values import error_ratio, factors, operands, product_error_ratio
from neuronmm_ops.ops.definitions import SPECS

LAYERS = ("dense, M=1, bf16", "low rank, M=1, fp8")
SMALL = ("xw of small, M=1, bf16", "xuv of small, M=200, fp8", "svd_mlp of small, M=1, bf16")
PROFILED = "2048 matmuls of resident tiles"
MICRO = ("loads-4096/32", "matmuls-512/64")
PREFILL, DECODE = run.MODEL.values()
TRN2 = SimulatedDevice("trn2")
CHAINED = next(c for c in programme.kernel_cases("trn2") if c.name == SMALL[2])
WHOLE = run.programme("trn2")
kernel_named = kernels.kernel_named


class Faulty(SimulatedDevice):
    """Refuses a kernel, computes another wrongly, dies of one and hangs in one."""

    def run(self, kernel, tensors, arguments):
        if kernel.name == "xw_decode":
            raise ValueError("NCC_EVRF051: float8_e4m3fn\nis not supported")
        if kernel.name == "xuv":
            os._exit(7)
        if kernel.name == "loads-4096/32":
            time.sleep(600)
        sample = super().run(kernel, tensors, arguments)
        return replace_outputs(sample) if kernel.name == "svd_mlp_decode" else sample


def replace_outputs(sample):
    return sample._replace(outputs=(sample.outputs[0] * 1.1,))


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """A programme of a few rows."""
    items = [item for item in run.programme("trn2") if item.name in (PROFILED, *SMALL, *MICRO)]
    assert len(items) == 6
    monkeypatch.setattr(run, "programme", lambda target: items)


def rows_of(document):
    return {row["name"]: row for row in document["rows"]}


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_every_row_was_predicted_and_every_kernel_is_run(target):
    rows = predictions.frozen().rows[target]
    cases = programme.kernel_cases(target)
    names = [case.name for case in cases]
    micro = [case.name for case in run.microkernels.cases(target)]
    profiled = [case.name for case in run.published(target)]
    assert len(profiled) == (6 if target == "trn1" else 7)
    assert sorted(rows) == sorted({*names, *micro, *profiled})
    assert len(names) == len(set(names))
    phases = {(case.problem.op, rows[case.name].kernel) for case in cases}
    # a chunk of a prompt has no row
    every = {(op, f"{op}_decode") for op in SPECS if op != "attention"}
    assert phases == every | {(op, op) for op, spec in SPECS.items() if not spec.states}
    for row in rows.values():
        low, high = row.range_us
        assert 0 < low <= row.time_us <= high


@pytest.mark.slow
def test_a_dry_run_finds_the_launch_and_a_slower_machine(tmp_path):
    slow = SimulatedDevice("trn2", {"dma_engine_gbps": 11.5}, launch_us=17.0)
    document = run.run(tmp_path, 10, slow)
    assert document["counts"] == {"measured": 6}
    assert document["launch_us"] == pytest.approx(17, abs=3)
    rows = rows_of(document)
    assert rows["loads-4096/32"]["ratio"] > 1.7
    assert rows["loads-4096/32"]["inside"] is False
    assert rows["matmuls-512/64"]["inside"] is True
    assert all(rows[name]["error_ratio"] < 1 for name in (PROFILED, *SMALL))
    kept = measurements.read(tmp_path / "measurements.json")
    assert {row.case: row.time_us for row in kept.rows} == {
        name: rows[name]["measured_us"] for name in MICRO
    }
    page = (tmp_path / "device-check.md").read_text()
    assert "| 445.1 TensorE active |" in page
    assert f"{document['outside']} outside; 0 not reached" in page
    assert "*Modelled* times were frozen" in page


@pytest.mark.parametrize(
    ("name", "published"),
    [(PROFILED, {"TensorE active": 445.1}), ("tiled 2048^3", {"time": 608})],
)
def test_profiled_kernels_are_beside_what_was_published(name, published):
    time_us, ratio, _ = run.measure_profiled(TRN2, name)
    assert ratio < 1
    prediction = predictions.frozen().rows["trn2"][name]
    row = Finding("profiled", name, "measured", prediction, "", time_us, ratio)
    for target, expected in (("trn2", published), ("trn3", None)):
        (found,) = page.summary(Record(target, "simulated", {}, {}, rows=(row,)))["rows"]
        assert found.get("published_us") == expected


@pytest.mark.parametrize("name", [PROFILED, "tiled 2048^3, nc_transpose of each tile"])
def test_wrong_products_are_found(name):
    case = page.PROFILED[name]
    a, b = factors(case)
    right = (a if case.function == "transposing" else a.T).double() @ b.double()
    result = (right * case.arguments.get("count", 1)).bfloat16()
    assert product_error_ratio(case, (a, b), result) < 1
    assert product_error_ratio(case, (a, b), result * 1.1) > run.WRONG


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path):
    def kill(step, done, total):
        if (step, done) == ("microkernels", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(tmp_path, 10, replace(TRN2, launch_us=10.0), kill)
    document = run.run(tmp_path, 10, replace(TRN2, launch_us=900.0))
    beyond = [round(row["measured_us"] - row["modelled_us"]) for row in document["rows"]]
    assert beyond == [10, 10, 10, 900, 900, 900]


@pytest.mark.slow
def test_what_fails_is_a_row_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "ROW_S", 20.0)
    rows = rows_of(run.run(tmp_path, 10, Faulty("trn2")))
    names = "loads-4096/32", "matmuls-512/64", *SMALL
    assert [(rows[name]["status"], rows[name]["reason"]) for name in names] == [
        ("late", "no answer in 20 s"),
        ("measured", ""),
        ("refused", "ValueError: NCC_EVRF051: float8_e4m3fn is not supported"),
        ("lost", "its process ended with exit code 7"),
        ("wrong", rows[SMALL[2]]["reason"]),
    ]
    assert rows[SMALL[2]]["error_ratio"] > run.WRONG
    statuses = [row.status for row in measurements.read(tmp_path / "measurements.json").rows]
    assert statuses == ["skipped", "measured"]
    assert "| late | no answer in 20 s |" in (tmp_path / "device-check.md").read_text()


def test_time_bounds_it(tmp_path):
    started = time.monotonic()
    document = run.run(tmp_path, 0.01, Faulty("trn2"))
    assert (document["rows"], document["missing"]) == ([], 6)
    assert time.monotonic() - started < 15


def test_other_versions_are_another_record(tmp_path):
    run.run(tmp_path, 1e-6, TRN2)
    path = tmp_path / "device-check.json"
    document = json.loads(path.read_text())
    document["versions"] |= {"nki": "0.6.0"}
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"is of versions nki 0\.6\.0, this run has nki None"):
        run.run(tmp_path, 1, TRN2)


@pytest.mark.slow
@pytest.mark.parametrize("offers", ["nki_op", "wrap_nki", "direct"])
def test_kernels_are_called_as_the_package_offers(offers, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "kernel_named", lambda *name: DirectKernel(kernel_named(*name)))
    monkeypatch.setattr(runners, "kernel_named", kernels.kernel_named)
    monkeypatch.setattr(runners, "FEW", 1)
    monkeypatch.setattr(runners, "MANY", 6)
    case = programme.kernel_cases("trn2")[0]
    with stand_ins.neuron_machine(tmp_path, monkeypatch) as machine:
        machine.nki()
        machine.torch_neuronx(offers)
        machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE="trn2")
        assert runners.device_here() == NeuronDevice("trn2", "neuron")
        with pytest.raises(ValueError, match="--target trn3 is not this machine's, trn2"):
            runners.device_here("trn3")
        on_cpu = NeuronDevice("trn2", "cpu")
        prediction = predictions.frozen().rows["trn2"][case.name]
        found = run.measure_kernel(on_cpu, case, prediction), run.measure_layers(on_cpu, CHAINED, 3)
    for time_us, ratio, _ in found:
        assert time_us > 0
        assert ratio < 1


@pytest.mark.parametrize("name", LAYERS)
def test_a_layers_results_and_caches_are_compared(name):
    name = f"decoder_layer of small, {name}"
    (case,) = [each for each in programme.kernel_cases("trn2") if each.name == name]
    prediction = predictions.frozen().rows["trn2"][name]
    found = run.measure_kernel(TRN2, case, prediction)
    assert found.error_ratio < 0.5
    assert found.time_us == pytest.approx(prediction.time_us + TRN2.launch_us, abs=1e-3)
    for place in range(4):
        wrong = WrongResult("trn2", place=place)
        assert run.measure_kernel(wrong, case, prediction).error_ratio > run.WRONG


@dataclass(frozen=True)
class WrongResult(SimulatedDevice):
    """The new token of one of the results is a little off."""

    place: int = 0

    def run(self, kernel, tensors, arguments):
        sample = super().run(kernel, tensors, arguments)
        outputs = [each.clone() for each in sample.outputs]
        outputs[self.place].view(-1)[-1] += 0.5
        return sample._replace(outputs=tuple(outputs))


def test_the_process_of_a_device_has_its_cores(monkeypatch):
    for name in ("NEURON_LOGICAL_NC_CONFIG", "NEURON_PLATFORM_TARGET_OVERRIDE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "3")
    NeuronDevice("trn2", "neuron").prepare(2)
    assert os.environ["NEURON_LOGICAL_NC_CONFIG"] == "2"
    assert os.environ["NEURON_CC_FLAGS"] == "-O1 --logical-nc-config=2"
    assert os.environ["NEURON_RT_VISIBLE_CORES"] == "3"


class Careless(SimulatedDevice):
    """Forgets what the prompt was."""

    def passes(self, lm, pieces):
        first, *_ = samples = super().passes(lm, pieces)
        return [first, *[sample._replace(outputs=first.outputs) for sample in samples[1:]]]


@pytest.mark.slow
def test_a_small_model_is_rows_without_a_prediction(tmp_path, monkeypatch):
    items = [item for item in WHOLE if item.step == "model"]
    monkeypatch.setattr(run, "programme", lambda target: items)
    document = run.run(tmp_path, 40, Careless("trn2"))
    rows = rows_of(document)
    assert [rows[name]["status"] for name in (PREFILL, DECODE)] == ["measured", "wrong"]
    assert rows[PREFILL]["error_ratio"] < 1 < run.WRONG < rows[DECODE]["error_ratio"]
    assert rows[PREFILL]["measured_us"] > 3 * TRN2.launch_us
    assert (document["inside"], document["outside"], rows[PREFILL]["modelled_us"]) == (0, 0, None)
    assert run.run(tmp_path, 1, TRN2)["rows"] == document["rows"]
    assert f"| {PREFILL} |  |  | " in (tmp_path / "device-check.md").read_text()


@pytest.mark.slow
def test_a_model_is_compiled_for_the_device(monkeypatch):
    monkeypatch.setitem(runners.COMPILERS, "cpu", "eager")
    monkeypatch.setattr(runners.neuron, "call_mode", lambda: None)
    for phase in run.MODEL:
        found = run.measure_model(NeuronDevice("trn2", "cpu"), phase)
        assert found.time_us > 0
        assert (found.error_ratio < 1, found.remark) == (True, "")


def test_the_first_token_that_differs_is_told():
    exact = torch.eye(3)
    assert model.first_other(exact, exact) == ""
    told = "token 2 of 3 is 0, on the CPU in float32 1"
    assert model.first_other(exact[[0, 0, 0]], exact) == told


def test_layers_in_a_graph_are_a_line():
    kept = predictions.frozen().rows["trn2"][SMALL[2]].times(2)
    found = []
    for count in (2, 4, 16):
        time_us, ratio, _ = run.measure_layers(replace(TRN2, launch_us=20.0), CHAINED, count)
        assert ratio < 1
        name = f"{count} of {SMALL[2]}"
        found.append(Finding("layers", name, "measured", kept, time_us=time_us + 300))
    line = page.layers(found)
    assert line["graph_us"] == pytest.approx(300)
    assert line["layer_us"] == pytest.approx(line["modelled_us"] + 20, rel=0.15)  # other kernels
    assert page.layers(found[:1]) is None


def test_values_that_are_no_numbers_are_infinitely_wrong():
    oracle = torch.ones(3, dtype=torch.float64)
    plain = torch.ones(3)
    assert error_ratio(plain, oracle, plain) == 0
    assert error_ratio(torch.full((3,), float("nan")), oracle, plain) == float("inf")
    with pytest.raises(ValueError, match=r"must be \[3\], got \[2\]"):
        error_ratio(plain[:2], oracle, plain)


def test_operands_are_the_same_in_every_run():
    for case in programme.kernel_cases("trn2")[2:8]:
        of = layer.operands if case.problem.op == layer.OP else operands
        first, second = [tree_leaves(of(case.problem)) for _ in range(2)]
        for a, b in zip(first, second, strict=True):
            assert a is b is None or torch.equal(a.float(), b.float())
