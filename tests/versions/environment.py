"""Make a virtual environment with the lowest or the highest versions that pyproject.toml allows.

torch and what requires it are installed without dependencies: the CUDA packages that they would
bring from the default index take 5 GB. Where torch is a CUDA build, stand-ins take their place.

Usage: python environment.py lowest|highest DIRECTORY     by the Python that it shall have
"""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = (ROOT, ROOT / "neuroncore")
STAND_INS = ROOT / "tests" / "xla" / "cuda_stand_ins.py"
REQUIRE_TORCH = ("torch", "accelerate", "peft")
CUDA = re.compile(r"(nvidia|cuda|triton)")
TESTS = ("pytest", "pytest-xdist", "hypothesis")


def requirements(is_lowest: bool) -> list[str]:
    """What both distributions and the extras `recover` and `plot` ask for, or the lowest of it."""
    project, simulator = (
        tomllib.loads((root / "pyproject.toml").read_text())["project"] for root in DISTRIBUTIONS
    )
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *simulator["dependencies"]]
    declared += [*extras["hf"], *extras["recover"], *extras["plot"]]
    third_party = sorted({text for text in declared if not text.startswith("neuron")})
    return [re.sub(r">=([\w.]+).*", r"==\1", text) if is_lowest else text for text in third_party]


def own_requirements(site: Path, name: str) -> list[str]:
    """What an installed package requires, CUDA apart."""
    (installed,) = importlib.metadata.distributions(name=name, path=[str(site)])
    return [
        text for text in installed.requires or [] if "extra ==" not in text and not CUDA.match(text)
    ]


def main() -> None:
    which, directory = sys.argv[1], Path(sys.argv[2])
    if which not in ("lowest", "highest"):
        sys.exit(__doc__)
    venv.create(directory, clear=True, with_pip=True)
    python = directory / "bin" / "python"

    def install(*arguments: object) -> None:
        options = ("--quiet", "--no-warn-conflicts", "--disable-pip-version-check", "--no-compile")
        command = [python, "-m", "pip", "install", *options, *arguments]
        subprocess.run([str(part) for part in command], check=True)

    wanted = requirements(which == "lowest")
    alone = [text for text in wanted if re.match(r"[\w-]+", text)[0] in REQUIRE_TORCH]
    rest = [text for text in wanted if text not in alone]
    install("--no-deps", *alone)
    (site,) = directory.glob("lib/python*/site-packages")
    # torch<0: pip stops at a requirement that requires torch, before it brings CUDA.
    (directory / "constraints.txt").write_text("torch<0\n")
    install("-c", directory / "constraints.txt", *rest, *own_requirements(site, "torch"), *TESTS)
    for root in DISTRIBUTIONS:
        install("--no-deps", "--editable", root)
    subprocess.run([str(python), str(STAND_INS)], check=True)


if __name__ == "__main__":
    main()
