"""What NKI's two front ends refuse, rule by rule."""

import functools
import types
from pathlib import Path

import pytest
from lint_sources import places, write

from neuroncore.checks.lint import lint
from neuroncore.checks.lint_rules import LINES, REFUSED_NODES, RULES

HEADER = """\
import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
from nki.language import arange, sequential_range


@nki.jit
def kernel(x, y):
"""

LOOP = """\
outer = [0]
def body(i):
    t = nl.ndarray((1, 2), nl.int8)
    {}
nl.fori_loop(0, 4, body)"""
# rule: bodies that break it, each with the line (from 1) and the column of its only finding.
BODIES = [
    ("async", "async with nl.no_reorder():\n    pass", 1, 5),
    ("async", "await x", 1, 5),
    ("comprehension", "tiles = [nl.load(x[i]) for i in range(4)]", 1, 13),
    ("comprehension", "total = sum(i for i in range(4))", 1, 16),
    ("comprehension", "table = {'a': i for i in range(4)}", 1, 13),
    ("comprehension", "table = {i for i in range(4)}", 1, 13),
    ("del", "a = 1\ndel a", 2, 5),
    ("deprecated-loop", "for i in nl.affine_range(4):\n    print(i)", 1, 14),
    ("deprecated-loop", "for i in sequential_range(4):\n    break", 1, 14),
    ("deprecated-loop", "for i in nl.static_range(4):\n    print(i)", 1, 14),
    ("dynamic-loop", "for i in nl.dynamic_range(4):\n    print(i)", 1, 14),
    ("dynamic-loop", "r = nisa.register_alloc(1)\nwhile r:\n    print(r)", 2, 5),
    ("dict-key", "table = {'a': 1, 2: 3}", 1, 13),
    ("dict-key", "table = {(0, 1): 3}", 1, 13),
    ("global", "global counter\nprint(x)", 1, 5),
    ("hbm-output", "out = nl.ndarray((1, 2), nl.int8, buffer=nl.hbm)\nreturn out", 1, 11),
    ("hbm-output", "out = nl.zeros((1, 2), nl.int8, nl.private_hbm)\nreturn x, out", 1, 11),
    ("hbm-output", "return nl.full((1, 2), 0, nl.int8, nl.private_hbm)", 1, 12),
    ("identity", "if x is None:\n    pass", 1, 8),
    ("identity", "flag = x is not y", 1, 12),
    ("inner-class", "class Pair:\n    def first(self):\n        return [i for i in x]", 1, 5),
    ("inner-def", "def helper():\n    return 1", 1, 5),
    ("inner-import", "import math\nprint(math)", 1, 5),
    ("inner-import", "from math import pi\nprint(pi)", 1, 5),
    ("lambda", "f = lambda a: a", 1, 9),
    ("legacy-call", "i = nl.arange(128)[:, None]", 1, 9),
    ("legacy-call", "i = arange(128)", 1, 9),
    ("legacy-call", "i, j = nl.mgrid[0:4, 0:8]", 1, 12),
    ("legacy-call", "t = nl.ndarray((2, nl.par_dim(128), 4), nl.int8)", 1, 24),
    ("enum-literal", "nisa.dma_copy(x, y, dge_mode=2)", 1, 5),
    ("enum-literal", "nisa.nc_matmul(x, y, y, perf_mode='double_row')", 1, 5),
    ("legacy-dtype", "nisa.tensor_copy(x, y, dtype=nl.int8)", 1, 5),
    ("legacy-mask", "nisa.tensor_copy(dst=x, src=y, mask=y)", 1, 5),
    ("legacy-mask", "t = nl.load(x, mask=y)", 1, 9),
    ("legacy-result", "x += nisa.nc_matmul(x, y)", 1, 5),
    ("legacy-transpose", "t = nl.load_transpose2d(x)", 1, 9),
    ("loop-body", "nl.fori_loop(0, 4, x.step)", 1, 5),
    ("loop-else", "for i in range(4):\n    pass\nelse:\n    pass", 1, 5),
    ("loop-else", "while x:\n    pass\nelse:\n    pass", 1, 5),
    ("match", "match x:\n    case 1:\n        pass", 1, 5),
    ("matmul-operator", "z = x @ y", 1, 9),
    ("matmul-operator", "x @= y", 1, 5),
    ("membership", "flag = 1 in (1, 2)", 1, 12),
    ("membership", "flag = 1 not in (1, 2)", 1, 12),
    ("numpy-dtype", "t = nl.load(x, dtype=np.float32)", 1, 9),
    ("numpy-dtype", "helper_elsewhere(x, np.int8)", 1, 5),
    ("numpy-dtype", "t = nl.ndarray((1, 2), ml_dtypes.bfloat16)", 1, 9),
    ("object-equality", "if x == None:\n    pass", 1, 8),
    ("object-equality", "t = nl.ndarray((1, 2), nl.int8)\nflag = t != y", 2, 12),
    ("raise", "raise ValueError(x)", 1, 5),
    ("register-value", "r = nisa.register_alloc(1)\nif r:\n    pass", 2, 5),
    ("register-value", "r = nisa.register_alloc(1)\nn = int(r)", 2, 9),
    ("register-value", "r = nisa.register_alloc(1)\nfor i in range(r):\n    pass", 2, 14),
    ("register-value", "r = nisa.register_alloc(1)\nnl.ds(r * 128, 4)", 2, 11),
    ("register-value", "def body(i):\n    assert i < 4\nnl.fori_loop(0, 4, body)", 2, 16),
    ("reordered-loop", "with nl.no_reorder():\n    nl.fori_loop(0, 4, y)", 2, 9),
    ("set", "s = {1, 2}", 1, 9),
    ("star-expansion", "print(*x)", 1, 11),
    ("star-expansion", "print(**x)", 1, 5),
    ("star-expansion", "table = {**x}", 1, 13),
    ("star-expansion", "t = (1, *x)", 1, 13),
    ("star-expansion", "a, *b = x", 1, 8),
    ("body-tensor", LOOP.format("outer.append(nl.zeros((1, 2), nl.int8))"), 4, 9),
    ("body-tensor", LOOP.format("outer[0] = t"), 4, 9),
    ("body-tensor", LOOP.format("x.kept = t"), 4, 9),
    ("body-tensor", LOOP.format("return t"), 4, 9),
    ("tile-store", "x[...] = 1", 1, 5),
    ("tile-store", "x[0:4] = 1", 1, 5),
    ("tile-store", "x[0, 0] += 1", 1, 5),
    ("tile-store", "a, x[:, 0] = 1, 2", 1, 8),
    ("tile-store", "t = nl.ndarray((1, 2), nl.int8)\nt[0] = 1", 2, 5),
    ("try", "try:\n    pass\nfinally:\n    pass", 1, 5),
    ("try", "try:\n    pass\nexcept* ValueError:\n    pass", 1, 5),
    ("tuple-attribute", "x.a, b = 1, 2", 1, 5),
    ("tuple-attribute", "b, table['a'] = 1, 2", 1, 5),
    ("with-as", "with nl.no_reorder() as region:\n    pass", 1, 5),
    ("yield", "yield x", 1, 5),
    ("yield", "yield from x", 1, 5),
]
SOURCES = [
    ("async", "import nki\n@nki.jit\nasync def kernel(x):\n    return x", 3, 1),
    ("bare-star", "import nki\n@nki.jit\ndef kernel(x, *,\n    k=1):\n    return x", 4, 5),
    ("decorator", "import nki\n@nki.jit\n@nki.trace\ndef kernel(x):\n    return x", 3, 2),
    ("decorator", "import nki\n@cache\ndef f(): ...\n@nki.jit\ndef kernel():\n    f()", 2, 2),
    ("global", "from nki import jit\n@jit\ndef kernel(x):\n    nonlocal x", 4, 5),
    ("legacy-import", "import neuronxcc.nki as nki\n@nki.jit\ndef kernel(): ...", 1, 1),
    ("legacy-import", "try:\n    from neuronxcc import nki\nexcept E:\n    pass", 2, 5),
    ("star-parameters", "import nki\n@nki.jit\ndef kernel(x, *rest):\n    ...", 3, 16),
    ("star-parameters", "import nki\n@nki.jit()\ndef kernel(x, **rest):\n    ...", 3, 17),
]
IN_CLASSES = [
    ("class-base", "class Part(Base):", 2, 1),
    ("class-base", "class Part(NamedTuple):", 2, 1),
    ("class-base", "class Part:", 2, 1),
    ("class-base", "class Part(nl.NKIObject, Base):", 2, 1),
    ("class-base", "class Part(nl.NKIObject, frozen=True):", 2, 1),
    ("comprehension", "    def f(self):\n        return [i for i in self.a]", 4, 16),
    ("comprehension", "    sizes = [i for i in range(4)]", 3, 13),
    ("decorator", "    @property\n    def f(self):\n        return 1", 3, 6),
    ("identity", "    def f(self, a):\n        self.a = a is not None", 4, 18),
    ("inner-class", "    class Inner:\n        pass", 3, 5),
    ("raise", "    def f(self):\n        raise ValueError", 4, 9),
    ("star-parameters", "    def f(self, *rest):\n        pass", 3, 18),
    (
        "try",
        "    def f(self):\n        try:\n            f()\n        finally:\n            g()",
        4,
        9,
    ),
    ("tuple-attribute", "    def f(self, a):\n        self.a, self.b = a", 4, 9),
]
LEGAL_CLASS = """\
@dataclass(frozen=True)
class Part(nl.NKIObject):
    rows: int = 128

    def __post_init__(self):
        self.columns = other(self.rows)

    @staticmethod
    def f(a):
        return a

class Mode(Enum):
    FAST = 1

@nki.jit
def kernel(x):
    return Part(x), Mode.FAST
"""
CALLS = """\
import numba
from neuroncore import jit

@jit
def first(x):
    return x

@numba.jit
def host(x):
    return lambda: x

@jit(mode="auto")
def second(x):
    first[2](x)
    return third(x)

def third(x):
    return first(x)
"""
HELPERS = """\
import nki

def unused():
    return lambda: 1

def far(x):
    return x in (1, 2)

def near(x):
    return far(x)

if True:
    @nki.jit
    def kernel(x):
        return near(x)
"""
CLASSES = """\
import nki

class Base(nl.NKIObject):
    def f(self):
        return lambda: far(self)

class Part(Base):
    def g(self):
        return far(self)

def far(x):
    return x in (1, 2)

class NotReached(Base):
    pass

@nki.jit
def kernel(x):
    return Part().f()
"""
DYNAMIC = """\
import nki
import nki.language as nl

def body(i):
    for j in range(4):
        if j == 2:
            break
    continue

def condition(r):
    break

@nki.jit
def kernel(x):
    for i in nl.dynamic_range(4):
        if i == 2:
            break
        for j in range(4):
            continue
    nl.fori_loop(0, 4, body)
    nl.while_loop(x, body_fun=condition)
"""
CLEAN = '''\
"""A module may do what a kernel may not."""

import functools

import numpy as np

from neuroncore import isa as nisa
from neuroncore import jit
from neuroncore import language as nl

TABLE = {i: np.dtype(np.float32) for i in range(4)}
try:
    SIZES = [*TABLE]
except KeyError:
    raise

class Config(nl.NKIObject):
    tile: int = 128

@functools.cache
def not_reached(*args, **kwargs):
    if args is None or 1 in args:
        raise ValueError(lambda: args)
    return not_reached(*args, **kwargs)

def activate(tile, op=None, *, dtype: np.dtype = np.float32): ...

def step(i):
    """The body of a loop on the device."""
    for j in range(2):
        if j == 1:
            break
    nisa.tensor_copy(dst=i, src=i)

def scaled(tile, factor=1.0, mask=None):
    """A helper."""
    print(f"{tile.shape} by {factor!r}")
    return tile[:, ::2] if factor != None else tile[-1]

@jit
def kernel(x, y, not_reached=2):
    """A kernel."""
    assert x.shape[0] <= nl.tile_size.pmax and not_reached > 0, f"too many rows: {x.shape}"
    M, N = x.shape
    out: nl.NkiTensor = nl.ndarray((M, N), dtype=x.dtype, buffer=nl.shared_hbm)
    scratch = nl.ndarray((M, N), dtype=x.dtype, buffer=nl.hbm)
    tiles, table, count = [], {"a": 1, f"{M}": 2}, 0
    tiles.append(nl.zeros((128, N), nl.float32, buffer=nl.psum))
    table["b"] = tiles[0]
    tiles[count] = nl.load(x[0:128, :])
    with nl.no_reorder():
        for i in range(0, N, 512):
            last = min(i + 512, N)
            if last == N and not (M < 4 or M > 8):
                break
            count += 1
            nisa.dma_copy(dst=out[:, i:last], src=scaled(tiles[0], mask=None)[..., nl.ds(0, 4)])
    while count > 0:
        count -= 1
        if count % 2 == 0:
            continue
        pass
    nl.fori_loop(0, 4, step)
    size = np.float32(3) + np.prod(x.shape)
    done = nisa.tensor_copy(dst=scratch, src=out)
    done.depends_on(nisa.tensor_copy(dst=out, src=scratch))
    if (rest := M - size) > 0:
        return out, (rest,)
    return (out, count)
'''


def in_body(body):
    """A kernel of these statements, and how many lines come before them."""
    return HEADER + "".join(f"    {row}\n" for row in body.splitlines()), HEADER.count("\n")


def in_class(part):
    head = "" if part.startswith("class") else "class Part(nl.NKIObject):\n"
    body = "\n    pass" if part.startswith("class") else ""
    kernel = "\n@nki.jit\ndef kernel(x):\n    return Part(x)\n"
    return "import nki\n" + head + part + body + kernel, 0


def decorator(function):
    return functools.wraps(function)(lambda *args: function(*args))


def helper(tile):
    return [tile for _ in range(2)]


def plain(tile):
    """A kernel without a decorator."""

    return helper(tile)


@decorator
def wrapped(tile):
    return tile is None


def line_of(function: types.FunctionType, offset: int) -> int:
    return function.__code__.co_firstlineno + offset


def found_by_line(path, rule):
    """What each line of NKI finds; where a rule is of one line, the other finds nothing."""
    own = RULES[rule].line
    for nki in LINES:
        found = places(lint(path, nki))
        if own in (None, nki):
            yield found
        elif rule != "dynamic-loop":
            assert found == []


CASES = [
    *[(rule, *in_body(body), line, column) for rule, body, line, column in BODIES],
    *[(rule, source, 0, line, column) for rule, source, line, column in SOURCES],
    *[(rule, *in_class(part), line, column) for rule, part, line, column in IN_CLASSES],
]


@pytest.mark.parametrize(("rule", "source", "before", "line", "column"), CASES)
def test_what_breaks_one_rule(tmp_path, rule, source, before, line, column):
    for found in found_by_line(write(tmp_path, source), rule):
        assert found == [(rule, before + line, column)]


def test_every_rule_has_a_test(tmp_path):
    tested = {case[0] for case in (*BODIES, *SOURCES, *IN_CLASSES)}
    assert set(RULES) - tested == {"dynamic-break", "sub-kernel", "type-alias"}
    assert all(rule.what and rule.remedy for rule in RULES.values())
    assert REFUSED_NODES["TypeAlias"] == "type-alias"  # the syntax is Python 3.12's


IN_SEVERAL_PLACES = {
    "break and continue where the loop runs on the device": (
        DYNAMIC, "0.6", [("dynamic-break", 8, 5), ("dynamic-break", 11, 5),
                         ("deprecated-loop", 15, 14), ("dynamic-break", 17, 13)]),
    "a kernel may not call a kernel": (
        CALLS, "0.7", [("sub-kernel", 14, 5), ("sub-kernel", 18, 12)]),
    "helpers are followed and code outside kernels is not": (
        HELPERS, "0.6", [("membership", 7, 12)]),
    "base classes and what methods reach are read": (
        CLASSES, "0.6", [("lambda", 5, 16), ("class-base", 7, 1), ("membership", 12, 12)]),
    "a legal class": (LEGAL_CLASS, "0.7", []),
    "a clean kernel": (CLEAN, "0.6", []),
    "no kernel": ("def helper(x):\n    return x is None\n", "0.6", []),
}  # fmt: skip


@pytest.mark.parametrize("case", IN_SEVERAL_PLACES)
def test_findings_of_a_file(tmp_path, case):
    source, nki, expected = IN_SEVERAL_PLACES[case]
    assert places(lint(write(tmp_path, source), nki)) == expected


def test_what_a_later_line_warns_of(tmp_path):
    assert [error.rule for error in lint(write(tmp_path, CLEAN))] == ["object-equality"]


def test_a_loop_of_the_migration_guide_is_of_both_lines(tmp_path):
    text = """\
    total = nl.zeros((1, 4), nl.float32)
    def body(i):
        t = nl.ndarray((1, 4), nl.float32)
        kept = [t]
        nisa.dma_copy(dst=t, src=x.ap([[4, 1], [1, 4]], scalar_offset=i))
        nisa.tensor_tensor(total, total, kept[0], nl.add)
    nl.fori_loop(0, 4, body)
    for i in range(4):
        print(i + 1)
    def until(r):
        return r
    nl.while_loop(nisa.register_alloc(3), until)
"""
    for nki in LINES:
        assert lint(write(tmp_path, HEADER + text), nki) == []


def test_objects_of_the_kernels_own_classes_are_compared(tmp_path):
    part = "class Part(nl.NKIObject):\n    n: int = 1\nclass Mode(Enum):\n    A = 1\n"
    kernel = "@jit\ndef kernel(x):\n    p = Part()\n    m = Mode(1)\n    return p == x, m == x\n"
    (found,) = lint(write(tmp_path, part + kernel))
    assert (found.rule, found.line, found.severity) == ("object-equality", 9, "warning")


def test_an_unknown_line(tmp_path):
    with pytest.raises(ValueError, match=r"nki must be one of 0.6, 0.7; got '0.5'"):
        lint(write(tmp_path, CLEAN), "0.5")


def test_functions_and_kernel_objects():
    place = ("comprehension", line_of(helper, 1), 12)
    (found,) = lint(plain, "0.6")
    for errors in ([found], lint(types.SimpleNamespace(func=plain), "0.6")):
        assert places(errors) == [place]
    assert str(found).endswith(
        ": comprehension: comprehensions are refused, allowed from NKI 0.7 on; write a for loop"
    )
    assert Path(found.path) == Path(__file__)
    assert lint(line_of) == []


def test_a_decorated_function_is_read_behind_its_wrapper():
    line = line_of(wrapped.__wrapped__, 0)
    assert places(lint(wrapped, "0.6")) == [("decorator", line, 2), ("identity", line + 2, 12)]


def test_a_function_inside_a_function_has_its_own_lines():
    def kernel(tile):
        assert tile != None  # noqa: E711
        return {1: tile}

    assert places(lint(kernel, "0.6")) == [("dict-key", line_of(kernel, 2), 16)]


def test_a_finding_is_one_line_with_its_remedy(tmp_path):
    source, before = in_body("for i in nl.affine_range(2):\n    z = x @ y")
    path = write(tmp_path, source)
    warning, error = lint(path)
    assert str(error) == (
        f"{path}:{before + 2}:13: matmul-operator: the @ operator is refused; call nisa.nc_matmul"
    )
    assert (warning.severity, error.severity) == ("warning", "error")
    assert str(warning).endswith("; use range, nl.fori_loop or nl.while_loop")


def without_source():
    namespace = {}
    exec("def kernel(x):\n    return x", namespace)  # noqa: S102
    return namespace["kernel"]


NOT_AVAILABLE = "the source of {} is not available; define it with def in a file"


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (without_source(), NOT_AVAILABLE.format("kernel")),
        (lambda x: x, NOT_AVAILABLE.format("<lambda>")),
        (len, "cannot lint a builtin_function_or_method; pass a function, a kernel or the path"),
        ("no/such/file.py", "cannot read no/such/file.py: No such file or directory; pass the"),
    ],
)
def test_what_cannot_be_read_is_one_line(kernel, message):
    with pytest.raises(ValueError, match="; ") as raised:
        lint(kernel)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", [b"x = 1\ndef f(:\n", b"x = 1\n\xff\n", b"x = 1\n\0\n"])
def test_a_file_that_is_not_python_is_one_line(tmp_path, text):
    path = tmp_path / "kernels.py"
    path.write_bytes(text)
    with pytest.raises(ValueError, match="not Python") as raised:
        lint(path)
    assert str(raised.value).startswith(f"{path}:")
    assert str(raised.value).endswith("; fix it first")
    assert "\n" not in str(raised.value)
