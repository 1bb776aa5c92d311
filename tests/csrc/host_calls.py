"""Host calls as XLA makes them: the config of a call, and the C library behind ctypes."""

import base64
import ctypes
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from neuronmm_ops.ops.launch import DTYPE_NAMES


def neuronmm_section(**changes: Any) -> dict[str, Any]:
    """Return what the handler reads of a config: by default `xuv`, 4 tokens."""
    section = {
        "op": "xuv",
        "M": 4,
        "K": 6,
        "N": 5,
        "ranks": [3],
        "inner": 0,
        "dtype": "float32",
        "packed": False,
        "bias": False,
        "activation": None,
    }
    rest = {
        "target": "trn1",
        "lnc": 1,
        "form": "decode",
        "blocks": {"a": 1, "b": True, "c": "text"},
    }
    return section | rest | changes


def document(section: Any) -> dict[str, Any]:
    """Return a whole config around the handler's section."""
    names = {"input_names": ["x", "u", "v"], "output_names": ["y"]}
    return {
        "func_name": "xuv_decode",
        "grid": [],
        "has_collectives": False,
        "kernel_version": 1,
        "klir_binary": {"binary": '\u00e9 \x7f "quoted"\\\n', **names},
        "neuronmm": section,
    }


def encoded(config: Any) -> bytes:
    text = config if isinstance(config, str) else json.dumps(config, sort_keys=True)
    return base64.b64encode(text.encode())


def config_of(
    op: str, operands: Sequence[Tensor], *, packed: bool = False, activation: str | None = None
) -> dict[str, Any]:
    """Return the section that fits the operands of `xw`, `xuv` or `svd_mlp`."""
    x, *rest = operands
    matrices = [t for t in rest if t.dim() == 2]
    return neuronmm_section(
        op=op,
        M=x.shape[0],
        K=x.shape[1],
        N=matrices[-1].shape[1],
        ranks=[u.shape[1] for u in matrices[:-1:2]],
        inner=matrices[1].shape[1] if op == "svd_mlp" else 0,
        dtype=DTYPE_NAMES[x.dtype],
        packed=packed,
        bias=rest[-1].dim() == 1,
        activation=activation,
    )


class Library:
    """libneuronmm_host_call.so, with a status that raises."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._messages: dict[int, bytes] = {}
        self._statuses = itertools.count(1)
        self._set_failure = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
        )(self._note)
        self._library.neuronmm_host_call.restype = None
        self._library.neuronmm_host_call_count.restype = ctypes.c_long
        self._library.neuronmm_set_status_failure(self._set_failure)

    def call(self, opaque: bytes, operands: Sequence[Tensor], out: Tensor) -> None:
        """Make the call.

        Raises:
            RuntimeError: the handler refused it, with the message.
        """
        status = next(self._statuses)
        pointers = (ctypes.c_void_p * len(operands))(*(t.data_ptr() for t in operands))
        # No NUL behind it: a read past the end is a read of somebody else's memory.
        buffer = (ctypes.c_char * len(opaque)).from_buffer_copy(opaque)
        self._library.neuronmm_host_call(
            ctypes.c_void_p(out.data_ptr()),
            pointers,
            buffer,
            ctypes.c_size_t(len(opaque)),
            ctypes.c_void_p(status),
        )
        if status in self._messages:
            raise RuntimeError(self._messages.pop(status).decode())

    def run(self, op: str, operands: Sequence[Tensor], **options: Any) -> Tensor:
        """Run an op on contiguous operands, a bias of `xw` and `xuv` last."""
        section = config_of(op, operands, **options)
        out = operands[0].new_full((section["M"], section["N"]), float("nan"))
        self.call(encoded(document(section)), [t.contiguous() for t in operands], out)
        return out

    def count(self) -> int:
        """Return the calls that computed a result."""
        return self._library.neuronmm_host_call_count()

    def _note(self, status: int, message: int, size: int) -> None:
        self._messages[status] = ctypes.string_at(message, size)
