"""The pristine inputs that faults damage copies of: models, texts, kernels, unfinished runs."""

import os
import shutil
import sys
import traceback
from importlib import import_module
from pathlib import Path
from unittest import mock

from reproductions import write_paper
from tiny import tiny_directory, tiny_model, tiny_tokenizer
from torch import Tensor

TEXT = "The quick brown fox jumps over the lazy dog. 0123456789\n" * 60
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
OPTIONS = ("--ratio", ".3", "--block", "8", "--seqlen", "64", "--samples", "8")
KERNELS = """\
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def scale(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, x.dtype)
    nisa.dma_copy(tile, x)
    nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)
    nisa.dma_copy(out, tile)
    return out


def reference(x):
    return 2 * x
"""


def build(place: Path) -> None:
    """Make all inputs in a directory, in a process of its own."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.chdir(place)
            for number in (1, 2):
                os.dup2(os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            _build(place)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0, (place / "log").read_text()


def compress(model: str, output: str, *options: str) -> tuple[str, ...]:
    """Return the arguments that compress a model with the text."""
    return ("compress", model, "-o", output, "--calibration", "{text.txt}", *OPTIONS, *options)


def _build(place: Path) -> None:
    tiny_directory(place / "dense")
    sharded = place / "sharded"
    tiny_model().save_pretrained(sharded, max_shard_size="100KB")  # pyright: ignore
    tiny_tokenizer().save_pretrained(sharded)
    chat = tiny_tokenizer()
    chat.chat_template = TEMPLATE
    shutil.copytree(place / "dense", place / "chat")
    chat.save_pretrained(place / "chat")
    (place / "text.txt").write_text(TEXT)
    (place / "kernels.py").write_text(KERNELS)
    write_paper(place)
    for name, options in (
        ("low", ()),
        ("int8", ("--storage", "int8")),
        ("fp8", ("--storage", "fp8")),
    ):
        _must("compress", "dense", "-o", name, "--calibration", "text.txt", *OPTIONS, *options)
    _unfinished_stream(place)
    _unfinished_recovery(place)
    _must("reproduce", "paper.toml", "-o", "kept")


def _must(*arguments: str) -> None:
    from neuronmm_ops.cli import main

    assert main(arguments) == 0, arguments


def _unfinished_stream(place: Path) -> None:
    """Leave `unfinished`, the state of a streamed compression of `dense` with one layer done."""
    from neuronmm_ops.cli import main
    from neuronmm_ops.hf.streaming.work import Work

    original = Work.save

    def interrupted(self: Work, name: str, tensors: dict[str, Tensor]) -> None:
        if name == "layer-1":
            raise KeyboardInterrupt
        original(self, name, tensors)

    with mock.patch.object(Work, "save", interrupted):
        arguments = ("compress", "dense", "-o", "out", "--calibration", "text.txt")
        assert main((*arguments, *OPTIONS, "--stream")) == 130
    (place / ".out.stream").rename(place / "unfinished")


def _unfinished_recovery(place: Path) -> None:
    """Leave `training`, the state of a recovery of `low` that was killed while it saved."""
    from neuronmm_ops.cli import main

    # By its module: `hf.recover` is the function.
    module = import_module("neuronmm_ops.hf.recover")
    with mock.patch.object(module, "save", side_effect=KeyboardInterrupt):
        assert main(recovery("low", "text.txt", "out", "dense")) == 130
    state = next(place.glob("out.recovery*"))
    state.rename(place / "training")


def recovery(model: str, text: str, output: str, dense: str) -> tuple[str, ...]:
    """Return the arguments that train a compressed model for a second."""
    options = ("--minutes", "0.02", "--seqlen", "32", "--dense", dense)
    return ("recover", model, "-o", output, "--data", text, *options)
