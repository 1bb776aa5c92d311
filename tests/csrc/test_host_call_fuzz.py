"""The host handler under sanitizers: whatever the config is, it is read or refused."""

import base64
import contextlib
import json
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_calls import document, encoded, neuronmm_section
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow  # all need the C compiler

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


class Driver:
    """The handler in a process of its own, built with sanitizers."""

    def __init__(self, path: Path, errors: Path) -> None:
        self._errors = errors
        with errors.open("w") as stderr:
            self._process = subprocess.Popen(
                [path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
            )

    def ask(self, opaque: bytes) -> str:
        """Return the line that answers a call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(struct.pack("=I", len(opaque)) + opaque)
            self._process.stdin.flush()
        answer = self._process.stdout.readline().decode()
        assert answer, self._errors.read_text()
        return answer

    def close(self) -> None:
        """End the process; leaked memory is an error too."""
        self._process.communicate()
        assert self._process.returncode == 0, self._errors.read_text()


@pytest.fixture(scope="module")
def driver(sanitized_driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    driver = Driver(sanitized_driver, tmp_path_factory.mktemp("driver") / "stderr")
    yield driver
    driver.close()


def check_answer(answer: str, opaque: bytes) -> None:
    """Assert that an accepted config is the one that Python reads in the same bytes."""
    if answer.startswith("neuronmm host call: "):
        return
    accepted = json.loads(answer)
    section = json.loads(base64.b64decode(opaque, validate=True))["neuronmm"]
    assert accepted == {
        "op": ("xw", "xuv", "svd_mlp").index(section["op"]),
        "dtype": ("float32", "bfloat16", "float16").index(section["dtype"]),
        "M": section["M"],
        "K": section["K"],
        "N": section["N"],
        "inner": section["inner"],
        "ranks": (section["ranks"] + [0, 0, 0])[:3],
        "packed": section["packed"],
        "bias": section["bias"],
        "activation": ACTIVATIONS.index(section["activation"] or "silu"),
    }


SECTIONS = [
    neuronmm_section(),
    neuronmm_section(dtype="bfloat16", K=256, packed=True, bias=True),
    neuronmm_section(op="xw", ranks=[], dtype="float16", M=1, bias=True, N=300),
    neuronmm_section(op="svd_mlp", ranks=[2, 3, 4], inner=8, activation="gelu"),
]


@pytest.mark.parametrize("section", SECTIONS, ids=["xuv", "packed", "xw", "svd_mlp"])
def test_nothing_outside_the_buffers_is_touched(driver, section):
    opaque = encoded(document(section))
    answer = driver.ask(opaque)
    assert answer.startswith("{")
    check_answer(answer, opaque)


@settings(max_examples=200)
@given(st.binary(max_size=80))
@example(b"")
@example(b"====")
def test_arbitrary_bytes_are_refused(driver, opaque):
    assert driver.ask(opaque).startswith("neuronmm host call: ")


def test_every_prefix_is_refused(driver):
    text = json.dumps({"neuronmm": SECTIONS[0], "escape": "\\\u00e9"}).encode()
    for size in range(len(text)):
        # Blanks in front leave no padding, so that the text ends where its buffer does.
        opaque = base64.b64encode(b" " * (-size % 3) + text[:size])
        assert driver.ask(opaque).startswith("neuronmm host call: ")


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.integers(1, 300),
        st.floats(),
        st.text(max_size=5),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)


@settings(max_examples=400)
@given(st.sampled_from(SECTIONS), st.sampled_from(sorted(SECTIONS[0])), json_values)
def test_any_value_of_a_key_is_read_or_refused(driver, section, key, value):
    opaque = encoded(document(section | {key: value}))
    check_answer(driver.ask(opaque), opaque)


@st.composite
def edited(draw: st.DrawFn, text: bytes) -> bytes:
    """Replace, insert or remove a few bytes."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        length = draw(st.integers(0, 3))
        inserted = draw(st.binary(max_size=2) | st.sampled_from([b'"', b"{", b"]", b",", b"0"]))
        text = text[:start] + inserted + text[start + length :]
    return text


@settings(max_examples=400)
@given(st.sampled_from(SECTIONS).flatmap(lambda s: edited(json.dumps({"neuronmm": s}).encode())))
def test_an_edited_text_is_read_or_refused(driver, text):
    opaque = base64.b64encode(text)
    check_answer(driver.ask(opaque), opaque)


@settings(max_examples=400)
@given(st.sampled_from(SECTIONS).flatmap(lambda s: edited(encoded({"neuronmm": s}))))
def test_edited_base64_is_read_or_refused(driver, opaque):
    check_answer(driver.ask(opaque), opaque)
