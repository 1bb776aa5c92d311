"""`neuroncore judge`: scores of right kernels, and what wrong and hostile submissions get."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from neuroncore.cli.files import FunctionPath
from neuroncore.judge import judging
from neuroncore.judge.task import KernelTask, TaskCase
from neuroncore.judge.tasks import TASKS

KERNELS = Path(__file__).parents[1] / "tasks" / "kernels"
BY_NAME = {task.name: task for task in TASKS}
HEAD = """\
import nki
import nki.isa as nisa
import nki.language as nl

"""
ADD = """
@nki.jit
def add(x, y):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for m in range(0, x.shape[0], 128):
        rows = min(128, x.shape[0] - m)
        a = nl.ndarray((rows, x.shape[1]), dtype=x.dtype)
        b = nl.ndarray((rows, x.shape[1]), dtype=x.dtype)
        nisa.dma_copy(a, x[m : m + rows])
        nisa.dma_copy(b, y[m : m + rows])
        nisa.tensor_tensor(a, a, b, nl.add)
        nisa.dma_copy(out[m : m + rows], a)
    return out
"""
SHORT = KernelTask("short", 1, "x + y", np.add, {"x": "M N", "y": "M N"}, ("M=128 N=64 fp32",))


def judged(tmp_path, source, task=SHORT, name="add", seed=0, **limits):
    path = tmp_path / "kernel.py"
    path.write_text(source)
    bounds = replace(judging.LIMITS, **limits)
    return judging.judge(task, FunctionPath(path, name), "trn2", seed, bounds)


def problem(tmp_path, source, **options):
    """What a submission of score 0 is told, in one line."""
    document = judged(tmp_path, source, **options)
    assert document["score"] == 0
    assert "\n" not in document["problem"]
    assert {"refused", "wrong", "time_ms", "par_ms"} < set(document["cases"][0])
    json.dumps(document, allow_nan=False)
    return document["problem"]


# --- tasks


def test_there_are_forty_tasks_of_five_levels_with_a_par_for_two_targets():
    assert len(BY_NAME) == len(TASKS) == 40
    assert {task.level for task in TASKS} == {1, 2, 3, 4, 5}
    for target in ("trn2", "trn3"):
        par = judging.par_of(target)
        assert {name: len(times) for name, times in par.items()} == {
            task.name: len(task.cases) for task in TASKS
        }
        assert all(0 < low <= high for times in par.values() for low, _, high in times)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_references_are_finite_and_outputs_have_dtypes(task):
    case = TaskCase(task.cases[-1])
    values = task.values(case, np.random.default_rng(0))
    assert [len(arrays) for arrays in values.values()] == [task.ranks or 1] * len(values)
    for outputs in task.expected(case, values):
        assert len(outputs) == len(task.outputs)
        assert all(np.isfinite(array).all() and array.size for array in outputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file"),
    [("add", "elementwise"), ("cumsum", "rows"), ("embedding", "layouts"), ("max_pool", "layouts"),
     ("matmul_fp8", "matmuls"), ("attention_decode", "attention"), ("row_parallel", "ranks"),
     ("two_cores_matmul", "matmuls")],
)  # fmt: skip
def test_par_kernels_score_one(name, file):
    submission = FunctionPath(KERNELS / f"{file}.py", name)
    document = judging.judge(BY_NAME[name], submission, "trn2", 7, judging.LIMITS)
    assert document["problem"] is None
    assert document["score"] == pytest.approx(1, abs=1e-4)
    assert document["score_range"] == pytest.approx([1, 1], abs=1e-4)


def test_the_baselines_name_every_task_once_best_and_those_that_are_worse():
    baselines = json.loads((KERNELS.parent / "baselines.json").read_text())["rows"]
    best = [row["task"] for row in baselines if row["grade"] == "best"]
    assert sorted(best) == sorted(BY_NAME)
    assert len({row["task"] for row in baselines if row["grade"] == "naive"}) >= 15
    assert all(row["score"] > 0 for row in baselines)


# --- the score


@pytest.mark.slow
def test_the_same_submission_gives_the_same_bytes_and_another_seed_other_values(tmp_path):
    first, again, other = (
        json.dumps(judged(tmp_path, HEAD + ADD, seed=seed)) for seed in (0, 0, 1)
    )
    assert first == again
    assert json.loads(first)["values_drawn_from"] != json.loads(other)["values_drawn_from"]


def test_a_task_without_par_has_no_score(tmp_path):
    document = judged(tmp_path, HEAD + ADD)
    assert (document["score"], document["problem"]) == (None, None)
    assert document["legal"]
    assert document["correct"]


def test_the_score_is_a_geometric_mean_in_the_middle_with_its_range():
    def row(low, time, high):
        return {"time_range_ms": [low, high], "time_ms": time, "par_ms": [1.0, 2.0, 4.0]}

    assert judging.score_of([row(1, 2, 4)]) == (1, 1, 1)
    assert judging.score_of([row(1, 2, 4), row(4, 8, 16)]) == (0.5, 0.5, 0.5)
    assert judging.score_of([row(2, 2, 2)]) == (1, 0.5, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("nl.add)", "nl.subtract)"), "output 0 has"),
        (("min(128, x.shape[0] - m)", "256"), "256"),
        (("return out", "return out, out"), "it returns 2 tensors; the task has 1"),
        (("return out", "return a"), "must be a tensor in nl.shared_hbm"),
        (("x.shape, dtype=x.dtype", "x.shape, dtype=nl.bfloat16"), "it must be float32"),
        (("return out", "return out.reshape((64, 128))"), "it must be float32 [128, 64]"),
        (("def add(x, y)", "def add(x)"), "the kernel must take (x, y)"),
        (("nl.add)", "nl.add)\n        nisa.activation(a, nl.log, a)"), "output 0 has nan"),
        (("return out", "return other"), "NameError"),
        (("def add(x, y):", "def add(x, y:"), "SyntaxError"),
    ],
)
def test_wrong_kernels_are_told_what_is_wrong(tmp_path, change, told):
    assert told in problem(tmp_path, HEAD + ADD.replace(*change))


def test_a_broken_rule_has_its_line(tmp_path):
    source = HEAD + ADD.replace("nl.add)", "nl.add)\n        nisa.nc_matmul(a, a, b)")
    told = problem(tmp_path, source)
    line = source.splitlines().index("        nisa.nc_matmul(a, a, b)") + 1
    assert told.startswith("nc_matmul: ")
    assert told.endswith(f"[kernel.py:{line}]")


def test_a_finding_of_lint_is_a_broken_rule(tmp_path):
    document = judged(
        tmp_path, HEAD + ADD.replace("    for m", "    y @ y if False else 0\n    for m")
    )
    assert document["score"] == 0
    assert document["findings"][0]["rule"] == "matmul-operator"
    assert not document["legal"]


# --- hostile submissions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("while True:\n    pass", "was stopped"),
        ("open('/etc/passwd')", "it may read its libraries"),
        ("open('out.txt', 'w')", "write nothing"),
        ("import pathlib; pathlib.Path('/proc/self/environ').read_text()", "it may read its lib"),
        ("import os; os.listdir('/')", "it may read its libraries"),
        ("import os; open(os.path.dirname(os.__file__) + '/../' * 9 + 'etc/passwd')", "may read"),
        ("import os, sys\nm = sys.modules['__main__']\nm._REFUSED, m._READS = (), ()\n"
         "os.path.realpath = os.fsdecode = str\nopen('/etc/passwd')", "it may read its libraries"),
        ("import os; os.fork()", "os.fork"),
        ("import os\nwhile True:\n    os.fork()", "os.fork"),
        ("import subprocess; subprocess.run(['true'])", "subprocess.Popen"),
        ("import _posixsubprocess as p; p.fork_exec", "AttributeError"),
        ("import os; os.execv('/bin/true', ['true'])", "os.exec"),
        ("import os; os.system('true')", "os.system"),
        ("import socket; socket.socket()", "socket."),
        ("import sys; del sys.modules['posix']; import posix", "ImportError: posix is not for"),
        ("from multiprocessing.shared_memory import SharedMemory as S; S('a', True, 9)", "[kernel"),
        ("import os; os.mkfifo('fifo')", "AttributeError"),
        ("import sqlite3; sqlite3.connect('/tmp/a.db')", "sqlite3.connect"),
        ("import ctypes; ctypes.CDLL(None)", "it may read its libraries"),
        ("import ctypes; ctypes.pythonapi.Py_Exit", "ctypes.dlsym"),
        ("import gc; gc.get_objects()", "gc.get_objects"),
        ("import os; os.kill(os.getppid(), 9)", "os.kill"),
        ("import resource; resource.setrlimit(resource.RLIMIT_AS, (1, 1))", "resource."),
        ("x = bytearray(1 << 40)", "memory"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import os; os._exit(0)", "ended with code 0 without a program"),
        ("import os; os.abort()", "ended by signal 6"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import os\nfor n in range(3, 50):\n    os.closerange(n, n + 1)", "without a program"),
        ("import os\nfor n in range(3, 50):\n    try:\n        os.write(n, b'[' * 99999)\n"
         "    except OSError:\n        pass", "no program"),
    ],
)  # fmt: skip
def test_what_a_submission_may_not_do_gives_score_0(tmp_path, code, told):
    assert told in problem(tmp_path, HEAD + code + ADD, seconds=20 if "while" not in code else 6)


@pytest.mark.slow
def test_printing_a_gigabyte_changes_nothing(tmp_path):
    noise = "import sys\nfor _ in range(1024):\n    sys.stdout.write('x' * (1 << 20))\n"
    assert judged(tmp_path, HEAD + noise + ADD)["correct"]


@pytest.mark.slow
def test_what_runs_at_exit_and_in_threads_changes_nothing(tmp_path):
    late = (
        "import atexit, threading\natexit.register(print, '{}')\n"
        "threading.Thread(target=print, args=('{}',)).start()\n"
    )
    assert judged(tmp_path, HEAD + late + ADD)["correct"]


def test_a_memory_bomb_on_the_core_is_stopped(tmp_path):
    bomb = ADD.replace("    for m", "    for _ in range(10**9):\n"
                       "        nl.ndarray((128, 8192), dtype=nl.float32)\n    for m")  # fmt: skip
    told = problem(tmp_path, HEAD + bomb, instructions=1000)
    assert told.startswith("the kernel has more than 1,000 instructions and tensors; ")
    assert told == problem(tmp_path, HEAD + bomb, instructions=1000)  # at the same place


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        # the clock, the costs and the rules of its own process
        "from neuroncore import MACHINES as m\n"
        "object.__setattr__(m['trn2'], 'clocks_ghz', (1e9,) * 9)\n",
        "import neuroncore.profile.profile as p\np.Profile.time_ms = 1e-9\n",
        "import neuroncore.judge.judging as j\nj.score_of = lambda rows: (9.0, 9.0, 9.0)\n",
        "import numpy as np\nnp.abs = lambda *a: 0 * a[0]\n",
    ],
)
def test_a_changed_clock_changes_no_time(tmp_path, code):
    honest, changed = (judged(tmp_path, HEAD + c + ADD)["cases"][0] for c in ("", code))
    assert (changed["refused"], changed["wrong"]) == (None, None)
    assert changed["time_ms"] == honest["time_ms"]


def test_values_cannot_be_known_when_the_program_is_made(tmp_path):
    """One that computes the answer by NumPy for the values it expects, and stores a constant."""
    cheat = """
import numpy as np
from neuroncore.judge.task import TaskCase
@nki.jit
def add(x, y):
    random = np.random.default_rng(0)
    total = random.standard_normal(x.shape) + random.standard_normal(x.shape)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, nl.shared_constant(total.astype(np.float32)))
    return out
"""
    assert "output 0 has" in problem(tmp_path, HEAD + cheat)


def test_a_kernel_sees_no_values(tmp_path):
    peek = ADD.replace("    for m", "    print(x.storage.data.sum())\n    for m")
    assert "AttributeError" in problem(tmp_path, HEAD + peek)


# --- programs: whatever a process sends is a kernel or nothing


def program(steps, records=0, edges=()):
    return {"warnings": [], "cores": [{"steps": steps, "records": records, "edges": list(edges)}]}


NEW = ["new", 2, [128, 64], "float32", "shared_hbm", None, 3]


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({}, "no program"),
        ([], "no program"),
        (program([["simulate", [], {}, 1]]), "no program"),
        (program([["dma_copy", [1, 2, 3, 4, 5, 6, 7, 8, 9], {}, 1]]), "no program"),
        (program([["end", {"t": [9]}]]), "no program"),
        (program([NEW, ["end", {"t": [2]}]]), "was never written"),
        (program([["new", 2, [-1, 64], "float32", "sbuf", None, 3]]), "[line 3]"),
        (program([NEW, ["dma_copy", [{"t": [2]}, {"t": [0, "float32", [64, 128], [1, -64], 0, None,
                                                         None]}], {}, 8]]), "no kernel can make"),
        (program([NEW, ["dma_copy", [{"t": [2]}, {"t": [0, "float32", [128, 64], [64, 1], 9999,
                                                         None, None]}], {}, 8]]), "[line 8]"),
        (program([NEW, ["dma_copy", [{"t": [2]}, {"t": [0]}], {}, 8], ["end", {"t": [2]}]]),
         "other instructions"),
        (program([NEW, ["dma_copy", [{"t": [2]}, {"t": [0]}], {}, 8], ["end", {"t": [2]}]], 1,
                 [[0, 0]]), "waits for one"),
        (program([["loop", 0, 0, 10, 1]]), "no program"),
    ],
)  # fmt: skip
def test_a_forged_program_is_no_more_than_a_kernel(document, told):
    random = np.random.default_rng(0)
    row = judging._run(SHORT, TaskCase(SHORT.cases[0]), document, random, "trn2", judging.LIMITS)
    assert told in row["refused"]


def test_a_program_with_a_view_across_partitions_is_refused():
    tile = ["new", 2, [128, 64], "float32", "sbuf", None, 3]
    view = [2, "float32", [64, 128], [1, 64], 0, None, None]
    steps = [tile, ["memset", [{"t": view}, 0.0], {}, 4]]
    random = np.random.default_rng(0)
    row = judging._run(
        SHORT, TaskCase(SHORT.cases[0]), program(steps), random, "trn2", judging.LIMITS
    )
    assert "no kernel can make" in row["refused"]


# --- the command


@pytest.mark.slow
def test_the_command_prints_a_score_and_a_document(run, tmp_path):
    kernel = str(KERNELS / "rows.py")
    page = run("judge", "row_sum", f"{kernel}:row_sum_tiled").page()
    assert page.splitlines()[-1].startswith("score 0.")
    assert "would" in page or "binds" in page or "free" in page
    document = run("judge", "row_sum", f"{kernel}:row_sum_tiled", "--json").document()
    assert 0 < document["score"] < 1
    assert document["modelled"] is True


def test_a_wrong_kernel_ends_the_command_with_1(run, tmp_path):
    (tmp_path / "wrong.py").write_text(HEAD + ADD.replace("nl.add)", "nl.subtract)"))
    outcome = run("judge", "add", str(tmp_path / "wrong.py"), "--json")
    assert outcome.document(1)["score"] == 0
    assert run("judge", "add", str(tmp_path / "wrong.py")).code == 1


def test_the_list_has_what_a_program_needs(run):
    tasks = run("judge", "--list", "--json").document()["tasks"]
    assert [task["name"] for task in tasks] == [task.name for task in TASKS]
    assert all(task["par_ms"] for task in tasks)
    assert "low_rank_mlp" in run("judge", "--list", "--target", "trn1").page()


@pytest.mark.slow
def test_a_task_of_ones_own(run, tmp_path):
    (tmp_path / "task.py").write_text(
        "from neuroncore.judge.task import KernelTask\n"
        "mine = KernelTask('mine', 1, 'x + y', lambda x, y: x + y, {'x': 'M N', 'y': 'M N'},\n"
        "            ('M=128 N=64 bf16',))\n"
    )
    (tmp_path / "kernel.py").write_text(HEAD + ADD)
    place = str(tmp_path / "task.py")
    for task in (place, f"{place}:mine"):
        document = run("judge", task, str(tmp_path / "kernel.py"), "--json").document()
        assert (document["score"], document["correct"]) == (None, True)
    assert "makes the tasks mine" in run("judge", f"{place}:other", place).err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["sofmax", "{kernels}"], "there is no task 'sofmax'; did you mean softmax"),
        (["softmax", "{kernels}"], "name a kernel of it"),
        (["softmax", "nowhere.py"], "nowhere.py is no file"),
        (["softmax"], "--list names the tasks"),
        (["softmax", "{kernels}:softmax", "--seed", "-1"], "--seed must not be negative"),
        (["softmax", "{kernels}:softmax", "--max-seconds", "0"], "must be positive"),
        (["softmax", "{kernels}:softmax", "--target", "gpu"], "gpu"),
    ],
)
def test_mistakes_of_the_command_line_are_one_line(run, arguments, told):
    outcome = run("judge", *[a.format(kernels=KERNELS / "rows.py") for a in arguments])
    assert outcome.code == 2
    assert told in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert outcome.out == ""


# --- recording


@pytest.mark.slow
def test_a_recorded_program_runs_as_the_kernel_did(tmp_path):
    """Device loops, constants, dynamic places, dependencies: in a process of its own."""
    loops = """
@nki.jit
def add(x, y):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    N = x.shape[1]
    bias = nl.ndarray((32, 32), dtype=nl.float32)
    nl.shared_identity_matrix(32, nl.float32, dst=bias)

    def body(row):
        a = nl.ndarray((32, N), dtype=x.dtype)
        b = nl.ndarray((32, N), dtype=x.dtype)
        nisa.dma_copy(a, x.ap([[N, 32], [1, N]], scalar_offset=row))
        first = nisa.dma_copy(b, y.ap([[N, 32], [1, N]], scalar_offset=row))
        nisa.tensor_tensor(a, a, b, nl.add, name="sum").depends_on(first)
        nisa.dma_copy(out.ap([[N, 32], [1, N]], scalar_offset=row), a)

    nl.fori_loop(0, x.shape[0], body, step=32)
    return out
"""
    document = judged(tmp_path, HEAD + loops)
    assert document["problem"] is None
    assert document["cases"][0]["instructions"] == 1 + 4 * 4


@pytest.mark.slow
def test_functions_of_the_language_are_recorded_by_their_instructions(tmp_path):
    task = KernelTask(
        "mine", 1, "", lambda x, y: np.exp(x) + 1 / y, SHORT.inputs, ("M=128 N=64 fp32",)
    )
    source = """
@nki.jit
def add(x, y):
    total = nl.add(nl.exp(nl.load(x)), nl.reciprocal(nl.load(y)))
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.where(nl.equal(total, total), total, 0.0))
    return out
"""
    assert judged(tmp_path, HEAD + source, task=task)["problem"] is None


@pytest.mark.parametrize(
    ("text", "told", "code"),
    [
        ("KernelTask('a', 1, '', abs, {'x': 'M Q'}, ('M=1 fp32',))", "task a: case 'M=1 fp32'", 1),
        ("KernelTask('a', 1, '', abs, {'x': 'M'}, ('M=1',))", "its last word is no dtype", 1),
        ("raise NameError('what')", "NameError: what [task.py:2]", 1),
        ("KernelTask('a', 1, '', lambda x, y: x @ y, SHORT, ('M=128 N=64 fp32',))", "task.py:2", 1),
        ("None", "makes the tasks none", 2),
    ],
)  # fmt: skip
def test_mistakes_of_a_task_file_are_one_line(run, tmp_path, text, told, code):
    task = tmp_path / "task.py"
    head = "from neuroncore.judge.task import KernelTask; SHORT = {'x': 'M N', 'y': 'M N'}\n"
    task.write_text(head + (text if "raise" in text else f"mine = {text}") + "\n")
    (tmp_path / "kernel.py").write_text(HEAD + ADD)
    outcome = run("judge", str(task), str(tmp_path / "kernel.py"))
    assert (outcome.code, outcome.out) == (code, "")
    assert told in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_a_file_that_is_no_text_is_named(run, tmp_path):
    (tmp_path / "kernel.py").write_bytes(b"\xff\xfe")
    outcome = run("judge", "add", str(tmp_path / "kernel.py"))
    assert outcome.code == 2
    assert "kernel.py is no text" in outcome.err


def test_outputs_of_zeros_are_right():
    case = TaskCase("M=2 N=2 fp32")
    zeros = np.zeros((2, 2), np.float32)
    assert judging._compared(SHORT, case, [[zeros]], [[zeros]]) == (0.0, None)
    share, wrong = judging._compared(SHORT, case, [[zeros + np.nan]], [[zeros]])
    assert share is None
    assert wrong == "output 0 has nan for 0 at [0, 0]"
