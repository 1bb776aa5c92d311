"""`manifest.json`: what a directory of weights holds, by SHA-256, and what it was made of.

It stands in every directory that this package writes. The hash of a tensor is of its dtype, its
shape and its bytes in the file; that of all weights does not depend on how they are spread over
files.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from neuronmm_ops.checkpoint import read_headers, read_object, weight_files
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.extras import version_of

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
CHUNK_BYTES = 2**20
MAX_THREADS = 8  # more wait for the disk
_ACCEPT = f"copy the checkpoint again, or, if the change is wanted, remove {MANIFEST}"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that factors depend on."""
    packages = installed_versions("neuronmm-ops", "torch", "transformers", "tokenizers")
    return {"python": platform.python_version(), **packages}


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    versions = {package: version_of(package) for package in packages}
    return {package: version for package, version in versions.items() if version is not None}


@dataclass(frozen=True)
class Origin:
    """What a directory was made of.

    Attributes:
        made_by: the command or function.
        source: of the model, `{"path", "sha256"}`; None where it is not known.
        texts: `{"path", "sha256"}` of each; the path is None of what was no file.
        versions: of the packages that made it.
    """

    made_by: str
    source: Mapping[str, Any] | None = None
    texts: tuple[Mapping[str, Any], ...] = ()
    versions: Mapping[str, str] = field(default_factory=versions)


# --- hashes


def tensor_hashes(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each tensor by name; reads all weights, in threads.

    Raises:
        CheckpointError: a file is missing, damaged or truncated.
    """
    files = weight_files(directory)
    read_headers(files)  # says what is wrong with a file
    parts = {
        name: (file, entry, start)
        for file in files
        for start, header in [_header(file)]
        for name, entry in header.items()
        if name != "__metadata__"
    }
    return dict(zip(parts, _each(_tensor_hash, parts.values()), strict=True))


def weights_sha256(tensors: Mapping[str, str]) -> str:
    """Return the hash of all weights by those of the tensors."""
    lines = "".join(f"{name} {tensors[name]};" for name in sorted(tensors))
    return hashlib.sha256(lines.encode()).hexdigest()


def _tensor_hash(part: tuple[Path, Mapping[str, Any], int]) -> str:
    file, entry, start = part
    begin, end = entry["data_offsets"]
    kind = f"{entry['dtype']} {entry['shape']};"
    return _sha256(file, start + begin, start + end, kind.encode())


def _file_hash(file: Path) -> str:
    return _sha256(file, 0, file.stat().st_size)


def _header_hash(file: Path) -> str:
    return _sha256(file, 0, _header(file)[0])


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return where the values of a safetensors file begin, and its header."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        return 8 + size, json.loads(stream.read(size))


def _sha256(file: Path, start: int, stop: int, before: bytes = b"") -> str:
    """Hash a part of a file: read, not mapped, which would count as this process's memory."""
    digest = hashlib.sha256(before)
    buffer = memoryview(bytearray(min(CHUNK_BYTES, stop - start)))
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        while start < stop:
            count = stream.readinto(buffer[: stop - start])
            if not count:
                raise CheckpointError(f"{file} was cut short while it was read; {_ACCEPT}")
            digest.update(buffer[:count])
            start += count
    return digest.hexdigest()


def _each(work: Any, items: Iterable[Any]) -> list[Any]:
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(work, items))


# --- the manifest


def write_manifest(directory: Path, tensors: Mapping[str, str], origin: Origin) -> None:
    """Write the manifest of all files in a directory.

    Args:
        directory: complete but for the manifest.
        tensors: from `tensor_hashes`.
        origin: what it was made of.
    """
    paths = sorted(p for p in directory.iterdir() if p.is_file() and p.name != MANIFEST)
    weights = set(weight_files(directory))
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": digest}
        | ({"header_sha256": _header_hash(path)} if path in weights else {})
        for path, digest in zip(paths, _each(_file_hash, paths), strict=True)
    }
    document = {
        "format_version": FORMAT_VERSION,
        **asdict(origin),
        "weights_sha256": weights_sha256(tensors),
        "files": files,
        "tensors": dict(sorted(tensors.items())),
    }
    text = json.dumps(document, indent=2) + "\n"
    (directory / MANIFEST).write_text(text, encoding="utf-8")


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the manifest; None where there is none.

    Raises:
        CheckpointError: it cannot be read, or is of another version.
    """
    path = directory / MANIFEST
    if not path.exists():
        return None
    manifest = read_object(path)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format_version must be {FORMAT_VERSION}, got "
            f"{manifest.get('format_version')!r:.50}; it is damaged, or of another neuronmm-ops"
        )
    files, tensors = manifest.get("files"), manifest.get("tensors")
    is_whole = isinstance(files, dict) and all(isinstance(e, dict) for e in files.values())
    if not is_whole or not isinstance(tensors, dict):
        raise CheckpointError(f"{path} must hold the objects files and tensors; {_ACCEPT}")
    return manifest


def check_weights(directory: Path, values: bool) -> dict[str, Any] | None:
    """Compare the weights of a directory with its manifest.

    Args:
        directory: of a checkpoint.
        values: compare the values of all tensors; otherwise sizes and headers of the files alone,
            which reads no value.

    Returns:
        The manifest; None where there is none, and nothing is compared.

    Raises:
        CheckpointError: a file or a tensor is not what the manifest says, the first is named.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        return None
    for path in weight_files(directory):
        entry = manifest["files"].get(path.name)
        if entry is None:
            raise CheckpointError(f"{path} is read, and {MANIFEST} does not list it; {_ACCEPT}")
        _check_size(path, entry)
        if _header_hash(path) != entry.get("header_sha256"):
            raise _differs(path, "another header")
    if values:
        tensors = tensor_hashes(directory)
        for name in sorted({*tensors, *manifest["tensors"]}):
            if tensors.get(name) != manifest["tensors"].get(name):
                raise _differs(directory, f"other values of {name}")
    return manifest


def verify(directory: Path) -> dict[str, Any]:
    """Compare every file and tensor of a directory with its manifest, which is returned.

    Files that the manifest does not list, such as notes, are not looked at.

    Raises:
        CheckpointError: there is no manifest; or a file or a tensor is not what it says, the first
            is named.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        raise CheckpointError(
            f"{directory} has no {MANIFEST} to verify it by; load it and save it by hf.save, or "
            "compress the model again"
        )
    for name, entry in sorted(manifest["files"].items()):
        path = directory / Path(name).name
        if not path.is_file():
            raise CheckpointError(f"{directory} lacks {name}, which {MANIFEST} lists; {_ACCEPT}")
        _check_size(path, entry)
        if "header_sha256" not in entry and _file_hash(path) != entry.get("sha256"):
            raise _differs(path, "other bytes")
    check_weights(directory, values=True)
    return manifest


def _check_size(path: Path, entry: Mapping[str, Any]) -> None:
    size = path.stat().st_size
    if size != entry.get("bytes"):
        raise _differs(path, f"{size} bytes instead of {entry.get('bytes')!r:.50}")


def _differs(path: Path, how: str) -> CheckpointError:
    return CheckpointError(f"{path} is not what {MANIFEST} says, it has {how}; {_ACCEPT}")
