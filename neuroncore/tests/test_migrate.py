"""The Beta dialect: interpreted, and rewritten; values before and after, and by NumPy."""

import functools
import types

import numpy as np
import pytest
from beta_kernels import HEADER, KERNELS
from hypothesis import given, settings
from hypothesis import strategies as st
from outcomes import failed

import neuroncore as nc
from neuroncore.legacy import as_neuronxcc
from neuroncore.migrate import MARK, migrate
from neuroncore.migrate.tables import BY_HAND

SIZES = st.integers(1, 150)


def _module(text):
    made = types.ModuleType("beta")
    exec(compile(text, "beta.py", "exec"), vars(made))  # noqa: S102
    return made


@functools.cache
def _dialects():
    """The kernels as they are, and as they are rewritten."""
    said: list[str] = []
    new, left = migrate(KERNELS)
    assert [one.rule for one in left] == ["allocator"]
    with nc.as_nki(), as_neuronxcc(said.append):
        modules = _module(KERNELS), _module(new)
    assert len(said) == 1
    assert "Beta dialect" in said[0]
    return modules


def _agree(name, reference, *arguments, tolerance=0.0):
    exact = np.asarray(reference, np.float64)
    for module in _dialects():
        found = np.asarray(getattr(module, name)(*arguments), np.float64)
        np.testing.assert_allclose(found, exact, rtol=0, atol=tolerance)


def _drawn(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.integers(-8, 9, shape).astype(np.float32) for shape in shapes]


@given(st.integers(1, 300), SIZES, st.integers(-3, 3))
@settings(max_examples=15)
def test_masks_become_ends_of_slices(rows, columns, factor):
    a, b = _drawn(rows, (rows, columns), (rows, columns))
    _agree("edges", factor * a + b, a, b, float(factor))


@given(st.integers(1, 128), st.integers(2, 90))
@settings(max_examples=10)
def test_columns_repeat_in_operators(rows, columns):
    (x,) = _drawn(rows, (rows, columns))
    raised = np.exp(x - x.max(1, keepdims=True))
    _agree("softmax", raised / raised.sum(1, keepdims=True), x, tolerance=1e-6)


@given(st.integers(1, 5), st.integers(1, 40))
@settings(max_examples=10)
def test_block_dimensions_become_lists(n, columns):
    (x,) = _drawn(n, (n * 32, columns))
    _agree("blocks", 2 * x.reshape(n, 32, columns), x)


@given(st.integers(1, 3), st.integers(1, 128), st.integers(1, 80))
@settings(max_examples=10)
def test_sums_stay_in_psum(k, m, n):
    at, b = _drawn(k, (64 * k, m), (64 * k, n))
    _agree("product", at.T @ b, at, b)


@given(st.integers(1, 128), st.integers(1, 7), st.integers(1, 7))
@settings(max_examples=10)
def test_index_arithmetic_becomes_an_access_pattern(partitions, rows, columns):
    (x,) = _drawn(rows, (partitions, rows * columns))
    turned = x.reshape(-1, rows, columns).transpose(0, 2, 1).reshape(x.shape)
    _agree("turned", turned, x, rows, columns)


@given(st.integers(1, 128), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 4]))
@settings(max_examples=10)
def test_reduced_axes_are_moved_to_the_end(channels, height, width, k):
    (x,) = _drawn(width, (channels, height * k, width * k))
    means = x.reshape(channels, height, k, width, k).mean((2, 4))
    _agree("pooled", means, x, k)


@given(st.integers(1, 128), st.integers(2, 20))
@settings(max_examples=10)
def test_a_negative_coefficient_becomes_a_loop(partitions, size):
    (x,) = _drawn(size, (partitions, size))
    new = np.empty((partitions, size - 1, 2))
    new[..., 0], new[..., 1] = (0.75 * x[:, i : size - 1 + i] + 0.25 * x[:, 1 - i : size - i]
                                for i in (0, 1))  # fmt: skip
    _agree("doubled", new.reshape(partitions, -1), x)


@given(st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=5)
def test_a_launch_becomes_loops_over_programs(rows, columns):
    a, b = _drawn(rows, (32 * rows, 16 * columns), (32 * rows, 16 * columns))
    _agree("launched", (a - b) / 2, a, b)


def test_other_calls():
    x, weights = _drawn(0, (96, 40), (96, 3))
    x, weights = x / 8, weights / 8
    sums = np.exp(x.astype(np.float64) * weights[:, :1]).cumsum(1)
    _agree("scanned", sums * x[:1], x, weights, tolerance=1e-4)
    kept = np.where(np.arange(96)[:, None] >= np.arange(40), x, 7) + np.arange(40)
    _agree("causal", -2 * kept, x, 7.0, tolerance=1e-5)
    q, k, v = _drawn(1, (24, 64), (24, 48), (48, 32))
    _agree("attended", q.T @ k @ v, q, k, v)
    _agree("begun", np.stack([q.T @ k + 1, 2 * q.T @ k]), q, k)
    _agree("bare", np.minimum((x + 1) * 2, 3), x)
    _agree("shifted", x / 2 + 2, x)


def test_every_function_of_the_dialect_takes_numpys_dtypes():
    text = """
import numpy as np
from neuronxcc import nki
import neuronxcc.nki.language as nl

@nki.jit
def turned(x):
    out = nl.ndarray(x.shape[::-1], dtype=np.float32, buffer=nl.shared_hbm)
    nl.store(out, nl.load_transpose2d(x, dtype=np.float32))
    return out
"""
    (x,) = _drawn(3, (24, 40))
    with nc.as_nki(), as_neuronxcc():
        turned = _module(text).turned
    assert np.array_equal(turned(x), x.T)


def test_what_is_not_rewritten_stays_as_it_is():
    new, _ = migrate(KERNELS)
    assert "            # a tile\n" in new
    assert '"""factor * a + b, at any shape."""' in new
    assert "# keep me" in new
    assert "import numpy as np\nimport nki\nimport nki.isa as nisa\n" in new
    for gone in ("neuronxcc", "par_dim", "affine_range", "mask=", "mgrid", "platform_target"):
        assert gone not in new


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("nl.store(out, tile, mask=(i_p >= i_f))", "mask"),
        ("nl.store(out, nisa.nc_matmul(tile, tile, mask=(i_p < 3)))", "mask"),
        ("y = tile[i_p, i_f // 2]", "index-pattern"),
        ("y = nl.add(nl.zeros((4, 1, 5), nl.float32), nl.zeros((4, 6, 5), nl.float32))",
         "broadcast"),
        ("b = nl.zeros((4, nl.par_dim(64), 8), nl.float32); y = b[0:2]", "block-dimension"),
        ("y = nisa.nonzero_with_count(tile)", "result"),
        ("y = nl.softmax(tile)", "removed"),
        ("y = nisa.no_such_call(tile)", "removed"),
        ("nki.benchmark(warmup=5)(kernel)(x, out)", "benchmark"),
        ("y = tile if rows else nl.exp(tile)", "nested"),
        ("y = nl.load(x[nl.program_id(rows) : 3, 0:5])", "grid"),
        ("rows = 3; nl.store(out[i_p, i_f], tile)", "stale-index"),
        ("y = [t for t in (1, 2)]", "comprehension"),
        ("nl.store(out, tile)", "output-parameter"),
        ("y = nl.load(x[tile[i_p, 0], i_f])", "indirect"),
        ("from neuronxcc.nki.nope import other", "import"),
        ("from neuronxcc.nki.language import *", "import"),
    ],
)  # fmt: skip
def test_what_has_no_single_meaning_is_left_with_its_rule(line, rule):
    lines = [f"    {part}\n" for part in line.split("; ")]
    new, left = migrate(HEADER + "".join(lines))
    assert rule in [one.rule for one in left]
    one = next(one for one in left if one.rule == rule)
    marked, kept = new.splitlines()[one.line - 1 : one.line + 1]
    assert marked.strip() == f"{MARK}{rule}; {one.remedy}"
    assert kept.strip() in (lines[-1].strip(), "@nki.jit")


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ("t = nl.load(x); u = nl.exp(t)", "nisa.dma_copy(dst=t, src=x); u = "),
        ("for i in range(1): t = nl.load(x)", "): t = nl.ndarray("),
        ("d = []\n    d.append(nl.load(x))", "    d.append(tile_"),
        ("(a, b), c = (nl.load(x), 2), 3", "    (a, b), c = ((tile_"),
        ("for i in range(2):\n        j = nl.arange(3)[:, None]", "        pass\n"),
        ("assert nl.exp(tile).shape, 'no'", ".shape, 'no'\n"),
        ("print(f'{nl.exp(tile)}')", "print(f'{tile_"),
        ("if rows:\n        j = nl.arange(3)\n    else:\n        j = nl.arange(4)\n    y = x[j, j]",
         "stale-index"),
        ("def f(i):\n        return i + nl.program_id(0)\n    f(3)", "return i + program_0\n"),
        ("s = 'a\u2028\x0cb'\n    t = nl.load(x)  # here", "src=x)  # here\n"),
    ],
)  # fmt: skip
def test_unusual_statements(lines, wanted):
    new, _ = migrate(f"{HEADER}    {lines}\n    return x\n")
    compile(new, "new.py", "exec")
    assert wanted in new


def test_every_rule_has_a_test():
    marks = test_what_has_no_single_meaning_is_left_with_its_rule.pytestmark
    tested = {rule for _, rule in marks[0].args[1]}
    assert set(BY_HAND) <= tested


@pytest.fixture
def beta(tmp_path):
    path = tmp_path / "beta.py"
    path.write_text(KERNELS)
    return path


def test_the_command_verifies_and_writes(run, beta, tmp_path):
    out = tmp_path / "new.py"
    arguments = ["--verify", "edges", "--arg", "a=f32[130,70]", "--arg", "b=f32[130,70]"]
    outcome = run("migrate", beta, "-o", out, *arguments, "--arg", "factor=2.0")
    assert outcome.code == 1
    assert outcome.out == ""
    assert "output 0: as before within 0, of values up to" in outcome.err
    assert "allocator; remove what computes addresses" in outcome.err
    assert out.read_text() == migrate(KERNELS)[0]
    outcome = run("simulate", f"{out}:edges", *arguments[2:], "--arg", "factor=2.0")
    assert outcome.code == 0
    outcome = run("simulate", f"{beta}:edges", *arguments[2:], "--arg", "factor=2.0")
    assert outcome.code == 0
    assert "Beta dialect, interpreted" in outcome.err


def test_the_command_prints_checks_and_tells_json(run, beta, tmp_path):
    assert run("migrate", beta).out.rstrip() == migrate(KERNELS)[0].rstrip()
    assert run("migrate", "--check", beta).out == ""
    document = run("migrate", "--json", beta).document(1)
    assert document["left"][0]["rule"] == "allocator"
    clean = tmp_path / "clean.py"
    clean.write_text(HEADER + "    return tile\n")
    outcome = run("migrate", clean)
    assert (outcome.code, outcome.err) == (0, "nothing left by hand\n")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.ipynb", "{}", "is a notebook"),
        ("a.py", "def f(:\n", "a.py:1: not Python"),
        ("a.py", "import nki\n", "imports no neuronxcc"),
        ("a.py", None, "cannot read"),
        ("a.py", b"\xff\xfe import neuronxcc", "not UTF-8"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, name, text, words):
    if text is not None:
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / name).write_bytes(data)
    failed(run("migrate", tmp_path / name), 2, words)


def test_a_wrong_value_is_a_failure(run, beta, monkeypatch):
    monkeypatch.setattr("neuroncore.legacy.names.OPERATORS", {"Sub": "subtract", "Div": "multiply"})
    outcome = run("migrate", beta, "--check", "--verify", "softmax", "--arg", "x=f32[64,32]")
    assert outcome.code == 1
    assert "values: output 0 is off by" in outcome.err.splitlines()[-1]
