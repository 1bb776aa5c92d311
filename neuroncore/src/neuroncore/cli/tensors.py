"""Tensors of `simulate` that lie in files: inputs that are read, outputs that are saved."""

import contextlib
import io
import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from neuroncore import TensorSpec
from neuroncore.boundary import as_arrays
from neuroncore.dtypes import DTYPES, DType, from_fp32, from_numpy
from neuroncore.files import replacing

_SAFETENSORS = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool_",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I8": "int8", "I16": "int16", "I32": "int32", "U8": "uint8", "U16": "uint16", "U32": "uint32",
    "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip
"""Dtypes of the format that are read; the last three must be converted."""
_WIDE = ("float64", "int64", "uint64")
SUFFIXES = (".npy", ".safetensors")


@dataclass(frozen=True)
class TensorFile:
    """A tensor argument whose values are in a `.npy`, `.npz` or `.safetensors` file.

    Attributes:
        name: the parameter.
        path: the file.
        key: the tensor's name in a file of several; "" for the only one.
        dtype: to convert the values to; None keeps the file's.
    """

    name: str
    path: Path
    key: str
    dtype: DType | None

    def spec(self) -> TensorSpec:
        """Shape and dtype, from the file's header. Raises ValueError that names the file."""
        shape, dtype = self._header()
        return TensorSpec(shape, self.dtype or self._own_dtype(dtype))

    def values(self, _: np.random.Generator) -> np.ndarray:
        """The values, rounded to `dtype`. Raises ValueError that names the file."""
        array = self._array()
        if self.dtype is None:
            self._own_dtype(array.dtype)
            return array
        return self._converted(array, self.dtype)

    def _header(self) -> tuple[tuple[int, ...], Any]:
        if self.path.suffix != ".safetensors":
            array = self._load(mmap_mode="r")
            return array.shape, array.dtype
        with self._opened() as (file, key):
            view = file.get_slice(key)
            return tuple(view.get_shape()), view.get_dtype()

    def _array(self) -> np.ndarray:
        if self.path.suffix != ".safetensors":
            return self._load()
        with self._opened() as (file, key):
            name = file.get_slice(key).get_dtype()
            if name not in _SAFETENSORS:
                raise self._wrong(f"holds {name}, which is not read")
            shape = file.get_slice(key).get_shape()
        bits = self._bits(key)
        own = _SAFETENSORS[name]
        return bits.view(own if own in _WIDE else DTYPES[own].numpy).reshape(shape)

    def _bits(self, key: str) -> np.ndarray:
        """A tensor's bytes in a file whose header safetensors has checked: without torch, it
        gives no values of one byte."""
        with open(self.path, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            begin, end = json.loads(file.read(header_bytes))[key]["data_offsets"]
            return np.fromfile(file, np.uint8, end - begin, offset=begin)

    def names(self) -> list[str]:
        """The tensors of an .npz file."""
        return list(self._read().files)

    def _load(self, **options: Any) -> np.ndarray:
        read = self._read(**options)
        return read[self._key_among(read.files)] if self.path.suffix == ".npz" else read

    def _read(self, **options: Any) -> Any:
        try:
            if self.path.suffix == ".npz":  # of a broken one, NumPy leaves the file open
                return np.load(io.BytesIO(self.path.read_bytes()), allow_pickle=False)
            return np.load(self.path, allow_pickle=False, **options)
        except (ValueError, EOFError, BadZipFile) as error:
            raise self._wrong(f"cannot be read: {error}") from error

    @contextlib.contextmanager
    def _opened(self) -> Generator[tuple[Any, str]]:
        """A safetensors file, and the name of the tensor in it."""
        try:
            opened = safe_open(self.path, framework="np")
        except (SafetensorError, OSError) as error:
            raise self._wrong(f"cannot be read: {error}") from error
        with opened as file:
            yield file, self._key_among(sorted(file.keys()))

    def _key_among(self, names: list[str]) -> str:
        if self.key in names:
            return self.key
        if len(names) == 1 and not self.key:
            return names[0]
        asked = f"has no tensor {self.key}" if self.key else f"has {len(names)} tensors"
        some = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        remedy = f"; name one of {some}, as in {self.path.name}:{names[0]}" if names else ""
        raise self._wrong(asked + remedy)

    def _own_dtype(self, dtype: Any) -> DType:
        """The NKI dtype of what the file holds."""
        if isinstance(dtype, str):
            dtype = _SAFETENSORS.get(dtype, dtype)
            if dtype in DTYPES:
                return DTYPES[dtype]
        else:
            with contextlib.suppress(TypeError):
                return from_numpy(dtype)
        if getattr(dtype, "kind", "") == "V":
            raise self._wrong(
                "holds bytes without a dtype, as NumPy writes bfloat16; name it, such as "
                f"--arg {self.name}=bf16[{self._place()}]"
            )
        raise self._wrong(
            f"holds {dtype}, which the NeuronCore has not; name the dtype to convert to, such as "
            f"--arg {self.name}=f32[{self._place()}]"
        )

    def _converted(self, array: np.ndarray, dtype: DType) -> np.ndarray:
        if dtype.kind == "packed" or dtype == "tfloat32":
            raise self._wrong(f"cannot become {dtype}, which has no NumPy dtype")
        if array.dtype == np.dtype(("V", dtype.itemsize)):
            return array.view(dtype.numpy)  # NumPy writes bfloat16 as bytes without a name
        if array.dtype == dtype.numpy:
            return array
        if not dtype.is_float:
            return self._whole(array, dtype)
        # of ml_dtypes the kind is V too, but they have values
        if array.dtype.kind in "cSUOmM" or array.dtype.type is np.void:
            raise self._wrong(f"holds {array.dtype}, which has no value in {dtype}")
        return from_fp32(array.astype(np.float32).reshape(array.shape or (1,)), dtype)

    def _whole(self, array: np.ndarray, dtype: DType) -> np.ndarray:
        converted = array.astype(dtype.numpy) if array.dtype.kind in "biu" else None
        if converted is None or not np.array_equal(converted, array):
            raise self._wrong(f"holds {array.dtype} values that {dtype} does not have")
        return converted

    def _place(self) -> str:
        return ":".join(filter(None, (str(self.path), self.key)))

    def _wrong(self, what: str) -> ValueError:
        return ValueError(f"--arg {self.name}: {self.path} {what}")


def check_suffix(path: Path) -> None:
    """Raise ValueError unless outputs can be saved in a file of this suffix."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--save takes a file that ends in .npy or .safetensors; got {path}")


def save_outputs(outputs: Any, path: Path) -> None:
    """Write a kernel's outputs: one to `.npy`, or all to `.safetensors` as output0, output1, ...

    bfloat16 in a `.npy` file is bytes without a name, which `bf16[FILE.npy]` reads.

    Raises:
        ValueError: there is none, there are too many for `.npy`, or safetensors lacks the dtype.
    """
    arrays = as_arrays(outputs)
    if not arrays:
        raise ValueError(f"cannot save to {path}: the kernel returns nothing")
    if path.suffix == ".npy" and len(arrays) > 1:
        raise ValueError(
            f"cannot save to {path}: the kernel returns {len(arrays)} tensors and .npy holds one; "
            "use .safetensors"
        )
    with replacing(path) as temporary:
        temporary.write_bytes(_serialized(arrays, path))


def _serialized(arrays: list[np.ndarray], path: Path) -> bytes:
    # Not by np.save or save_file into the file: on a full disk they name neither it nor the cause.
    if path.suffix == ".npy":
        buffer = io.BytesIO()
        np.save(buffer, arrays[0])
        return buffer.getvalue()
    try:
        return save({f"output{i}": np.ascontiguousarray(a) for i, a in enumerate(arrays)})
    except SafetensorError as error:
        dtypes = ", ".join(sorted({str(a.dtype) for a in arrays}))
        raise ValueError(f"cannot save {dtypes} to {path}: {error}; use .npy") from error
