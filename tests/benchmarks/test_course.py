"""`python benchmarks course`, on a stand-in of a clone: a kernel with a constant."""

import pytest

from benchmarks import course, megakernel
from neuroncore import as_nki
from neuronmm_ops.estimate.served import LAUNCH_US

KERNEL = """
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl


@nki.jit
def added(a, b):
    out = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
    ROWS = 1
    for m in nl.affine_range(a.shape[0] // ROWS):
        rows = slice(m * ROWS, (m + 1) * ROWS)
        x, y = nl.ndarray((ROWS, 1), a.dtype), nl.ndarray((ROWS, 1), a.dtype)
        nisa.dma_copy(dst=x, src=a[rows])
        nisa.dma_copy(dst=y, src=b[rows])
        nisa.dma_copy(dst=out[rows], src=nisa.tensor_scalar(x, nl.add, y))
    return out
"""


def case(rows, us=100.0):
    return course.TimedSolution(
        "somebody", "kernels.py", "added", "trn2", us, "float32", ((1024,),) * 2, ("ROWS", rows)
    )


@pytest.fixture
def clones(tmp_path):
    (tmp_path / "somebody").mkdir()
    (tmp_path / "somebody/kernels.py").write_text(KERNEL)
    return tmp_path


def test_a_solution_is_traced_with_its_constant_and_a_launch(clones):
    few, many = course.run(clones, cases=(case(128), case(8)))
    assert few["name"] == "added, ROWS 128, 1024 float32"
    assert LAUNCH_US.middle < few["modelled_us"] < many["modelled_us"] / 4
    low, high = few["range_us"]
    assert LAUNCH_US.low < low < few["modelled_us"] < high
    assert few["error"] == pytest.approx(few["modelled_us"] / 100 - 1)
    assert many["assumed_us"]["dma-queues"] > many["modelled_us"] > many["assumed_us"]["dma"]


FUSED = """
import nki
import nki.isa as nisa
import nki.language as nl
from nkilib.core.utils.tensor_view import TensorView


@nki.jit
def twice(x, scales):
    for core in range(nl.num_programs(0) * 8):
        a = nl.ndarray((128, 1), x.dtype)
        nisa.memset(a, 1.0)
        for _ in range(8):
            nisa.activation(a, nl.copy, a)
    return x
"""


def test_a_kernel_of_todays_nki_with_nki_library_on_two_cores(clones):
    folder = clones / "nki-library/src/nkilib_src/nkilib/core/utils"
    folder.mkdir(parents=True)
    (folder / "tensor_view.py").write_text("TensorView = None")
    kernels = clones / "KevGomes1403/kernels/attn_tkg/agents"
    kernels.mkdir(parents=True)
    (kernels / "v1.py").write_text(FUSED)
    fused = course.TimedSolution(
        "KevGomes1403", "kernels/attn_tkg/agents/v1.py", "", "trn3", 50.0, "bfloat16",
        ((128, 1), (1, 1)), lnc=2, others=((1, "float32"),),
    )  # fmt: skip
    (row,) = course.run(clones, cases=(fused,))
    assert row["name"] == "attn_tkg, v1, 2 cores, 128 x 1 bfloat16"
    assert row["assumed_us"]["instruction-order"] < row["modelled_us"]


LAYERS = """
import nki.isa as nisa
import nki.language as nl


def _build_multilayer_kernel(layers):
    def kernel(x, *operands, replica_groups=None):
        for _ in range(layers * 8):
            a = nl.ndarray((128, 512), nl.float32, buffer=nl.sbuf)
            nisa.memset(a, 1.0)
        return x

    return kernel
"""


def test_a_layer_is_what_the_second_one_adds(clones):
    folder = clones / "nki-moe-megakernel/megakernels/qwen3_moe"
    assert not megakernel.is_at_hand(clones)
    folder.mkdir(parents=True)
    assert megakernel.is_at_hand(clones)
    with pytest.raises(ValueError, match=r"must have the module .*transformer_qwen"):
        megakernel.row(clones)
    (folder / "transformer_qwen.py").write_text(LAYERS)
    with as_nki():
        row = megakernel.row(clones)
    of_a_memset = 512 / 1.2e3  # us on trn3, a column a cycle
    assert row["modelled_us"] == pytest.approx(8 * of_a_memset, rel=0.01)
    low, high = row["range_us"]
    assert low <= row["modelled_us"] <= high < row["us"]


def test_the_summary():
    two_orders = {"modelled_us": 4.0, "assumed_us": {"instruction-order": 1.0}}
    rows = [
        {"error": error, "us": us, "range_us": [1.0, 2.0]} | two_orders
        for error, us in ((0.1, 1.5), (-0.3, 2.5), (0.2, 1.0), (0.2, 2.0))
    ]
    expected = {"kernels": 4, "mean_error": 0.2, "median_error": 0.2, "worst": -0.3, "inside": 3}
    expected["mean_error_between"] = (0.5 / 1.5 + 0.5 / 2.5 + 1) / 4
    assert course.summary(rows) == pytest.approx(expected)


def test_a_folder_without_the_clones_is_refused(clones):
    with pytest.raises(ValueError, match="must have a clone named nobody"):
        course.run(clones, cases=(case(8)._replace(author="nobody"),))
    with pytest.raises(ValueError, match=r"there is no .*latency_throughput.*csv; clone its"):
        course.run(clones)


def test_reports_are_read(clones):
    folder = clones / "allenkchau/profiling/reports"
    folder.mkdir(parents=True)
    (folder / "latency_throughput_20260307T073830Z.csv").write_text(
        "dtype,kernel,p50_us,seqlen\nbf16,fused,28.0,512\n"
    )
    (folder / "mlp_latency_throughput_20260310T172309Z.csv").write_text(
        "config,dtype,kernel,p50_us\n128x256x512,fp32,fused_pwl,21.0\n1x1x1,fp32,baseline,9.0\n"
    )
    attention, mlp = course.reported(clones)
    assert attention.name == "fused_attention, 128 x 512 bfloat16"
    assert attention.file == "kernels/fused/attention.py"
    assert (mlp.kernel, mlp.us) == ("fused_mlp_pwl", 21)
    assert mlp.shapes == ((256, 128), (256, 512), (1, 512))


def test_steps_of_a_search_are_read_and_not_run(clones, monkeypatch):
    folder = clones / "autocomp/examples/trn-tutorial"
    folder.mkdir(parents=True)
    code = KERNEL[KERNEL.index("@nki.jit") :].replace("def added", "def test")
    first = f"C(parent=None, plan=None, code={code!r}, score=0.05)"
    last = code.replace("ROWS = 1\n", "ROWS = 128\n")
    trace = f"C(parent={first}, plan=exit(), code={last!r}, score=0.01)"
    (folder / "7_added_trace.py").write_text(trace)
    shapes = ((1024,),) * 2
    monkeypatch.setattr(course, "_SEARCHED", {"7_added": ("float32", shapes, (0, 1))})
    steps = tuple(course.searched(clones))
    assert [(step.name, step.us) for step in steps] == [
        ("added, step 0, 1024 float32", 50), ("added, step 1, 1024 float32", 10),
    ]  # fmt: skip
    slow, fast = course.run(clones, cases=steps)
    assert (slow["title"], slow["step"]) == ("added", 0)
    assert slow["modelled_us"] > 4 * fast["modelled_us"]
