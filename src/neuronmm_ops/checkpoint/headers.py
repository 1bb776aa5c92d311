"""The headers of safetensors files: every tensor's shape and dtype, and what they must be.

What is refused raises CheckpointError.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.errors import CheckpointError

FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class TensorHeader:
    """What a file's header says of one tensor; dtype as safetensors writes it, such as `BF16`."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_headers(files: Iterable[Path]) -> dict[str, TensorHeader]:
    """Read the header of every tensor, by the tensor's name."""
    headers: dict[str, TensorHeader] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                    view = tensors.get_slice(name)
                    headers[name] = TensorHeader(file, tuple(view.get_shape()), view.get_dtype())
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None
        except SafetensorError as error:
            raise CheckpointError(
                f"{file} is damaged or truncated ({error}); copy it again"
            ) from None
    return headers


def check_float(headers: Mapping[str, TensorHeader]) -> None:
    """Refuse integer weights, for a checkpoint whose config says nothing of quantization.

    Transformers would cast the integers to floats as they are, without their scales.
    """
    for name, header in headers.items():
        if name.endswith(".weight") and header.dtype not in FLOATS:
            raise CheckpointError(
                f"{name} is {header.dtype} in {header.file}, and config.json has no "
                "quantization_config; start from the checkpoint before quantization, or restore "
                "the entry"
            )


def check_shapes(headers: Mapping[str, TensorHeader], layers: Iterable[LayerReport]) -> None:
    """Refuse tensors of other shapes than the record describes, and factors that are missing."""
    for layer in layers:
        for tensor, expected in _expected(layer).items():
            found = headers.get(tensor)
            if layer.dense and found is None:
                continue  # a tied weight is stored under its other name
            if found is None or found.shape != expected:
                actual = f"the file has {'none' if found is None else list(found.shape)}"
                raise CheckpointError(
                    f"{tensor}: config.json asks for {list(expected)}, {actual}; "
                    "config and weights are not of the same checkpoint"
                )


def are_renamed(headers: Mapping[str, TensorHeader], layers: Iterable[LayerReport]) -> bool:
    """Say whether the factors are all there, under other names.

    Transformers renames some architectures' tensors on saving, and back on loading.
    """
    factors = {n: shape for layer in layers if layer.r for n, shape in _expected(layer).items()}
    stored = [(n[-2:], header.shape) for n, header in headers.items() if n.endswith((".u", ".v"))]
    same = Counter(stored) == Counter((n[-2:], shape) for n, shape in factors.items())
    return same and not set(factors) & set(headers)


def _expected(layer: LayerReport) -> dict[str, tuple[int, int]]:
    """The tensors that the layer is stored as, and their shapes."""
    if layer.r is None:
        return {f"{layer.name}.weight": (layer.N, layer.K)}
    return {f"{layer.name}.u": (layer.K, layer.r), f"{layer.name}.v": (layer.r, layer.N)}
