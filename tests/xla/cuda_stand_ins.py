"""Build small stand-ins for the CUDA libraries that a CUDA build of torch links.

torch 2.9.0 comes as a CUDA build only; with these, `import torch` works on a machine without CUDA
and without the 6 GB of nvidia-* wheels. Every function answers 100 (cudaErrorNoDevice), so
`torch.cuda.is_available()` is False. Nothing is built where `import torch` works already, and an
environment that holds a CUDA package is refused: something in it resolved torch's dependencies.

Usage: python cuda_stand_ins.py      in the environment that has torch; needs gcc, nm, readelf
"""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

PACKAGE = re.compile(r"(nvidia|cuda)[-_]|(pytorch-)?triton$")
CUDA = re.compile(r"lib(cu|nccl|nvshmem|nvrtc|nvJit|nvTools)")
# Libraries whose symbols carry no version, told apart by the prefix of their functions.
PREFIXES = {
    "libcusparseLt.so.0": "cusparseLt",
    "libcufile.so.0": "cuFile",
    "libnccl.so.2": "nccl",
    "libcurand.so.10": "curand",
    "libcupti.so.12": "cupti",
    "libcusolver.so.11": "cusolver",
}


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def missing_libraries(folder: Path) -> set[str]:
    """Names of the CUDA libraries that the libraries of `folder` need and it does not hold."""
    needed: set[str] = set()
    for library in folder.glob("*.so"):
        needed.update(re.findall(r"NEEDED.*\[(.*?)\]", run("readelf", "-d", str(library))))
    return {name for name in needed if CUDA.match(name) and not (folder / name).exists()}


def undefined_symbols(folder: Path) -> dict[str, set[str]]:
    """Undefined symbols of the libraries of `folder` by the version they ask for, "" for none."""
    symbols: dict[str, set[str]] = defaultdict(set)
    for library in folder.glob("*.so"):
        listing = run("nm", "-D", "--undefined-only", "--with-symbol-versions", str(library))
        for name, version in re.findall(r"^\s+[Uwv]\s+(\w+)(?:@+(\S+))?$", listing, re.MULTILINE):
            symbols[version].add(name)
    return symbols


def source_of(functions: set[str]) -> str:
    """C source of a library with these functions."""
    lines = ["int neuronmm_stand_in;"]
    for name in sorted(functions):
        is_text = "String" in name or "ErrorName" in name
        body = (
            'const char *%s(void) { return "no CUDA"; }'
            if is_text
            else "int %s(void) { return 100; }"
        )
        lines.append(body % name)
    return "\n".join(lines)


def build(library: Path, version: str, functions: set[str]) -> None:
    """Compile a library whose symbols all have one version."""
    with tempfile.TemporaryDirectory() as name:
        source, versions = Path(name, "stand_in.c"), Path(name, "versions.map")
        source.write_text(source_of(functions))
        versions.write_text(f"{version} {{ global: *; }};")
        run(
            *("gcc", "-w", "-O1", "-shared", "-fPIC", "-fno-builtin", str(source)),
            *(f"-Wl,-soname,{library.name}", f"-Wl,--version-script,{versions}"),
            *("-o", str(library)),
        )


def cuda_packages() -> list[str]:
    """Names of the installed CUDA packages."""
    names = {installed.name for installed in importlib.metadata.distributions()}
    return sorted(name for name in names if PACKAGE.match(name))


def torch_imports() -> bool:
    tried = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True)
    return tried.returncode == 0


def main() -> None:
    found = cuda_packages()
    if found:
        sys.exit(
            f"this environment must hold no CUDA package, found {', '.join(found)}; delete it, and "
            "take what requires torch out of tests/xla/requirements.txt"
        )
    if torch_imports():
        return
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("torch is not installed in this environment; run: make xla-env")
    folder = Path(spec.origin).parent / "lib"
    symbols = undefined_symbols(folder)
    for name in sorted(missing_libraries(folder)):
        version = "NVSHMEM" if name.startswith("libnvshmem") else name
        functions = set(symbols[version])
        if name in PREFIXES:
            functions |= {s for s in symbols[""] if s.startswith(PREFIXES[name])}
        build(folder / name, version, functions)
        print(f"{name}: {len(functions)} functions")


if __name__ == "__main__":
    main()
