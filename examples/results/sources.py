"""The data of the page of results: which commands make it, and where it is kept.

A data set is a file `docs/results/NAME.json`: what each of its commands printed, with the machine,
the versions and the commit that it ran on.
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from neuroncore.files import replacing
from neuronmm_ops.measure.timing import cpu_name
from neuronmm_ops.models import SHAPES, ModelShape, model_shape

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "results"
RATIOS = (0.1, 0.2, 0.5)
"""Of the gallery's pages."""
PROMPT, NEW = 2048, 256
"""Tokens of the modelled runs of whole models."""
TARGET = "trn2"
WEIGHT_GIB = 20
"""Of the 24 GiB that two trn2 cores share; the rest is for the KV cache and activations."""
SHOWN = "Llama-3.2-1B"
"""The model whose decode is modelled at every ratio and storage that the demo's quality has."""
PARETO_RATIOS = (0.1, 0.2, 0.3, 0.5)
STORAGES = ("bf16", "fp8")
WHOLE = (
    (0.2, "mlp", False),
    (0.2, "all-linear", False),
    (0.2, "mlp", True),
    (0.2, "all-linear", True),
    (0.5, "mlp", True),
    (0.5, "all-linear", True),
)
"""Ratio, targets, and whether every Linear is in fp8, of the rows of a whole model's page."""
PAPER_RUN = (
    f"neuronmm bench model --model {SHOWN} --target trn1 --prompt-tokens 32 --new-tokens 32 "
    "--ratio 0.2"
)
"""The setting of the run in NeuronMM's README."""
RIVAL = (
    f"neuronmm bench model --model {SHOWN} --target {TARGET} --prompt-tokens {PROMPT} "
    f"--new-tokens {NEW} --ratio 0.2 --storage fp8 --targets all-linear --storage-lm-head fp8"
)
"""What low rank must beat: dense weights in one byte, the output head's too."""
NKIBENCH = "python benchmarks nkibench out/sources/kda-for-trainium out/sources/AccelOpt"
ENGINES = "python tests/engines/sources out/sources"
"""What runs in the sources of others' engines; `checkouts.py` next to it says how to get them."""
DIVIDED_MODELS = ("Llama-3.1-70B", "Qwen3-32B", "Llama-3.1-8B")
DIVIDED = ((0.2, "bf16"), (0.5, "bf16"), (0.5, "fp8"))
"""Ratio and storage of the MLPs of the models that tensor parallelism is shown on."""
_DEMO = "out/demo/dense --text out/results/held_out.txt --calibration out/demo/calibration.txt"
EVALUATED_CHARACTERS = 75_000
"""Of the demo's held-out text: some 20,000 tokens, as many as the demo's own report evaluates."""
DENSE, COMPRESSED = "out/demo/dense", "out/demo/greedy-0.4"
"""The models of the README's numbers."""
_PACKAGES = ("neuronmm-ops", "torch", "transformers", "numpy")


@dataclass(frozen=True)
class Dataset:
    """Commands whose documents make one file.

    Attributes:
        name: of the file, without its suffix.
        commands: command lines of `neuronmm` or of `python benchmarks`, run in the root of the
            repository.
        minutes: about how long they take on two cores.
        measured: whether they time this machine, which then must do nothing else.
    """

    name: str
    commands: tuple[str, ...]
    minutes: float
    measured: bool = False

    @property
    def path(self) -> Path:
        """The file."""
        return DATA / f"{self.name}.json"


def datasets() -> dict[str, Dataset]:
    """Every data set by its name, in the order in which they run."""
    ratios = " ".join(str(ratio) for ratio in PARETO_RATIOS)
    all_data = [
        Dataset("methods", (f"python benchmarks methods {_DEMO} --dtype float32",), 10),
        Dataset("storages", (f"python benchmarks storages {_DEMO} --ratio {ratios}",), 8),
        Dataset("divergence", ("python benchmarks divergence",), 15),
        Dataset("stories", ("python benchmarks stories out/sources/stories",), 10),
        Dataset("residuals", ("python benchmarks residuals",), 10),
        Dataset("figure1", ("python benchmarks kernels --figure1",), 5),
        Dataset(
            "clock",
            tuple(
                f"python benchmarks kernels --model {SHOWN} --tokens 1 128 1024 --target {target}"
                for target in ("trn2", "trn1")
            ),
            5,
        ),
        Dataset(
            "cpu",
            tuple(
                f"neuronmm bench cpu --model {SHOWN} --dtype {dtype}"
                for dtype in ("bfloat16", "float32")
            ),
            6,
            measured=True,
        ),
        Dataset(
            "generate",
            (f"neuronmm bench generate {DENSE} {COMPRESSED} --prompt-tokens 384",),
            3,
            measured=True,
        ),
        Dataset("gpu", ("python benchmarks gpu",), 2, measured=True),
        Dataset("configuration", tuple(_configuration()), 4),
        Dataset("pareto", tuple(_pareto()), 2),
        Dataset("published", ("python benchmarks published",), 2),
        Dataset("whole", tuple(_whole()), 6),
        Dataset("rival", (RIVAL,), 1),
        Dataset("engines", (ENGINES,), 15),
        Dataset("aws", ("python benchmarks aws out/sources/nki-library",), 2),
        Dataset("stored", ("python benchmarks stored out/sources/nki-library",), 8),
        Dataset("nkibench", (NKIBENCH,), 5),
        Dataset("course", ("python benchmarks course out/sources/course",), 2),
        Dataset("tensor_parallel", tuple(_divided()), 3),
    ]
    all_data += [Dataset(f"model_{name}", tuple(_models(name)), 1) for name in SHAPES]
    all_data += [Dataset(f"plan_{name}", tuple(_plans(name)), 0.5) for name in SHAPES]
    return {dataset.name: dataset for dataset in all_data}


def model_command(model: str, ratio: float, storage: str, targets: str) -> str:
    """The command that models a whole model, dense next to compressed."""
    tp = ranks(model_shape(model))
    split = "" if tp == 1 else f" --tp {tp}"
    return (
        f"neuronmm bench model --model {model} --target {TARGET}{split} --prompt-tokens {PROMPT} "
        f"--new-tokens {NEW} --ratio {ratio:g}{_stored(storage)} --targets {targets}"
    )


def _stored(storage: str) -> str:
    """The option of the storage of low-rank pairs."""
    return "" if storage == "bf16" else f" --storage {storage}"


def ranks(shape: ModelShape) -> int:
    """The fewest ranks, a power of two, whose HBM holds their shares of the dense weights."""
    tp = 1
    # a rank that is not alone has a neighbour on the same HBM
    while 2 * parameters(shape) / tp > WEIGHT_GIB * 2**30 / min(tp, 2):
        tp *= 2
    return tp


def parameters(shape: ModelShape) -> int:
    """Of all matrices, the embedding once where it is the output head too."""
    layer = sum(K * N for K, N in shape.projections.values())
    return shape.layers * layer + end_parameters(shape)


def end_parameters(shape: ModelShape) -> int:
    """Of the embedding and the output head."""
    return shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2)


def evaluate_command(directory: str) -> str:
    """The command that measures the perplexity of a model on the text of all tables."""
    return f"neuronmm eval {directory} --text out/results/held_out.txt --dtype float32"


def of_checkpoint() -> str:
    """The command that models the README's checkpoint."""
    return (
        f"neuronmm bench model --model {COMPRESSED} --target {TARGET} --prompt-tokens 384 "
        "--new-tokens 64"
    )


def _configuration() -> Iterator[str]:
    yield evaluate_command(DENSE)
    yield evaluate_command(COMPRESSED)
    yield of_checkpoint()
    for storage in STORAGES:
        yield model_command(SHOWN, 0.4, storage, "mlp")


def _pareto() -> Iterator[str]:
    for storage in STORAGES:
        for ratio in PARETO_RATIOS:
            yield model_command(SHOWN, ratio, storage, "mlp")


def whole_command(ratio: float, targets: str, is_one_byte: bool) -> str:
    """The command that models `SHOWN` on two cores, every Linear of its layers in one storage."""
    stored = " --storage fp8 --storage-dense fp8" if is_one_byte else ""
    return (
        f"neuronmm bench model --model {SHOWN} --target {TARGET} --lnc 2 --prompt-tokens {PROMPT} "
        f"--new-tokens {NEW} --ratio {ratio:g} --targets {targets}{stored}"
    )


def _whole() -> Iterator[str]:
    for ratio, targets, is_one_byte in WHOLE:
        yield whole_command(ratio, targets, is_one_byte)
    yield PAPER_RUN


def divided_command(model: str, ratio: float, storage: str) -> str:
    """The command that models MLPs in low rank on 8 and on 32 ranks of two cores each."""
    return (
        f"neuronmm bench model --model {model} --target {TARGET} --lnc 2 --tp 8,32 "
        f"--prompt-tokens {PROMPT} --new-tokens {NEW} --ratio {ratio:g}{_stored(storage)}"
    )


def _divided() -> Iterator[str]:
    for model in DIVIDED_MODELS:
        for ratio, storage in DIVIDED:
            yield divided_command(model, ratio, storage)


def _models(name: str) -> Iterator[str]:
    yield model_command(name, 0.2, "bf16", "mlp")
    yield model_command(name, 0.2, "fp8", "all-linear")
    yield model_command(name, 0.5, "fp8", "all-linear")


def _plans(name: str) -> Iterator[str]:
    for ratio in RATIOS:
        yield (
            f"neuronmm plan --model {name} --ratio {ratio:g} --target {TARGET} --tokens 1 {PROMPT}"
        )


def read(name: str) -> dict[str, Any] | None:
    """A data set's file as it was committed.

    None where there is none.

    Raises:
        ValueError: it is no such file.
    """
    path = DATA / f"{name}.json"
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        commands = [run["command"] for run in data["runs"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no data set ({error}); run make results-data DATA={name}"
        ) from error
    wanted = datasets()[name].commands
    if tuple(commands) != wanted:
        raise ValueError(
            f"{path} is of other commands than those of {name}; run make results-data DATA={name}"
        )
    return data


def write_held_out() -> None:
    """Write the beginning of the demo's held-out text, which the models of a table all read.

    Raises:
        FileNotFoundError: `make demo` has not run.
    """
    whole, part = ROOT / "out" / "demo" / "held_out.txt", ROOT / "out" / "results" / "held_out.txt"
    if not whole.is_file():
        raise FileNotFoundError(f"{whole} is missing; run make demo")
    part.parent.mkdir(parents=True, exist_ok=True)
    text = whole.read_text(encoding="utf-8")[:EVALUATED_CHARACTERS]
    with replacing(part) as temporary:
        temporary.write_text(text, encoding="utf-8")


def make(dataset: Dataset) -> None:
    """Run a data set's commands and write its file; nothing is written unless all succeed.

    Raises:
        FileNotFoundError: `make demo` has not run, and a command needs its text.
        RuntimeError: a command failed; its last line says why.
        ValueError: the work tree has changes, so that no commit has what runs.
    """
    commit = _commit()
    if not re.fullmatch("[0-9a-f]{12}", commit):
        raise ValueError(
            f"the work tree is of {commit}; commit first, then run make results-data "
            f"DATA={dataset.name}"
        )
    if any("out/results/" in command for command in dataset.commands):
        write_held_out()
    start = time.perf_counter()
    runs = [{"command": line, "document": _document(line)} for line in dataset.commands]
    provenance = {
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": round(time.perf_counter() - start),
        "machine": machine(),
        "versions": {name: version(name) for name in _PACKAGES}
        | {"python": platform.python_version()},
        "commit": commit,
    }
    DATA.mkdir(parents=True, exist_ok=True)
    with replacing(dataset.path) as temporary:
        temporary.write_text(dumped({"provenance": provenance, "runs": runs}), encoding="utf-8")


def dumped(document: dict[str, Any]) -> str:
    """A data set as JSON: a row a line, so that a change of one number is a change of one line."""
    runs: list[str] = []
    for run in document["runs"]:
        body = _lines(_rounded(run["document"]))
        runs.append(f'{{"command": {json.dumps(run["command"])}, "document": {body}}}')
    provenance = json.dumps(document["provenance"], indent=1)
    return f'{{"provenance": {provenance},\n"runs": [\n' + ",\n".join(runs) + "\n]}\n"


def _lines(value: Any) -> str:
    """A list with an entry a line; an object with a field a line, its lists as lists."""
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n]"
    fields = [f"{json.dumps(key)}: {_field(entry)}" for key, entry in value.items()]
    return "{\n" + ",\n".join(fields) + "\n}"


def _field(value: Any) -> str:
    return _lines(value) if isinstance(value, list) else json.dumps(value)


def _rounded(value: Any) -> Any:
    """Six significant digits: more than any clock or model here is worth."""
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def machine() -> str:
    """CPU, cores and memory of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cpu_name()}, {os.cpu_count()} cores, {memory:.0f} GiB"


def _document(line: str) -> Any:
    program, *arguments = shlex.split(line)
    command = [str(Path(sys.executable).with_name(program)), *arguments, "--json"]
    done = subprocess.run(  # noqa: S603 - a command of the list above
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{line} failed with exit code {done.returncode}: {last}")
    return json.loads(done.stdout)


def _commit() -> str:
    """The commit, with `-dirty` if a file other than a data set has been changed."""
    data = f":!{DATA.relative_to(ROOT)}"  # which the run before has written
    head = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", data)
    return f"{head}-dirty" if changed else head or "unknown"


def _git(*arguments: str) -> str:
    command = ("git", *arguments)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip()


def machine_of(name: str) -> str:
    """On what a data set was made."""
    data = read(name)
    assert data is not None
    return data["provenance"]["machine"]
