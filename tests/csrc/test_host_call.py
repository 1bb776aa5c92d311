"""The host handler of the lowered custom call: its values, and what it refuses."""

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from commands import run
from host_calls import Library, document, encoded, neuronmm_section
from operands import doubled
from tolerances import assert_close_to_oracle
from torch import Tensor

from neuronmm_ops.ops import reference
from neuronmm_ops.ops.launch import DTYPE_NAMES

pytestmark = pytest.mark.slow  # all need the C compiler

DTYPES = tuple(DTYPE_NAMES)
ACTIVATIONS = tuple(reference.ACTIVATIONS)
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="session")
def library(build: Callable[[str], Path]) -> Library:
    return Library(build("libneuronmm_host_call.so"))


def draw(*shapes: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in shapes]


# --- values --------------------------------------------------------------------------------------

# One row, odd sizes, more than one tile of the C loops in every direction.
SHAPES = [(1, 6, 5, 3), (1, 300, 520, 33), (7, 33, 9, 1), (3, 130, 257, 70), (129, 64, 40, 8)]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_xw(library, shape, dtype, bias):
    M, K, N, _ = shape
    operands = draw((M, K), (K, N), *[(N,)] * bias, dtype=dtype)
    actual = library.run("xw", operands)
    assert_close_to_oracle(actual, reference.xw(*doubled(*operands)), reference.xw(*operands))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_xuv(library, shape, dtype, bias):
    M, K, N, r = shape
    operands = draw((M, K), (K, r), (r, N), *[(N,)] * bias, dtype=dtype)
    actual = library.run("xuv", operands)
    assert_close_to_oracle(actual, reference.xuv(*doubled(*operands)), reference.xuv(*operands))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_svd_mlp(library, shape, dtype, activation):
    M, K, I, r = shape  # noqa: E741
    shapes = [(M, K), (K, r), (r, I), (K, r + 1), (r + 1, I), (I, r + 2), (r + 2, K + 1)]
    operands = draw(*shapes, dtype=dtype, scale=0.25)
    actual = library.run("svd_mlp", operands, activation=activation)
    oracle = reference.svd_mlp(*doubled(*operands), activation=activation)
    low = reference.svd_mlp(*operands, activation=activation)
    magnitude = reference.svd_mlp(*[t.abs() for t in doubled(*operands)], activation="relu")
    assert_close_to_oracle(actual, oracle, low, magnitude)


# --- rounding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_16_bit_value_survives(library, dtype):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)[None]
    actual = library.run("xw", [torch.ones(1, 1, dtype=dtype), every])
    torch.testing.assert_close(actual, every, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_products_are_rounded_to_nearest_even(library, dtype):
    # A product of two 16-bit floats is exact in fp32: overflow, subnormals, ties and all.
    bits = torch.randint(-(2**15), 2**15, (2, 700), generator=torch.Generator().manual_seed(1))
    x, w = bits.to(torch.int16).view(dtype)
    expected = (x.float()[:, None] * w.float()).to(dtype)
    actual = library.run("xw", [x[:, None], w[None]])
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_intermediate_is_rounded_once(library, dtype):
    x, u, v = draw((50, 1), (1, 1), (1, 50), dtype=dtype)
    inner = (x.float() * u.float()).to(dtype)
    assert torch.equal(library.run("xuv", [x, u, v]), (inner.float() * v.float()).to(dtype))


def test_sums_are_kept_in_fp32(library):
    # A bfloat16 sum of ones stops at 256.
    ones = torch.ones(1, 4096, dtype=torch.bfloat16)
    assert library.run("xw", [ones, ones.t().contiguous()]).item() == 4096


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_steps_of_an_mlp_are_rounded_like_the_reference(library, activation, dtype):
    # With ranks and sizes of one every sum is exact, so only the roundings are left to differ.
    x, *factors = draw((500, 1), *[(1, 1)] * 6, dtype=dtype)
    actual = library.run("svd_mlp", [x, *factors], activation=activation)
    expected = reference.svd_mlp(x, *factors, activation=activation)
    # expf and torch's vectorized exp may lie on two sides of a tie.
    assert (actual != expected).sum() <= 5
    oracle = reference.svd_mlp(*doubled(x, *factors), activation=activation)
    assert_close_to_oracle(actual, oracle, expected)


# --- calls ---------------------------------------------------------------------------------------

OPERANDS = draw((4, 6), (6, 3), (3, 5), dtype=torch.float32)


def attempt(library: Library, opaque: bytes) -> str | None:
    """Return the message of a refused call, None of one that computed."""
    out, count = torch.full((4, 5), 7.0), library.count()
    try:
        library.call(opaque, OPERANDS, out)
    except RuntimeError as refusal:
        assert torch.equal(out, torch.full((4, 5), 7.0)), "a refused call wrote to its output"
        assert library.count() == count
        return str(refusal)
    assert library.count() == count + 1
    return None


def test_order_space_and_unknown_keys_do_not_matter(library):
    section = dict(reversed(neuronmm_section(novelty=[{"M": 9}, None, -1.5e-3]).items()))
    config = {"neuronmm": section, "more": {"neuronmm": 1, "wide": [[[], {}]] * 20}}
    text = "\n\t " + json.dumps(config, indent=3) + " \r\n"
    assert attempt(library, encoded(text)) is None


def test_threads_call_at_once(library):
    cases = [draw((5, 40), (40, 7), (7, 60), dtype=dtype) for dtype in DTYPES] * 40
    expected = [library.run("xuv", case) for case in cases]
    count = library.count()
    with ThreadPoolExecutor(8) as pool:
        actual = list(pool.map(lambda case: library.run("xuv", case), cases))
    assert library.count() == count + len(cases)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_without_a_failure_function_the_message_goes_to_stderr(build):
    script = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]);"
        "out = ctypes.c_float(7);"
        "library.neuronmm_host_call(ctypes.byref(out), None, b'!!!!', ctypes.c_size_t(4), None);"
        "print(out.value, library.neuronmm_host_call_count())"
    )
    command = [sys.executable, "-c", script, str(build("libneuronmm_host_call.so"))]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "7.0 0\n"
    assert result.stderr.startswith("neuronmm host call: the opaque string must be base64, got")
    assert result.stderr.count("\n") == 1


def test_the_library_needs_no_torch(build):
    linked = run("ldd", build("libneuronmm_host_call.so"))
    assert "libtorch" not in linked
    assert "libc10" not in linked


# --- refusals ------------------------------------------------------------------------------------

MLP = {"op": "svd_mlp", "ranks": [2, 2, 2], "inner": 8, "activation": "silu"}
HUGE = 2**31 - 1
WRONG_SECTIONS = {
    "unknown op": ({"op": "xuv_packed"}, 'op must be one of xw, xuv, svd_mlp; got "xuv_packed"'),
    "op of another type": ({"op": 1}, "op must be one of xw, xuv, svd_mlp; got 1"),
    "unknown dtype": ({"dtype": "float64"}, "dtype must be one of float32, bfloat16, float16; got"),
    "zero": ({"M": 0}, "M must be an integer in 1..2147483647, got 0"),
    "negative": ({"K": -6}, "K must be an integer in 1..2147483647, got -6"),
    "fraction": ({"N": 5.0}, "N must be an integer in 1..2147483647, got 5.0"),
    "text": ({"M": "4"}, 'M must be an integer in 1..2147483647, got "4"'),
    "large": ({"M": 2**31}, "M must be an integer in 1..2147483647, got 2147483648"),
    "larger": ({"M": 2**64 + 4}, "M must be an integer in 1..2147483647, got 18446744073709551620"),
    "bytes of a factor": (
        {"M": 1, "K": HUGE, "N": HUGE, "ranks": [HUGE]},
        "matrices must be smaller than 2^63 bytes, got K=2147483647 N=2147483647",
    ),
    "bytes of a factor inside an MLP": (
        MLP | {"M": 1, "K": 1, "N": 1, "inner": HUGE, "ranks": [1, 1, HUGE]},
        "matrices must be smaller than 2^63 bytes, got K=1 N=1 inner=2147483647 and a rank of 21",
    ),
    "bytes of all tokens": (
        {"M": HUGE, "K": HUGE, "N": HUGE, "ranks": [1]},
        "no memory for 2147483647 rows of 4294967295 floats, got M=2147483647",
    ),
    "bytes of all tokens inside an MLP": (
        MLP | {"M": HUGE, "K": 1, "N": 1, "inner": 2**30, "ranks": [1, 1, 1]},
        "no memory for 2147483647 rows of 2147483651 floats, got M=2147483647",
    ),
    "bytes of all tokens at the rank": (
        {"M": HUGE, "K": 1, "N": 1, "ranks": [HUGE]},
        "no memory for 2147483647 rows of 2147483649 floats, got M=2147483647",
    ),
    "bytes of xw": (
        {"op": "xw", "M": 1, "K": HUGE, "N": HUGE, "ranks": []},
        "matrices must be smaller than 2^63 bytes, got K=2147483647",
    ),
    "memory": ({"M": 2**30, "K": 2**16}, "no memory for 1073741824 rows of 65544 floats"),
    "no rank": ({"ranks": []}, "ranks of xuv must be a list of 1, got []"),
    "ranks of another op": ({"ranks": [3, 3, 3]}, "ranks of xuv must be a list of 1, got [3, 3, 3"),
    "ranks of xw": ({"op": "xw"}, "ranks of xw must be a list of 0, got [3]"),
    "ranks as a number": ({"ranks": 3}, "ranks of xuv must be a list of 1, got 3"),
    "zero rank": ({"ranks": [0]}, "a rank must be an integer in 1..2147483647, got 0"),
    "two ranks of an MLP": (
        MLP | {"ranks": [2, 2]},
        "ranks of svd_mlp must be a list of 3, got [2",
    ),
    "no inner": (MLP | {"inner": 0}, "inner must be an integer in 1..2147483647, got 0"),
    "inner of xuv": ({"inner": 8}, "inner of an op other than svd_mlp must be"),
    "unknown activation": (
        MLP | {"activation": "tanh"},
        'activation must be one of silu, gelu, gelu_tanh, relu; got "tanh"',
    ),
    "no activation": (MLP | {"activation": None}, "activation must be one of silu, gelu, gelu_t"),
    "activation of xuv": ({"activation": "silu"}, "activation of an op other than svd_mlp must be"),
    "packed as a number": ({"packed": 1}, "packed must be true or false, got 1"),
    "packed K": ({"packed": True}, "packed needs K a multiple of 128, got K=6"),
    "packed MLP": (MLP | {"packed": True}, "packed must be false for svd_mlp, got true"),
    "bias as null": ({"bias": None}, "bias must be true or false, got null"),
    "bias of an MLP": (MLP | {"bias": True}, "bias must be false for svd_mlp, got true"),
}


def assert_refused(message: str | None, expected: str) -> None:
    assert message is not None
    assert message.startswith(f"neuronmm host call: {expected}")
    assert "\n" not in message
    assert "; " in message.removeprefix(expected), "no remedy"


@pytest.mark.parametrize(("changes", "expected"), WRONG_SECTIONS.values(), ids=WRONG_SECTIONS)
def test_a_wrong_section_is_refused(library, changes, expected):
    opaque = encoded(document(neuronmm_section(**changes)))
    assert_refused(attempt(library, opaque), expected)


@pytest.mark.parametrize(
    "key", [key for key in neuronmm_section() if key not in ("target", "lnc", "form", "blocks")]
)
def test_a_missing_or_doubled_key_is_refused(library, key):
    section = neuronmm_section()
    doubled = json.dumps(section)[:-1] + f', "{key}": {json.dumps(section[key])}' + "}"
    del section[key]
    expected = f'the config must have "{key}" exactly once, got it '
    assert_refused(attempt(library, encoded(document(section))), expected + "0 times")
    opaque = encoded('{"neuronmm": ' + doubled + "}")
    assert_refused(attempt(library, opaque), expected + "2 times")


VALID = json.dumps(document(neuronmm_section()))
WRONG_TEXTS = {
    "empty": ("", "the opaque string must have 1..67108864 bytes, got 0"),
    "space": (" ", "the config must be JSON in ASCII, got an error at byte 1 of 1"),
    "cut": (VALID[:-1], f"the config must be JSON in ASCII, got an error at byte {len(VALID) - 1}"),
    "trailing text": (VALID + "}", "the config must be JSON in ASCII, got an error at byte"),
    "trailing comma": (
        '{"a": 1,}',
        "the config must be JSON in ASCII, got an error at byte 8 of 9",
    ),
    "comment": ("{} //", "the config must be JSON in ASCII, got an error at byte 3 of 5"),
    "leading zero": ('{"a": 01}', "the config must be JSON in ASCII, got an error at byte 7 of 9"),
    "NaN": ('{"a": NaN}', "the config must be JSON in ASCII, got an error at byte 6 of 10"),
    "bad escape": (r'{"\x": 1}', "the config must be JSON in ASCII, got an error at byte 3 of 9"),
    "short escape": (r'{"\u12": 1}', "the config must be JSON in ASCII, got an error at byte 6"),
    "control character": ('{"\n": 1}', "the config must be JSON in ASCII, got an error at byte 2"),
    "beyond ASCII": ('{"é": 1}', "the config must be JSON in ASCII, got an error at byte 2 of 9"),
    "NUL": (VALID + "\0", "the config must be JSON in ASCII, got an error at byte"),
    "list": ("[]", "the config must be a JSON object, got []"),
    "no section": ("{}", 'the config must have "neuronmm" exactly once, got it 0 times'),
    "section as a list": ('{"neuronmm":\n[\n]}', '"neuronmm" must be a JSON object, got [ ]'),
    "nesting": (
        '{"a": ' + "[" * 16 + "]" * 16 + "}",
        "the config must nest at most 16 deep, got more at byte 21",
    ),
    "endless nesting": ("[" * 10**6, "the config must nest at most 16 deep, got more at byte 16"),
    "half a pair": ('{"a"', "the config must be JSON in ASCII, got an error at byte 4 of 4"),
}


@pytest.mark.parametrize(("text", "expected"), WRONG_TEXTS.values(), ids=WRONG_TEXTS)
def test_a_text_that_is_no_config_is_refused(library, text, expected):
    assert_refused(attempt(library, encoded(text)), expected)


@pytest.mark.parametrize(
    ("opaque", "expected"),
    [
        (b"AAAAAA", "the opaque string must be padded base64, got 6 bytes"),
        (b"AA-A", "the opaque string must be base64, got byte 0x2d at 2"),
        (b"AA=A", "the opaque string must be base64, got byte 0x3d at 2"),
        (b"A===", "the opaque string must be base64, got byte 0x3d at 1"),
        (b"AA==AAAA", "the opaque string must be base64, got byte 0x3d at 2"),
        (b"\xff\0\0\0", "the opaque string must be base64, got byte 0xff at 0"),
    ],
)
def test_what_is_no_base64_is_refused(library, opaque, expected):
    assert_refused(attempt(library, opaque), expected)
