"""`compression.json`: the run that made a checkpoint, and how to run it again.

It stands next to config.json, and speaks of the run: where model and text were, and their SHA-256.
What became of each layer is in config.json.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import torch

from neuronmm_ops.checkpoint import read_config
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.report import is_count
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.files import read_document
from neuronmm_ops.hf.computing import AUTO, DTYPES
from neuronmm_ops.hf.loading import local_directory
from neuronmm_ops.hf.text import ORDERS, read_text
from neuronmm_ops.manifest import Origin, tensor_hashes, versions, weights_sha256

RUN_FILE = "compression.json"
FORMAT_VERSION = 1
FLOAT64 = "float64"  # computed in where the model is in it, and never asked for by name
SHA256 = re.compile(r"[0-9a-f]{64}")
# What decides a model's activations in addition to its weights: architecture and tokenizer.
DECIDING = re.compile(
    r"config\.json|tokenizer.*\.json|(special_tokens_map|added_tokens)\.json"
    r"|vocab\.(json|txt)|merges\.txt|.*\.model"
)


@dataclass(frozen=True)
class ModelSource:
    """The dense model.

    Attributes:
        path: of its directory, absolute, or a hub id.
        sha256: of its config, its tokenizer and every byte of its weights.
    """

    path: str
    sha256: str

    def __post_init__(self) -> None:
        _check("model.path", self.path, isinstance(self.path, str) and self.path, "a path")
        _check_sha256("model.sha256", self.sha256)

    @classmethod
    def of(cls, model: str | Path) -> Self:
        """Describe a model directory, or a hub id, as it is now; reads all of it."""
        directory = local_directory(model)
        read_config(directory)  # says what is wrong with a path that is no model's
        path = str(model) if directory != Path(model) else str(directory.resolve())
        digest = hashlib.sha256(weights_sha256(tensor_hashes(directory)).encode())
        for file in sorted(directory.iterdir()):
            if DECIDING.fullmatch(file.name) and file.is_file():
                digest.update(f"{file.name} {_sha256(file.read_bytes())};".encode())
        return cls(path, digest.hexdigest())


@dataclass(frozen=True)
class CalibrationSource:
    """The calibration text, and which blocks of it were taken.

    Attributes:
        path: of the file, absolute; None where the text was no file.
        sha256: of the text in UTF-8, which is the file's.
        samples: blocks asked for.
        seqlen: tokens in a block.
        order: of the blocks, see `calibration_batches`.
    """

    path: str | None
    sha256: str
    samples: int
    seqlen: int
    order: str

    def __post_init__(self) -> None:
        is_path = self.path is None or (isinstance(self.path, str) and self.path)
        _check("calibration.path", self.path, is_path, "a path or null")
        _check_sha256("calibration.sha256", self.sha256)
        for name in ("samples", "seqlen"):
            value = getattr(self, name)
            _check(f"calibration.{name}", value, is_count(value), "a positive integer")
        _check("calibration.order", self.order, self.order in ORDERS, f"one of {_list(ORDERS)}")

    @classmethod
    def of(cls, path: Path | None, text: str, samples: int, seqlen: int, order: str) -> Self:
        """Describe a text and, where it was read from a file, the file."""
        absolute = None if path is None else str(path.resolve())
        return cls(absolute, _sha256(text.encode()), samples, seqlen, order)

    @property
    def named(self) -> dict[str, Any]:
        """The text, as one of `Origin.texts`."""
        return {"path": self.path, "sha256": self.sha256}


@dataclass(frozen=True)
class CompressionRun:
    """All that `hf.compress` was given, as `compression.json` holds it.

    Attributes:
        model: the dense model.
        config: what was done.
        calibration: the text; None where the method needs none.
        dtype: to compute in, as asked for.
        compute_dtype: what was computed in.
        device: of torch.
        max_shard_size: of one file of weights.
        threads: of torch; sums of another number of threads may differ in the last bit.
        versions: of what the factors depend on.
        weights_sha256: of the checkpoint that the run wrote; None before it is written.
    """

    model: ModelSource
    config: SVDConfig
    calibration: CalibrationSource | None
    dtype: str
    compute_dtype: str
    device: str
    max_shard_size: int | str
    threads: int = field(default_factory=torch.get_num_threads)
    versions: Mapping[str, str] = field(default_factory=versions)
    weights_sha256: str | None = None

    def __post_init__(self) -> None:
        dtypes, computing, size = (AUTO, *DTYPES), (*DTYPES, FLOAT64), self.max_shard_size
        is_known = self.compute_dtype in computing
        is_size = isinstance(size, str) or is_count(size)
        _check("dtype", self.dtype, self.dtype in dtypes, f"one of {_list(dtypes)}")
        _check("compute_dtype", self.compute_dtype, is_known, f"one of {_list(computing)}")
        _check("device", self.device, isinstance(self.device, str), "a device's name")
        _check("max_shard_size", size, is_size, "bytes or a size such as 5GB")
        _check("threads", self.threads, is_count(self.threads), "a positive integer")
        is_text = isinstance(self.versions, Mapping) and all(
            isinstance(text, str) for text in self.versions.values()
        )
        _check("versions", self.versions, is_text, "an object of texts")
        if self.weights_sha256 is not None:
            _check_sha256("weights_sha256", self.weights_sha256)

    @property
    def origin(self) -> Origin:
        """What the checkpoint was made of."""
        text = self.calibration
        texts = () if text is None else (text.named,)
        return Origin("compress", asdict(self.model), texts, dict(self.versions))

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `hf.compress`; the dtype is that which was computed in."""
        options = {
            "dtype": self.dtype if self.compute_dtype == FLOAT64 else self.compute_dtype,
            "device": self.device,
            "max_shard_size": self.max_shard_size,
        }
        if self.calibration is not None:
            options |= {name: getattr(self.calibration, name) for name in _BLOCK_OPTIONS}
        return options

    def checked_model(self) -> str:
        """Return the model's path or hub id.

        Raises:
            CheckpointError: it is not there, or no longer what was compressed.
        """
        try:
            source = ModelSource.of(self.model.path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; give MODEL if the recorded model has moved") from None
        if source.sha256 != self.model.sha256:
            raise CheckpointError(
                f"model {self.model.path} must be what was compressed, of SHA-256 "
                f"{self.model.sha256}, got {source.sha256}; give MODEL to take it as it is"
            )
        return self.model.path

    def checked_text(self) -> Path | None:
        """Return the path of the calibration text; None where there was none.

        Raises:
            ValueError: it cannot be read, was no file, or is no longer what was calibrated on.
        """
        if self.calibration is None:
            return None
        if self.calibration.path is None:
            raise ValueError("the calibration text was no file; give --calibration FILE.txt")
        path = Path(self.calibration.path)
        try:
            sha256 = _sha256(read_text(path).encode())
        except ValueError as error:
            raise ValueError(f"{error}; give --calibration FILE.txt") from None
        if sha256 != self.calibration.sha256:
            raise ValueError(
                f"calibration text {path} must be what was calibrated on, of SHA-256 "
                f"{self.calibration.sha256}, got {sha256}; give --calibration to take it as it is"
            )
        return path

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible dict with a format version."""
        return {
            "format_version": FORMAT_VERSION,
            **asdict(self),
            "config": self.config.to_dict(),
            "versions": dict(self.versions),
        }

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Read what `to_dict` wrote, checking every value.

        Raises:
            ValueError: a field is missing, unknown, of the wrong type or out of range.
        """
        values = _object("the record", values)
        version = values.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(
                f"format_version must be {FORMAT_VERSION}, got {version!r}; "
                "the file was written by another version of neuronmm-ops"
            )
        _check_names("the record", values, cls)
        _check_sha256("weights_sha256", values["weights_sha256"])
        model = _object("model", values["model"])
        _check_names("model", model, ModelSource)
        values["model"] = ModelSource(**model)
        values["config"] = _read_config(values["config"])
        if values["calibration"] is not None:
            calibration = _object("calibration", values["calibration"])
            _check_names("calibration", calibration, CalibrationSource)
            values["calibration"] = CalibrationSource(**calibration)
        return cls(**values)


_BLOCK_OPTIONS = ("samples", "seqlen", "order")


def read_run(path: str | Path) -> CompressionRun:
    """Read a `compression.json`.

    Raises:
        CheckpointError: it is missing, or is no such document; says which field is wrong.
    """
    try:
        return CompressionRun.from_dict(json.loads(read_document(path)))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise CheckpointError(f"{path} must be a {RUN_FILE}: it is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{path} must be a {RUN_FILE}: {error}") from None


def write_run(directory: Path, run: CompressionRun, weights: str) -> None:
    """Write `compression.json` next to the weights of this SHA-256, which the run made."""
    text = json.dumps(replace(run, weights_sha256=weights).to_dict(), indent=2) + "\n"
    (directory / RUN_FILE).write_text(text, encoding="utf-8")


def kept_run(source: Path, weights: str) -> CompressionRun | None:
    """Return the run in the `compression.json` of `source`, if it made the weights of this hash."""
    try:
        run = read_run(source / RUN_FILE)
    except CheckpointError:
        return None
    return run if run.weights_sha256 == weights else None


def _read_config(values: object) -> SVDConfig:
    try:
        return SVDConfig.from_dict(_object("config", values))
    except TypeError as error:
        raise ValueError(f"config: {error}") from None


def _object(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, got {value!r:.50}")
    return dict(value)


def _check_names(name: str, values: Mapping[str, Any], kind: Any) -> None:
    names = {each.name for each in fields(kind)}
    odd = sorted(set(values) ^ names)
    if odd:
        raise ValueError(f"{name} must have exactly {_list(sorted(names))}; see {odd[0]!r:.50}")


def _check(name: str, value: object, is_valid: object, rule: str) -> None:
    if not is_valid:
        raise ValueError(f"{name} must be {rule}, got {value!r:.50}")


def _check_sha256(name: str, value: object) -> None:
    is_valid = isinstance(value, str) and SHA256.fullmatch(value)
    _check(name, value, is_valid, "a SHA-256 in hexadecimal")


def _list(names: Any) -> str:
    return ", ".join(names)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
